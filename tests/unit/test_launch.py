"""Starting, stopping and the exit code of a run, with real processes in place of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from fsdp_trainer import launch as launching
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch import (
    LAUNCHER,
    SCRIPT,
    ask_workers_to_stop,
    count_cores,
    count_gpus,
    free_port,
    launch,
    launch_command,
    launch_environment,
    plan_processes,
)
from fsdp_trainer.launch_profile import read_profile, write_profile

# --- how many processes


def put_nvidia_smi(folder: Path, lines: list[str], code: int = 0) -> None:
    tool = folder / "nvidia-smi"
    body = "".join(f"echo {line!r}\n" for line in lines)
    tool.write_text(f"#!/bin/sh\n{body}exit {code}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,-1,2", 1), ("3", 1), ("4", 0), ("GPU-aaaa,GPU-bbbb", 2)],
)
def test_count_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int) -> None:
    put_nvidia_smi(tmp_path, [f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})" for n in range(4)])
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus({}) == 0
    put_nvidia_smi(tmp_path, ["NVIDIA-SMI has failed"], code=9)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert count_gpus({}) == 0


@pytest.fixture
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(launching, "count_cores", lambda: 4)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, ["GPU 0: NVIDIA L4", "GPU 1: NVIDIA L4"])
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("no_gpus")
def test_one_process_without_gpus() -> None:
    assert plan_processes(Config(), profile=None, processes=None) == (1, None)
    assert plan_processes(Config(), profile=None, processes=4) == (4, None)


@pytest.mark.usefixtures("two_gpus")
def test_one_process_per_gpu() -> None:
    assert plan_processes(Config(), profile=None, processes=None) == (2, None)
    with pytest.raises(ConfigError, match="--processes 3, 2 GPUs"):
        plan_processes(Config(), profile=None, processes=3)


@pytest.mark.usefixtures("no_gpus")
def test_more_processes_than_cores_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_processes(Config(), profile=None, processes=64)
    assert "--processes 64, 4 cores and no GPU" in caught.value.values
    assert "ask for 4 (at most 16)" in caught.value.fix
    profile = write_profile(tmp_path / "p.yaml", Config(), processes=64, use_cpu=True)
    with pytest.raises(ConfigError, match=f"num_processes: 64 in {profile}, 4 cores"):
        plan_processes(Config(), profile=profile, processes=None)
    text = profile.read_text()
    profile.write_text(text.replace("num_machines: 1", "num_machines: 16"))  # 4 on each
    assert plan_processes(Config(), profile=profile, processes=None)[0] == 64


@pytest.mark.usefixtures("no_gpus")
def test_some_more_processes_than_cores_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two on one core are the smallest run that shards; four try another number of ranks on a small machine."""
    monkeypatch.setattr(launching, "count_cores", lambda: 1)
    assert plan_processes(Config(), profile=None, processes=2)[0] == 2
    assert "warning" not in capsys.readouterr().err
    assert plan_processes(Config(), profile=None, processes=4)[0] == 4
    assert "warning: --processes 4, on 1 core" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_a_profile_for_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.yaml", Config(), processes=8, use_cpu=False)
    with pytest.raises(ConfigError, match=r"num_processes: 8 in .*, 2 GPUs visible"):
        plan_processes(Config(), profile=profile, processes=None)


@pytest.mark.usefixtures("no_gpus")
def test_the_profile_says_how_many(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.yaml", Config(), processes=4, use_cpu=True)
    assert plan_processes(Config(), profile=profile, processes=None)[0] == 4
    assert plan_processes(Config(), profile=profile, processes=4)[0] == 4
    with pytest.raises(ConfigError, match="--processes 2, num_processes: 4"):
        plan_processes(Config(), profile=profile, processes=2)


def test_the_world_is_checked_before_anything_starts(tmp_path: Path) -> None:
    config = Config.from_dict({"batch": {"global_batch_size": 7}})
    profile = write_profile(tmp_path / "p.yaml", config, processes=2, use_cpu=True)
    with pytest.raises(ConfigError, match="7 = 1 x accumulation x 2"):
        launch(config, arguments=[], profile=profile)


# --- the command and its environment


def test_two_runs_on_a_machine_get_different_ports(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.yaml", Config(), processes=2, use_cpu=True)
    content = read_profile(profile)
    commands = [launch_command(profile, content, arguments=["--config", "run.yaml"]) for _ in range(2)]
    ports = [command[command.index("--main_process_port") + 1] for command in commands]
    assert len({*ports, "29500", "0"}) == 4
    assert commands[0][-3:] == [str(SCRIPT), "--config", "run.yaml"]


@pytest.mark.parametrize("content", [{"main_process_port": 12345}, {"num_machines": 2}])
def test_a_port_of_the_profile_stays(content: dict[str, int]) -> None:
    assert "--main_process_port" not in launch_command(Path("p.yaml"), content, arguments=[])


def test_environment_of_the_workers() -> None:
    on_cpu = launch_environment({"A": "1"}, {"use_cpu": True}, processes=1)
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", LAUNCHER: "1"}
    assert on_cpu == {"A": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(count_cores())} | segments
    assert launch_environment({}, {}, processes=10**6) == {"OMP_NUM_THREADS": "1"} | segments
    assert launch_environment({"OMP_NUM_THREADS": "3"}, {}, processes=2) == {"OMP_NUM_THREADS": "3"} | segments


def test_free_port_is_free() -> None:
    assert 1024 <= free_port() < 65536


# --- a stand-in for the agent: starts workers that run a file, waits for them, and turns any failure into exit code 1

AGENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1) if sys.argv[4] == "weak" else None)
script, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
workers = [subprocess.Popen([sys.executable, script, folder, str(rank)]) for rank in range(count)]
sys.exit(1 if any([worker.wait() for worker in workers]) else 0)
"""

WORKER = """
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), sys.argv[2]
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append("TERM"))
signal.signal(signal.SIGINT, lambda *_: stopped.append("INT"))
(folder / f"ready-{rank}").write_text(str(os.getpid()))
while not stopped:
    time.sleep(0.01)
