"""SIGTERM, Ctrl-C and a failing rank: all ranks agree, the state is saved, and nobody waits for one that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest

from tests import models, training_runs
from tests.e2e.test_resume import STEPS, assert_same_run, tiny
from tests.fault_runs import Fault, checkpoints, comparable_metrics, read_seen, read_status, run
from tests.ranks import IMPORT_TIME_ENVIRONMENT, REPOSITORY, run_ranks

Folder = Callable[[str], str]
PROFILE = REPOSITORY / "configs" / "accelerate" / "cpu-x2.yaml"

# What comes where, and the step after which the run then stops; None: the one that was struck.
MOMENTS = {
    "one rank, in a step": (Fault(signal.SIGTERM, (1,), call=5, share=0.3), None),
    "both ranks, in a step": (Fault(signal.SIGTERM, (0, 1), call=5, share=0.6), None),
    "Ctrl-C to rank 0": (Fault(signal.SIGINT, (0,), call=2), None),
    "in an evaluation": (Fault(signal.SIGTERM, (1,), within="training.evaluate", call=2), 6),
    "in the last evaluation": (Fault(signal.SIGTERM, (0,), within="training.evaluate", call=5), STEPS),
    "while data is prepared": (Fault(signal.SIGTERM, (0,), within="training.load_training_data"), 1),
    "to the rank that waits for the data": (Fault(signal.SIGTERM, (1,), within="training.load_training_data"), 1),
    "while the model is loaded": (Fault(signal.SIGTERM, (1,), within="training.build_run"), 1),
}


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


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_saves_and_stops(moment: str, quiet: dict[str, Any], tmp_path: Path) -> None:
    fault, expected = MOMENTS[moment]
    output = tmp_path / "run"
    settings = {**quiet, "output_dir": str(output)}
    assert run(settings, 2, fault) == [75, 75]
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    assert signal.Signals(fault.number).name in status["message"] or 0 not in fault.ranks
    assert [len(read_seen(output, rank)) for rank in (0, 1)] == [status["step"]] * 2
    assert status["step"] == expected or (expected is None and fault.call <= status["step"] < STEPS)
    assert checkpoints(output)[-1] == f"step-{status['step']:08d}"
    assert not (output / "model").exists()

    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


def test_a_signal_during_the_export_comes_too_late_to_stop(quiet: dict[str, Any], tmp_path: Path) -> None:
    settings = {**quiet, "output_dir": str(tmp_path / "run")}
    assert run(settings, 2, Fault(signal.SIGTERM, (0, 1), within="training.export_model")) == [0, 0]
    assert_same_run(quiet, settings)
