"""The router loss of a mixture-of-experts model is what Transformers' own forward adds, once a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import architectures, models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

COEFFICIENT = 0.5  # of qwen3_moe_router
PACKED = {"packing": True, "seq_len": 40}


def settings_for(model: str, tmp_path: Path, micro_batch_size: int, data: dict[str, Any]) -> dict[str, Any]:
    return training_runs.settings(
        model,
        "unused.jsonl",
        tmp_path,
        data=data,
        optim={"max_grad_norm": None},
        activation_checkpointing={"mode": "full"},
        batch={"global_batch_size": 8, "micro_batch_size": micro_batch_size},
    )


def rows_of() -> list[list[models.Document]]:
    return [[document] for document in models.make_records(8, seed=31)[1]]


def router_gradients(folder: str, settings: dict[str, Any], world_size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the gradients of cross-entropy plus router loss, both from Transformers' forward of whole micro-batches.

    Each router loss counts by the micro-batch's share of the supervised tokens.
    """
    from fsdp_trainer.data.loader import build_window

    model: Any = reference.load(folder)
    model.config.output_router_logits = False
    loss = reference.gradients(model, [row[0] for row in rows_of()])
    for rank in range(world_size):
        window = build_window(
            step_runs.make_rows(rows_of()),
            step=0,
            global_batch_size=8,
            micro_batch_size=settings["batch"]["micro_batch_size"],
            rank=rank,
            world_size=world_size,
            seed=0,
            shuffle=False,
            seq_len=settings["data"]["seq_len"],
            packing=settings["data"]["packing"],
        )
        for batch in window.micro_batches:
            assert batch.lengths is not None
            mask = (torch.arange(batch.input_ids.shape[1])[None] < batch.lengths[:, None]).long()
            out = model(input_ids=batch.input_ids, attention_mask=mask, output_router_logits=True)
            share = len(batch.targets) / window.supervised_tokens
            (COEFFICIENT * share * out.aux_loss).backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("data", [{"packing": False, "seq_len": 40}, PACKED], ids=["padded", "packed"])
def test_gradients_hold_the_router_loss(micro_batch_size: int, data: dict[str, Any], tmp_path: Path) -> None:
    """Padding is left out of it; the logged loss is cross-entropy alone; accumulation does not make it grow."""
    model = run_plainly(architectures.save_architecture, "qwen3_moe_router", str(tmp_path / "model"))[0]
    settings = settings_for(model, tmp_path, micro_batch_size, data)
    got = run_on_kept_ranks(step_runs.one_step, 2, settings, rows_of())[0]
    loss, expected = run_ranks(router_gradients, 1, model, settings, 2)[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert max(reference.relative_errors(got["gradients"], expected).values()) < 1e-4
    _, without = run_plainly(reference.gradient_snapshot, model, [row[0] for row in rows_of()])[0]
    gates = {
        name: error for name, error in reference.relative_errors(without, expected).items() if "gate.weight" in name
    }
    assert min(gates.values()) > 0.01, "the router loss must matter here"


def evaluated(settings: dict[str, Any]) -> float:
    from fsdp_trainer.training import evaluate

    run = step_runs.build(settings)
    value = evaluate(run, step_runs.make_rows(rows_of()))
    assert value is not None
    return value


def test_evaluation_is_cross_entropy_alone(tmp_path: Path) -> None:
    model = run_plainly(architectures.save_architecture, "qwen3_moe_router", str(tmp_path / "model"))[0]
    settings = settings_for(model, tmp_path, 2, {"packing": False})
    loss, _ = run_plainly(reference.gradient_snapshot, model, [row[0] for row in rows_of()])[0]
    assert run_ranks(evaluated, 2, settings)[0] == pytest.approx(loss, rel=1e-5)
