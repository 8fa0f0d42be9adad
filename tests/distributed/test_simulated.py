"""The same build_run and train_step on fake tensors of eight pretended accelerators: the seam a plan stands on.

Each test runs in a process of its own, since a simulated device stays registered with torch for a process's life.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models, step_runs, training_runs
from tests.ranks import run_ranks
from tests.sweeps import share

Folder = Callable[[str], str]
STAGES: dict[str, dict[str, Any]] = {
    "stage0": {"zero_stage": 0},
    "stage1": {"zero_stage": 1},
    "stage2": {"zero_stage": 2},
    "stage3": {"zero_stage": 3},
    "hybrid": {"zero_stage": 3, "replicate": 2},
    "reshard2": {"zero_stage": 3, "reshard_after_forward": 2},
    "offload": {"zero_stage": 3, "offload": "params"},
}


def settings_for(model: str, tmp_path: Path, world: int, /, **sections: Any) -> dict[str, Any]:
    batch = {"global_batch_size": 4 * world, "micro_batch_size": 2}
    sections = {"batch": batch, "data": {"packing": True}, **sections}
    return training_runs.settings(model, "unused.jsonl", tmp_path, **sections)


def rows(world: int) -> list[list[models.Document]]:
    _, docs = models.make_records(8 * world, seed=2, longest=20)
    return [docs[2 * index : 2 * index + 2] for index in range(4 * world)]


def describe(run: Any, output: Any) -> dict[str, Any]:
    """Return what a plan rests on: shapes, dtypes and devices of all that a rank holds after a step."""
    import torch
    from torch.distributed.tensor import DTensor

    def facts(value: torch.Tensor) -> tuple[Any, ...]:
        local = value.to_local() if isinstance(value, DTensor) else value
        return tuple(local.shape), str(local.dtype)

    state = run.optimizer.state
    return {
        "parameters": {name: facts(parameter) for name, parameter in run.model.named_parameters()},
        "buffers": {name: facts(buffer) for name, buffer in run.model.named_buffers()},
        "state": {
            name: {key: facts(value) for key, value in state[parameter].items()}
            for name, parameter in run.model.named_parameters()
        },
        "gradients": [name for name, parameter in run.model.named_parameters() if parameter.grad is not None],
        "output": {name: facts(getattr(output, name)) for name in ("loss", "grad_norm", "skipped")},
    }


def simulate(run_settings: dict[str, Any], documents: list[Any], world: int, rank: int) -> dict[str, Any]:
    import os

    import torch.distributed as dist
    from accelerate import PartialState
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    from fsdp_trainer.config import Config
    from fsdp_trainer.run import build_run
    from fsdp_trainer.simulated import simulated_runtime
    from fsdp_trainer.step import eval_step, train_step

    config = Config.from_dict(run_settings)
    config.check_world(world)
    with simulated_runtime(world_size=world, rank=rank) as runtime:
        run = build_run(config, runtime)
        window = step_runs.window_of(run, documents)
        output = train_step(run, window, learning_rate=1e-3, optimizer_step=0)
        found = describe(run, output)
        evaluated = eval_step(run, window.micro_batches[0])
        run.sharding.reshard_all()
        tensors = [output.loss, output.grad_norm, evaluated]
        tensors += [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters()]
        found["fake"] = all(isinstance(tensor, FakeTensor) for tensor in tensors)
        found["devices"] = sorted({str(tensor.device.type) for tensor in tensors[3:]})
    left = dist.is_initialized() or bool(PartialState._shared_state)
    found["left_behind"] = left or os.environ["ACCELERATE_USE_CPU"] != "true"
    return found


def really(run_settings: dict[str, Any], documents: list[Any]) -> dict[str, Any]:
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    return describe(run, train_step(run, step_runs.window_of(run, documents), learning_rate=1e-3, optimizer_step=0))


STEPS = [(stage, packing) for stage in STAGES for packing in (True, False)]


@pytest.mark.parametrize(("stage", "packing"), share(STEPS, [*STEPS[::4], *STEPS[3::4]]))
def test_one_step_of_eight_ranks(stage: str, packing: bool, model_folder: Folder, tmp_path: Path) -> None:
    """Nothing reads a value on the host, at any stage; a rank holds its eighth and the state of it."""
    settings = settings_for(
        model_folder("llama"),
        tmp_path,
        8,
        sharding=STAGES[stage],
        data={"packing": packing},
        precision="bf16",
        activation_checkpointing={"mode": "full"},
    )
    documents = rows(8) if packing else [row[:1] for row in rows(8)]
    got = run_ranks(simulate, 1, settings, documents, 8, 3)[0]
    assert got["fake"]
    assert not got["left_behind"]
    assert got["devices"] == (["cpu"] if stage == "offload" else ["simgpu"])
    share = {"stage0": 1, "hybrid": 4}.get(stage, 8)
    assert got["parameters"]["model.layers.0.self_attn.q_proj.weight"] == ((48 // share, 48), "torch.float32")
    for name, shape in got["parameters"].items():
        assert got["state"][name]["exp_avg"] == got["state"][name]["exp_avg_sq"] == shape
    assert got["gradients"] == []


@pytest.mark.parametrize("kind", models.KINDS)
def test_every_architecture(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    settings = settings_for(model_folder(kind), tmp_path, 8, precision="bf16")
    got = run_ranks(simulate, 1, settings, rows(8), 8, 0)[0]
    assert got["fake"]


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "fp16"},
        {"loss": {"kind": "plain"}},
        {"optim": {"max_grad_norm": None}},
        {"optim": {"implementation": "foreach"}},
        {"activation_checkpointing": {"mode": "every_n_layers", "every_n": 2}},
        {"model": {"init": "random"}},
    ],
    ids=lambda sections: "-".join(str(value) for value in sections.values()),
)
def test_other_settings(sections: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    settings = settings_for(model_folder("qwen3"), tmp_path, 8, **sections)
    settings["model"]["path"] = model_folder("qwen3")
    assert run_ranks(simulate, 1, settings, rows(8), 8, 7)[0]["fake"]


HELD = [(kind, stage) for kind in ("llama", "gpt2") for stage in ("stage0", "stage1", "stage2", "stage3", "offload")]


@pytest.mark.parametrize(("kind", "stage"), share(HELD, [*HELD[:5], ("gpt2", "stage3")]))
def test_holds_what_a_real_rank_holds(kind: str, stage: str, model_folder: Folder, tmp_path: Path) -> None:
    """Shapes and dtypes of parameters, buffers, optimizer state and results, on each rank of a real run of two."""
    settings = settings_for(model_folder(kind), tmp_path, 2, sharding=STAGES[stage], precision="bf16")
    real = run_ranks(really, 2, settings, rows(2))
    for rank in range(2):
        fake = run_ranks(simulate, 1, settings, rows(2), 2, rank)[0]
        assert {name: fake[name] for name in real[rank]} == real[rank]
