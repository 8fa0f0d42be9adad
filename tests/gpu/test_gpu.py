"""The trainer on one CUDA device: the same numbers as the plain loop on CPU, and memory and speed that are measured.

These run in the test process itself, one rank over NCCL, without the forkserver (a forked process has no CUDA).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models, reference, training_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

STEPS = 10
RECIPE = reference.Recipe(warmup_steps=3, total_steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the folder of a tiny model of a kind."""
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = models.save_model(kind, str(tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get


def run_on_gpu(model: str, output: Path, **sections: Any) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Train on the GPU; return the metrics, the weights and the documents of each step."""
    records, _ = models.make_records(60, seed=3)
    file = models.write_jsonl(records, output / "train.jsonl")
    run = training_runs.settings(model, file, output, train={"max_steps": STEPS, "seed": 7}, **sections)
    got = training_runs.train(run)
    return got["metrics"], got["weights"], training_runs.documents_by_step(run, STEPS)


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "gemma2", "gpt2"])
@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"packing": True}},
        {"activation_checkpointing": {"mode": "full"}, "batch": {"global_batch_size": 16, "micro_batch_size": 2}},
        {"sharding": {"zero_stage": 3, "offload": "params"}},
        {"sharding": {"zero_stage": 0}, "loss": {"kind": "plain"}},
    ],
    ids=["packed", "checkpointing-accumulation", "params-offload", "stage0-plain"],
)
def test_fp32_parity_on_gpu(kind: str, sections: dict[str, Any], folder: Callable[[str], str], tmp_path: Path) -> None:
    metrics, weights, plan = run_on_gpu(folder(kind), tmp_path, **sections)
    expected = reference.train(folder(kind), plan, RECIPE)
    assert [row["loss"] for row in metrics] == pytest.approx(expected.losses, rel=1e-5)
    errors = reference.movement_errors(weights, expected)
    assert max(errors.values()) < 1e-3, sorted(errors.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_gpu_stays_close(precision: str, folder: Callable[[str], str], tmp_path: Path) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    metrics, _, plan = run_on_gpu(folder("llama"), tmp_path, precision=precision)
    expected = reference.train(folder("llama"), plan, RECIPE)
    assert [row["loss"] for row in metrics] == pytest.approx(expected.losses, rel=1e-2)


def test_memory_is_measured(folder: Callable[[str], str], tmp_path: Path) -> None:
    metrics, _, _ = run_on_gpu(folder("llama"), tmp_path)
    last = metrics[-1]
    assert 0 < last["max_allocated_gib"] <= last["max_reserved_gib"]
    assert last["num_alloc_retries"] == 0
