"""Start the trainer as a person does, in real processes: warm (tests/warm.py) unless a test wants them cold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import warm
from tests.ranks import IMPORT_TIME_ENVIRONMENT, REPOSITORY

SCRIPT = REPOSITORY / "fsdp_trainer" / "train.py"
PROFILE = REPOSITORY / "configs" / "accelerate" / "cpu-x2.yaml"


def executable(name: str) -> str:
    """Return the path of a command that was installed beside this Python."""
    path = Path(sys.executable).with_name(name)
    assert path.is_file(), f"{path} is missing: run ./launch.sh setup"
    return str(path)


def environment(*, cold: bool = False) -> dict[str, str]:
    """Return this process's environment for a child on CPU, with one thread a rank as the ranks of other tests have.

    `cold`: the child and all that it starts are new interpreters, which import everything themselves.
    """
    mark = {} if cold else {warm.MARK: "1"}
    return {**os.environ, **IMPORT_TIME_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", **mark}


def run_command(
    command: Sequence[str], *, cwd: Path, timeout: float = 280.0, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command with stdin closed and return what it said; pytest shows it when the test fails."""
    ended = subprocess.run(
        list(command),
        cwd=cwd,
        env=environment(cold=cold),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    print(ended.stdout[-8000:], ended.stderr[-8000:])
    return ended


def write_settings(settings: dict[str, Any], folder: Path, name: str = "run.yaml") -> str:
    """Write a settings file (JSON is YAML) and return its path."""
    path = folder / name
    path.write_text(json.dumps(settings), encoding="utf-8")
    return str(path)
