"""The processes that simulate for a plan: one that ends says so, and none is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
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


PLAN = """
import sys
from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.simulation_workers import simulation_workers
config = Config.from_dict({"model": {"path": sys.argv[1]}})
with simulation_workers() as ask:
    ask([config], parse_gpus("2xRTX4090"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_the_one_that_asks(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asking = subprocess.Popen([sys.executable, "-c", PLAN, str(MODEL)])
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    while not children and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(asking.pid).children()
    time.sleep(1.0)  # it is importing torch by now
    assert children and children[0].is_running()
    asking.send_signal(number)
    assert asking.wait() == -number
    _, left = psutil.wait_procs(children, timeout=5)
    assert left == []
