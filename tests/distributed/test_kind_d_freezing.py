"""Kind D of the public failures: frozen parameters stay as they are, cost no state, and the others train as alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import ConfigError
from tests import checkpoint_runs, models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

ModelFolder = Callable[[str], str]
LAYER_0 = ["model.layers.0", "model.layers.1.*norm*"]


def settings_for(model: str, tmp_path: Path, freeze: list[str], **sections: Any) -> dict[str, Any]:
    return training_runs.settings(
        model,
        "unused.jsonl",
        tmp_path,
        model={"path": model, "freeze": freeze},
        optim={"max_grad_norm": None, "weight_decay": 0.1},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        **sections,
    )


def rows_of(n: int = 8) -> list[list[models.Document]]:
    return [[document] for document in models.make_records(n, seed=5)[1]]


def is_frozen(name: str) -> bool:
    return name.startswith("model.layers.0.") or (name.startswith("model.layers.1.") and "norm" in name)


@pytest.mark.parametrize(
    ("sharding", "checkpointing"),
    [
        ({"zero_stage": 0}, "none"),
        ({"zero_stage": 1}, "full"),
        ({"zero_stage": 2}, "none"),
        ({"zero_stage": 3}, "full"),
        ({"zero_stage": 3, "offload": "params"}, "none"),
    ],
)
def test_the_others_have_the_gradients_they_had(
    sharding: dict[str, Any], checkpointing: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """A whole frozen layer, and units in which some tensors are frozen; two micro-batches a rank."""
    model = model_folder("llama")
    settings = settings_for(
        model, tmp_path, LAYER_0, sharding=sharding, activation_checkpointing={"mode": checkpointing}
    )
    got = run_on_kept_ranks(step_runs.one_step, 2, settings, rows_of())[0]
    loss, gradients = run_plainly(reference.gradient_snapshot, model, [row[0] for row in rows_of()])[0]
    trained = {name: gradient for name, gradient in gradients.items() if not is_frozen(name)}
    assert len(trained) == len(gradients) - 11
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert max(reference.relative_errors(got["gradients"], trained).values()) < 1e-4
    moved = {name for name, tensor in got["after"].items() if not tensor.equal(got["before"][name])}
    assert moved == trained.keys(), "weight decay leaves the frozen alone too"


def described(settings: dict[str, Any]) -> dict[str, Any]:
    run = step_runs.build(settings)
    return {
        "trained": [name for group in run.optimizer.param_groups for name in group["names"]],
        "frozen": [name for name, parameter in run.model.named_parameters() if not parameter.requires_grad],
        "facts": run.facts,
    }


@pytest.mark.parametrize("pattern", ["model.embed_tokens", "lm_head.weight", "*embed*"])
def test_a_tied_head_is_frozen_with_its_embedding(pattern: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = settings_for(model_folder("qwen3_tied"), tmp_path, [pattern])
    found = run_on_kept_ranks(described, 2, settings)[0]
    assert found["frozen"] == ["model.embed_tokens.weight"]
    assert not set(found["frozen"]) & set(found["trained"])
    assert any(line.startswith("frozen: ") and "model.embed_tokens.weight" in line for line in found["facts"])
    got = run_on_kept_ranks(step_runs.one_step, 2, settings, rows_of())[0]
    assert "model.embed_tokens.weight" not in got["gradients"]
    assert got["after"]["model.embed_tokens.weight"].equal(got["before"]["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("freeze", "said"),
    [(["model.layers.0", "embed"], "['embed']"), (["*"], "all 21 parameters"), (["model", "lm_head"], "21")],
)
def test_pattern_that_cannot_be_meant_is_refused(
    freeze: list[str], said: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_on_kept_ranks(described, 1, settings_for(model_folder("llama"), tmp_path, freeze))
    assert said in caught.value.values


def train_save_resume_export(settings: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save, go on to four; resume a second run from the save, go on, and export it."""
    from fsdp_trainer.export import export_model

    run = checkpoint_runs.build(settings)
    checkpoint_runs.take_steps(run, 0, 2)
    path = checkpoint_runs.save(run, 2).wait()
    checkpoint_runs.take_steps(run, 2, 4)
    again = checkpoint_runs.build(settings)
    checkpoint_runs.load(again, path)
    checkpoint_runs.take_steps(again, 2, 4)
    folder = Path(settings["output_dir"]) / "model"
    export_model(folder, model=again.model, optimizer=again.optimizer, hf_config=again.hf_config, dtype="fp32")
    from fsdp_trainer.checkpoint import training_tensors
    from fsdp_trainer.optim.masters import trained_weights

    states = [name for name in training_tensors(again.model, again.optimizer) if name.startswith("optim.")]
    straight, resumed = (
        {name: step_runs.whole(tensor) for name, tensor in trained_weights(one.model, one.optimizer).items()}
        for one in (run, again)
    )
    return {"straight": straight, "resumed": resumed, "states": states}


@pytest.mark.parametrize(
    "sections",
    [{}, {"precision": "bf16", "sharding": {"offload": "optimizer"}}],
    ids=["fp32", "bf16-offloaded"],
)
def test_resume_and_export(sections: dict[str, Any], model_folder: ModelFolder, tmp_path: Path) -> None:
    """Report 28: no state of frozen parameters is saved, resuming is bitwise, the export has them unchanged.

    Also where the device keeps them narrower than they were loaded.
    """
    model = model_folder("llama")
    settings = settings_for(model, tmp_path, LAYER_0, **sections)
    got = run_ranks(train_save_resume_export, 2, settings)[0]
    assert not any(is_frozen(state.removeprefix("optim.")) for state in got["states"])
    assert all(tensor.equal(got["straight"][name]) for name, tensor in got["resumed"].items())
    written, source = (training_runs.read_weights(Path(folder)) for folder in (tmp_path / "model", model))
    assert written.keys() == source.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, got["resumed"][name])
        assert torch.equal(tensor, source[name]) == is_frozen(name)
