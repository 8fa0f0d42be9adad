"""Training with gradients, averages and masters on the host equals training with all of them on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import reference
from tests.distributed.test_parity import Case, case_sections, kind_of, recipe_for, data, references  # noqa: F401
from tests import training_runs
from tests.ranks import run_ranks

OFFLOAD = {"offload": "optimizer"}
# Every pair of sharding, world size, accumulation, tie and place of the step that can be.
CASES: dict[str, tuple[Case, str]] = {
    "stage0-1": (Case("stage0", 1, "none", 4, False, True, "gpt2", "chunked", "on"), "device"),
    "stage1-1": (Case("stage1", 1, "full", 1, True, False, "llama", "plain", "off"), "host"),
    "stage1-2": (Case("stage1", 2, "none", 4, True, True, "qwen3", "chunked", "on"), "host"),
    "stage2-2": (Case("stage2", 2, "every2", 1, False, False, "llama", "chunked", "on"), "device"),
    "stage2-4": (Case("stage2", 4, "full", 4, True, True, "gemma2", "plain", "on"), "host"),
    "stage3-1": (Case("stage3", 1, "full", 4, True, True, "llama", "chunked", "on"), "host"),
    "stage3-2": (Case("stage3", 2, "full", 4, True, False, "qwen3", "chunked", "on"), "host"),
    "stage3-4": (Case("stage3", 4, "none", 1, False, True, "gpt2", "plain", "off"), "device"),
    "hybrid-4": (Case("hybrid", 4, "full", 4, True, True, "qwen3", "chunked", "on"), "host"),
    "reshard2-4": (Case("reshard2", 4, "full", 4, False, False, "llama", "chunked", "on"), "device"),
}


@pytest.mark.parametrize("case", CASES)
def test_fp32_parity(
    case: str, model_folder: Callable[[str], str], data: Any, references: Any, tmp_path: Path  # noqa: F811
) -> None:
    how, where = CASES[case]
    expected = references(kind_of(how), how.packing, how.clip)
    got = train(how, where, model_folder(kind_of(how)), data[how.packing][0], tmp_path)
    rows = [row for row in got["metrics"] if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=1e-4)
    errors = reference.movement_errors(got["weights"], expected)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


def train(how: Case, where: str, model: str, file: str, output: Path, **more: Any) -> dict[str, Any]:
    """Train a case with the optimizer offloaded, its step on the host or the device."""
    sections = case_sections(how)
    sections["sharding"] |= OFFLOAD
    sections["optim"] |= {"offload_step": where}
    run = training_runs.settings(model, file, output, **(sections | more))
    return run_ranks(training_runs.train, how.world, run, timeout=120)[0]
