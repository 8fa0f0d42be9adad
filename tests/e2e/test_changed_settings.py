"""What changed since the checkpoint is logged, refused, or let through by name; tests/unit has every setting's rule."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny_run import SAVE_EVERY, STEPS, leave_as_if_killed, tiny
from tests.fault_runs import checkpoints, comparable_metrics, read_seen, read_status, run, train
from tests.ranks import run_ranks

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a finished run that kept all its checkpoints."""
    folder = tmp_path_factory.mktemp("changed")
    settings = tiny(model_folder("llama"), folder, "quiet", checkpoint={"keep_latest": 100})
    assert run(settings, 2) == [0, 0]
    return settings


def changed(quiet: dict[str, Any], output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of the same run, killed after its first save, with some of them changed."""
    leave_as_if_killed(quiet, SAVE_EVERY, output)
    new = {name: {**quiet.get(name, {}), **values} for name, values in sections.items()}
    return {**quiet, "output_dir": str(output), **new}


def train_and_listen(settings: dict[str, Any]) -> tuple[int, list[str]]:
    """Train on this rank; return the exit code and the lines that the log has from it."""
    from fsdp_trainer import training_start

    lines: list[str] = []

    def hear(text: Any, *, is_main: bool = True) -> None:
        if is_main:
            lines.append(str(text))

    training_start.log_line = hear
    return train(settings), lines


def lines_of(settings: dict[str, Any]) -> list[str]:
    """Train to the end on two ranks and return what the log says of changes."""
    (first, lines), (second, others) = run_ranks(train_and_listen, 2, settings, timeout=120.0)
    assert (first, second, others) == (0, 0, [])
    return [line for line in lines if line.startswith("changed since")]


def test_what_may_change_goes_on_with_a_line_each(quiet: dict[str, Any], tmp_path: Path) -> None:
    moved = str(shutil.copy(quiet["data"]["train"], tmp_path / "moved.jsonl"))
    settings = changed(
        quiet,
        tmp_path / "run",
        batch={"micro_batch_size": 4},
        sharding={"zero_stage": 1},
        activation_checkpointing={"mode": "full"},
        loss={"kind": "plain"},
        optim={"implementation": "foreach"},
        data={"train": moved},
        log={"samples": 1},
    )
    said = lines_of(settings)
    expected_lines = [
        "batch.micro_batch_size: 2 saved, 4 now",
        "sharding.zero_stage: 3 saved, 1 now",
        "activation_checkpointing.mode: 'none' saved, 'full' now",
        "loss.kind: 'chunked' saved, 'plain' now",
        "optim.implementation: 'fused' saved, 'foreach' now",
        f"data.train: {quiet['data']['train']!r} saved, {moved!r} now",
    ]  # and none about log.samples
    assert sorted(line.partition(" (")[0] for line in said) == sorted(
        f"changed since the checkpoint: {line}" for line in expected_lines
    )
    assert [seen[:2] for seen in read_seen(tmp_path / "run", 0)] == [
        seen[:2] for seen in read_seen(Path(quiet["output_dir"]), 0)[SAVE_EVERY:]
    ]
    rows, expected = (comparable_metrics(path) for path in (tmp_path / "run", Path(quiet["output_dir"])))
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6, abs=1e-5)


def test_all_that_may_not_change_stands_in_one_refusal(quiet: dict[str, Any], tmp_path: Path) -> None:
    optim, output = {"lr": 2e-3, "weight_decay": 0.0}, tmp_path / "run"
    settings = changed(quiet, output, optim=optim, train={"seed": 8}, checkpoint={"resume_anyway": ["optim.lr"]})
    metrics = comparable_metrics(output)
    assert run(settings, 2) == [4, 4]
    message = read_status(output)["message"]
    assert "train.seed: 7 saved, 8 now; optim.weight_decay: 0.1 saved, 0.0 now" in message
    assert "--resume-anyway=train.seed,optim.weight_decay" in message
    assert "optim.lr" not in message
    assert comparable_metrics(output) == metrics, "the refusal changed the run folder"
    assert checkpoints(output) == [f"step-{SAVE_EVERY:08d}"]


def test_a_named_change_takes_effect_and_the_same_command_goes_on_again(quiet: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = changed(quiet, output, optim={"lr": 2e-3}, checkpoint={"resume_anyway": ["optim.lr"]})
    (line,) = lines_of(settings)
    assert line.startswith("changed since the checkpoint (as asked): optim.lr: 0.001 saved, 0.002 now (")
    rates, quiet_rates = (
        {row["step"]: row["lr"] for row in comparable_metrics(folder) if "lr" in row}
        for folder in (output, Path(quiet["output_dir"]))
    )
    for step in range(1, STEPS + 1):
        assert rates[step] == pytest.approx(quiet_rates[step] * (2 if step > SAVE_EVERY else 1))

    (output / "model" / "model.safetensors").unlink()
    assert lines_of(settings) == []
    assert (output / "model" / "model.safetensors").is_file()
