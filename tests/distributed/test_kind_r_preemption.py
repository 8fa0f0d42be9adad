"""Preemption and safety (reports R): what a kill leaves is never taken for a checkpoint, and nobody is asked anything.

Entries 146 and 150. Elsewhere: kills at every file operation in test_kill_points.py and at random moments in
tests/e2e/test_kill.py, 147 in tests/e2e/test_signals.py and test_second_signal.py, 148 in test_integrity.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests import fault_runs, models, training_runs
from tests.ranks import REPOSITORY, run_on_kept_ranks, run_ranks

ModelFolder = Callable[[str], str]
INPUTS = REPOSITORY / "tests" / "inputs" / "checkpoints"


def leave_truncated(folder: Path) -> None:
    """Input c01: a file whose header promises more than there is, where a checkpoint of step 200 would be."""
    folder.mkdir()
    shutil.copy(INPUTS / "c01_truncated.safetensors", folder / "model.safetensors")


def leave_part(folder: Path) -> None:
    """Input c03: one rank's part, no table of contents and no mark that it is complete."""
    shutil.copytree(INPUTS / "c03_partial_step_dir", folder)


def leave_part_among_good_files(folder: Path) -> None:
    """Input c03 again, its part in place of the right one: nothing but its size and bytes shows it."""
    shutil.copytree(folder.with_name("step-00000001"), folder)
    shutil.copy(INPUTS / "c03_partial_step_dir" / "__0_0.distcp", folder)


def find(output_dir: str, explicit: str) -> tuple[str, list[str], str]:
    import torch.distributed as dist

    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    dist.init_process_group("gloo")
    notes: list[str] = []
    found = find_checkpoint(Path(output_dir), resume="auto", log=notes.append)
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint(Path(output_dir), resume=explicit)
    return str(found), notes, str(raised.value)


@pytest.fixture(scope="module")
def saved(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config = training_runs.settings(model_folder("llama"), "unused.jsonl", folder)
    run_on_kept_ranks(runs.train_and_save, 2, config, 1, 1, False)
    return folder / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (leave_truncated, ".metadata is missing: the save was not finished"),
        (leave_part, ".metadata is missing: the save was not finished"),
        (leave_part_among_good_files, "__0_0.distcp has 32 bytes of"),
    ],
)
def test_146_half_a_checkpoint_is_skipped_and_refused_by_path(
    leave: Callable[[Path], None], said: str, saved: Path, tmp_path: Path
) -> None:
    good, half = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (1, 200))
    shutil.copytree(saved, good)
    leave(half)
    for rank, (found, notes, message) in enumerate(run_ranks(find, 2, str(tmp_path), str(half))):
        assert found == str(good)
        assert [f"skipped {half}: {said}" in note for note in notes] == ([True] if rank == 0 else [])
        assert message.startswith("This is no complete and intact checkpoint.")
        assert f"{half}: {said}" in message


def build_from(settings: dict[str, Any]) -> str:
    from fsdp_trainer.errors import FsdpTrainerError

    try:
        runs.build(settings)
    except FsdpTrainerError as error:
        return str(error)
    return "built"


def test_146_truncated_weights_are_refused_as_a_model_too(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Input c01, under the name that a model folder's weights have."""
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    shutil.copy(INPUTS / "c01_truncated.safetensors", folder / "model.safetensors")
    config = training_runs.settings(str(folder), "unused.jsonl", tmp_path / "run")
    for message in run_ranks(build_from, 2, config):
        assert message != "built"
        assert "model.safetensors" in message


def train_without_stdin(settings: dict[str, Any]) -> int:
    sys.stdin = None
    os.close(0)
    return fault_runs.train(settings)


def test_150_nobody_is_asked(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A batch job has no terminal: a whole run, over data not seen before, into a folder that exists, without one."""
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        model_folder("llama"), data, tmp_path, train={"max_steps": 2}, schedule={"warmup_steps": 1}
    )
    assert run_ranks(train_without_stdin, 2, settings) == [0, 0]
    assert (tmp_path / "model" / "model.safetensors").is_file()
