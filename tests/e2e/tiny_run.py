"""The run that the end-to-end tests start, strike and bring back: small, but with everything a run can have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests import models, training_runs
from tests.checkpoint_runs import differing
from tests.fault_runs import comparable_metrics, end_state, read_status

STEPS, SAVE_EVERY = 14, 4


def tiny(model: str, folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """Settings of a run over 22 rows: three steps an epoch, the last of them short; two micro-batches a step."""
    train, _ = models.make_records(22, seed=30)
    held_out, _ = models.make_records(5, seed=31)
    data = {
        "eval": models.write_jsonl(held_out, folder / "eval.jsonl"),
        "cache_dir": str(folder / "cache"),
        **sections.pop("data", {}),
    }
    base: dict[str, Any] = {
        "data": data,
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"max_steps": STEPS},
        "eval": {"every_steps": 3, "at_end": True},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_latest": 2, "async_save": True, "resume": "auto"},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return training_runs.settings(model, models.write_jsonl(train, folder / "train.jsonl"), folder / name, **base)


def assert_same_run(quiet: dict[str, Any], struck: dict[str, Any]) -> None:
    """Every tensor, file and metric of two finished runs is equal, and the struck one has each step once."""
    one, other = Path(quiet["output_dir"]), Path(struck["output_dir"])
    assert comparable_metrics(other) == comparable_metrics(one)
    steps = [row["step"] for row in comparable_metrics(other) if "loss" in row]
    assert steps == list(range(1, struck["train"]["max_steps"] + 1))
    assert differing(end_state(other), end_state(one)) == []
    assert read_status(other) == read_status(one)
    assert read_status(other)["state"] == "finished"


def leave_as_if_killed(settings: dict[str, Any], step: int, output: Path) -> None:
    """Make `output` what a kill after the save of `step` would have left of a finished run that kept it."""
    name = f"checkpoints/step-{step:08d}"
    shutil.copytree(Path(settings["output_dir"]) / name, output / name)
    shutil.copy(Path(settings["output_dir"]) / "metrics.jsonl", output)
