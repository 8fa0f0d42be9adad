"""What a person reads last when a run fails, and the exit code of each of its processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer.errors import DataError
from fsdp_trainer.launch import AGENT
from tests.e2e.commands import PROFILE, SCRIPT, environment, executable, run_command, write_settings
from tests.e2e.tiny_run import tiny
from tests.ranks import LAUNCH_ENVIRONMENT, free_port

Folder = Callable[[str], str]
# What torch's agent and Accelerate say of a rank that has failed, none of which helps a user.
NOISE = ("Traceback", "ChildFailedError", "elastic", "Root Cause", "closing signal", "CalledProcessError")


def failing(model_folder: Folder, folder: Path) -> str:
    """Write the settings of a run whose data is not there, and return their path."""
    settings = tiny(model_folder("llama"), folder, "run", data={"train": "nosuch.jsonl"})
    return write_settings(settings, folder)


@pytest.mark.slow
@pytest.mark.cold
def test_the_command_ends_with_the_message_and_nothing_else(model_folder: Folder, tmp_path: Path) -> None:
    file = failing(model_folder, tmp_path)
    command = [executable("fsdp-trainer"), "train", "--processes", "2", "--config", file]
    ended = run_command(command, cwd=tmp_path, cold=True)
    assert ended.returncode == DataError.exit_code
    for word in NOISE:
        assert word not in ended.stderr
    (said,) = ended.stderr.split("error: ")[1:]
    assert said.startswith("the data file does not exist\n  found: nosuch.jsonl (looked in ")
    assert said.splitlines()[-1].startswith("  to fix: give the path of a file or folder"), "it is said once"
    assert "[rank 1]" not in ended.stderr, "it has nothing to add"


@pytest.mark.slow
def test_the_agents_report_under_accelerate_launch_ends_with_the_message(model_folder: Folder, tmp_path: Path) -> None:
    file = failing(model_folder, tmp_path)
    command = [executable("accelerate"), "launch", "--config_file", str(PROFILE), str(SCRIPT), "--config", file]
    ended = run_command(command, cwd=tmp_path)
    assert ended.returncode != 0
    cause = ended.stderr[ended.stderr.index("Root Cause") :]
    assert "the data file does not exist" in cause
    assert "found: nosuch.jsonl (looked in " in cause
    assert "to fix: give the path of a file or folder" in cause


@pytest.mark.slow
def test_a_process_without_an_agent_ends_with_its_own_code(tmp_path: Path) -> None:
    profile, script = tmp_path / "profile.yaml", tmp_path / "script.py"
    profile.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
        "num_machines: 1\nmachine_rank: 0\nmixed_precision: 'no'\n"
    )
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    ended = run_command([sys.executable, str(AGENT), "--config_file", str(profile), str(script)], cwd=tmp_path)
    assert ended.returncode == 128 + 9
    assert "Traceback" not in ended.stderr


LEAVE = """
import atexit, os, runpy, sys
import torch.distributed as dist
script = runpy.run_path(SCRIPT)
dist.init_process_group("gloo")
dist.barrier()
if sys.argv[1] == "0":
    script["_leave_together"]()
    assert not dist.is_initialized()
else:
    atexit.register(os.abort)  # what gloo's threads do at some of the exits that run this, not at all of them
script["_exit"](int(sys.argv[1]))
"""


def codes_of_bare_ranks(code: int, world_size: int, folder: Path) -> list[int]:
    """End ranks with `code` as train.py does, without an agent, which would hide how each ended."""
    script = folder / "leave.py"
    script.write_text(LEAVE.replace("SCRIPT", repr(str(SCRIPT))))
    launch = {**environment(), **LAUNCH_ENVIRONMENT, "WORLD_SIZE": str(world_size)}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(code)], env={**launch, "RANK": str(rank)}, cwd=folder)
        for rank in range(world_size)
    ]
    try:
        return [rank.wait(200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "world_size"), [(0, 2), (3, 1)])
def test_no_rank_is_aborted_at_its_exit(code: int, world_size: int, tmp_path: Path) -> None:
    """gloo's threads abort a process that exits with the group open: SIGABRT in place of its own code."""
    assert codes_of_bare_ranks(code, world_size, tmp_path) == [code] * world_size
