"""The files of a run folder: whole or as they were, JSON that any reader takes, and errors that name the file."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer.checkpoint_folder import remove_leftovers
from fsdp_trainer.errors import OutputError
from fsdp_trainer.run_folder import (
    append_metrics,
    check_writable,
    explain_no_room,
    trim_metrics,
    write_settings,
    write_status,
    write_text_atomically,
)

Write = Callable[[Path], object]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_in_the_metrics(number: float, tmp_path: Path) -> None:
    append_metrics(tmp_path, {"step": 1, "loss": number, "grad_norm": 2.5})

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": 2.5}


def status(folder: Path) -> None:
    write_status(folder, state="running", exit_code=0, step=3)


def settings(folder: Path) -> None:
    write_settings(folder, "optim: {}\n")


def metrics(folder: Path) -> None:
    append_metrics(folder, {"step": 1})


FILES: dict[str, Write] = {"status.json": status, "config.yaml": settings, "metrics.jsonl": metrics}


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_belongs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OutputError) as caught:
        FILES[name](tmp_path)
    assert caught.value.exit_code == 7
    assert caught.value.values == f"{tmp_path / name}: Is a directory"
    assert "move away what stands in its place" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == [name], "a temporary file was left"


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device") as caught:
        metrics(tmp_path)
    assert str(tmp_path / "metrics.jsonl") in caught.value.values
    assert "make room on that disk, or set output_dir on another one" in caught.value.fix


def chained(last: Exception, cause: Exception) -> Exception:
    last.__context__ = cause
    return last


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "No space", "/d/a.bin"), "/d/a.bin: No space left on device"),
        (chained(RuntimeError("unexpected pos 704"), OSError(errno.EDQUOT, "full", "/d/b")), "/d/b: "),
        (OSError(errno.EFBIG, "File too large"), "File too large"),
        # As safetensors has it (0.8), which knows no OSError.
        (ValueError("I/O error: No space left on device (os error 28)"), "os error 28"),
        (OSError(errno.EACCES, "Permission denied", "/d/c"), None),
        (ValueError("no room"), None),
    ],
)
def test_a_full_disk_is_known_in_anybodys_words(error: Exception, named: str | None) -> None:
    found = explain_no_room(error)
    assert (found is None) == (named is None)
    if found is not None and named is not None:
        assert found.exit_code == 7 and named in found.values and "make room" in found.fix


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        check_writable(tmp_path / "file" / "run")
    assert caught.value.values == f"{tmp_path / 'file' / 'run'}: Not a directory"


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "run")
    assert list((tmp_path / "a" / "run").iterdir()) == []


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_what_a_killed_write_left_goes(tmp_path: Path) -> None:
    names = [".status.json.0123abcd", "..lock-owner.json.89abcdef"]
    others = [".lock", ".status.json.part", "checkpoints", ".notes.12345678.txt"]
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    for name in (*names, *others[:2], others[3]):
        (tmp_path / name).write_text("")
    of_best = tmp_path / "checkpoints" / "step-00000004" / ".state.json.01234567"
    of_best.write_text("")
    write_text_atomically(tmp_path / "status.json", "{}")
    assert (tmp_path / names[0]).exists(), "another process may be writing it"
    os.utime(tmp_path / names[0], (1.0, 1.0))
    write_text_atomically(tmp_path / "status.json", "{}")
    assert [(tmp_path / name).exists() for name in names] == [False, True]
    remove_leftovers(tmp_path)  # of a start, which holds the folder
    assert not of_best.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "status.json"])


EARLIER = {"exit_code": 0, "step": 8, "message": "", "started": 5.5, "started_step": 4, "total_steps": 8}


def earlier_run(folder: Path, state: str) -> bytes:
    """The status of a run that was over before this process began."""
    path = folder / "status.json"
    path.write_text(json.dumps({"state": state, **EARLIER}))
    os.utime(path, (6.0, 6.0))
    return path.read_bytes()


@pytest.mark.parametrize("state", ["finished", "interrupted", "running"])
def test_a_refused_start_leaves_the_run_as_it_was(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = earlier_run(tmp_path, state)
    write_status(tmp_path, state="failed", exit_code=4, step=8, message="of another run")
    assert (tmp_path / "status.json").read_bytes() == before
    refusals = tmp_path / "refusals"
    monkeypatch.setenv("FSDP_TRAINER_REFUSALS", str(refusals))
    write_status(tmp_path, state="failed", exit_code=4, step=8, message="of another run")
    assert (tmp_path / "status.json").read_bytes() == before
    told = json.loads((refusals / "status.json").read_text())
    assert (told["exit_code"], told["message"], told["started"]) == (4, "of another run", None)


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_start_without_memory_is_told(state: str, tmp_path: Path) -> None:
    """It is no refusal: a run that goes on, or on from its end, has failed."""
    earlier_run(tmp_path, state)
    write_status(tmp_path, state="failed", exit_code=8, step=8)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["exit_code"], status["total_steps"], status["started"]) == (8, 8, 5.5)


def test_torn_and_later_rows_are_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n[1]\n{"step": 2, "los')
    assert trim_metrics(tmp_path, after_step=2) == 3
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_files_have_the_rights_that_new_files_have(tmp_path: Path) -> None:
    """Whoever may read metrics.jsonl may read settings and status too: a folder on a cluster is looked at by others."""
    (tmp_path / "other").touch()
    for _ in range(2):  # also where it takes the place of one
        write_text_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]
