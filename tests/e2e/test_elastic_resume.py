"""A run that was saved on some number of ranks goes on with any other: the same rows, losses equal up to rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import training_runs
from tests.e2e.tiny_run import leave_as_if_killed, tiny
from tests.fault_runs import comparable_metrics, read_seen, read_status, run
from tests.sweeps import share

Folder = Callable[[str], str]
# Divisible by 1, 2, 3 and 4 ranks; 22 rows make a full window and a short one, so the save lies within epoch 2.
BATCH = {"global_batch_size": 12, "micro_batch_size": 1}
STEPS, SAVED_AT = 8, 3
CLOSE = {"rel": 1e-6, "abs": 1e-5}  # losses are about 5
PLAIN, HYBRID = {"zero_stage": 3}, {"zero_stage": 3, "replicate": 2}
SAVED_ON = {"2 ranks": (2, PLAIN), "4 ranks, HYBRID": (4, HYBRID)}
RESUMED_ON = {
    "1 rank": (1, PLAIN),
    "2 ranks": (2, PLAIN),
    "3 ranks": (3, PLAIN),
    "4 ranks": (4, PLAIN),
    "4 ranks, HYBRID": (4, HYBRID),
    "2 ranks, stage 0": (2, {"zero_stage": 0}),
}


def elastic(model: str, folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """Settings of a run that any of these worlds can take."""
    sections = {"checkpoint": {"every_steps": SAVED_AT, "keep_latest": 100}, "train": {"max_steps": STEPS}, **sections}
    return tiny(model, folder, name, batch=BATCH, eval={"every_steps": 2}, **sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of finished runs, by the world that saved them."""
    runs = {}
    for number, (name, (world, sharding)) in enumerate(SAVED_ON.items()):
        runs[name] = elastic(model_folder("qwen3"), folder, f"quiet-{number}", sharding=sharding)
        assert run(runs[name], world) == [0] * world
    return runs


def assert_same_training(folder: Path, expected: Path, *, from_step: int) -> None:
    """Rows are equal step by step, and every number of the metrics within the tolerance."""
    rows, planned = ([seen[:2] for seen in read_seen(path, 0)] for path in (folder, expected))
    assert rows == planned[from_step:]
    metrics, quiet_metrics = comparable_metrics(folder), comparable_metrics(expected)
    assert [row["step"] for row in metrics if "loss" in row] == list(range(1, STEPS + 1))
    for row, other in zip(metrics, quiet_metrics, strict=True):
        assert row == pytest.approx(other, **CLOSE)
    weights, others = (training_runs.read_weights(path / "model") for path in (folder, expected))
    assert weights.keys() == others.keys()
    # Trained as far from the start as the learning rate allows: a wrong optimizer state would be 1e-3 off a step.
    worst = max(float((weights[name] - others[name]).abs().max()) for name in weights)
    assert worst < 2e-5, worst


# Fewer and more ranks, an odd number, whole copies and groups of shards, to and from.
SHARE = [
    ("2 ranks", "1 rank"),
    ("2 ranks", "3 ranks"),
    ("2 ranks", "4 ranks, HYBRID"),
    ("4 ranks, HYBRID", "2 ranks, stage 0"),
]


@pytest.mark.parametrize(("saved", "resumed"), share(itertools.product(SAVED_ON, RESUMED_ON), SHARE, ids=" to ".join))
def test_another_world_goes_on(saved: str, resumed: str, quiet: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    world, sharding = RESUMED_ON[resumed]
    output = tmp_path / "run"
    settings = {**quiet[saved], "output_dir": str(output), "sharding": {**quiet[saved]["sharding"], **sharding}}
    settings["sharding"].setdefault("replicate", 1)
    if sharding is not HYBRID:
        settings["sharding"]["replicate"] = 1
    leave_as_if_killed(quiet[saved], SAVED_AT, output)
    assert run(settings, world) == [0] * world
    assert_same_training(output, Path(quiet[saved]["output_dir"]), from_step=SAVED_AT)
    assert read_status(output)["state"] == "finished"


def test_from_world_to_world_in_one_run(quiet: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Two ranks, four in two copies, one, three: max_steps ends each part, so the learning rate must not follow it."""
    schedule = {"name": "constant", "min_lr_ratio": 0.1, "warmup_steps": 2}
    whole = {**quiet["2 ranks"], "output_dir": str(tmp_path / "whole"), "schedule": schedule}
    assert run(whole, 2) == [0, 0]
    output, begun = tmp_path / "run", 0
    worlds = [(2, PLAIN), (4, HYBRID), (1, PLAIN), (3, PLAIN)]
    for (world, sharding), steps in zip(worlds, itertools.count(2, 2), strict=False):
        train = {**whole["train"], "max_steps": steps}
        part = {**whole, "output_dir": str(output), "train": train, "sharding": {"replicate": 1, **sharding}}
        assert run(part, world) == [0] * world
        assert len(read_seen(output, 0)) == steps
        assert begun == steps - 2
        begun = steps
    part_rows = [row for row in comparable_metrics(output) if "loss" in row]
    for row, other in zip(part_rows, [r for r in comparable_metrics(tmp_path / "whole") if "loss" in r], strict=True):
        assert row == pytest.approx(other, **CLOSE)
    assert [seen[:2] for seen in read_seen(output, 0)] == [seen[:2] for seen in read_seen(tmp_path / "whole", 0)]
