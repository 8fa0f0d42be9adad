"""The harness itself: answers in rank order, a failure on one rank ends all at once, nothing hangs."""

import os
import time

import pytest

from fsdp_trainer.errors import DistributedError
from tests.ranks import RankFailed, run_ranks


def _sum_of_ranks(scale: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def _fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise DistributedError("a rank was lost", values=f"rank {rank}", fix="nothing")
    time.sleep(60)


def _die_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)
    time.sleep(60)


def _sleep() -> None:
    time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_returns_one_answer_a_rank(world_size: int) -> None:
    total = 10.0 * sum(range(world_size))
    assert run_ranks(_sum_of_ranks, world_size, 10) == [(rank, total, 1) for rank in range(world_size)]


def test_raises_the_exception_of_the_rank_that_failed() -> None:
    start = time.monotonic()
    with pytest.raises(DistributedError, match="a rank was lost") as caught:
        run_ranks(_fail_on, 2, 1)
    assert caught.value.values == "rank 1"
    assert "_fail_on" in str(caught.value.__cause__)
    assert time.monotonic() - start < 20


def test_a_dead_rank_ends_all() -> None:
    with pytest.raises(RankFailed, match="exit code 7"):
        run_ranks(_die_on, 2, 0)


def test_a_hang_ends_at_the_timeout_with_stacks() -> None:
    with pytest.raises(RankFailed, match=r"(?s)did not finish in 0.5 s.*_sleep"):
        run_ranks(_sleep, 2, timeout=0.5)
