"""The closed form of a step's time against the traced one: the same units, stages and transfers, counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import simulation_runs
from tests.ranks import run_on_kept_ranks
from tests.simulation_runs import settings

# Wide enough that products and bytes take the time, not the starting of operations.
WIDE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 2, "num_attention_heads": 16}
WIDE |= {"num_key_value_heads": 4, "vocab_size": 32_000}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "tie_word_embeddings": True}
# name -> (GPUs, sections of the settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3": ("8xA100-80GB", {"activation_checkpointing": {"mode": "full"}}),
    "stage 2, accumulated": ("2xRTX4090", {"sharding": {"zero_stage": 2}}),
    "stage 1, accumulated": ("2xRTX4090", {"sharding": {"zero_stage": 1}}),
    "stage 0": ("8xA100-80GB", {"sharding": {"zero_stage": 0}}),
    "hybrid": ("2x4xRTX4090", {"sharding": {"replicate": 2}}),
    "within four": ("8xRTX4090", {"sharding": {"reshard_after_forward": 4}}),
    "whole logits, packed": ("8xH100", {"loss": {"kind": "plain"}, "data": {"packing": True, "seq_len": 2048}}),
    "fp16 on T4": ("4xT4", {"precision": "fp16"}),
    "fp32": ("8xA100-80GB", {"precision": "fp32"}),
    "parameters offloaded": ("2xRTX4090", {"sharding": {"offload": "params"}}),
    "optimizer offloaded": ("2xRTX4090", {"sharding": {"offload": "optimizer"}}),
    "optimizer offloaded, one GPU": ("RTX4090", {"sharding": {"offload": "optimizer"}, "precision": "bf16_pure"}),
    "state streamed": ("2xRTX4090", {"sharding": {"offload": "optimizer"}, "optim": {"offload_step": "device"}}),
    "bf16 averages": ("2xA100-80GB", {"precision": "bf16_pure", "optim": {"state_dtype": "bf16"}}),
    "8-bit": ("2xA100-80GB", {"optim": {"name": "adamw_8bit"}}),
    "qwen3": ("8xH100", {"model": QWEN3}),
}


FEW = {"RTX4090": 2, "2xRTX4090": 6, "2xA100-80GB": 2, "4xT4": 4}  # rows of a step; of the others eight


def build(folder: Path) -> dict[str, tuple[str, Any]]:
    cases = {}
    for name, (gpus, words) in CASES.items():
        sections = {"data": {"packing": False, "seq_len": 2048}, **words}
        values = settings(folder, **{**sections, "model": {**WIDE, **words.get("model", {})}})
        if gpus in FEW:
            values["batch"]["global_batch_size"] = FEW[gpus]
        cases[name] = gpus, values
    return cases


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = build(tmp_path_factory.mktemp("models"))
    return run_on_kept_ranks(simulation_runs.time_both, 1, cases, timeout=400, group="simulated")[0]


@pytest.mark.parametrize("name", CASES)
def test_closed_form_follows_the_traced_step(times: dict[str, dict[str, Any]], name: str) -> None:
    traced, closed = times[name]["traced"], times[name]["closed"]
    assert sum(closed[part] for part in PARTS) == pytest.approx(sum(traced[part] for part in PARTS), rel=0.06)
    for part in PARTS:
        assert closed[part] == pytest.approx(traced[part], abs=0.08 * sum(traced[part] for part in PARTS)), part


PARTS = ("compute", "exposed_communication", "exposed_transfer", "optimizer", "exposed_data")


def test_products_are_counted_exactly(times: dict[str, dict[str, Any]]) -> None:
    """Recomputation included: of a layer everything but its last product, where torch's checkpointing stops."""
    found = times["stage 3"]
    assert found["closed_flops"] == pytest.approx(found["traced_flops"], rel=1e-3)


def test_a_look_at_a_device_moves_nothing(times: dict[str, dict[str, Any]]) -> None:
    """What an update moves: 28 bytes a parameter in the kernel, 12 for norm and clipping."""
    assert times["stage 3"]["update_bytes"] == pytest.approx(40, rel=0.01)
