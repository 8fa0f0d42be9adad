"""The processes that simulate for a plan: one that ends says so, and none is left behind."""

from __future__ import annotations

import signal
import sys
import threading
import time
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


def test_an_interrupt_does_not_wait_for_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's stop button sends it: to this process alone, while the others are at work."""
    busy = tmp_path / "busy"
    busy.write_text("#!/bin/sh\nexec sleep 20\n", encoding="utf-8")
    busy.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(busy))
    main = threading.get_ident()
    stop = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    config = Config.from_dict({"model": {"path": str(MODEL)}})
    began = time.monotonic()
    stop.start()
    with pytest.raises(KeyboardInterrupt), simulation_workers() as ask:
        ask([config, config], parse_gpus("2xRTX4090"))
    assert time.monotonic() - began < 10
