"""Every documented way to start a run, with real processes, and the ways that must be refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from fsdp_trainer.errors import DistributedError
from tests import training_runs
from tests.e2e.commands import PROFILE, SCRIPT, executable, run_command, write_settings
from tests.e2e.tiny_run import STEPS, assert_same_run, tiny
from tests.fault_runs import comparable_metrics, read_status, run
from tests.ranks import run_ranks
from tests.run_folders import Page

Folder = Callable[[str], str]
pytestmark = pytest.mark.timeout(600)
LOG = {"samples": 1, "trackers": ["tensorboard"], "report": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start")


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, folder: Path) -> dict[str, Any]:
    """The settings of a finished run on two ranks of this test process, which every other start must equal."""
    settings = tiny(model_folder("qwen3_tied"), folder, "quiet", log=LOG)
    assert run(settings, 2) == [0, 0]
    return settings


def settings_in(quiet: dict[str, Any], folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """Return the same settings with an output_dir of their own, and the file they are written to."""
    settings = {**quiet, "output_dir": str(folder / name)}
    return settings, write_settings(settings, folder, f"{name}.yaml")


# --- accelerate launch


@pytest.fixture(scope="module")
def launched(quiet: dict[str, Any], folder: Path) -> tuple[dict[str, Any], CompletedProcess[str]]:
    """A run that `accelerate launch` started with the shipped profile, in new interpreters."""
    settings, file = settings_in(quiet, folder, "launched")
    command = [executable("accelerate"), "launch", "--config_file", str(PROFILE), str(SCRIPT), "--config", file]
    return settings, run_command(command, cwd=folder, cold=True)


@pytest.mark.slow
@pytest.mark.cold
def test_accelerate_launch(quiet: dict[str, Any], launched: tuple[dict[str, Any], CompletedProcess[str]]) -> None:
    settings, ended = launched
    assert ended.returncode == 0
    assert_same_run(quiet, settings)
    # Once each: only rank 0 speaks.
    for line in ("row 0 (what is trained on is marked)", "over 2 ranks", f"step {STEPS}/{STEPS}  loss", "finished: "):
        assert ended.stdout.count(line) == 1, line


@pytest.mark.slow
def test_run_folder_is_complete(launched: tuple[dict[str, Any], CompletedProcess[str]]) -> None:
    from fsdp_trainer import Config

    output = Path(launched[0]["output_dir"])
    present = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    expected = {"config.yaml", "metrics.jsonl", "status.json", "report.html"}
    expected |= {f"model/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")}
    expected |= {f"checkpoints/step-{STEPS:08d}/{name}" for name in (".metadata", "state.json", "__0_0.distcp")}
    assert expected <= present
    leftovers = [name for name in present if name.endswith((".tmp", ".part", ".deleting"))]
    assert leftovers == []
    report = Page((output / "report.html").read_text()).text
    assert f"finished steps {STEPS} of {STEPS}" in report
    for library in ("torch", "accelerate", "transformers"):  # which ones made the numbers
        assert f"{library} {version(library)}" in report
    # What the folder says it was is what it was: the run can be started again from its own file.
    assert Config.load(output / "config.yaml") == Config.from_dict(launched[0])


@pytest.mark.slow
def test_tensorboard_has_what_the_metrics_have(launched: tuple[dict[str, Any], CompletedProcess[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = Path(launched[0]["output_dir"])
    (events,) = {path.parent for path in output.rglob("events.out.tfevents.*") if path.parent.name == "tracker"}
    board = EventAccumulator(str(events))
    board.Reload()
    rows = training_runs.read_metrics(output)
    for name in ("loss", "grad_norm", "lr", "eval_loss"):
        found = {event.step: event.value for event in board.Scalars(name)}
        assert found == pytest.approx({row["step"]: row[name] for row in rows if name in row})


@pytest.mark.slow
def test_a_profile_that_contradicts_the_settings_is_one_error(quiet: dict[str, Any], folder: Path) -> None:
    settings, file = settings_in(quiet, folder, "contradicted")
    profile = yaml.safe_load(PROFILE.read_text())
    profile["mixed_precision"] = "bf16"
    profile["fsdp_config"]["fsdp_offload_params"] = True
    other = folder / "contradicting.yaml"
    other.write_text(yaml.safe_dump(profile))
    command = [executable("accelerate"), "launch", "--config_file", str(other), str(SCRIPT), "--config", file]
    ended = run_command(command, cwd=folder)
    assert ended.returncode != 0
    (message,) = [block for block in ended.stderr.split("[rank ") if block.startswith("0] error")]
    assert "mixed_precision: bf16 in the profile, precision: fp32 in the settings" in message
    assert "fsdp_offload_params: 'true', sharding.offload: 'none'" in message
    assert not Path(settings["output_dir"]).exists()


@pytest.mark.slow
@pytest.mark.cold
def test_accelerate_that_starts_one_process_where_two_were_asked_for(quiet: dict[str, Any], folder: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` starts a single process and says nothing (accelerate 1.15)."""
    settings, file = settings_in(quiet, folder, "alone")
    command = [executable("accelerate"), "launch", "--cpu", "--num_processes", "2", str(SCRIPT), "--config", file]
    ended = run_command(command, cwd=folder, cold=True)
    assert ended.returncode != 0
    assert "one process" in ended.stderr
    assert "configs/accelerate" in ended.stderr
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()


# --- from Python


@pytest.mark.slow
def test_one_process_from_the_command_line(quiet: dict[str, Any], folder: Path) -> None:
    settings, file = settings_in(quiet, folder, "single")
    code = f"from fsdp_trainer import Config, finetune; finetune(Config.load({file!r}))"
    assert run_command([sys.executable, "-c", code], cwd=folder).returncode == 0
    output = Path(settings["output_dir"])
    assert read_status(output)["state"] == "finished"
    for row, expected in zip(comparable_metrics(output), comparable_metrics(Path(quiet["output_dir"])), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


# --- Accelerate in another state than a run needs


def join_after_a_process_of_its_own(world: str) -> None:
    """What a notebook does that made an Accelerator, or a launcher that started each process alone."""
    import os

    from accelerate import Accelerator

    launch = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP")
    Accelerator(cpu=True)
    os.environ.update(launch if world == "launched" else {}, ACCELERATE_USE_FSDP=fsdp)

    from fsdp_trainer.runtime import build_runtime

    build_runtime(timeout_minutes=1)


def test_fewer_ranks_than_launched() -> None:
    with pytest.raises(DistributedError) as caught:
        run_ranks(join_after_a_process_of_its_own, 2, "launched")
    assert "2 launched, 1 in the process group" in caught.value.values


def test_fsdp_not_active() -> None:
    with pytest.raises(DistributedError, match="FSDP is not active") as caught:
        run_ranks(join_after_a_process_of_its_own, 1, "alone")
    assert "distributed_type" in caught.value.values
