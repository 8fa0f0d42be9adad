"""Activation checkpointing (reports K): the same gradients, whole layers, no cache, and FSDP on the outside.

Entries 81, 82, 84, 85 (the export's part is in test_export*.py), 87, 89, 90 and 91 are checked here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.activation_checkpointing import layers_to_checkpoint
from fsdp_trainer.errors import ConfigError
from tests import models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks
from tests.sweeps import share

Folder = Callable[[str], str]
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "every2": {"mode": "every_n_layers", "every_n": 2},
    "every3": {"mode": "every_n_layers", "every_n": 3},
}


def settings_for(model: str, tmp_path: Path, mode: str, **sections: Any) -> dict[str, Any]:
    sections = {"batch": {"global_batch_size": 8, "micro_batch_size": 2}, **sections}
    return training_runs.settings(model, "unused.jsonl", tmp_path, activation_checkpointing=MODES[mode], **sections)


def rows() -> list[list[models.Document]]:
    _, docs = models.make_records(8, seed=6)
    return [[document] for document in docs]


WAYS = [(mode, stage) for mode in ("full", "every2", "every3") for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("mode", "zero_stage"), share(WAYS, [("full", 0), ("full", 3), ("every2", 2), ("every3", 1)]))
def test_dropout_gradients_are_those_without_checkpointing(
    mode: str, zero_stage: int, model_folder: Folder, tmp_path: Path
) -> None:
    """Report 81: with another dropout mask in the recomputation a third of the gradient's norm is wrong."""
    results = [
        run_on_kept_ranks(
            step_runs.one_step,
            2,
            settings_for(model_folder("gpt2_dropout"), tmp_path, name, sharding={"zero_stage": zero_stage}),
            rows(),
        )[0]
        for name in ("none", mode)
    ]
    without, with_it = results
    assert without["loss"] == with_it["loss"]
    assert max(reference.relative_errors(with_it["gradients"], without["gradients"]).values()) < 1e-6


def dropout_losses(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> list[Any]:
    import torch.distributed as dist

    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)
    losses = [train_step(run, window, learning_rate=0.0, optimizer_step=0).loss.item() for _ in range(2)]
    masks = [torch.zeros(64) for _ in range(dist.get_world_size())]
    dist.all_gather(masks, torch.rand(64))
    return [losses, [mask.tolist() for mask in masks]]


def test_dropout_is_repeatable_and_differs_between_steps_and_ranks(model_folder: Folder, tmp_path: Path) -> None:
    settings = settings_for(model_folder("gpt2_dropout"), tmp_path, "full")
    first, second = (run_on_kept_ranks(dropout_losses, 2, settings, rows())[0] for _ in range(2))
    assert first == second
    losses, masks = first
    assert losses[0] != losses[1]
    assert masks[0] != masks[1]
    other = training_runs.settings(
        model_folder("gpt2_dropout"),
        "unused.jsonl",
        tmp_path,
        activation_checkpointing=MODES["full"],
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        train={"seed": 8},
    )
    assert run_on_kept_ranks(dropout_losses, 2, other, rows())[0][0] != losses


@pytest.mark.parametrize(
    ("mode", "every_n", "expected"),
    [("none", 1, []), ("full", 1, [0, 1, 2, 3, 4]), ("every_n_layers", 2, [0, 2, 4]), ("every_n_layers", 5, [0])],
)
def test_layers_are_chosen_by_index(mode: str, every_n: int, expected: list[int]) -> None:
    assert [layers_to_checkpoint(5, mode=mode, every_n=every_n) for _ in range(2)] == [expected] * 2


