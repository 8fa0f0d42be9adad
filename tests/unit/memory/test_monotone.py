"""What more of something may never do to memory: the order of stages, policies, row lengths and numbers of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.quick import simulate_quick
from tests import simulation_runs
from tests.ranks import run_on_kept_ranks

ROOT = Path(__file__).parents[3]
MODELS = ("llama-3.1-8b", "qwen3-4b", "llama-3.2-1b", "llama-2-7b")
# In `full` a layer is computed once more, and what it leaves then stands beside what is kept of all layers: with few
# layers, or short rows, the gathered weights decide and all policies are alike but for that.
SLACK = 1.002


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text((ROOT / "benchmarks" / "models" / f"{name}.json").read_text())
        found[name] = str(folder)
    return found


drawn = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "gpus": st.sampled_from((2, 4, 8)),
        "seq_len": st.integers(64, 8192),
        "micro": st.integers(1, 8),
        "accumulation": st.integers(1, 3),
        "stage": st.integers(0, 3),
        "mode": st.sampled_from(("none", "full", "every_n_layers")),
        "loss": st.sampled_from(("chunked", "plain")),
        "precision": st.sampled_from(("bf16", "fp16", "fp32", "bf16_pure")),
        "packing": st.booleans(),
    }
)


def allocated(models: dict[str, str], case: dict[str, Any], **changes: Any) -> float:
    case = {**case, **changes}
    config = Config.from_dict(
        {
            "model.path": models[case["model"]],
            "data.seq_len": case["seq_len"],
            "data.packing": case["packing"],
            "batch.micro_batch_size": case["micro"],
            "batch.global_batch_size": case["micro"] * case["gpus"] * case["accumulation"],
            "sharding.zero_stage": case["stage"],
            "activation_checkpointing.mode": case["mode"],
            "activation_checkpointing.every_n": 2 if case["mode"] == "every_n_layers" else 1,
            "loss.kind": case["loss"],
            "precision": case["precision"],
        }
    )
    return simulate_quick(config, parse_gpus(f"{case['gpus']}xH100"))["allocated_gib"]


@settings(max_examples=20, deadline=None)
@given(case=drawn)
def test_closed_form_never_falls_with_what_is_asked_for(models: dict[str, str], case: dict[str, Any]) -> None:
    here = allocated(models, case)
    assert allocated(models, case, seq_len=2 * case["seq_len"]) >= here
    assert allocated(models, case, micro=case["micro"] + 1) >= here
    assert allocated(models, case, gpus=2 * case["gpus"], stage=3) <= allocated(models, case, stage=3)
    stages = [allocated(models, case, stage=stage) for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    modes = [allocated(models, case, mode=mode) for mode in ("full", "every_n_layers", "none")]
    assert modes[0] <= SLACK * modes[1] and modes[1] <= SLACK * modes[2]


@pytest.mark.slow
def test_the_simulation_never_falls_with_what_is_asked_for(tmp_path: Path) -> None:
    """The same order, of whole simulations of a small model."""
    ask = simulation_runs.settings
    every2, full = {"mode": "every_n_layers", "every_n": 2}, {"mode": "full"}
    model = {"num_hidden_layers": 4, "vocab_size": 512}
    cases = {
        **{f"stage{n}": ask(tmp_path, model=model, sharding={"zero_stage": n}) for n in range(4)},
        "every2": ask(tmp_path, model=model, activation_checkpointing=every2),
        "full": ask(tmp_path, model=model, activation_checkpointing=full),
        "longer": ask(tmp_path, model=model, data={"seq_len": 1024, "packing": False}),
        "larger": ask(tmp_path, model=model, batch={"global_batch_size": 16, "micro_batch_size": 2}),
        "copies": ask(tmp_path, model=model, sharding={"replicate": 2}),
    }
    found = run_on_kept_ranks(simulation_runs.simulate_all, 1, cases, "2x4xA100-80GB", timeout=300, group="simulated")[
        0
    ]
    peak = {name: case["json"]["allocated_gib"] for name, case in found.items()}
    assert peak["stage3"] <= peak["stage2"] <= peak["stage1"] <= peak["stage0"]
    assert peak["full"] <= peak["every2"] <= peak["stage3"]
    assert peak["stage3"] <= peak["longer"] and peak["stage3"] <= peak["larger"]
    # Two copies of the model, each over the four GPUs of a node: twice the shards of one over eight.
    resting = {n: found[n]["breakdown"]["parameters"] + found[n]["breakdown"]["optimizer_state"] for n in found}
    assert resting["copies"] == pytest.approx(2 * resting["stage3"], rel=0.01)
