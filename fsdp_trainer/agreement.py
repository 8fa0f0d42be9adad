"""What one rank does, decides or fails at, made known to all of them, so that no rank waits for one that has given up.

Every function here is a collective: all ranks of the group call it, in the same order.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_trainer.errors import DistributedError, FsdpTrainerError, OutputError
from fsdp_trainer.run_folder import explain_no_room

Result = TypeVar("Result")


def is_main(process_group: dist.ProcessGroup | None = None) -> bool:
    """True on rank 0 of the group, and in a process that has no group. Not a collective."""
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def all_true(flag: bool, *, process_group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on every rank. The group needs a CPU backend."""
    if not dist.is_initialized():
        return flag
    agreed = torch.tensor(int(flag))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=process_group)
    return bool(agreed.item())


def run_on_main(action: Callable[[], Result], *, process_group: dist.ProcessGroup | None = None) -> Result:
    """Run `action` on rank 0 alone; every rank gets its (picklable) result, or raises what it raised."""
    if not dist.is_initialized():
        return action()
    answer: list[Any] = [None, None]
    failure: Exception | None = None
    if is_main(process_group):
        try:
            answer[0] = action()
        except Exception as error:
            failure, answer[1] = error, _portable(error, rank=0)
    dist.broadcast_object_list(answer, src=0, group=process_group)
    if answer[1] is not None:
        raise failure or _heard(answer[1])
    return answer[0]


def run_on_all(action: Callable[[], Result], *, process_group: dist.ProcessGroup | None = None) -> Result:
    """Run `action` on every rank and return this rank's result; when it raises on any rank, every rank raises."""
    result: list[Result] = []
    gather_from_all(lambda: result.append(action()), process_group=process_group)
    return result[0]


def gather_from_all(action: Callable[[], Result], *, process_group: dist.ProcessGroup | None = None) -> list[Result]:
    """Run `action` on every rank; each gets the (picklable) results of all, or raises when it raised on any rank."""
    if not dist.is_initialized():
        return [action()]
    mine: tuple[Any, FsdpTrainerError | None]
    failure: Exception | None = None
    try:
        mine = action(), None
    except Exception as error:
        failure = error
        mine = None, _portable(error, rank=dist.get_rank(process_group))
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, mine, group=process_group)
    if failure is not None:
        raise failure
    for error in filter(None, (error for _, error in found)):
        raise _heard(error)
    return [result for result, _ in found]


def is_broken_collective(error: BaseException) -> bool:
    """Return whether an error is how torch says that another rank did not take part; gloo has no class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _heard(error: FsdpTrainerError) -> FsdpTrainerError:
    error.heard = True
    return error


def _portable(error: Exception, *, rank: int) -> FsdpTrainerError:
    """Return an error that other ranks can unpickle and raise: ours as it is, a foreign one as text."""
    if isinstance(error, FsdpTrainerError):
        return error
    if (full := explain_no_room(error)) is not None:
        return OutputError(full.what, values=f"rank {rank}: {full.values}", fix=full.fix)
    return DistributedError(f"Rank {rank} failed.", values=f"{type(error).__name__}: {error}")
