"""An export that replaces an older one can be killed at every file operation, and a whole model is there again.

Where two names can be exchanged in one operation it is there at every moment; elsewhere after the next start.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer import export_folder
from fsdp_trainer.export_checksums import find_export_damage
from fsdp_trainer.export_folder import make_empty, recover, replace_folder, unfinished
from fsdp_trainer.run_folder import CHECKSUMS
from tests.file_operations import watch_operations

FILES = ("config.json", "model.safetensors", "code/modeling.py")


def write_model(part: Path, word: str) -> None:
    for name in FILES:
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_text(f"{word} {name}")


def export(folder: Path, word: str) -> None:
    """Do with a model of a few bytes what an export does."""
    make_empty(unfinished(folder))
    write_model(unfinished(folder), word)
    replace_folder(folder, unfinished(folder))


def which(folder: Path) -> str:
    """Return which model is in the folder, whole; "none" where there is no folder."""
    if not folder.exists():
        return "none"
    assert find_export_damage(folder) is None
    (word,) = {(folder / name).read_text().split()[0] for name in FILES}
    return word


def killed(folder: Path, log: Path, kill_at: int | None) -> int:
    """Replace the model in `folder` in a fork that dies before an operation; return the signal it died of."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir()
    export(folder, "first")
    log.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            watch_operations(kill_at, log, within=folder.parent.name)
            export(folder, "second")
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status)


def not_offered(one: Path, other: Path) -> bool:
    return False


@pytest.mark.parametrize("exchange", [export_folder._exchange, not_offered])
def test_a_whole_model_at_every_kill_point(
    exchange: Callable[[Path, Path], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_folder, "_exchange", exchange)
    folder, log = tmp_path / "the-run" / "model", tmp_path / "log"
    assert killed(folder, log, None) == 0
    operations = log.read_text().splitlines()
    assert any("exchange" in line for line in operations) == (exchange is not not_offered)
    seen = []
    for number in range(len(operations)):
        assert killed(folder, log, number) == signal.SIGKILL
        at_once = which(folder)
        assert at_once != "none" or exchange is not_offered, operations[number]
        recover(folder)  # as every start does
        seen.append(which(folder))
        assert seen[-1] == at_once or at_once == "none"
        assert [path.name for path in folder.parent.iterdir()] == ["model"], operations[number]
        export(folder, "third")
        assert which(folder) == "third"
    assert seen == sorted(seen) and set(seen) == {"first", "second"}, "there is one moment at which the new one counts"


def test_the_moment_between_two_renames_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an exchange there is a kill after which no model has the name: what `recover` is for."""
    monkeypatch.setattr(export_folder, "_exchange", not_offered)
    folder, log = tmp_path / "the-run" / "model", tmp_path / "log"
    killed(folder, log, None)
    renames = [number for number, line in enumerate(log.read_text().splitlines()) if line.startswith("os.rename")]
    killed(folder, log, renames[-1])
    assert which(folder) == "none"
    assert (folder.with_name(".model.old") / CHECKSUMS).is_file()


def test_a_first_export_needs_no_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_folder, "_exchange", lambda one, other: pytest.fail("there is nothing to exchange with"))
    export(tmp_path / "model", "first")
    assert which(tmp_path / "model") == "first"
