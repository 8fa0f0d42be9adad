"""The ledger of a run: what is measured is what a simulation says, to the byte, and tracing changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ledger_runs, models, training_runs
from tests.ranks import run_ranks

ModelFolder = Callable[[str], str]

# Rows that are as full as a plan assumes: text that is longer than a row, every token of which is trained on.
SEQ_LEN = 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage0": ("llama", {"sharding": {"zero_stage": 0}}),
    "stage1-bf16-accumulation": (
        "qwen3",
        {"sharding": {"zero_stage": 1}, "precision": "bf16", "batch": {"global_batch_size": 12, "micro_batch_size": 2}},
    ),
    "stage2-tied-full": (
        "llama_tied",
        {"sharding": {"zero_stage": 2}, "precision": "bf16", "activation_checkpointing": {"mode": "full"}},
    ),
    "stage3": ("llama", {}),
    "stage3-many-micro-batches": ("llama", {"batch": {"global_batch_size": 10, "micro_batch_size": 1}}),
    "fp16": ("qwen3", {"precision": "fp16", "loss": {"chunk_tokens": 7}}),
    "8bit": ("llama", {"precision": "bf16", "optim": {"name": "adamw_8bit"}}),
    "offload-params": ("llama", {"sharding": {"offload": "params"}, "precision": "bf16"}),
    "offload-optimizer": ("llama", {"sharding": {"zero_stage": 2, "offload": "optimizer"}, "precision": "bf16"}),
    "pure-bf16": ("llama", {"precision": "bf16_pure"}),
}


def settings(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Return the settings of four steps over full rows."""
    train = folder / "train.jsonl"
    train.parent.mkdir(parents=True, exist_ok=True)
    words = [" ".join(f"w{(7 * index + row) % models.N_WORDS}" for index in range(3 * SEQ_LEN)) for row in range(24)]
    train.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    base: dict[str, Any] = {
        "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        "schedule": {"warmup_steps": 1},
        "train": {"max_steps": 4},
        "export": {"at_end": False},
        **sections,
    }
    data = {"format": "text", "seq_len": SEQ_LEN, "packing": False, **base.pop("data", {})}
    return training_runs.settings(model, str(train), folder / "run", data=data, **base)


@pytest.fixture(scope="module")
def runs(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings, what both ranks measured, and what is simulated, by case."""
    folder = tmp_path_factory.mktemp("ledger")
    cases = {name: settings(model_folder(kind), folder / name, **sections) for name, (kind, sections) in CASES.items()}
    ranks = run_ranks(ledger_runs.trained_all, 2, cases, timeout=300)
    simulated = run_ranks(ledger_runs.simulated_all, 1, cases, 2, timeout=300)[0]
    return {
        name: {"settings": cases[name], "ranks": [rank[name] for rank in ranks], "simulated": simulated[name]}
        for name in cases
    }


@pytest.mark.parametrize("case", CASES)
def test_measured_is_predicted_to_the_byte(case: str, runs: dict[str, dict[str, Any]]) -> None:
    found = runs[case]
    assert all(isinstance(rank, dict) for rank in found["ranks"]), found["ranks"]
    phases, simulated = found["ranks"][0]["phases"], found["simulated"]
    expected = {name: size for name, size in simulated["phases"].items() if name not in ("load", "save")}
    assert phases == [expected]
    assert found["ranks"][0]["breakdowns"] == [simulated["breakdown"]]
