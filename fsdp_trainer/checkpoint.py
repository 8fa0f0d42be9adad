"""Save a run so that it can be killed at any moment, and bring it back as if it had never stopped.

A checkpoint is a folder `checkpoints/step-00000100/`: sharded tensors written by torch's distributed checkpoint (DCP),
which every rank writes and reads its own part of, and `state.json`. It has that name only once it is complete.
"""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from fsdp_trainer.agreement import (
    all_true,
    gather_from_all,
    is_broken_collective,
    is_main,
    run_on_all,
    run_on_main,
)
from fsdp_trainer.checkpoint_copy import HostCopy, HostMemory, local_part, plan_copy
from fsdp_trainer.checkpoint_folder import TRIAL, checkpoint_path, make_empty, prune, publish, published
from fsdp_trainer.checkpoint_layouts import describe_regrouping, regroup_moments, scales_of_other_layouts
from fsdp_trainer.checkpoint_manifest import FORMAT, Best, Progress, read_state
from fsdp_trainer.checkpoint_pace import DISK, waiting_for
from fsdp_trainer.checkpoint_rng import derive_rng, restore_rng, rng_tensors
from fsdp_trainer.checkpoint_search import refuse_damage
from fsdp_trainer.checkpoint_table import TableReader, read_table
from fsdp_trainer.checkpoint_writer import CheckpointWriter
from fsdp_trainer.errors import CheckpointError, DistributedError, FailedSave
from fsdp_trainer.model import named_weights
from fsdp_trainer.optim.masters import MASTER, send_masters, trained_weights
from fsdp_trainer.run_folder import how_to_go_on

_ENTRY_BYTES = 2048  # of torch.save's archive and the table of contents, per tensor
_RNG_RULE = "rng.<rank>.*, restored at the same world size; else derived from (seed, step, rank)"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingSave:
    """A save that may still be written in the background; `path` exists once `poll` or `wait` says so."""

    path: Path
    _written: Future[None]
    _copy: HostCopy | None  # of a save in the background

    def poll(self) -> bool:
        """Return whether the checkpoint is complete; drop this object after True. Collective while it is not.

        All ranks get the same answer at the same call, and a failure is raised on all of them.
        """
        if self._copy is not None and not all_true(self._written.done()):
            return False
        self.wait()
        return True

    def wait(self) -> Path:
        """Block until the checkpoint is complete and return its folder; a failure is raised on all ranks."""
        try:
            self._written.result()
        finally:
            if self._copy is not None:
                self._copy.release()
        return self.path


