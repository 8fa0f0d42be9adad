"""Precision (reports I): fp32 masters whatever the source and the compute dtype, so that small updates move weights.

Entries 67, 68, 70 and 72. Pure bf16 with stochastic rounding: test_pure_bf16.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly

Folder = Callable[[str], str]


def save_in(source: str, target: Path, dtype: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return str(target)


def steps_and_dtypes(run_settings: dict[str, Any], rows: list[list[models.Document]], steps: int) -> dict[str, Any]:
    """Take steps at a learning rate far below bf16's grid; return dtypes and the share of entries that moved."""
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, rows)
    before = step_runs.parameters(run)
    buffers = {name: str(buffer.dtype) for name, buffer in run.model.named_buffers()}
    inside: set[str] = set()
    layer = run.model.get_submodule("model.layers.0.mlp")
    layer.register_forward_pre_hook(lambda _, args: inside.add(str(args[0].dtype)))
    losses = [train_step(run, window, learning_rate=1e-4, optimizer_step=step).loss.item() for step in range(steps)]
    after = step_runs.parameters(run)
    return {
        "parameters": {str(parameter.dtype) for parameter in run.model.parameters()},
        "state": {
            str(value.dtype)
            for state in run.optimizer.state.values()
            for name, value in state.items()
            if name.startswith("exp_avg")
        },
        "buffers": buffers,
        "buffers_after": {name: str(buffer.dtype) for name, buffer in run.model.named_buffers()},
        "inside": inside,
        "moved": {name: (before[name] != after[name]).float().mean().item() for name in before},
        "before": before,
        "losses": losses,
    }


@pytest.mark.parametrize(
    ("source_dtype", "precision"),
    [("float32", "bf16"), ("bfloat16", "bf16"), ("bfloat16", "fp32"), ("float16", "fp16"), ("bfloat16", "fp16")],
)
def test_masters_are_fp32_and_every_kind_of_weight_moves(
    source_dtype: str, precision: str, model_folder: Folder, tmp_path: Path
) -> None:
    """Reports 67, 68 and 70: no norm weight near 1 moves by 1e-4 in bf16, and fp16 weights cannot be unscaled."""
    model = run_plainly(save_in, model_folder("llama"), tmp_path / "model", source_dtype)[0]
    _, docs = models.make_records(8, seed=12)
    settings = training_runs.settings(
        model,
        "unused.jsonl",
        tmp_path,
        precision=precision,
        batch={"global_batch_size": 8, "micro_batch_size": 2},
    )
    got = run_on_kept_ranks(steps_and_dtypes, 2, settings, [[document] for document in docs], 20)[0]
    compute = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[precision]
    assert got["inside"] == {compute}
    assert got["parameters"] == got["state"] == {"torch.float32"}
    assert {dtype for name, dtype in got["buffers"].items() if "inv_freq" in name} == {"torch.float32"}
    assert got["buffers_after"] == got["buffers"]
    for name, share in got["moved"].items():
        # Rows of words that do not occur have no gradient; every other entry must move.
        assert share > (0.3 if "embed_tokens" in name else 0.99), name
    assert got["losses"][-1] < got["losses"][0]
    rounded = {name: tensor.to(getattr(torch, source_dtype)).float() for name, tensor in got["before"].items()}
    assert all(tensor.equal(rounded[name]) for name, tensor in got["before"].items()), "loaded as stored"


def buffers_of(run_settings: dict[str, Any]) -> dict[str, Any]:
    run = step_runs.build(run_settings)
    return {name: buffer.clone() for name, buffer in run.model.named_buffers()}


def buffers_of_a_plain_model(folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "gpt2"])
def test_buffers_are_those_of_a_plain_model_on_every_rank(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    """Report 95: rotary tables are in no checkpoint; built on meta they would be garbage on some ranks."""
    settings = training_runs.settings(
        model_folder(kind),
        "unused.jsonl",
        tmp_path,
        precision="bf16",
        batch={"global_batch_size": 2, "micro_batch_size": 1},
    )
    plain = run_plainly(buffers_of_a_plain_model, model_folder(kind))[0]
    for rank in run_on_kept_ranks(buffers_of, 2, settings):
        assert rank.keys() == plain.keys()
        assert all(buffer.equal(plain[name]) and buffer.dtype == plain[name].dtype for name, buffer in rank.items())


def norms_by_denominator(run_settings: dict[str, Any], rows: list[list[models.Document]]) -> list[float]:
    """Return the gradient norm of the same rows when their window is said to hold 256 tokens, then 255."""
    from dataclasses import replace

    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, rows)
    return [
        train_step(run, replace(window, supervised_tokens=tokens), learning_rate=0.0, optimizer_step=0).grad_norm.item()
        for tokens in (256, 255)
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_is_scaled_in_fp32(precision: str, model_folder: Folder, tmp_path: Path) -> None:
    """1/255 lies halfway between two numbers of bf16: rounded, it would scale a whole step's gradient by 0.4 %."""
    _, docs = models.make_records(4, seed=3)
    settings = training_runs.settings(model_folder("llama"), "unused.jsonl", tmp_path, precision=precision)
    for at_256, at_255 in run_on_kept_ranks(norms_by_denominator, 2, settings, [[document] for document in docs]):
        assert at_255 / at_256 == pytest.approx(256 / 255, rel=1.5e-3)  # gradients in bf16 are off by 4e-4 themselves
