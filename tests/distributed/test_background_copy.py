"""A save in the background holds the state of its step, although the next step's forward and backward run beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests.ranks import run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
Bytes = dict[str, dict[str, Any]]
EIGHT_BIT_ON_DEVICE = {"name": "adamw_8bit", "offload_step": "device"}


class LateMemory(dict[str, Any]):
    """Host memory that is there only once `begun` is set, and a while later: a copy that is as late as can be."""

    begun: threading.Event

    def get(self, name: str, default: Any = None) -> Any:
        if not self:
            assert self.begun.wait(30), "the next step never came"
            time.sleep(0.5)  # the step would be over long since, if it did not wait
        return super().get(name, default)


def written_parts(state: dict[str, Any]) -> Bytes:
    """Return what a checkpoint says of its parts; not of .metadata, which has a number of its own for each save."""
    return {name: file for name, file in state["files"].items() if name.endswith(".distcp")}


def count_forwards(model: Any, *_: Any) -> None:
    model.seen.add_(1.0)


def step_at_once(config: dict[str, Any]) -> tuple[Bytes, Bytes, list[str], bool]:
    """Save after a step in the foreground and in the background, and take the next step at once, where all is changed.

    Returns what the two checkpoints say of their bytes, what of the loaded state is not that of the step, and whether
    the optimizer is left as it was.
    """
    import torch

    from fsdp_trainer.checkpoint_manifest import read_state

    run = runs.build(config)
    run.model.register_buffer("seen", torch.zeros(3))  # persistent, and changed by a forward below
    run.model.register_forward_hook(count_forwards)
    runs.take_steps(run, 0, 1)
    before = runs.local_digests(run)
    group, memory = runs.save_group(), LateMemory()
    foreground = runs.save(run, 1, process_group=group).wait()
    as_was = foreground.rename(foreground.with_name("foreground")) if run.runtime.rank == 0 else None
    torch.distributed.barrier()
    memory.begun = threading.Event()
    hook = run.optimizer.register_step_pre_hook(lambda *_: memory.begun.set())  # returns None
    pending = runs.save(run, 1, asynchronous=True, process_group=group, memory=memory)
    torch.rand(3)
    runs.take_steps(run, 1, 2)
    path = pending.wait()
    hook.remove()
    moved = runs.local_digests(run)
    assert all(moved[name] != digest for name, digest in before.items() if name.startswith(("model.", "optim.")))
    foreground_bytes, background_bytes = (written_parts(read_state(folder)) for folder in (as_was or path, path))
    runs.load(run, path)
    hooks: Any = run.optimizer._optimizer_step_pre_hooks
    return foreground_bytes, background_bytes, runs.differing(before, runs.local_digests(run)), not hooks


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (2, {"sharding": {"zero_stage": 3}}),
        (2, {"sharding": {"zero_stage": 0}, "precision": "fp16"}),
        (2, {"sharding": {"zero_stage": 3, "offload": "params"}, "precision": "bf16"}),
        (1, {"sharding": {"zero_stage": 2}}),
        (2, {"sharding": {"offload": "optimizer"}, "precision": "bf16"}),
        (1, {"sharding": {"offload": "optimizer"}, "precision": "fp16", "optim": EIGHT_BIT_ON_DEVICE}),
        (2, {"sharding": {"zero_stage": 1}, "precision": "bf16_pure", "optim": {"state_dtype": "bf16"}}),
    ],
    ids=["stage3", "stage0-scaler", "offloaded", "one-rank", "host-step", "device-step-8bit", "pure-bf16"],
)
def test_the_copy_is_of_the_step_it_was_begun_after(
    world: int, sections: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    config = settings(model_folder("llama"), "unused.jsonl", tmp_path, **sections)
    answers = run_ranks(step_at_once, world, config)
    foreground, background = answers[0][:2]
    assert background.keys() == {f"__{rank}_0.distcp" for rank in range(world)}
    assert background == foreground
    assert [answer[2:] for answer in answers] == [([], True)] * world
