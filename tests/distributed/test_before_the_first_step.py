"""What a run will write is tried before its first step, and what cannot be written at its end does not cost the model.

The failing writers are limits of the system, or our own writer made to answer as a system does.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.run_folder import how_to_go_on
from fsdp_trainer.saving import saving_failed
from tests import fault_runs, models, training_runs
from tests.ranks import run_ranks

ModelFolder = Callable[[str], str]


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    data = models.write_jsonl(models.make_records(16, seed=3)[0], folder / "data.jsonl")
    base = {"batch": {"global_batch_size": 8, "micro_batch_size": 2}, "train": {"max_steps": 4}}
    base |= {"data": {"cache_dir": str(folder / "cache")}, "schedule": {"warmup_steps": 1}}
    made = training_runs.settings(model, data, folder / "run", **(base | sections))
    for section in (values for values in made.values() if isinstance(values, dict)):
        for name in [name for name, value in section.items() if value is ...]:
            del section[name]
    return made


def status(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(settings["output_dir"]) / "status.json").read_text())


def left(settings: dict[str, Any]) -> set[str]:
    """What there is in the run folder that a run leaves: not the harness's files."""
    found = (path.name for path in Path(settings["output_dir"]).iterdir())
    return {name for name in found if not name.startswith(("settings-of", "seen-", "pid-of", ".lock", "cache"))}


def train_with_small_files(settings: dict[str, Any], limit: int) -> int:
    """Train where no file may be larger than `limit` (ulimit -f), as on a disk with such a quota."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return fault_runs.train(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("rehearse", [False, True], ids=["plain", "rehearsed"])
@pytest.mark.parametrize("what", ["checkpoint", "export"])
def test_a_limit_of_the_system_is_met_before_the_first_step(
    what: str, rehearse: bool, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Free space says nothing of a quota: before, the steps were taken and lost."""
    settings = tiny(
        model_folder("llama"),
        tmp_path,
        checkpoint={"every_steps": 100} if what == "checkpoint" else {"enabled": False, "every_steps": ...},
        export={"at_end": what == "export"},
        rehearse=rehearse,
    )
    assert run_ranks(train_with_small_files, 2, settings, 60_000) == [7, 7]
    said = status(settings)["message"]
    assert "no room" in said and os.strerror(errno.EFBIG) in said and "ulimit" in said
    assert left(settings) == {"status.json"}, "nothing is left of the trial"
    assert run_ranks(train_with_small_files, 2, settings, 10_000_000) == [0, 0]


def train_with_broken_writer(settings: dict[str, Any], *, after: int, slow: float = 0.0) -> int:
    """Train with a writer that answers as a quota does after so many calls, or takes `slow` seconds on rank 1."""
    from fsdp_trainer import checkpoint_writer

    calls, write = 0, checkpoint_writer.CheckpointWriter.write_data

    def write_or_fail(self: Any, plan: Any, planner: Any) -> Any:
        nonlocal calls
        calls += 1
        if slow and os.environ["RANK"] == "1":
            time.sleep(slow)
        if calls > after:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return write(self, plan, planner)

    checkpoint_writer.CheckpointWriter.write_data = write_or_fail
    try:
        return fault_runs.train(settings)
    finally:
        checkpoint_writer.CheckpointWriter.write_data = write


def fail_after(settings: dict[str, Any], after: int) -> int:
    return train_with_broken_writer(settings, after=after)


def test_a_writer_that_fails_is_found_before_the_first_step(model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = tiny(model_folder("llama"), tmp_path)
    assert run_ranks(fail_after, 2, settings, 0) == [7, 7]
    said = status(settings)["message"]
    assert "before the first step" in said and os.strerror(errno.EDQUOT) in said and "no step was taken" in said
    assert "last checkpoint" not in said
    assert left(settings) == {"status.json"}


@pytest.mark.parametrize("every", [4, 100], ids=["due", "not-due"])
def test_a_failed_last_save_does_not_cost_the_model(every: int, model_folder: ModelFolder, tmp_path: Path) -> None:
    """The trial passes; the quota is met by the one save there is."""
    settings = tiny(model_folder("llama"), tmp_path, checkpoint={"every_steps": every, "async_save": False})
    assert run_ranks(fail_after, 2, settings, 1) == [7, 7]
    said = status(settings)["message"]
    assert "there is none before it" in said and "starts anew" in said
    assert "the trained model is there all the same" in said
    exported = training_runs.read_weights(tmp_path / "run" / "model")
    assert fault_runs.checkpoints(tmp_path / "run") == []
    assert run_ranks(fail_after, 2, settings, 100) == [0, 0]
    again = training_runs.read_weights(tmp_path / "run" / "model")
    assert all(tensor.equal(again[name]) for name, tensor in exported.items())


def test_a_failed_save_names_the_one_it_goes_on_from(model_folder: ModelFolder, tmp_path: Path) -> None:
    resumes = {"every_steps": 2, "async_save": False, "resume": "auto"}
    settings = tiny(model_folder("llama"), tmp_path, checkpoint=resumes)
    assert run_ranks(fail_after, 2, settings, 2) == [7, 7]
    said = status(settings)["message"]
    assert "goes on from the last checkpoint, step-00000002" in said and "the ones before it are as they were" in said


def test_neither_checkpoint_nor_model(tmp_path: Path) -> None:
    failed = CheckpointError("The checkpoint could not be written.", values="a: no room", fix="make room")
    with pytest.raises(CheckpointError, match="a: no room; b: no room") as caught, saving_failed(failed, tmp_path):
        raise CheckpointError("The model could not be written.", values="b: no room")
    assert caught.value.what.startswith("Neither")
    with pytest.raises(CheckpointError, match="b: no room"), saving_failed(None, tmp_path):
        raise CheckpointError("The model could not be written.", values="b: no room")
    with saving_failed(None, tmp_path):
        pass


def test_no_message_promises_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    assert how_to_go_on(tmp_path) == "no checkpoint is there yet: the same command starts anew"
    for name in ("step-00000002", "step-00000010", ".step-00000012.tmp", "step-trial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert how_to_go_on(tmp_path).endswith("step-00000010")


def test_the_limit_follows_from_size_and_speed() -> None:
    from fsdp_trainer.checkpoint_pace import LEAST_SECONDS, MARGIN, Pace

    pace = Pace()
    before = pace.limit(10**12)
    pace.saw(10**6, 100.0)  # so little says nothing of the disk
    assert pace.limit(10**12) == before
    pace.saw(10**9, 10.0)
    assert pace.limit(10**12).total_seconds() == LEAST_SECONDS + MARGIN * 10**12 / 10**8
    pace.saw(10**9, 0.1)  # a cache took it in
    assert pace.limit(10**12).total_seconds() == LEAST_SECONDS + MARGIN * 10**12 / 10**8
