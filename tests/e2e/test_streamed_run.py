"""A run over a stream: nothing is stored, a resume goes on at the next row, and other ranks see the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny_run import SAVE_EVERY, STEPS, assert_same_run, leave_as_if_killed, tiny
from tests.fault_runs import comparable_metrics, read_seen, run

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a finished run on two ranks, over about two epochs in buffers of 5 of the 22 records."""
    folder = tmp_path_factory.mktemp("streamed")
    data = {"streaming": True, "shuffle_buffer": 5, "workers": 0, "packing": True}
    checkpoint = {"keep_latest": 100}
    settings = tiny(model_folder("llama_tied"), folder, "quiet", data=data, checkpoint=checkpoint)
    assert run(settings, 2) == [0, 0]
    return settings


def test_only_the_evaluation_data_are_stored(quiet: dict[str, Any]) -> None:
    assert [path.name.split("-")[1] for path in Path(quiet["data"]["cache_dir"]).iterdir()] == ["eval"]
    rows = [row for row in comparable_metrics(Path(quiet["output_dir"])) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["epoch"] == 0
    assert rows[-1]["epoch"] >= 2


def test_a_resume_is_the_same_run_to_the_last_bit(quiet: dict[str, Any], tmp_path: Path) -> None:
    resumed = {**quiet, "output_dir": str(tmp_path / "run")}
    leave_as_if_killed(quiet, 2 * SAVE_EVERY, tmp_path / "run")
    assert run(resumed, 2) == [0, 0]
    assert_same_run(quiet, resumed)
    for rank in range(2):
        assert read_seen(tmp_path / "run", rank) == read_seen(Path(quiet["output_dir"]), rank)[2 * SAVE_EVERY :]


def test_another_number_of_ranks_goes_on_with_the_same_rows(quiet: dict[str, Any], tmp_path: Path) -> None:
    resumed = {**quiet, "output_dir": str(tmp_path / "run")}
    leave_as_if_killed(quiet, SAVE_EVERY, tmp_path / "run")
    assert run(resumed, 1) == [0]
    for row, other in zip(
        comparable_metrics(tmp_path / "run"), comparable_metrics(Path(quiet["output_dir"])), strict=True
    ):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-5)
