"""A rank that is stopped or killed: the others name it, end in bounded time with a code of its own, and can go on."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_trainer.errors import DistributedError
from tests import training_runs
from tests.e2e.commands import PROFILE, SCRIPT, environment, executable, write_settings
from tests.e2e.tiny_run import assert_same_run, tiny
from tests.fault_runs import Fault, read_status, run, run_losing, train
from tests.ranks import RankFailed, run_ranks
from tests.sweeps import share

Folder = Callable[[str], str]
LOST = DistributedError.exit_code


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a finished run."""
    settings = tiny(model_folder("llama"), tmp_path_factory.mktemp("lost"), "quiet")
    assert run(settings, 2) == [0, 0]
    return settings


STOPPED = [(place, victim) for place in ("training.train_step", "training.load_training_data") for victim in (1, 0)]


@pytest.mark.parametrize(("within", "victim"), share(STOPPED, [STOPPED[0], STOPPED[3]]))
def test_a_stopped_rank_ends_the_others_within_the_timeout(
    victim: int, within: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 also holds the store here, so where it is stopped nobody can ask who is alive."""
    timeout = 5.0
    train = {**quiet["train"], "timeout_minutes": timeout / 60}
    settings = {**quiet, "output_dir": str(tmp_path / "run"), "train": train}
    call = 6 if within == "training.train_step" else 1
    start = time.monotonic()
    codes = run_losing(settings, 2, Fault(signal.SIGSTOP, (victim,), within=within, call=call))
    seconds = time.monotonic() - start
    assert codes[1 - victim] == LOST
    assert timeout * 0.8 < seconds < timeout + 15
    status = read_status(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("failed", LOST)
    assert f"rank {victim} has not answered for" in status["message"]

    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_ends_the_others_at_once(victim: int, quiet: dict[str, Any], tmp_path: Path) -> None:
    settings = {**quiet, "output_dir": str(tmp_path / "run")}
    start = time.monotonic()
    codes = run_losing(settings, 2, Fault(signal.SIGKILL, (victim,), call=6, share=0.5))
    assert time.monotonic() - start < 20
    assert codes == {victim: -signal.SIGKILL}
    status = read_status(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("failed", LOST)
    assert f"rank {victim} is gone: its process was killed; after step " in status["message"]

    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


def train_stuck(settings: dict[str, Any]) -> int:
    """Train; on rank 1 the main thread falls asleep in the sixth step, while the process lives."""
    from fsdp_trainer import training

    take_step, calls = training.train_step, itertools.count(1)

    def stuck(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and next(calls) == 6:
            time.sleep(1000)
        return take_step(*args, **options)

    training.train_step = stuck
    return train(settings)


def test_a_rank_that_hangs_alive_ends_soon_after_the_others_gave_up(quiet: dict[str, Any], tmp_path: Path) -> None:
    timeout = 5.0
    settings = {**quiet, "output_dir": str(tmp_path / "run")}
    settings["train"] = {**quiet["train"], "timeout_minutes": timeout / 60}
    start = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank 1\ndied with exit code {LOST}"):
        run_ranks(train_stuck, 2, settings, timeout=60.0)
    assert time.monotonic() - start < timeout + 20
    status = read_status(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("failed", LOST)
    assert "The ranks lost touch." in status["message"]
    assert "every rank is alive" in status["message"]
    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


def train_paused(settings: dict[str, Any], seconds: float) -> int:
    """Train; rank 1 is stopped in a step, and goes on after a while."""

    def wake() -> None:
        pid = Path(settings["output_dir"]) / "pid-of-rank1"
        while not pid.is_file() or psutil.Process(int(pid.read_text())).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        time.sleep(seconds)
        psutil.Process(int(pid.read_text())).resume()

    if os.environ["RANK"] == "0":
        threading.Thread(target=wake, daemon=True).start()
    return train(settings, Fault(signal.SIGSTOP, (1,), call=6))


def test_a_rank_that_pauses_is_waited_for(quiet: dict[str, Any], tmp_path: Path) -> None:
    settings = {**quiet, "output_dir": str(tmp_path / "run")}
    settings["train"] = {**quiet["train"], "timeout_minutes": 8.0 / 60}
    assert run_ranks(train_paused, 2, settings, 3.0) == [0, 0]
    assert_same_run(quiet, settings)


# --- with real launchers, whose agent alone would wait 30 s more for a worker that is stopped

COMMANDS = {
    "accelerate launch": ["accelerate", "launch", "--config_file", str(PROFILE), str(SCRIPT)],
    "fsdp-trainer train": ["fsdp-trainer", "train", "--processes", "2"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", share(COMMANDS, ["fsdp-trainer train"]))
def test_a_stopped_rank_ends_the_whole_job(launcher: str, model_folder: Folder, tmp_path: Path) -> None:
    timeout, output = 15.0, tmp_path / "run"
    settings = tiny(model_folder("llama"), tmp_path, "run", train={"max_steps": 400, "timeout_minutes": timeout / 60})
    name, *words = COMMANDS[launcher]
    command = [executable(name), *words, "--config", write_settings(settings, tmp_path)]
    started = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (output / "metrics.jsonl").is_file() or len(training_runs.read_metrics(output)) < 2:
            assert started.poll() is None, "the run ended before it could be struck"
            time.sleep(0.05)
        processes = psutil.Process(started.pid).children(recursive=True)
        (victim,) = [p for p in processes if str(SCRIPT) in p.cmdline() and p.environ().get("RANK") == "1"]
        victim.suspend()
        start = time.monotonic()
        _, said = started.communicate(timeout=timeout + 40)
        seconds = time.monotonic() - start
    finally:
        started.kill()
    print(f"{launcher}: ended after {seconds:.1f} s\n{said}")
    assert seconds < timeout + 15
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert started.returncode == LOST if launcher == "fsdp-trainer train" else started.returncode != 0
    assert "rank 1 has not answered for" in said
    assert f"process {victim.pid} on " in said
    assert read_status(output)["exit_code"] == LOST
