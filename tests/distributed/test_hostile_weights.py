"""Nothing hostile among the weights is opened: names that lead out of the folder, tables that lie, zip bombs.

Each reader runs under an audit hook, sees a good file first, and says what it refused in an error of ours.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import hostile_pickles, hostile_weights
from tests.distributed.test_integrity import FORBIDDEN
from tests.ranks import run_ranks

MAX_GROWTH_BYTES = 64 * 2**20
REFUSALS = ("A weight file ", "The weight index ", "The model folder holds no weights")
Answers = dict[str, tuple[str, list[str]]]


class Watch:
    """Notes what happens in this process while it is on: files opened outside a folder, and what code would do."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        self._thread = threading.get_ident()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or threading.get_ident() != self._thread:
            return
        # Source that a warning quotes is read as text.
        known = str(arguments[0]).startswith(str(self.folder)) or str(arguments[0]).endswith(".py")
        outside = event == "open" and not known
        writing = event == "open" and any(letter in str(arguments[1]) for letter in "wax+")
        if outside or writing or event.startswith(FORBIDDEN):
            self.seen.append(f"{event} {arguments!r}")

    def ask(self, folder: Path) -> tuple[str, list[str]]:
        """Open the weights of `folder`; return what was said and what was seen."""
        from fsdp_trainer.errors import CheckpointError
        from fsdp_trainer.weight_files import open_weights

        self.seen.clear()
        self.folder = folder
        try:
            names = sorted(open_weights(folder))
            said = f"read {names}"
        except CheckpointError as error:
            said = str(error)
        finally:
            self.folder = None
        return said, list(self.seen)


def read_all(folder: str, kind: str) -> tuple[Answers, int, bool]:
    """Return what each hostile case of a kind led to, the growth of memory in bytes, and whether a mark was left."""
    from benchmarks.loading import Peaks

    place, mark, watch, answers = Path(folder), Path(folder) / "mark", Watch(), {}
    cases: dict[str, Callable[[Path], Any]] = {"good": GOOD[kind]}
    if kind == "index":
        cases |= hostile_weights.indexes()
    elif kind == "header":
        cases |= hostile_weights.headers()
    else:
        contents = hostile_weights.archives() if kind == "archive" else hostile_pickles.make(mark)
        for name, content in contents.items():
            data = content if kind == "archive" else hostile_weights.archive(content)
            cases[name] = lambda case, data=data: (case / "pytorch_model.bin").write_bytes(data)
    for name, make in cases.items():
        hostile_weights.prepare(place / name)
        make(place / name)
    good = watch.ask(place / "good")  # before the peaks: it imports what is imported lazily
    with Peaks() as peaks:
        for name in cases:
            answers[name] = watch.ask(place / name)
    assert good[0] == answers["good"][0]
    return answers, peaks.peak[0] - peaks.base[0], mark.exists()


def _good_index(folder: Path) -> None:
    hostile_weights._write({"a": hostile_weights.GOOD, "b": hostile_weights.GOOD})(folder)


def _good_header(folder: Path) -> None:
    hostile_weights._header(hostile_weights._tensors())(folder)


def _good_archive(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(hostile_weights.archive(hostile_weights.table_of()))


GOOD = {"index": _good_index, "header": _good_header, "archive": _good_archive, "pickle": _good_archive}


def check(kind: str, tmp_path: Path, *, least: int, expected: str) -> None:
    answers, growth, marked = run_ranks(read_all, 1, str(tmp_path), kind)[0]
    good, seen = answers.pop("good")
    assert good == expected and not seen, (good, seen)
    assert len(answers) >= least
    for name, (said, seen) in answers.items():
        assert said.startswith(REFUSALS), (name, said)
        assert len(said.splitlines()) == 3 and len(said) < 1500, (name, said)
        assert not seen, (name, seen)
    assert growth < MAX_GROWTH_BYTES
    assert not marked


def test_no_hostile_index_is_followed(tmp_path: Path) -> None:
    check("index", tmp_path, least=40, expected="read ['a', 'b']")


def test_no_forged_header_is_believed(tmp_path: Path) -> None:
    check("header", tmp_path, least=25, expected="read ['a', 'b']")


def test_no_hostile_archive_is_unpacked(tmp_path: Path) -> None:
    check("archive", tmp_path, least=18, expected="read ['a']")


def test_no_hostile_pickle_in_an_archive_is_obeyed(tmp_path: Path) -> None:
    check("pickle", tmp_path, least=40, expected="read ['a']")
