"""Tied embeddings (reports C): one parameter, one unit, both halves of its gradient.

Entries 19 and 20 are checked here for every tied architecture. Elsewhere: 21 (a head that came apart), 22 and 23 (one
name for a tied tensor, and the folder loads whole) in test_export.py, 24 in test_kind_l_loading.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly

Folder = Callable[[str], str]
TIED_KINDS = [kind for kind, tied in models.TIED.items() if tied and kind != "gpt2_dropout"]


def step_and_look(run_settings: dict[str, Any], rows: list[list[models.Document]]) -> dict[str, Any]:
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    embedding, head = run.model.get_input_embeddings(), run.model.get_output_embeddings()
    before = embedding.weight is head.weight
    with step_runs.captured_gradients(run) as gradients:
        train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    return {
        "tied": before and embedding.weight is head.weight,
        "equal": step_runs.whole(embedding.weight).equal(step_runs.whole(head.weight)),
        "in_optimizer": sum(p is head.weight for group in run.optimizer.param_groups for p in group["params"]),
        "gradients": gradients,
    }


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", TIED_KINDS)
def test_first_step_of_a_tied_model(kind: str, zero_stage: int, model_folder: Folder, tmp_path: Path) -> None:
    """Reports 19 and 20: the first step runs, the tie holds, and the gradient has the input and the output part."""
    _, docs = models.make_records(8, seed=5)
    settings = training_runs.settings(
        model_folder(kind),
        "unused.jsonl",
        tmp_path,
        sharding={"zero_stage": zero_stage},
        optim={"max_grad_norm": None},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
    )
    got = run_on_kept_ranks(step_and_look, 2, settings, [[document] for document in docs])
    assert [(rank["tied"], rank["equal"], rank["in_optimizer"]) for rank in got] == [(True, True, 1)] * 2
    _, gradients = run_plainly(reference.gradient_snapshot, model_folder(kind), docs)[0]
    assert max(reference.relative_errors(got[0]["gradients"], gradients).values()) < 1e-4
