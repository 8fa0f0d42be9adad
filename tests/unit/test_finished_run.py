"""The same command on a finished run says so before torch is imported, touches nothing, and only then."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_trainer
from fsdp_trainer import Config
from fsdp_trainer.finished_run import describe_finished
from fsdp_trainer.launch import launch
from fsdp_trainer.memory.plan_files import PLANNED
from fsdp_trainer.run_lock import lock_folder, unlock_folder
from tests import light_imports as light
from tests.run_folders import contents

SAID = "finished already: 8 steps, "


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": str(folder / "model-of-no-files")},
        "data": {"train": [str(folder / "train.jsonl"), {"path": str(folder / "more")}]},
        "train": {"max_steps": 8},
        "output_dir": str(folder / "run"),
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return base


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run that finished leaves, as far as it is looked at."""
    (tmp_path / "more").mkdir()
    for data in ("train.jsonl", "more/one.jsonl"):
        (tmp_path / data).write_text('{"text": "a"}\n')
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "model.safetensors").write_bytes(b"0123456789")
    listed = {"files": {"model.safetensors": {"bytes": 10}, "README.md": {"bytes": 3}}}
    (run / "model" / "checksums.json").write_text(json.dumps(listed))
    Config.from_dict(settings(tmp_path)).save(run / "config.yaml")
    status = {"state": "finished", "exit_code": 0, "step": 8, "message": "", "updated": time.time() + 1}
    (run / "status.json").write_text(json.dumps(status))
    (run / "metrics.jsonl").write_text('{"step": 8, "loss": 1.0, "step_seconds": 1.0, "tokens_per_second": 3.0}\n')
    return tmp_path


def test_every_way_to_start_it_says_so_and_touches_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings(folder)))
    config, before = Config.load(file), contents(folder / "run")
    lines: list[str] = []
    assert launch(config, arguments=[], processes=999, on_line=lines.append) == 0
    assert [line.startswith(SAID) for line in lines] == [True]
    for processes in (None, 2):
        assert fsdp_trainer.finetune(config, processes=processes).state == "finished"
        assert capsys.readouterr().out.startswith(SAID)
    assert contents(folder / "run") == before


@pytest.mark.parametrize("start", ["from fsdp_trainer.cli import main; main(['train', '--config', {file!r}])",
                                   "import runpy; sys.argv = ['', '--config', {file!r}]; "
                                   "runpy.run_path({script!r}, run_name='__main__')"])  # fmt: skip
def test_torch_is_not_imported_for_it(folder: Path, start: str) -> None:
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings(folder)))
    before = contents(folder / "run")
    script = str(Path(fsdp_trainer.__file__).with_name("train.py"))
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    ended = light.python(code + start.format(file=str(file), script=script))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(SAID) and ended.stdout.endswith("\nFalse\n")
    assert contents(folder / "run") == before


def touch_data(folder: Path) -> None:
    (folder / "more" / "two.jsonl").write_text('{"text": "b"}\n')
    later = time.time() + 60
    os.utime(folder / "more" / "two.jsonl", (later, later))


def lose_weights(folder: Path) -> None:
    (folder / "run" / "model" / "model.safetensors").write_bytes(b"012")


def stop_it(folder: Path) -> None:
    path = folder / "run" / "status.json"
    path.write_text(path.read_text().replace("finished", "interrupted"))


def lose_settings(folder: Path) -> None:
    (folder / "run" / "config.yaml").write_text("optim: [\n")


DAMAGE: list[Callable[[Path], None]] = [touch_data, lose_weights, stop_it, lose_settings]


@pytest.mark.parametrize("change", DAMAGE)
def test_what_has_something_left_to_do_is_not_finished(folder: Path, change: Callable[[Path], None]) -> None:
    config = Config.from_dict(settings(folder))
    assert describe_finished(config)
    change(folder)
    assert describe_finished(config) is None


@pytest.mark.parametrize(
    ("sections", "finished"),
    [
        ({"train": {"max_steps": 9}}, False),
        ({"optim": {"lr": 0.5}}, False),
        ({"export": {"dtype": "fp32"}}, False),
        ({"checkpoint": {"resume": "never"}}, False),
        ({"log": {"every_steps": 3}, "train": {"timeout_minutes": 3}}, True),
    ],
)
def test_other_settings_are_another_command(folder: Path, sections: dict[str, Any], finished: bool) -> None:
    assert (describe_finished(Config.from_dict(settings(folder, **sections))) is not None) == finished


def test_what_a_plan_chose_is_not_compared_with_a_default(folder: Path) -> None:
    ended = Config.from_dict(settings(folder, activation_checkpointing={"mode": "none"}))
    ended.save(folder / "run" / "config.yaml")
    assert describe_finished(Config.from_dict(settings(folder))) is None
    assert describe_finished(Config.from_dict(settings(folder)), unsaid=PLANNED)
    said = Config.from_dict(settings(folder, activation_checkpointing={"mode": "full"}))
    assert describe_finished(said, unsaid=PLANNED) is None


def test_a_folder_that_another_run_holds_is_not_finished(folder: Path) -> None:
    lock = lock_folder(folder / "run", log=print)
    try:
        assert describe_finished(Config.from_dict(settings(folder))) is None
    finally:
        unlock_folder(lock)