if (folder / "deaf").exists():
    time.sleep(60)
(folder / f"saved-{rank}").write_text(stopped[0])
(folder / "status.json").write_text(json.dumps({"state": "interrupted", "exit_code": 75, "step": 3, "message": ""}))
sys.exit(75)
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Let `launch` start the stand-in with two workers; returns the run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    agent, worker = tmp_path / "agent.py", tmp_path / "worker.py"
    agent.write_text(AGENT)
    worker.write_text(WORKER)
    command = [sys.executable, str(agent), str(worker), "2", str(folder), getattr(request, "param", "strong")]
    monkeypatch.setattr(launching, "launch_command", lambda *a, **k: command)
    real = ask_workers_to_stop
    monkeypatch.setattr(launching, "ask_workers_to_stop", lambda pid, **more: real(pid, script=str(worker), **more))
    return folder


def when_ready(folder: Path, act: object, *, times: int = 1) -> threading.Thread:
    def wait_and_act() -> None:
        deadline = time.monotonic() + 30
        while len(list(folder.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(times):
            assert callable(act)
            act()
            time.sleep(0.3)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def run_config(folder: Path) -> Config:
    model = folder.with_name("model")  # one that the hub need not be asked for
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return Config.from_dict({"output_dir": str(folder), "model": {"path": str(model)}})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_worker_save_and_its_exit_code_comes_back(agent: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    sender = when_ready(agent, lambda: os.kill(os.getpid(), number))
    code = launch(run_config(agent), arguments=[], processes=2)
    sender.join()
    assert code == 75
    passed = "INT" if number == signal.SIGINT else "TERM"
    assert [(agent / f"saved-{rank}").read_text() for rank in (0, 1)] == [passed, passed]
    assert signal.getsignal(number) is before


def test_three_signals_end_workers_that_do_not_listen(agent: Path) -> None:
    (agent / "deaf").touch()
    sender = when_ready(agent, lambda: os.kill(os.getpid(), signal.SIGTERM), times=3)
    started = time.monotonic()
    code = launch(run_config(agent), arguments=[], processes=2)
    sender.join()
    assert time.monotonic() - started < 30
    assert code == 128 + signal.SIGTERM
    assert not list(agent.glob("saved-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_a_worker_is_a_stop(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As while the agent imports torch: it ends by the signal, and nobody has said anything yet."""
    folder, said = tmp_path / "run", list[str]()
    end_with(monkeypatch, f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)")

    def strike() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=strike).start()
    typed = ["fsdp-trainer", "train", "--config", "my run.yaml"]
    assert launch(run_config(folder), arguments=[], processes=2, typed=typed, on_refusal=said.append) == 75
    line = f"Stopped on {number.name} before the first step."
    assert capfd.readouterr().err.startswith(f"{line}\n  so far: nothing was trained")
    assert said[0].endswith("\n  to go on: fsdp-trainer train --config 'my run.yaml'")


def test_a_refusal_is_said_by_the_rank_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    text = json.dumps({"state": "failed", "exit_code": 4, "message": "of another run", "started": None})
    write = "pathlib.Path({}, 'status.json').write_text({!r}); sys.exit(6)"
    # On a folder with a run in it what the ranks have to say lies elsewhere; on a new one it is in the folder.
    for place in ("os.environ['FSDP_TRAINER_REFUSALS']", repr(str(tmp_path))):
        end_with(monkeypatch, "import os, pathlib, sys; " + write.format(place, text))
        assert launch(run_config(tmp_path), arguments=[], processes=2, on_refusal=said.append) == 4
        assert capfd.readouterr().err == ""
    assert said == ["of another run"]


def test_a_second_ctrl_c_does_not_wait(agent: Path) -> None:
    (agent / "deaf").touch()
    sender = when_ready(agent, lambda: os.kill(os.getpid(), signal.SIGINT), times=2)
    started = time.monotonic()
    assert launch(run_config(agent), arguments=[], processes=2) == 128 + signal.SIGINT
    sender.join()
    assert time.monotonic() - started < 15, "the agent's 30 s for its workers"


@pytest.mark.parametrize("agent", ["weak"], indirect=True)
def test_an_agent_that_dies_leaves_no_worker_behind(agent: Path) -> None:
    (agent / "deaf").touch()
    sender = when_ready(agent, lambda: os.kill(os.getpid(), signal.SIGTERM), times=2)
    assert launch(run_config(agent), arguments=[], processes=2) == 128 + signal.SIGTERM
    sender.join()
    deadline = time.monotonic() + 10
    pids = [int((agent / f"ready-{rank}").read_text()) for rank in (0, 1)]
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_workers_are_not_in_the_terminals_session(agent: Path) -> None:
    sessions = []

    def look_and_stop() -> None:
        sessions.extend(os.getsid(int((agent / f"ready-{rank}").read_text())) for rank in (0, 1))
        os.kill(os.getpid(), signal.SIGTERM)

    sender = when_ready(agent, look_and_stop)
    launch(run_config(agent), arguments=[], processes=2)
    sender.join()
    assert len(sessions) == 2
    assert os.getsid(0) not in sessions


def end_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(launching, "launch_command", lambda *a, **k: [sys.executable, "-c", textwrap.dedent(code)])


def test_exit_code_and_message_of_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = {"state": "failed", "exit_code": 5, "step": 1, "message": "loss is NaN"}
    path = str(tmp_path / "status.json")
    end_with(
        monkeypatch,
        f"import pathlib, sys; pathlib.Path({path!r}).write_text({json.dumps(status)!r}); sys.exit(1)",
    )
    assert launch(run_config(tmp_path), arguments=[], processes=2) == 5
    assert capfd.readouterr().err.endswith("error: loss is NaN\n")
    (tmp_path / "status.json").unlink()
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 5
    assert capfd.readouterr().err == "", "a rank that is alone has just said it"
    (tmp_path / "status.json").unlink()
    stopped = {**status, "state": "interrupted", "exit_code": 75, "message": "Stopped on SIGINT"}
    text = json.dumps(stopped)
    end_with(monkeypatch, f"import pathlib, sys; pathlib.Path({path!r}).write_text({text!r}); sys.exit(1)")
    assert launch(run_config(tmp_path), arguments=[], processes=2) == 75
    assert capfd.readouterr().err == "", "rank 0 has just said it for all"


def test_a_status_of_an_earlier_run_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "interrupted", "exit_code": 75, "step": 1}))
    end_with(monkeypatch, "import sys; sys.exit(1)")
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"exit_code": "5"}', '{"exit_code": 0}'])
def test_a_broken_status_is_not_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    path = str(tmp_path / "status.json")
    end_with(monkeypatch, f"import pathlib, sys; pathlib.Path({path!r}).write_text({text!r}); sys.exit(1)")
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 1


