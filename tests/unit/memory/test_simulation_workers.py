"""The processes that simulate for a plan: one that ends says so, and none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.simulation_workers import simulation_workers

MODEL = Path(__file__).resolve().parents[3] / "benchmarks" / "models" / "qwen3-0.6b.json"


def test_a_process_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "false")
    config = Config.from_dict({"model": {"path": str(MODEL)}})
    with (
        pytest.raises(FsdpTrainerError, match="exit code 1"),
        simulation_workers() as ask,
    ):
        ask([config], parse_gpus("2xRTX4090"))
