"""Parameter groups (reports D 29, 30): what decays is decided by kind, and the optimizer holds the model's own shards.

Elsewhere: 26 in test_simulate.py, 28 in test_kind_d_freezing.py.
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
STAGES = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage2": {"zero_stage": 2},
    "stage3": {"zero_stage": 3},
    "offload": {"zero_stage": 3, "offload": "params"},
}


def decay_with_zero_gradients(run_settings: dict[str, Any], rows: list[list[models.Document]]) -> dict[str, Any]:
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    before = step_runs.parameters(run)

    def zero(*_: Any) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    run.optimizer.register_step_pre_hook(zero)
    train_step(run, step_runs.window_of(run, rows), learning_rate=0.1, optimizer_step=0)
    after = step_runs.parameters(run)
    return {"factor": {name: (after[name] / before[name]).nan_to_num(1.0) for name in before}, "before": before}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_decay_leaves_norms_biases_and_embeddings(kind: str, stage: str, model_folder: Folder, tmp_path: Path) -> None:
    """Report 29: zero gradient, weight decay 0.5, lr 0.1: matrices shrink by 0.95, the rest stays as it is."""
    _, docs = models.make_records(2, seed=5)
    settings = training_runs.settings(
        model_folder(kind),
        "unused.jsonl",
        tmp_path,
        sharding=STAGES[stage],
        optim={"weight_decay": 0.5},
        batch={"global_batch_size": 2, "micro_batch_size": 1},
    )
    got = run_on_kept_ranks(decay_with_zero_gradients, 2, settings, [[document] for document in docs])[0]
    decayed = run_plainly(names_that_decay, model_folder(kind))[0]
    assert 0 < len(decayed) < len(got["factor"])
    for name, factor in got["factor"].items():
        expected = 0.95 if name in decayed else 1.0
        assert torch.allclose(factor, torch.full_like(factor, expected), rtol=1e-5), name


def names_that_decay(folder: str) -> set[str]:
    model = reference.load(folder)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in reference.parameter_groups(model, 0.5)[0]["params"]}


def look_at_parameters(run_settings: dict[str, Any], rows: list[list[models.Document]]) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    before = step_runs.parameters(run)
    output = train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    after = step_runs.parameters(run)
    held = [names.get(id(p)) for group in run.optimizer.param_groups for p in group["params"]]
    # Modules sharded together (a tied embedding and head) share one state.
    modules = [module for module in run.model.modules() if isinstance(module, FSDPModule)]
    states = {id(module._get_fsdp_state()): module._get_fsdp_state() for module in modules}
    return {
        "held": held,
        "group_names": [name for group in run.optimizer.param_groups for name in group["names"]],
        "names": list(names.values()),
        "moved": {name for name in before if not before[name].equal(after[name])},
        "sharded": all(isinstance(parameter, DTensor) for parameter in run.model.parameters()),
        "unit_parameters": sum(
            len(group.fsdp_params) for state in states.values() for group in state._fsdp_param_groups
        ),
        "loss": output.loss.item(),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma3", "gpt2"])
def test_optimizer_holds_the_models_own_shards(
    kind: str, world_size: int, model_folder: Folder, tmp_path: Path
) -> None:
    """Report 30: each parameter once in the optimizer and once in a unit, each a shard, and all of them move.

    Three ranks leave some with empty shards, which all have the same data_ptr: the trap of `accelerator.prepare`.
    """
    _, docs = models.make_records(6, seed=5)
    settings = training_runs.settings(
        model_folder(kind),
        "unused.jsonl",
        tmp_path,
        batch={"global_batch_size": 6, "micro_batch_size": 1},
    )
    for rank in run_on_kept_ranks(look_at_parameters, world_size, settings, [[document] for document in docs]):
        assert sorted(rank["held"]) == sorted(rank["group_names"]) == sorted(rank["names"])
        assert rank["held"] == rank["group_names"]
        assert rank["moved"] == set(rank["names"])
        assert rank["sharded"]
        assert rank["unit_parameters"] == len(rank["names"])
