"""Learning-rate schedule (reports H): one move per optimizer step that moved the weights, whatever the world size.

Entries 65 and 66. The schedule's own numbers are in tests/unit/test_schedule.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import NonFiniteError
from tests import models, reference, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly

Folder = Callable[[str], str]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"name": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0}, [1, 0.8, 0.6, 0.4, 0.2, 0.0]),
        ({"name": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1}, [1, 1, 0.868198, 0.55, 0.231802, 0.1]),
        # 0.3 of 6 steps, rounded up
        ({"name": "linear", "warmup_ratio": 0.3, "warmup_steps": None}, [0.5, 1, 1, 0.7, 0.4, 0.1]),
    ],
    ids=["constant", "linear", "cosine", "ratio"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rates_do_not_depend_on_the_world_size(
    world_size: int, schedule: dict[str, Any], expected: list[float], model_folder: Folder, tmp_path: Path
) -> None:
    """Report 65: a prepared scheduler moves world_size times a step and ends the run at the lowest rate half way."""
    records, _ = models.make_records(8, seed=1)
    settings = training_runs.settings(
        model_folder("llama"),
        models.write_jsonl(records, tmp_path / "train.jsonl"),
        tmp_path / "run",
        optim={"lr": 0.002, "weight_decay": 0.0},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        train={"max_steps": 6},
    )
    settings["schedule"] = schedule
    got = run_on_kept_ranks(training_runs.train, world_size, settings)[0]
    rates = [row["lr"] for row in got["metrics"] if "loss" in row]
    assert rates == pytest.approx([0.002 * share for share in expected], rel=1e-5, abs=1e-12)


def with_large_gradients(source: str, target: Path) -> str:
    """Save a copy of a model whose gradients overflow fp16 at the scaler's first scale and fit at a lower one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(40.0)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_does_not_move_the_schedule(world_size: int, model_folder: Folder, tmp_path: Path) -> None:
    """Report 66: with a fused optimizer the scaler calls step() also when it skips; the rate must stay where it is."""
    model = run_plainly(with_large_gradients, model_folder("llama"), tmp_path / "model")[0]
    records, _ = models.make_records(8, seed=1)
    settings = training_runs.settings(
        model,
        models.write_jsonl(records, tmp_path / "train.jsonl"),
        tmp_path / "run",
        precision="fp16",
        data={"shuffle": False},
        schedule={"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.0},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        train={"max_steps": 12},
    )
    got = run_on_kept_ranks(training_runs.train, world_size, settings)[0]
    rows = [row for row in got["metrics"] if "loss" in row]
    skipped = [row["grad_norm"] is None for row in rows]  # not finite, which JSON has no number for
    assert skipped[0], "the first scale overflows"
    assert [row.get("skipped", False) for row in rows] == skipped
    assert [row["loss_scale"] for row in rows if row.get("skipped")] == [2.0**16 / 2**n for n in range(sum(skipped))]
    assert sum(skipped) <= 8, "a later one fits"
    recipe = reference.Recipe(schedule="linear", warmup_steps=4, min_lr_ratio=0.0, total_steps=12)
    expected = [reference.learning_rate(step - sum(skipped[:step]), recipe) for step in range(12)]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    # An epoch is two windows here: every second step sees the same rows, and nothing has moved until one is taken.
    still = skipped.index(False) + 1
    assert still > 2
    assert len({row["loss"] for row in rows[:still:2]}) == 1


def inject(run_settings: dict[str, Any], documents: list[list[models.Document]], at: int, rank: int) -> list[Any]:
    """Take three steps; in step `at` one rank's gradient of the embedding becomes infinite, before it is reduced."""
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * float("inf"))

    found = []
    moves = 0
    for step in range(3):
        hooks = []
        if step == at and run.runtime.rank == rank:
            hooks.append(run.model.get_input_embeddings().register_forward_hook(spoil))
        before = step_runs.parameters(run)
        output = train_step(run, window, learning_rate=1e-3, optimizer_step=moves)
        moves += not output.skipped.item()
        after = step_runs.parameters(run)
        counts = {int(state["step"].item()) for state in run.optimizer.state.values()}
        moved = {name for name in before if not before[name].equal(after[name])}
        scale = run.scaler.get_scale() if run.scaler is not None else None
        finite = all(torch.isfinite(tensor).all().item() for tensor in after.values())
        found.append((output.skipped.item(), len(moved), len(before), counts, scale, finite))
        for hook in hooks:
            hook.remove()
    return found


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage3": (2, {"zero_stage": 3}),
    "stage1": (2, {"zero_stage": 1}),
    "stage0": (2, {"zero_stage": 0}),
    "offload": (2, {"zero_stage": 3, "offload": "params"}),
    "hybrid": (4, {"zero_stage": 3, "replicate": 2}),
    "uneven": (3, {"zero_stage": 3}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_one_ranks_infinite_gradient_is_skipped_by_all(
    precision: str, mesh: str, model_folder: Folder, tmp_path: Path
) -> None:
    """Weights, moments and step counts stay on every rank, the scale halves, and the next step goes on."""
    world, sharding = MESHES[mesh]
    _, docs = models.make_records(2 * world, seed=8)
    settings = training_runs.settings(
        model_folder("llama"),
        "unused.jsonl",
        tmp_path,
        precision=precision,
        sharding=sharding,
        train={"on_nonfinite": "skip"},
        batch={"global_batch_size": 2 * world, "micro_batch_size": 1},
    )
    ranks = run_on_kept_ranks(inject, world, settings, [[document] for document in docs], 1, world - 1)
    assert ranks == [ranks[0]] * world
    total = ranks[0][0][2]
    scales = (65536.0, 32768.0, 32768.0) if precision == "fp16" else (None, None, None)
    assert ranks[0] == [
        (0.0, total, total, {1}, scales[0], True),
        (1.0, 0, total, {1}, scales[1], True),
        (0.0, total, total, {2}, scales[2], True),
    ]


def with_a_nan_weight(source: str, target: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[models.EOS, 0] = float("nan")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return str(target)


@pytest.mark.parametrize(("on_nonfinite", "steps"), [("error", 0), ("skip", 3)])
def test_nonfinite_ends_the_run_on_all_ranks(
    on_nonfinite: str, steps: int, model_folder: Folder, tmp_path: Path
) -> None:
    """error stops at once; skip gives up after three in a row. Both name the step and its rows."""
    model = run_plainly(with_a_nan_weight, model_folder("llama"), tmp_path / "model")[0]
    records, _ = models.make_records(8, seed=1)
    settings = training_runs.settings(
        model,
        models.write_jsonl(records, tmp_path / "train.jsonl"),
        tmp_path / "run",
        train={"max_steps": 6, "on_nonfinite": on_nonfinite},
        batch={"global_batch_size": 4, "micro_batch_size": 2},
    )
    with pytest.raises(NonFiniteError) as caught:
        run_on_kept_ranks(training_runs.train, 2, settings)
    assert f"step {steps + 1}" in caught.value.values
    assert "rows" in caught.value.values
    assert ("on_nonfinite: skip" in caught.value.fix) == (on_nonfinite == "error"), "no advice to set what is set"
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    assert [row["skipped"] for row in rows] == [True] * steps
    assert "; the first that is not finite is the weight lm_head.weight (rank " in caught.value.values


def spoiled(run_settings: dict[str, Any], documents: list[list[models.Document]], what: str) -> str:
    """Name what is found in a window where rank 1 makes an output or a gradient of the second layer infinite."""
    from fsdp_trainer.nonfinite import find_first_nonfinite

    run = step_runs.build(run_settings)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if what == "output":
            return output * float("inf")
        output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    if run.runtime.rank == 1 and what != "nothing":
        run.model.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(spoil)
    found = find_first_nonfinite(run, step_runs.window_of(run, documents))
    assert all(parameter.grad is None for parameter in run.model.parameters())
    return found


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("output", "the output of model.layers.1.mlp.up_proj (rank 1)"),
        # All in front of it are infinite as well; it is the first of the backward, on the ranks that share it.
        ("gradient", "the gradient of model.layers.1.mlp.up_proj.weight (rank 0)"),
        ("nothing", ""),
    ],
)
def test_the_first_tensor_that_is_not_finite(what: str, named: str, model_folder: Folder, tmp_path: Path) -> None:
    _, docs = models.make_records(4, seed=8)
    batch = {"global_batch_size": 4, "micro_batch_size": 1}
    settings = training_runs.settings(model_folder("llama"), "unused.jsonl", tmp_path, precision="fp16", batch=batch)
    assert run_on_kept_ranks(spoiled, 2, settings, [[document] for document in docs], what) == [named] * 2
