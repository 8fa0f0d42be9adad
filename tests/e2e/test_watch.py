"""A real run on two ranks, followed from another process: from before its folder exists to its end, through a kill."""

from __future__ import annotations

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

from fsdp_trainer import cli, cli_watch
from fsdp_trainer.run_metrics import Metrics
from fsdp_trainer.run_record import find_newest_checkpoint, read_record
from tests.e2e.commands import environment, executable
from tests.e2e.tiny_run import STEPS, tiny
from tests.fault_runs import Fault, run, run_killed

Folder = Callable[[str], str]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that no path is folded


@pytest.fixture
def settings(model_folder: Folder, tmp_path: Path) -> dict[str, Any]:
    return tiny(model_folder("llama"), tmp_path, "run")


def watch_once(folder: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", folder, "--once"])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_a_run_is_followed_from_before_its_start_to_its_end(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output = settings["output_dir"]
    command = [executable("fsdp-trainer"), "watch", output, "--every", "0.1"]
    watching = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        assert watching.stdout.readline() == f"{output}: waiting for a run\n"
        # Both ranks stand still in the fifth step: this is the middle.
        codes: list[int] = []
        fault = Fault(signal.SIGSTOP, (1, 0), call=5)  # rank 0 sends it, so it is the last to stop
        running = threading.Thread(target=lambda: codes.extend(run(settings, 2, fault)))
        running.start()
        pids = [_wait_until_stopped(Path(output), rank) for rank in (0, 1)]
        code, text = watch_once(output, capsys)
        record = read_record(Path(output))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert (code, record.state, record.pid) == (0, "running", pids[0])
        assert f"4 of {STEPS}" in text and "running" in text and "after step 3" in text, text
        assert "about" in text and "left" in text and "rank 0 holds" in text
        running.join()
        said = watching.stdout.read().splitlines()
        assert (codes, watching.wait(timeout=20)) == ([0, 0], 0)
    finally:
        watching.kill()
    steps = [line.split()[1] for line in said if "loss" in line and "eval_loss" not in line]
    assert steps == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert [line.split(":")[0] for line in said if "eval_loss" in line] == [f"step {n}" for n in (3, 6, 9, 12, 14)]
    assert any(line.startswith("checkpoint: ") and "step-" in line for line in said)
    assert said[-1] == f"{output}: finished after {STEPS} steps"
    code, text = watch_once(output, capsys)
    assert code == 0 and "finished" in text and f"{STEPS} of {STEPS}" in text and f"{output}/model" in text


def _wait_until_stopped(output: Path, rank: int) -> int:
    path, deadline = output / f"pid-of-rank{rank}", time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.is_file():
            pid = int(path.read_text())
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return pid
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} was not stopped")


def test_a_killed_run_is_lost_and_one_that_goes_on_is_not(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(settings["output_dir"])
    # One rank: of two, the one that the signal reaches last may find the time to say that the other is gone.
    assert run_killed(settings, 1, Fault(signal.SIGKILL, (0,), call=7))
    code, text = watch_once(str(output), capsys)
    assert code == 6 and "lost" in text and "no process of it is left" in text
    described = cli_watch.describe(output)
    assert (described["state"], described["step"], described["total_steps"]) == ("lost", 6, STEPS)
    assert described["checkpoint"] == str(getattr(find_newest_checkpoint(output), "path", None))
    metrics = Metrics(output)
    metrics.read_new()
    assert run(settings, 1) == [0]
    again = [row["step"] for row in metrics.read_new() if "eval_loss" not in row]
    assert again[0] > 4 and again[-1] == STEPS  # those of before the newest checkpoint stayed, and are no news
    assert metrics.curves["loss"].steps == list(range(1, STEPS + 1))
    assert cli_watch.describe(output)["state"] == "finished"
