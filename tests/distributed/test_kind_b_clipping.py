"""Gradient clipping (reports B): by the true norm over all ranks, the same at every stage, and 0 means off.

Entries 16 and 18 are checked here. 17 (modules left unsharded) cannot arise: every parameter belongs to a unit, which
test_kind_d_parameters.py asserts. The importer's part of 18 (DeepSpeed files) is work of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly

Folder = Callable[[str], str]
ALL_STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (2, {"zero_stage": 0}),
    "stage1": (2, {"zero_stage": 1}),
    "stage2": (2, {"zero_stage": 2}),
    "stage3": (2, {"zero_stage": 3}),
    "uneven": (3, {"zero_stage": 3}),
    "hybrid": (4, {"zero_stage": 3, "replicate": 2}),
    "offload": (2, {"zero_stage": 3, "offload": "params"}),
}


def one_step(
    model: str, tmp_path: Path, world: int, sharding: dict[str, Any], max_grad_norm: float | None
) -> tuple[dict[str, Any], list[models.Document]]:
    _, docs = models.make_records(12, seed=4)
    settings = training_runs.settings(
        model,
        "unused.jsonl",
        tmp_path,
        sharding=sharding,
        optim={"max_grad_norm": max_grad_norm},
        batch={"global_batch_size": 12, "micro_batch_size": 12 // (2 * world) if world != 4 else 3},
    )
    return run_on_kept_ranks(step_runs.one_step, world, settings, [[document] for document in docs])[0], docs


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_clips_by_the_global_norm(stage: str, model_folder: Folder, tmp_path: Path) -> None:
    """Report 16: a rank's own norm, or gradients counted world_size times, would clip by something else."""
    world, sharding = ALL_STAGES[stage]
    got, docs = one_step(model_folder("qwen3"), tmp_path, world, sharding, 0.1)
    _, gradients = run_plainly(reference.gradient_snapshot, model_folder("qwen3"), docs)[0]
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert norm > 0.2, "the limit must bite"
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = {name: gradient * (0.1 / norm) for name, gradient in gradients.items()}
    assert max(reference.relative_errors(got["gradients"], clipped).values()) < 1e-4


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_zero_is_off(off: float | None, model_folder: Folder, tmp_path: Path) -> None:
    """Report 18: read as a number, 0 would clip every gradient to nothing."""
    got, docs = one_step(model_folder("qwen3"), tmp_path, 2, {"zero_stage": 3}, off)
    _, gradients = run_plainly(reference.gradient_snapshot, model_folder("qwen3"), docs)[0]
    assert max(reference.relative_errors(got["gradients"], gradients).values()) < 1e-4


def test_a_small_gradient_is_left_alone(model_folder: Folder, tmp_path: Path) -> None:
    got, docs = one_step(model_folder("qwen3"), tmp_path, 2, {"zero_stage": 3}, 1e6)
    _, gradients = run_plainly(reference.gradient_snapshot, model_folder("qwen3"), docs)[0]
    assert max(reference.relative_errors(got["gradients"], gradients).values()) < 1e-4
