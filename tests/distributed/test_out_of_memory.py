"""A rank without memory, phase by phase: what is said of it, that all end soon, and that the advice is true."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import OutOfMemory
from tests import training_runs
from tests.e2e.tiny_run import tiny
from tests.fault_runs import checkpoints, read_status
from tests.out_of_memory_runs import run, run_out

PHASES = ("load", "forward", "backward", "step", "evaluate", "save")
STEPS = 4


def settings_of(model: str, folder: Path, name: str, *, steps: int = STEPS) -> dict[str, Any]:
    """A run without sharding that saves at step 2 and is evaluated after each."""
    return tiny(
        model,
        folder,
        name,
        data={"packing": True},  # so that rows are as long as a prediction takes them to be
        sharding={"zero_stage": 0},
        loss={"kind": "plain"},
        batch={"global_batch_size": 8, "micro_batch_size": 4},
        train={"max_steps": steps},
        schedule={"warmup_steps": 1},
        eval={"every_steps": 1, "at_end": False},
        checkpoint={"every_steps": 2, "async_save": False, "keep_latest": 2, "resume": "auto"},
        export={"at_end": False},
        log={"samples": 0, "report": False, "trace_step": False},
    )


@pytest.fixture(scope="module")
def begun(model_folder: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two steps with a checkpoint, the settings to go on from it, and the peaks of one that did."""
    folder = tmp_path_factory.mktemp("begun")
    run(settings_of(model_folder("llama"), folder, "begun", steps=2))
    whole = settings_of(model_folder("llama"), folder, "whole")
    shutil.copytree(folder / "begun", folder / "whole")
    return {"settings": whole, "peaks": run(whole)[1], "folder": folder / "begun"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_without_memory_says_what_would_fit_and_it_does(
    phase: str, begun: dict[str, Any], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(begun["folder"], output)
    settings = {**begun["settings"], "output_dir": str(output)}
    limit = int(begun["peaks"][phase] * 0.97)
    before = checkpoints(output)

    start = time.monotonic()
    codes = run_out(settings, limit=limit, phase=phase)
    seconds = time.monotonic() - start
    record = json.loads((output / "out_of_memory.json").read_text())
    print(f"{phase}: {seconds:.1f} s, limit {limit:,}\n{read_status(output)['message']}")
    assert codes[1] == OutOfMemory.exit_code
    assert set(codes) == {0, 1}, "both ranks are gone"
    assert seconds < 40
    assert (record["rank"], record["phase"], record["place"]) == (1, phase, "device")
    assert record["total_gib"] == pytest.approx(limit / 2**30, rel=0.01)
    if phase in ("forward", "backward"):
        assert record["batch"]["rows"] == 4
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("failed", OutOfMemory.exit_code)
    assert set(before) <= set(checkpoints(output)), "no checkpoint is lost"
    assert (output / "out_of_memory.html").is_file()

    advice = next(row for row in record["advice"] if row["fits"])
    for name, value in advice["settings"].items():
        section, _, key = name.rpartition(".")
        settings = {**settings, **({section: {**settings[section], key: value}} if section else {key: value})}
    if record["refused"]:  # as the command has it
        output = tmp_path / "anew"
        settings["output_dir"] = str(output)
    peaks = run(settings, limit=limit)[1]  # in every phase now
    assert max(peaks.values()) <= limit
    assert training_runs.read_metrics(output)[-1]["step"] == STEPS
    assert not (output / "out_of_memory.json").exists()
    assert abs(max(peaks.values()) / (advice["peak_gib"] * 2**30) - 1) < 0.1, "what was promised"
