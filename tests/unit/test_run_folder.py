"""The files of a run folder: whole or as they were, JSON that any reader takes, and errors that name the file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer.errors import OutputError
from fsdp_trainer.run_folder import (
    append_metrics,
    check_writable,
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
