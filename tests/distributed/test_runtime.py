"""Joining the ranks: what Accelerate must be told on CPU, and what is refused."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import DataError, DistributedError
from tests import training_runs
from tests.ranks import run_ranks


def type_without_the_patch() -> str:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from fsdp_trainer.runtime import build_fsdp_plugin

    kind = Accelerator(cpu=True, fsdp_plugin=build_fsdp_plugin()).distributed_type
    assert isinstance(kind, DistributedType)
    return kind.value


def test_cpu_ranks_still_need_to_be_promoted() -> None:
    """Fails when Accelerate makes FSDP ranks of gloo ranks by itself: `promote_cpu_ranks_to_fsdp` can then go."""
    assert run_ranks(type_without_the_patch, 2) == ["MULTI_CPU"] * 2


def timeouts(run_settings: dict[str, Any]) -> list[float]:
    """Return the seconds that each process group of a run waits."""
    import torch.distributed as dist

    from fsdp_trainer import Config
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime

    run = build_run(Config.from_dict(run_settings), build_runtime(timeout_minutes=7), load=False)
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(run.runtime.device).options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize("sharding", [{"replicate": 2}, {"reshard_after_forward": 2}, {"zero_stage": 0}])
def test_every_group_of_a_run_waits_as_long_as_asked(
    sharding: dict[str, Any], model_folder: Any, tmp_path: Any
) -> None:
    """A mesh of two dimensions makes groups of its own, which would wait for torch's 30 (NCCL: 10) minutes."""
    run = training_runs.settings(
        model_folder("llama"), "unused.jsonl", tmp_path, sharding=sharding, batch={"micro_batch_size": 1}
    )
    found = run_ranks(timeouts, 4, run)[0]
    assert len(found) > 1 and set(found) == {7 * 60.0}


def joined() -> dict[str, Any]:
    import torch.distributed as dist

    from fsdp_trainer.runtime import build_runtime

    runtime = build_runtime(timeout_minutes=7)
    again = build_runtime(timeout_minutes=7)  # a notebook's second run in the same process
    group = dist.distributed_c10d._get_default_group()
    return {
        "rank": (runtime.rank, runtime.local_rank, runtime.world_size, runtime.is_main),
        "again": (again.rank, again.world_size),
        "device": runtime.device.type,
        "type": runtime.accelerator.distributed_type.value,
        "timeout_minutes": group._get_backend(runtime.device).options._timeout.total_seconds() / 60,
        "simulated": runtime.simulated,
    }


def test_ranks_join_as_fsdp_ranks() -> None:
    for rank, found in enumerate(run_ranks(joined, 2)):
        assert found == {
            "rank": (rank, rank, 2, rank == 0),
            "again": (rank, 2),
            "device": "cpu",
            "type": "FSDP",
            "timeout_minutes": 7,
            "simulated": False,
        }


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_MIXED_PRECISION"]
    (found,) = run_ranks(joined, 1, environment=dict.fromkeys(names, ""))
    assert found["rank"] == (0, 0, 1, True)
    assert found["type"] == "FSDP"


def wait_for_rank_0() -> float:
    import torch.distributed as dist

    from fsdp_trainer.runtime import build_runtime

    runtime = build_runtime(timeout_minutes=0.05)
    start = time.monotonic()
    runtime.main_first("slow preparation", lambda: time.sleep(5.0) if runtime.is_main else None)
    waited = time.monotonic() - start
    dist.barrier()
    return waited


def test_rank_0_may_prepare_for_longer_than_the_timeout() -> None:
    """The others wait on the store: a barrier would give up after the process group's timeout, here three seconds."""
    assert all(waited > 4.5 for waited in run_ranks(wait_for_rank_0, 2))


def fail_in_preparation() -> None:
    from fsdp_trainer.runtime import build_runtime

    runtime = build_runtime(timeout_minutes=1)

    def prepare() -> None:
        if runtime.is_main:
            raise DataError("no such file", values=os.environ["RANK"], fix="nothing")

    runtime.main_first("prepare", prepare)


def test_a_failed_preparation_ends_every_rank() -> None:
    start = time.monotonic()
    with pytest.raises((DataError, DistributedError)) as caught:
        run_ranks(fail_in_preparation, 2)
    assert time.monotonic() - start < 20
    assert "no such file" in str(caught.value.__cause__)


def prepare_twice(seconds: float) -> list[bool]:
    from fsdp_trainer.runtime import build_runtime

    runtime = build_runtime(timeout_minutes=1)
    store = torch.distributed.distributed_c10d._get_default_store()
    seen = []
    for turn in range(2):

        def work(turn: int = turn) -> None:
            if runtime.is_main:
                time.sleep(seconds)
                store.set(f"prepared {turn}", "yes")
            else:
                seen.append(store.check([f"prepared {turn}"]))

        runtime.main_first("prepare data", work)
    return seen


def test_a_second_preparation_in_one_process_waits_too() -> None:
    """A script may fine-tune twice, one run after the other, in the same ranks."""
    assert run_ranks(prepare_twice, 2, 0.5) == [[], [True, True]]
