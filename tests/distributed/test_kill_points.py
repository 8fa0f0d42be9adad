"""A save and a prune can be killed at every single file operation: what is found next is whole, and never older."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests import file_operations
from tests.ranks import run_ranks


def assert_usable(answer: dict[str, Any]) -> None:
    assert answer["step"] in (2, 3), answer
    assert answer["fits"], answer
    assert answer["notes"] == [], "a folder that cannot be used has a checkpoint's name"
    assert answer["again"] == (answer["step"] + 1, True, []), "the run does not go on"
    assert answer["left"] == [], answer


@pytest.mark.parametrize("keep_latest", [1, 2])
def test_killed_at_every_file_operation_of_save_and_prune(keep_latest: int, tmp_path: Path) -> None:
    """The kinds of a half-written checkpoint that is chosen, and of a half-deleted one that looks whole."""
    answers = run_ranks(file_operations.kill_at_every_operation, 1, str(tmp_path), keep_latest, timeout=150.0)[0]
    for answer in answers:
        assert answer["killed"] == signal.SIGKILL, answer
        assert_usable(answer)
    operations = [answer["at"][0].split()[0] for answer in answers]
    assert {"open", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir"} <= set(operations)
    steps = [answer["step"] for answer in answers]
    assert steps == sorted(steps) and set(steps) == {2, 3}, "there is one moment at which the new one counts"
    print(f"{len(answers)} operations: " + ", ".join(operations))


def test_killed_in_the_middle_of_every_file(tmp_path: Path) -> None:
    limits = [1, 100, 1000, *range(2000, 24000, 1500)]
    answers = run_ranks(file_operations.kill_in_every_file, 1, str(tmp_path), limits, timeout=150.0)[0]
    assert [answer["killed"] for answer in answers] == [signal.SIGXFSZ] * len(limits)
    for answer in answers:
        assert_usable(answer)
        assert answer["step"] == 2
