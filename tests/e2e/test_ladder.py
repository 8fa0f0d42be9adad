"""The ladder as a person starts it: real rungs on two ranks, stopped and gone on with, and on a real 135M model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.demo import smollm2_folder
from fsdp_trainer.ladder_result import LadderResult
from tests.e2e.commands import environment, run_command, write_settings
from tests.e2e.tiny_run import tiny
from tests.ranks import REPOSITORY

Folder = Callable[[str], str]
pytestmark = pytest.mark.timeout(1500)


def ladder_command(file: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "fsdp_trainer", "ladder", "--config", file, "--processes", "2", *words]


def stop_when(path: Path, command: list[str], *, cwd: Path, timeout: float = 120.0) -> tuple[int, str]:
    """Start a command, send it Ctrl-C when `path` is a file with a line in it; return its exit code and all it said."""
    child = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + timeout
    while child.poll() is None and time.monotonic() < deadline and not (path.is_file() and path.stat().st_size):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=timeout)
    print(said)
    return child.returncode, said


def test_a_ladder_that_was_stopped_goes_on(model_folder: Folder, tmp_path: Path) -> None:
    settings = tiny(model_folder("llama"), tmp_path, "run")
    command = ladder_command(write_settings(settings, tmp_path), "--only", "baseline,stage3")
    folder = Path(f"{settings['output_dir']}-ladder")
    code, said = stop_when(folder / "05-stage3" / "output.log", command, cwd=REPOSITORY)
    assert code == 75
    assert "baseline: finished" in said and "The ladder was stopped" in said
    stopped = LadderResult.read(folder)
    assert stopped is not None
    assert [rung.outcome for rung in stopped.rungs] == ["finished", "not run"]

    ended = run_command(command, cwd=REPOSITORY)
    assert ended.returncode == 0
    assert "baseline: kept from an earlier start (finished)" in ended.stdout
    result = LadderResult.read(folder)
    assert result is not None and result.rungs[0] == stopped.rungs[0]
    baseline, stage3 = result.rungs
    assert stage3.outcome == "finished"
    # The same rows and weights: only the order of sums differs.
    assert stage3.first_loss == pytest.approx(baseline.first_loss, rel=1e-6)
    assert (baseline.tokens_per_second or 0) > 0 and (stage3.tokens_per_second or 0) > 0
    assert stage3.predicted_gib is not None and baseline.predicted_gib is not None
    assert stage3.predicted_gib < baseline.predicted_gib
    # Numbers and nothing else: neither a checkpoint nor a model.
    left = {path.name for path in folder.rglob("*") if path.is_dir()}
    assert left <= {"01-baseline", "05-stage3"}, left


# --- a real model

RUNGS = ("baseline", "checkpointing", "stage1", "stage2", "stage3", "8bit")
SEQ_LEN, ROWS, STEPS = 96, 2, 3


@pytest.fixture(
    scope="module",
    params=[("baseline", "8bit"), pytest.param(RUNGS, marks=pytest.mark.sweep)],
    ids=["first and last", "all"],
)
def climbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LadderResult:
    """Rungs on SmolLM2-135M, of rows that are as full as a prediction takes them: two documents of equal length."""
    folder = tmp_path_factory.mktemp("ladder")
    text = " the" * (SEQ_LEN // 2 - 1)  # a token each, and the end
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(2 * ROWS * STEPS)))
    settings: dict[str, Any] = {
        "model": {"path": str(smollm2_folder())},
        "data": {"train": str(folder / "train.jsonl"), "format": "text", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "output_dir": str(folder / "run"),
    }
    command = ladder_command(write_settings(settings, folder), "--only", ",".join(request.param), "--steps", str(STEPS))
    assert run_command(command, cwd=REPOSITORY, timeout=1400).returncode == 0
    result = LadderResult.read(folder / "run-ladder")
    assert result is not None
    return result


@pytest.mark.slow
def test_real_rungs_hold_what_was_predicted(climbed: LadderResult) -> None:
    """To the byte: the live bytes of the traced step, and those of the simulation."""
    for rung in climbed.rungs:
        assert rung.outcome == "finished", rung
        assert rung.predicted_gib is not None and rung.measured_gib is not None
        predicted, measured = (size * 2**30 for size in (rung.predicted_gib, rung.measured_gib))
        assert (rung.name, round(measured)) == (rung.name, round(predicted))


@pytest.mark.slow
def test_real_rungs_learn_the_same(climbed: LadderResult) -> None:
    losses = [rung.first_loss for rung in climbed.rungs]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


@pytest.mark.slow
def test_each_real_rung_holds_less_than_the_one_below(climbed: LadderResult) -> None:
    peaks = [rung.measured_gib or 0.0 for rung in climbed.rungs]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(climbed.rungs)
