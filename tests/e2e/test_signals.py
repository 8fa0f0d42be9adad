"""SIGTERM, Ctrl-C and a failing rank: all ranks agree, the state is saved, and nobody waits for one that is gone."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest

from tests import models, training_runs
from tests.e2e.commands import PROFILE, SCRIPT, environment, executable, run_command, write_settings
from tests.e2e.tiny_run import STEPS, assert_same_run, tiny
from tests.fault_runs import Fault, Watched, checkpoints, read_seen, read_status, run, train
from tests.ranks import run_ranks
from tests.sweeps import share

Folder = Callable[[str], str]
NO_EVALUATION = {"every_steps": None, "at_end": False}

# What comes where, and the step after which the run then stops; None: the one that was struck.
MOMENTS = {
    "one rank, in a step": (Fault(signal.SIGTERM, (1,), call=5, share=0.3), None),
    "both ranks, in a step": (Fault(signal.SIGTERM, (0, 1), call=5, share=0.6), None),
    "Ctrl-C to rank 0": (Fault(signal.SIGINT, (0,), call=2), None),
    "in an evaluation": (Fault(signal.SIGTERM, (1,), within="training.evaluate", call=2), 6),
    "in the last evaluation": (Fault(signal.SIGTERM, (0,), within="training.evaluate", call=5), STEPS),
    "while data is prepared": (Fault(signal.SIGTERM, (0,), within="training.load_training_data"), 0),
    "to the rank that waits for the data": (Fault(signal.SIGTERM, (1,), within="training.load_training_data"), 0),
    "while the model is loaded": (Fault(signal.SIGTERM, (1,), within="training.build_run"), 0),
}
SHARE = ("one rank, in a step", "in an evaluation", "to the rank that waits for the data", "while the model is loaded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, folder: Path) -> dict[str, Any]:
    """The settings of a finished run whose evaluations (after every third step) are long enough to be struck."""
    records, _ = models.make_records(60, seed=32)
    data = {"eval": models.write_jsonl(records, folder / "long_eval.jsonl")}
    settings = tiny(model_folder("gpt2_dropout"), folder, "quiet", data=data)
    assert run(settings, 2) == [0, 0]
    return settings


@pytest.mark.parametrize("moment", share(MOMENTS, SHARE))
def test_a_signal_saves_and_stops(moment: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    fault, expected = MOMENTS[moment]
    settings, codes, attempts = quiet, [0, 0], 0
    while codes == [0, 0] and attempts < 3:  # on a busy machine a short moment may be over before it is struck
        attempts += 1
        settings = {**quiet, "output_dir": str(tmp_path / f"run{attempts}")}
        codes = run(settings, 2, fault)
    assert codes == [75, 75]
    output = Path(settings["output_dir"])
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    moment_said = f"after step {status['step']}" if expected != 0 else "before the first step"
    assert f"Stopped on {fault.number.name} {moment_said}" in status["message"]
    if status["step"]:
        assert [len(read_seen(output, rank)) for rank in (0, 1)] == [status["step"]] * 2
    assert status["step"] == expected or (expected is None and fault.call <= status["step"] < STEPS)
    assert checkpoints(output)[-1:] == ([f"step-{status['step']:08d}"] if status["step"] else [])
    assert not (output / "model").exists()

    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


def test_a_signal_during_the_export_comes_too_late_to_stop(quiet: dict[str, Any], tmp_path: Path) -> None:
    settings = {**quiet, "output_dir": str(tmp_path / "run")}
    assert run(settings, 2, Fault(signal.SIGTERM, (0, 1), within="training.export_model")) == [0, 0]
    assert_same_run(quiet, settings)


SECONDS_TO_LIVE = 30


def train_with_notice(settings: dict[str, Any]) -> int:
    """Train as on a machine that is taken away: SIGTERM in the fifth step, and the end by the system 30 s later."""
    from fsdp_trainer import training

    take_step, calls = training.train_step, itertools.count(1)

    def struck(*args: Any, **options: Any) -> Any:
        if next(calls) == 5:
            signal.alarm(SECONDS_TO_LIVE)  # nobody handles SIGALRM: the process ends as by a SIGKILL
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(*args, **options)

    training.train_step = struck
    return train(settings)


def test_thirty_seconds_are_enough_to_save(quiet: dict[str, Any], tmp_path: Path) -> None:
    """A machine that is taken away after a notice: the save in flight ends, the state is saved, no step is lost."""
    output = tmp_path / "run"
    settings = {**quiet, "output_dir": str(output)}
    assert run_ranks(train_with_notice, 2, settings) == [75, 75]
    assert checkpoints(output)[-1] == "step-00000005"
    assert [len(read_seen(output, rank)) for rank in (0, 1)] == [5, 5]
    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


# --- one rank is late, or gone


def train_timed(settings: dict[str, Any]) -> tuple[int, float]:
    preparation = Watched("training.load_training_data")
    return train(settings), preparation.seconds


def slow_template(seconds: float) -> str:
    """A chat template that takes about so long to render, by counting."""
    loop = "{% for i in range(1000) %}{% for j in range(COUNT) %}{% endfor %}{% endfor %}"
    start = time.perf_counter()
    jinja2.Template(loop.replace("COUNT", "200")).render()
    count = 200 * seconds / (time.perf_counter() - start)
    return loop.replace("COUNT", str(int(count))) + models.CHAT_TEMPLATE


@pytest.mark.slow
def test_long_preparation_does_not_trip_the_timeout_of_the_ranks_that_wait(
    model_folder: Folder, tmp_path: Path
) -> None:
    template, limit = tmp_path / "slow.jinja", 6.0
    template.write_text(slow_template(0.5))
    records = [
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"w{index} w2"}]}
        for index in range(24)
    ]
    data = {"train": models.write_jsonl(records, tmp_path / "chats.jsonl"), "format": "messages", "eval": None}
    settings = tiny(
        model_folder("llama"),
        tmp_path,
        "run",
        data={**data, "chat_template": str(template), "workers": 0},
        train={"max_steps": 3, "timeout_minutes": limit / 60},
        eval=NO_EVALUATION,
    )
    (_, prepared), (_, _) = answers = run_ranks(train_timed, 2, settings, timeout=200)
    assert [code for code, _ in answers] == [0, 0]
    assert prepared > 1.2 * limit, "the preparation was too short to show anything"


FAILING = """
import os, runpy, sys, time
from fsdp_trainer import training
take_step, calls = training.train_step, []