def test_success_and_death_by_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    end_with(monkeypatch, "pass")
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 0
    end_with(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 128 + 9
    said = capfd.readouterr().err
    assert said.startswith("error: A process of the run was killed.\n  found: it ended with SIGKILL\n  to fix: ")


def test_a_kill_that_the_kernel_counted_is_out_of_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr("fsdp_trainer.launch.count_kills", lambda: next(counts))
    end_with(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert launch(run_config(tmp_path), arguments=[], processes=1) == 8
    said = capfd.readouterr().err
    assert said.startswith("Out of host memory.\n")
    assert "the kernel killed a process of the run" in said
    record = json.loads((tmp_path / "out_of_memory.json").read_text())
    assert (record["place"], record["phase"]) == ("host", None)


def test_lines_for_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end_with(monkeypatch, "import sys; print('step 1'); sys.stdout.flush(); print('warned', file=sys.stderr)")
    lines: list[str] = []
    assert launch(run_config(tmp_path), arguments=[], processes=1, on_line=lines.append) == 0
    assert lines == ["step 1", "warned"]


def test_without_workers_the_agent_is_asked() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert ask_workers_to_stop(child.pid) == []
    assert child.wait(timeout=20) == -signal.SIGTERM
    assert ask_workers_to_stop(child.pid) == []


def test_nothing_is_left_behind_when_reading_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end_with(monkeypatch, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("the notebook is gone")

    with pytest.raises(RuntimeError, match="the notebook is gone"):
        launch(run_config(tmp_path), arguments=[], processes=1, on_line=fail)
    assert not psutil.pid_exists(pids[0])
