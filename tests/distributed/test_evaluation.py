"""Evaluation: the token-weighted mean over the whole held-out set, for any batch and world size, leaving no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models, reference, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly

Folder = Callable[[str], str]


def settings_for(model: str, tmp_path: Path, name: str, **sections: Any) -> dict[str, Any]:
    train, _ = models.make_records(12, seed=20)
    held_out, _ = models.make_records(7, seed=21)  # uneven: some rank or the last micro-batch goes without
    sections["data"] = {"eval": models.write_jsonl(held_out, tmp_path / "eval.jsonl"), **sections.get("data", {})}
    sections = {"batch": {"global_batch_size": 8, "micro_batch_size": 2}, "train": {"max_steps": 4}, **sections}
    sections.setdefault("eval", {"every_steps": 1, "at_end": True})
    return training_runs.settings(
        model, models.write_jsonl(train, tmp_path / "train.jsonl"), tmp_path / name, **sections
    )


def plain_loss(model: str, held_out: list[models.Document], weights: dict[str, Any]) -> float:
    """Return the plain loss of the given weights on documents, each run alone."""
    import torch

    loaded = reference.load(model)
    loaded.load_state_dict(weights, strict=False)
    loaded.tie_weights()  # type: ignore[operator]
    loaded.eval()
    with torch.no_grad():
        total = sum(reference.document_loss(loaded, document).item() for document in held_out)
    return total / sum(sum(document.supervised) for document in held_out)


@pytest.mark.parametrize(
    ("world", "micro", "packing", "sharding"),
    [
        (1, 8, False, {"zero_stage": 3}),
        (2, 1, False, {"zero_stage": 2}),
        (2, 4, True, {"zero_stage": 1}),
        (4, 1, True, {"zero_stage": 3, "replicate": 2}),
        (4, 2, False, {"zero_stage": 0}),
    ],
)
@pytest.mark.parametrize("kind", ["llama_tied", "gpt2_dropout"])
def test_equals_the_plain_loss_of_the_exported_weights(
    kind: str, world: int, micro: int, packing: bool, sharding: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    """GPT-2 has dropout: it must be off in an evaluation, and on again in the next step."""
    settings = settings_for(
        model_folder(kind),
        tmp_path,
        "run",
        sharding=sharding,
        data={"packing": packing},
        batch={"global_batch_size": 8, "micro_batch_size": micro},
        eval={"at_end": True},
    )
    got = run_on_kept_ranks(training_runs.train, world, settings)[0]
    evaluated = [row for row in got["metrics"] if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [4]
    _, held_out = models.make_records(7, seed=21)
    expected = run_plainly(plain_loss, model_folder(kind), held_out, got["weights"])[0]
    assert evaluated[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_leaves_no_trace_in_training(zero_stage: int, model_folder: Folder, tmp_path: Path) -> None:
    """Stages 0 to 2 gather once a step: weights left gathered by an evaluation would be trained on unchanged."""
    runs = []
    for name, evaluation in (("without", None), ("with", {"every_steps": 1, "at_end": True})):
        settings = settings_for(
            model_folder("gpt2_dropout"),
            tmp_path,
            name,
            sharding={"zero_stage": zero_stage},
            activation_checkpointing={"mode": "full"},
        )
        if evaluation is None:
            settings["data"]["eval"] = None
            settings["eval"] = {"at_end": False}
        runs.append(run_on_kept_ranks(training_runs.train, 2, settings)[0])
    without, with_it = ([row["loss"] for row in run["metrics"] if "loss" in row] for run in runs)
    assert with_it == without
    evaluated = [row["eval_loss"] for row in runs[1]["metrics"] if "eval_loss" in row]
    assert len(evaluated) == 4
    assert len(set(evaluated)) == 4
    assert all(tensor.equal(runs[0]["weights"][name]) for name, tensor in runs[1]["weights"].items())
