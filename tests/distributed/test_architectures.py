"""Gradients of packed rows equal those of documents run alone, for many architectures; the others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import ConfigError
from tests import architectures, models, reference, step_runs, training_runs
from tests.ranks import run_ranks

# Attention that ours cannot stand in for, and logits made elsewhere.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "opt": (ConfigError, "logits"),
    "bloom": (ConfigError, "attention"),
    "stablelm": (ConfigError, "attention"),
    "falcon": (ConfigError, "attention"),
    "gpt_oss": (ConfigError, "attention"),
}


def settings_for(model: str, tmp_path: Path, attention: str = "auto") -> dict[str, Any]:
    return training_runs.settings(
        model,
        "unused.jsonl",
        tmp_path,
        model={"path": model, "attention": attention},
        data={"packing": True},
        optim={"max_grad_norm": None},
        activation_checkpointing={"mode": "full"},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
    )


@pytest.mark.parametrize(
    "name", [name for name in architectures.ARCHITECTURES if name not in (*REFUSED, "qwen3_moe_router")]
)
def test_packed_gradients(name: str, tmp_path: Path) -> None:
    check_packed_gradients(name, "auto", tmp_path)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "granite", "gpt_oss"])
def test_packed_gradients_with_eager_attention(name: str, tmp_path: Path) -> None:
    """GPT-OSS has attention sinks, which only its own eager attention computes."""
    check_packed_gradients(name, "eager", tmp_path)


def check_packed_gradients(name: str, attention: str, tmp_path: Path) -> None:
    model = run_ranks(architectures.save_architecture, 1, name, str(tmp_path / "model"))[0]
    _, docs = models.make_records(8, seed=13, longest=20)
    rows = [docs[index : index + 2] for index in range(0, 8, 2)]
    got = run_ranks(step_runs.one_step, 2, settings_for(model, tmp_path, attention), rows)[0]
    loss, gradients = run_ranks(reference.gradient_snapshot, 1, model, docs)[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    errors = reference.relative_errors(got["gradients"], gradients)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    model = run_ranks(architectures.save_architecture, 1, name, str(tmp_path / "model"))[0]
    _, docs = models.make_records(4, seed=13)
    error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        run_ranks(step_runs.one_step, 2, settings_for(model, tmp_path), [[document] for document in docs])