def build_save_group(*, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make the process group that saves talk on; once a run, on all ranks. None where there is no process group.

    A save in the background on the group that training uses deadlocks or aborts: two threads of a rank would order
    their collectives differently than those of another. Reading and writing have limits by their size
    (checkpoint_pace.py); `timeout`, or that of nothing where it is more, is for the rest, such as deleting old ones.
    """
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo", timeout=max(timeout, DISK.limit(0)))
    assert isinstance(group, dist.ProcessGroup), "every rank takes part in saves"
    return group


# Saving


def save_checkpoint(
    output_dir: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    progress: Progress,
    facts: Mapping[str, Any],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    asynchronous: bool = False,
    after: PendingSave | None = None,
    memory: HostMemory | None = None,
    keep_latest: int | None = None,
    best: Best | None = None,
) -> PendingSave:
    """Save the run to `output_dir/checkpoints/step-N`, N being `progress.step`. All ranks call it between two steps.

    `facts` is kept in state.json (config, digest of the rows, versions: what `check_resume` compares). With
    `asynchronous` the state is copied to host memory (one more copy of the shards of parameters and optimizer, in
    `memory` where the saves of a run share it) and written by a thread, while training goes on; only a step of the
    optimizer waits until it is copied. Weights must not be moved in any other way meanwhile, and `process_group` must
    come from `build_save_group`. Only one save may be in flight: `after` is waited for first. Once this one is
    durable, all but the newest `keep_latest` checkpoints and that of `best` are deleted.
    FailedSave on every rank when any rank cannot write; the checkpoints before stay as they are.
    """
    if after is not None:
        after.wait()
    assert process_group is not None or not asynchronous or not dist.is_initialized(), "see build_save_group"
    target = checkpoint_path(output_dir, progress.step)
    state = _describe_run(optimizer, scaler, progress, facts) | {"best": asdict(best) if best else None}
    keep = [target] + ([checkpoint_path(output_dir, best.step)] if best else [])
    tensors = training_tensors(model, optimizer) | rng_tensors(device)
    copy = plan_copy(tensors, model=model, optimizer=optimizer, device=device, memory=memory) if asynchronous else None

    def write() -> None:
        # A rank that had no memory for its copy is heard of here, where training does not wait for the slowest copy.
        held = tensors if copy is None else run_on_all(copy.make, process_group=process_group)
        _write(held, target=target, state=state, process_group=process_group)
        if (n := keep_latest) is not None:
            run_on_main(lambda: prune(output_dir, keep_latest=n, keep=keep), process_group=process_group)

    return PendingSave(target, _at_once(write) if copy is None else _in_background(write), copy)


def _at_once(work: Callable[[], None]) -> Future[None]:
    written: Future[None] = Future()
    written.set_result(work())
    return written


def _in_background(work: Callable[[], None]) -> Future[None]:
    written: Future[None] = Future()

    def run() -> None:
        try:
            written.set_result(work())
        except BaseException as error:
            written.set_exception(error)

    # A daemon, so that a process that ends on an error does not wait for a collective its peers have left.
    threading.Thread(target=run, name="checkpoint-writer", daemon=True).start()
    return written


def _write(
    tensors: dict[str, torch.Tensor],
    *,
    target: Path,
    state: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    with waiting_for(f"The save of {target}", size, process_group=process_group):
        _write_together(tensors, temporary, target=target, state=state, process_group=process_group)


def _write_together(
    tensors: dict[str, torch.Tensor],
    temporary: Path,
    *,
    target: Path,
    state: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> None:
    try:
        run_on_main(lambda: make_empty(temporary), process_group=process_group)
        writer = CheckpointWriter(temporary)
        save_sharded(tensors, storage_writer=writer, process_group=process_group)
        parts = gather_from_all(lambda: writer.described, process_group=process_group)
        files = {name: file for part in parts for name, file in part.items()}
        run_on_main(lambda: publish(temporary, target, state, files), process_group=process_group)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if is_broken_collective(error):
            raise  # a rank is not there: nothing can be agreed any more
        # Every rank is here and writes no more: DCP and `run_on_main` tell all of them what any of them failed at. Only
        # one without memory may be alone, and the others in a collective: the next start removes what is left then.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "t allocate memory" not in str(error):
            run_on_main(lambda: shutil.rmtree(temporary, ignore_errors=True), process_group=process_group)
        raise _explain_failed_save(error, target) from error


def _explain_failed_save(error: BaseException, target: Path) -> FailedSave:
    output_dir = target.parent.parent
    before = "the ones before it are as they were" if published(output_dir) else "there is none before it"
    return FailedSave(
        f"The checkpoint could not be written; {before}.",
        values=f"{target}: {_failures(error)}",
        fix=f"make room or give write access in output_dir; {how_to_go_on(output_dir)}",
    )


def try_saving(
    output_dir: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Send one small parameter, its optimizer state and the random states through the writer and back, and remove it.

    Collective. FailedSave on every rank where what a save does cannot be done there, or what is read is not what
    was written. Nothing of the run is changed.
    """
    trained = {name: p for name, p in named_weights(model).items() if isinstance(p, nn.Parameter) and p.requires_grad}
    smallest = min(trained, key=lambda name: trained[name].numel())
    tensors = training_tensors(model, optimizer, only=smallest) | rng_tensors(device)
    target = checkpoint_path(output_dir, 0).with_name(TRIAL)
    state = _describe_run(optimizer, scaler, Progress(), {}) | {"best": None}
    _write(tensors, target=target, state=state, process_group=process_group)
    try:
        _compare_with_file(tensors, target, process_group)
    finally:
        run_on_main(lambda: shutil.rmtree(target, ignore_errors=True), process_group=process_group)


def _compare_with_file(
    tensors: Mapping[str, torch.Tensor], target: Path, process_group: dist.ProcessGroup | None
) -> None:
    read = {name: torch.zeros_like(tensor, requires_grad=False) for name, tensor in tensors.items()}
    sizes = run_on_main(lambda: _sizes(read_state(target)), process_group=process_group)
    _read(target, read, sizes, process_group)

    def compare() -> None:
        for name, tensor in tensors.items():
            one, other = (local_part(t.detach()).reshape(-1).view(torch.uint8) for t in (tensor, read[name]))
            if not torch.equal(one, other):
                raise OSError(f"{name} in {target} is read other than it was written")

    try:
        run_on_all(compare, process_group=process_group)
    except (OSError, DistributedError) as error:
        raise _explain_failed_save(error, target) from error


def _failures(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
    return error.values if isinstance(error, DistributedError) else f"{type(error).__name__}: {error}"


# What a checkpoint holds


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, only: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the live tensors of model and optimizer by name: `model.<name>`, `optim.<name>.<state>`.

    With `only` they are those of one weight.

    A weight is its master where there is one: a run may be offloaded before a resume and not after it.
    A trainable parameter that was never stepped has the state AdamW would start from. Found by identity, without the
    dummy step that torch's `get_optimizer_state_dict` takes, which leaves the bias correction one step ahead.
    """
    named = named_weights(model)
    weights = trained_weights(model, optimizer).items()
    tensors = {f"model.{name}": tensor for name, tensor in weights if only in (None, name)}
    names = {id(tensor): name for name, tensor in named.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                name = names.get(id(parameter))
                assert name is not None, "the optimizer steps a tensor that is no parameter of the model"
                if only not in (None, name):
                    continue
                for key, value in _optimizer_state(optimizer, parameter, group).items():
                    tensors[f"optim.{name}.{key}"] = value
    return tensors


def _optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(parameter)  # pyright: ignore[reportArgumentType]
    if not state:
        return _initial_adamw_state(parameter, group)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and key != MASTER}


def _initial_adamw_state(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what torch's Adam._init_group makes at a parameter's first step (torch/optim/adam.py)."""
    beside = bool(group.get("fused") or group.get("capturable"))  # then the counter lies beside the parameter
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if beside else "cpu"),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return what a checkpoint of this run takes on disk, all ranks together; within 5 % from a few MB on."""
    tensors = list(trained_weights(model, optimizer).values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                # Before the first step there is none: AdamW will keep two tensors like the parameter.
                state = optimizer.state.get(parameter) or {"exp_avg": parameter, "exp_avg_sq": parameter}
                tensors += [value for key, value in state.items() if isinstance(value, torch.Tensor) and key != MASTER]
    return sum(tensor.numel() * tensor.element_size() + _ENTRY_BYTES for tensor in tensors)


def _describe_run(
    optimizer: torch.optim.Optimizer, scaler: Any, progress: Progress, facts: Mapping[str, Any]
) -> dict[str, Any]:
    groups = [
        _plain({key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "world_size": _world_size(),
        "rng": _RNG_RULE,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "param_groups": groups,
        "facts": _plain(facts),
    }


def _plain(value: Any) -> Any:
    """Return `value` as it comes back from JSON; what JSON has no word for becomes text."""
    return json.loads(json.dumps(value, default=lambda other: other.item() if hasattr(other, "item") else str(other)))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# Loading


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    device: torch.device,
    seed: int,
    already_verified: bool = False,
    process_group: dist.ProcessGroup | None = None,
    log: Callable[[str], None] = logger.warning,
) -> Progress:
    """Fill model, optimizer, scaler and random states from `path`, in place, and return how far the run had come.

    All ranks call it before any forward (FSDP would go on with weights gathered earlier). Another world size or mesh is
    fine: each rank reads its own slices, and random states follow from (seed, step, rank), which is logged.
    CheckpointError on every rank when the folder is incomplete, when any byte is not what was written (checked before
    anything is changed, unless `already_verified`: `find_checkpoint` has just done it), or when names, shapes or dtypes
    differ from this run's either way: nothing is guessed or left out. Whether it is of the same run is for
    `resume_rules.check_resume` to say.
    """
    path = Path(path)
    if not already_verified:
        refuse_damage(path, process_group=process_group)
    state = run_on_main(lambda: _read_matching_state(path, scaler), process_group=process_group)
    _create_optimizer_state(optimizer)
    tensors = training_tensors(model, optimizer)
    stored, others = run_on_main(lambda: _check_tensors(path, tensors), process_group=process_group)
    scales = {name: torch.empty(shape, dtype=torch.float32) for name, shape in others.items()}
    rng = rng_tensors(device)
    fits = state["world_size"] == _world_size() and rng.keys() <= stored
    fits = all_true(fits, process_group=process_group)
    progress = Progress(**state["progress"])
    for name in [name for name in tensors if _is_count(name) and name not in stored]:
        tensors.pop(name).fill_(progress.optimizer_steps)
    _read(path, tensors | scales | (rng if fits else {}), _sizes(state), process_group)
    regroup_moments(tensors, scales)
    send_masters(optimizer)
    if scales and is_main():
        log(describe_regrouping(path, scales))
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if fits:
        restore_rng(rng, device)
    else:
        derive_rng(seed=seed, step=progress.step)
        if is_main():
            log(
                f"{path} was saved by {state['world_size']} ranks, this run has {_world_size()} on {device.type}: its "
                f"random states do not fit, so they follow from (seed {seed}, step {progress.step}, rank)"
            )
    return progress


def _is_count(name: str) -> bool:
    """Tell a parameter's own count of steps: torch's AdamW has one, ours takes the run's."""
    return name.startswith("optim.") and name.endswith(".step")


def _sizes(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: file["bytes"] for name, file in state["files"].items()}


def _read(
    path: Path, tensors: dict[str, torch.Tensor], sizes: Mapping[str, int], process_group: dist.ProcessGroup | None
) -> None:
    try:
        with waiting_for(f"Reading {path}", sum(sizes.values()), process_group=process_group):
            load_sharded(tensors, storage_reader=TableReader(path, sizes), process_group=process_group)
    except CheckpointException as error:
        raise CheckpointError(
            "The checkpoint cannot be read.",
            values=f"{path}: {_failures(error)}",
            fix="set checkpoint.resume to the path of another checkpoint",
        ) from error


def _create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter the state of an optimizer before its first step, for the load to fill."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                optimizer.state[parameter] = _initial_adamw_state(parameter, group)


def _read_matching_state(path: Path, scaler: Any) -> dict[str, Any]:
    state = read_state(path)
    saved = state["scaler"] is not None
    if saved != (scaler is not None):
        with_and_without = ("with", "without") if saved else ("without", "with")
        raise CheckpointError(
            "The checkpoint was saved in another precision.",
            values="{}: saved {} a gradient scaler, this run is {} one".format(path, *with_and_without),
            fix="set precision as it was, or start afresh in another output_dir",
        )
    return state


def _check_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[set[str], dict[str, torch.Size]]:
    """Compare the stored entries of model and optimizer with `tensors`, or raise CheckpointError.

    Returns the names of everything stored, and the shapes of 8-bit scales that belong to another number of shards.
    """
    stored = _stored_tensors(path)
    wanted = {name: _describe(t.shape, t.dtype) for name, t in tensors.items() if not _is_count(name)}
    entries = {
        name: _describe(e.size, e.properties.dtype)
        for name, e in stored.items()
        if not name.startswith("rng.") and not _is_count(name)
    }
    elsewhere = scales_of_other_layouts(tensors, stored)
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - entries.keys())]
    wrong += [f"{name} is not in this run" for name in sorted(entries.keys() - wanted.keys())]
    wrong += [
        f"{name} is {entries[name]}, {text} in this run"
        for name, text in wanted.items()
        if name in entries and entries[name] != text and name not in elsewhere
    ]
    if wrong:
        raise CheckpointError(
            "The checkpoint does not fit this model and optimizer.",
            values=f"{path}: {'; '.join(wrong[:5])}" + (f"; {len(wrong) - 5} more" if len(wrong) > 5 else ""),
            fix="set model.path, model.freeze, precision, optim.name and optim.state_dtype as they were saved, which "
            "--resume-anyway cannot change; or start afresh in another output_dir",
        )
    return set(stored), elsewhere


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape, dtype and parts of every tensor in the checkpoint at `path`, by name."""
    entries = read_table(path, _sizes(read_state(path))).state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
