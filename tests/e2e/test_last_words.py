"""What a person reads last when a run fails, and the exit code of each of its processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import DataError, DistributedError
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
def test_the_command_ends_with_the_message_and_nothing_else(model_folder: Folder, tmp_path: Path) -> None:
    file = failing(model_folder, tmp_path)
    ended = run_command([executable("fsdp-trainer"), "train", "--processes", "2", "--config", file], cwd=tmp_path)
    assert ended.returncode == DataError.exit_code
    for word in NOISE:
        assert word not in ended.stderr
    first, last = ended.stderr.split("[rank 0] ")[1].split("\nerror: ")
    assert last.startswith("the data file does not exist\n  found: nosuch.jsonl (looked in ")
    assert last.splitlines()[-1].startswith("  to fix: give the path of a JSONL file")
    assert first == f"error: {last.rstrip()}", "the rank's own words come first"
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
    assert "to fix: give the path of a JSONL file" in cause


def run_bare_ranks(file: str, folder: Path) -> list[int]:
    """Run two ranks without an agent, which would hide how each ended; return their exit codes."""
    port = str(free_port())
    rendezvous = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--config", file],
            env={**environment(), **LAUNCH_ENVIRONMENT, **rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        return [rank.wait(200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "codes"), [({}, [0, 0]), ({"train": "nosuch.jsonl"}, [3, DistributedError.exit_code])]
)
def test_no_rank_is_aborted_at_its_exit(
    data: dict[str, Any], codes: list[int], model_folder: Folder, tmp_path: Path
) -> None:
    """gloo's threads abort a process that exits with the group open: SIGABRT in place of its own code."""
    settings = tiny(model_folder("llama"), tmp_path, "run", data={**data, "eval": None}, train={"max_steps": 2})
    settings["eval"] = {"every_steps": None, "at_end": True}
    settings["schedule"] = {**settings["schedule"], "warmup_steps": 1}
    assert run_bare_ranks(write_settings(settings, tmp_path), tmp_path) == codes
