"""A profiled run: traces that open, a summary that adds up, and the same training."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer.errors import ConfigError
from tests import models, training_runs
from tests.ranks import run_on_kept_ranks

ModelFolder = Callable[[str], str]


def settings(model: str, folder: Path, **profile: int) -> dict:
    train, _ = models.make_records(64, seed=30)
    data = models.write_jsonl(train, folder / "train.jsonl")
    sections = {"train": {"max_steps": 5}, "batch": {"global_batch_size": 8, "micro_batch_size": 2}}
    return training_runs.settings(model, data, folder / "run", profile=profile, **sections)


def test_profile_of_two_ranks(model_folder: ModelFolder, tmp_path: Path) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    plain.mkdir()
    profiled.mkdir()
    expected = run_on_kept_ranks(training_runs.train, 2, settings(model_folder("llama"), plain))[0]
    found = run_on_kept_ranks(training_runs.train, 2, settings(model_folder("llama"), profiled, start=3, steps=2))[0]

    assert [row.get("profiled") for row in found["metrics"]] == [None, None, True, True, None]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in found["metrics"]] == [row[name] for row in expected["metrics"]]
    assert all(found["weights"][name].equal(tensor) for name, tensor in expected["weights"].items())

    folder = profiled / "run" / "profile"
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.json.gz", "rank1.json.gz", "summary.json"]
    trace = json.loads(gzip.decompress((folder / "rank1.json.gz").read_bytes()))
    labels = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert labels.count("optimizer step") == 2
    assert labels.count("forward") == labels.count("backward") == 4  # two micro-batches a step

    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["first_step"], summary["steps"], len(summary["ranks"])) == (3, 2, 2)
    for rank in summary["ranks"]:
        seconds = rank["seconds"]
        assert seconds["compute"] > 0
        assert seconds["communication_exposed"] + seconds["communication_hidden"] > 0
        exposed = seconds["communication_exposed"] + seconds["copies_exposed"]
        assert seconds["compute"] + exposed + seconds["idle"] == pytest.approx(seconds["step"], rel=1e-6)
        assert sum(rank["phases"].values()) < seconds["step"]
        assert list(rank["phases"]) == ["forward", "backward", "clip", "step"]
        assert any(found["name"] == "aten::mm" for found in rank["top"])
    measured = [row["step_seconds"] for row in found["metrics"] if row.get("profiled")]
    assert summary["ranks"][0]["seconds"]["step"] == pytest.approx(sum(measured) / 2, rel=0.25)


def test_a_profiled_step_is_not_the_traced_one(model_folder: ModelFolder, tmp_path: Path) -> None:
    run = settings(model_folder("llama"), tmp_path, start=2, steps=2)
    run["log"] = {**run["log"], "trace_step": True}
    rows = run_on_kept_ranks(training_runs.train, 1, run)[0]["metrics"]
    assert [row["step"] for row in rows if row.get("profiled")] == [2, 3]
    assert [row["step"] for row in rows if row.get("traced")] == [4]


def test_a_profile_beyond_the_end_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ends before the steps that are to be profiled"):
        run_on_kept_ranks(training_runs.train, 1, settings(model_folder("llama"), tmp_path, start=4, steps=3))


def test_a_resume_past_the_range_does_not_profile_again(model_folder: ModelFolder, tmp_path: Path) -> None:
    run = settings(model_folder("llama"), tmp_path, start=1, steps=1)
    run["checkpoint"] = {"every_steps": 2, "resume": "auto"}
    run_on_kept_ranks(training_runs.train, 1, run)
    folder = tmp_path / "run" / "profile"
    before = (folder / "summary.json").stat().st_mtime_ns
    run["train"]["max_steps"] = 7
    rows = run_on_kept_ranks(training_runs.train, 1, run)[0]["metrics"]
    assert len(rows) == 7 and [row["step"] for row in rows if row.get("profiled")] == [1]
    assert (folder / "summary.json").stat().st_mtime_ns == before
