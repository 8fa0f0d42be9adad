"""Report 127, packing leaks: the gradients of packed rows are those of the same records one to a row.

fp32, on architectures that differ in what could leak: rotary and learned positions, windows, soft-capped scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import models, step_runs
from tests.ranks import run_on_kept_ranks

if TYPE_CHECKING:
    import torch

SEQ_LEN = 64
TOLERANCE = 1e-6  # of the norm of the whole gradient
EACH = 3e-6  # of the norm of a parameter's own: twelve weights of a norm sum over all tokens in another order

# (model, model.attention): sdpa attends to each document alone, or through a block mask where a window is shorter than
# a document; eager always takes the mask
CASES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("qwen3", "sdpa"),
    ("gemma3", "sdpa"),
    ("gemma2", "auto"),
    ("gpt2", "sdpa"),
    ("gpt2", "eager"),
]


def gradients_of(settings: list[dict[str, Any]], rows: list[list[step_runs.Row]]) -> list[dict[str, Any]]:
    """Take one step each way and return the losses and the whole gradients, before clipping."""
    return [step_runs.one_step(run, way) for run, way in zip(settings, rows, strict=True)]


def settings_of(model: str, attention: str, output: Path, *, packing: bool, batch: int) -> dict[str, Any]:
    return {
        "model": {"path": model, "attention": attention},
        "data": {"train": "unused.jsonl", "seq_len": SEQ_LEN, "packing": packing},
        "precision": "fp32",
        "activation_checkpointing": {"mode": "none"},
        "batch": {"global_batch_size": batch, "micro_batch_size": batch},
        "optim": {"max_grad_norm": 0},
        "output_dir": str(output),
    }


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_127_packed_gradients_are_those_of_the_records_alone(
    kind: str, attention: str, model_folder: Callable[[str], str], tmp_path: Path
) -> None:
    _, documents = models.make_records(8, seed=5, shortest=6, longest=24)
    packed, alone = [documents[:3], documents[3:6], documents[6:]], [[document] for document in documents]
    assert all(sum(len(document.tokens) for document in row) <= SEQ_LEN for row in packed)
    runs = [
        settings_of(model_folder(kind), attention, tmp_path / "a", packing=True, batch=len(packed)),
        settings_of(model_folder(kind), attention, tmp_path / "b", packing=False, batch=len(alone)),
    ]
    (first, second) = run_on_kept_ranks(gradients_of, 1, runs, [packed, alone])[0]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    assert first["gradients"].keys() == second["gradients"].keys()
    errors = {name: first["gradients"][name] - expected for name, expected in second["gradients"].items()}
    assert norm(errors.values()) <= TOLERANCE * norm(second["gradients"].values())
    for name, expected in second["gradients"].items():
        assert norm([errors[name]]) <= EACH * norm([expected]), name


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
