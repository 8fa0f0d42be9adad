"""Kinds of failure from public reports, section M (memory), that touch offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.simulation_runs import SMALL, settings, simulate_all


def test_pinning_that_fails_is_no_error() -> None:
    """Report 106: without a driver, or where it refuses, memory stays as it is and the run says so."""
    import torch

    from fsdp_trainer.optim.transfers import pin

    if torch.cuda.is_available():
        pytest.skip("this machine can pin")
    assert pin([torch.ones(3)]) is False


def simulated_peaks(cases: dict[str, Any], gpus: str) -> dict[str, dict[str, int]]:
    """Return each phase's peak on the device, and what a rank's process takes on the host."""
    return {name: case["phases"] | {"host": case["host"]} for name, case in simulate_all(cases, gpus).items()}


def test_never_more_than_two_layers_gradients_on_the_device(tmp_path: Path) -> None:
    """A longer model takes its weights and what checkpointing keeps, and no byte of gradients or state.

    Report 99: so the first step cannot run out of memory where the backward before it did not. Report 101: nor does an
    untied table share a buffer with another.
    """

    def case(layers: int, **sharding: Any) -> dict[str, Any]:
        return settings(
            tmp_path,
            model={"num_hidden_layers": layers},
            sharding={"zero_stage": 3} | sharding,
            precision="bf16",
            activation_checkpointing={"mode": "full"},
            batch={"global_batch_size": 16, "micro_batch_size": 1},
        )

    cases = {
        f"{name}-{layers}": case(layers, **more)
        for layers in (3, 5)
        for name, more in {
            "none": {},
            "optimizer": {"offload": "optimizer"},
            "hybrid": {"offload": "optimizer", "replicate": 2},
        }.items()
    }
    got = run_ranks(simulated_peaks, 1, cases, "8xA100-80GB", timeout=300)[0]
    kept = 2 * 512 * SMALL["hidden_size"] * 2
    for name in ("optimizer", "hybrid"):
        few, many = got[f"{name}-3"], got[f"{name}-5"]
        weights = many["load"] - few["load"]
        assert many["backward"] - few["backward"] == pytest.approx(weights + kept, abs=1024)
        assert many["step"] - few["step"] == pytest.approx(weights, abs=1024)
    assert got["none-5"]["backward"] - got["none-3"]["backward"] > got["none-5"]["load"] - got["none-3"]["load"] + kept
    for name, phases in got.items():
        if not name.startswith("none"):
            assert phases["step"] < phases["backward"]
    # On the host: masters, two averages, gradients, where those of two units land, and the save's copy.
    added = got["optimizer-5"]["host"] - got["none-5"]["host"]
    weights = (got["none-5"]["load"] - got["none-3"]["load"]) * 5 / 2  # fp32 shards of the five layers
    assert added > 16 / 4 * weights