def failing(run, window, **options):
    calls.append(window)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        open("failed_at", "w").write(str(time.monotonic()))
        raise ValueError("rank 1 cannot go on")
    return take_step(run, window, **options)

training.train_step = failing
sys.argv[0] = SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
"""


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_with_its_message(model_folder: Folder, tmp_path: Path) -> None:
    settings = write_settings(tiny(model_folder("llama"), tmp_path, "run", log={"report": True}), tmp_path)
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("SCRIPT", repr(str(SCRIPT))))
    command = [executable("accelerate"), "launch", "--config_file", str(PROFILE), str(script), "--config", settings]
    ended = run_command(command, cwd=tmp_path)
    seconds = time.monotonic() - float((tmp_path / "failed_at").read_text())
    assert ended.returncode != 0
    assert seconds < 30
    assert "ValueError: rank 1 cannot go on" in ended.stderr
    status = read_status(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["message"] == "ValueError: rank 1 cannot go on", "the other rank's lost connection hides the cause"


# --- the whole way, with real processes


def long_run(model: str, folder: Path, name: str) -> dict[str, Any]:
    """Settings of a run that is still busy when its first steps have been seen from outside."""
    steps, log = {"max_steps": 60}, {"report": True}
    saves = {"every_steps": 20}  # what matters is the save at the stop
    return tiny(model, folder, name, data={"eval": None}, eval=NO_EVALUATION, train=steps, log=log, checkpoint=saves)


def strike(command: list[str], output: Path, send: Callable[[int], None]) -> int:
    """Start a command, call `send` with its process id after two steps, and return its exit code.

    It must save where it is, say so in the run folder, and leave no process behind.
    """
    started = subprocess.Popen(
        command, env=environment(), cwd=output.parent, start_new_session=True, stdin=subprocess.DEVNULL
    )
    try:
        while not (output / "metrics.jsonl").is_file() or len(training_runs.read_metrics(output)) < 2:
            assert started.poll() is None, "the run ended before it could be struck"
            time.sleep(0.05)
        processes = psutil.Process(started.pid).children(recursive=True)
        send(started.pid)
        code = started.wait(60)
    finally:
        started.kill()
    assert len(processes) >= 2, "two ranks, and the launcher where it is a process of its own"
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    assert status["step"] == len(training_runs.read_metrics(output)) < 60
    assert checkpoints(output)[-1] == f"step-{status['step']:08d}"
    assert "interrupted" in (output / "report.html").read_text()
    return code


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_through_the_command(model_folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quiet, struck = (long_run(model_folder("gpt2_dropout"), tmp_path, name) for name in ("quiet", "struck"))
    command = [executable("fsdp-trainer"), "train", "--config", write_settings(struck, tmp_path), "--processes", "2"]
    # What a terminal does: the signal goes to the command's group, which its children are not in.
    assert strike(command, tmp_path / "struck", lambda pid: os.killpg(pid, signal.SIGINT)) == 75
    said = capfd.readouterr().err
    assert said.count("Stopped on SIGINT") == 1, "two ranks and the command agree on it"
    assert "error" not in said, "a person's own stop is none"
    assert said.rstrip().endswith(f"to go on: fsdp-trainer {shlex.join(command[1:])}")
    status = json.loads((tmp_path / "struck" / "status.json").read_text())
    step = status["step"]
    assert status["total_steps"] == 60 and status["started"] < status["updated"], "it was written twice"

    again = run_command(command, cwd=tmp_path)
    assert again.returncode == 0
    assert f"at step {step}" in again.stdout
    assert run(quiet, 2) == [0, 0]
    assert_same_run(quiet, struck)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_agent_of_accelerate_launch_is_stopped(number: int, model_folder: Folder, tmp_path: Path) -> None:
    """As a batch system or a terminal does: the agent passes the signal on and gives its workers 30 s."""
    settings = write_settings(long_run(model_folder("llama"), tmp_path, "run"), tmp_path)
    command = [executable("accelerate"), "launch", "--config_file", str(PROFILE), str(SCRIPT), "--config", settings]
    assert strike(command, tmp_path / "run", lambda pid: os.kill(pid, number)) != 0
