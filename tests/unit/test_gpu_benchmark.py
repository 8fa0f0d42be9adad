"""benchmarks/gpu.py on CPU: the code that runs on a GPU, where the peak of live tensors must be the predicted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import CONFIGURATIONS
from tests.e2e.commands import run_command

ROOT = Path(__file__).parents[2]


def test_there_are_at_least_six_configurations() -> None:
    assert len(CONFIGURATIONS) >= 6


@pytest.mark.slow
def test_dry_run_predicts_what_it_measures() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--only", "accumulation-every-2-foreach"]
    done = run_command(command, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert found["predicted_allocated_gib"] == pytest.approx(found["max_allocated_gib"], rel=1e-9)
    assert "+0.0%" in done.stdout.splitlines()[-1]
