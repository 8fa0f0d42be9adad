"""The demo's run folder: what a second start of it finds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer import demo
from fsdp_trainer.config import Config
from fsdp_trainer.demo import clear_ended_run
from fsdp_trainer.run_folder import write_status


@pytest.mark.parametrize(
    ("state", "stays"), [("interrupted", True), ("running", True), ("finished", False), ("failed", False)]
)
def test_only_a_demo_that_ended_is_cleared(tmp_path: Path, state: str, stays: bool) -> None:
    """Ctrl-C says that the same command goes on: its checkpoint must still be there."""
    checkpoint = tmp_path / "checkpoints" / "step-00000027"
    checkpoint.mkdir(parents=True)
    write_status(tmp_path, state=state, exit_code=0, step=27)
    clear_ended_run(tmp_path)
    assert checkpoint.exists() is stays


def test_a_folder_without_a_status_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "rest").touch()
    clear_ended_run(tmp_path)
    assert not tmp_path.exists()
    clear_ended_run(tmp_path)  # and one that is not there is no error


def test_training_is_launched_as_the_command_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: a command of its own would be killed on Ctrl-C while its ranks still save."""
    seen: list[Any] = []

    def launch(config: Config, *, arguments: list[str], processes: int) -> int:
        seen.append((config.output_dir, arguments, processes, Path.cwd()))
        return 75

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setattr(demo, "ask", lambda _folder, questions: ["?"] * len(questions))
    monkeypatch.setattr(demo, "smollm2_folder", lambda: Path("base"))
    assert demo.run_demo([f"--output_dir={tmp_path}", "--train.max_steps=2"]) == 75
    ((output, arguments, processes, where),) = seen
    assert (output, processes, where) == (str(tmp_path), 2, demo.REPOSITORY)
    assert arguments[:3] == ["--config", str(demo.RECIPE), "--model.path=base"]
    assert arguments[-2:] == [f"--output_dir={tmp_path}", "--train.max_steps=2"]
    assert "ended with exit code 75" in capsys.readouterr().out