def saved_bytes_by_layer(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, Any]:
    """Return for each decoder layer how many tensors, and bytes, one forward leaves for the backward."""
    from fsdp_trainer.loss import Supervision
    from fsdp_trainer.model import find_parts

    run = step_runs.build(run_settings)
    batch = step_runs.window_of(run, documents).micro_batches[0]
    saved: list[list[int]] = []
    stored: set[int] = {p.to_local().untyped_storage().data_ptr() for p in run.model.parameters()}  # type: ignore[attr-defined]

    def around(module: torch.nn.Module) -> None:
        # Hooks on the module run inside FSDP's own pre-hook and before its post-hook.
        state: dict[str, Any] = {}

        def before(*_: Any) -> None:
            saved.append([])
            gathered = {p.untyped_storage().data_ptr() for p in module.parameters()}
            here = saved[-1]

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.untyped_storage().data_ptr() not in gathered | stored:
                    here.append(tensor.numel() * tensor.element_size())
                return tensor

            state["hooks"] = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            state["hooks"].__enter__()

        def after(*_: Any) -> None:
            state["hooks"].__exit__(None, None, None)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, prepend=True)

    for layer in find_parts(run.model).layers:
        around(layer)
    scale = torch.ones(())
    run.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        supervision=Supervision(batch.supervised_positions, batch.targets, scale),
    )
    return {"saved": saved, "hidden": batch.input_ids.numel() * 48 * 4}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_whole_layers_are_recomputed(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    """Report 82: wrapped children keep several tensors a layer; a wrapped layer keeps only what goes into it."""
    by_mode = {
        mode: run_ranks(saved_bytes_by_layer, 1, settings_for(model_folder(kind), tmp_path, mode), rows())[0]
        for mode in ("none", "full", "every2")
    }
    hidden = by_mode["full"]["hidden"]
    totals = {mode: [sum(layer) for layer in found["saved"]] for mode, found in by_mode.items()}
    assert all(len(layers) == models.N_LAYERS for layers in totals.values())
    assert all(total > 5 * hidden for total in totals["none"])
    assert all(total < 2 * hidden for total in totals["full"])
    assert [total < 2 * hidden for total in totals["every2"]] == [True, False] * (models.N_LAYERS // 2)


def step_with_cache_asked_for(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, Any]:
    from fsdp_trainer.step import train_step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = step_runs.build(run_settings)
        run.model.config.use_cache = True  # type: ignore[union-attr]
        output = train_step(run, step_runs.window_of(run, documents), learning_rate=1e-3, optimizer_step=0)
    texts = [str(warning.message) for warning in caught]
    return {
        "loss": output.loss.item(),
        "warnings": [text for text in texts if "cache" in text.lower() or "checkpoint" in text.lower()],
        "source_use_cache": run.hf_config.use_cache,
    }


def test_cache_and_checkpointing(model_folder: Folder, tmp_path: Path) -> None:
    """Report 84: a cache inside a recomputed layer is appended to twice; the config may well ask for one."""
    settings = settings_for(model_folder("llama"), tmp_path, "full")
    got = run_on_kept_ranks(step_with_cache_asked_for, 2, settings, rows())[0]
    loss, _ = run_plainly(reference.gradient_snapshot, model_folder("llama"), [row[0] for row in rows()])[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert got["warnings"] == []
    assert got["source_use_cache"] is True, "the export takes its config from the source"


def gathers_of_a_step(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)
    train_step(run, window, learning_rate=0.0, optimizer_step=0)
    with CommDebugMode() as counted:
        train_step(run, window, learning_rate=0.0, optimizer_step=0)
    return {str(collective): count for collective, count in counted.get_comm_counts().items()}


def test_recomputation_gathers_nothing_more(model_folder: Folder, tmp_path: Path) -> None:
    """Reports 87 and 90: checkpoint(FSDP(layer)) gathers a layer's weights once more than FSDP(checkpoint(layer))."""
    counts = [
        run_on_kept_ranks(gathers_of_a_step, 2, settings_for(model_folder("llama"), tmp_path, mode), rows())[0]
        for mode in ("none", "full")
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) > 0


def functions_held(run_settings: dict[str, Any]) -> list[Any]:
    from fsdp_trainer.model import find_parts

    run = step_runs.build(run_settings)
    names = [name for name, _ in run.model.named_parameters()]
    layers = find_parts(run.model).layers
    keywords = [getattr(layer.forward, "keywords", None) for layer in layers]
    return [names, keywords, run.model.is_gradient_checkpointing]


def test_every_layer_holds_the_non_reentrant_kind_once(model_folder: Folder, tmp_path: Path) -> None:
    """Reports 39 and 89: names stay canonical, and no other layer of code switches its own checkpointing on."""
    plain = run_ranks(functions_held, 1, settings_for(model_folder("llama"), tmp_path, "none"))[0]
    names, keywords, by_transformers = run_ranks(
        functions_held, 1, settings_for(model_folder("llama"), tmp_path, "full")
    )[0]
    assert names == plain[0]
    assert plain[1] == [None] * models.N_LAYERS
    assert keywords == [{"use_reentrant": False, "preserve_rng_state": True}] * models.N_LAYERS
    assert not by_transformers


def parts_of(with_layers: bool) -> int:
    from transformers import GPT2Config, GPT2LMHeadModel

    from fsdp_trainer.model import find_parts

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    if not with_layers:
        blocks = torch.nn.ModuleDict({f"block{index}": block for index, block in enumerate(model.transformer.h)})
        model.transformer.add_module("h", blocks)
    return len(find_parts(model).layers)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    """Report 91: going on unwrapped would save nothing and say nothing."""
    assert run_ranks(parts_of, 1, True) == [2]
    with pytest.raises(ConfigError, match="layers") as caught:
        run_ranks(parts_of, 1, False)
    assert "transformer" in caught.value.values
