"""What runs alone runs last, on one worker, whatever else was asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import schedule

CONFTEST = """
import json, os, time
import schedule

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: schedule.place(item.nodeid))

def pytest_xdist_make_scheduler(config, log):
    return schedule.make_scheduler(config, log)

def pytest_runtest_call(item):
    start = time.monotonic()
    def note():
        with open("ran.jsonl", "a") as file:
            print(json.dumps([start, time.monotonic(), os.environ["PYTEST_XDIST_WORKER"], item.nodeid]), file=file)

    item.addfinalizer(note)
"""
TESTS = "import time\n" + "".join(f"def test_{number}(): time.sleep(0.1)\n" for number in range(3))
SERIAL = sorted(schedule.SERIAL)[:2]
OTHERS = [f"tests/test_{letter}.py" for letter in "abc"]


@pytest.mark.parametrize("files", [[*SERIAL, *OTHERS], SERIAL, OTHERS, SERIAL[:1], [*SERIAL[:1], OTHERS[0]]], ids=len)
def test_serial_files_run_alone_at_the_end(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    shutil.copy(schedule.__file__, tmp_path)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "--rootdir=.", "-p", "no:cacheprovider", *files]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{3 * len(files)} passed" in ended.stdout
    ran = [json.loads(line) for line in (tmp_path / "ran.jsonl").read_text().splitlines()]
    serial = [row for row in ran if schedule.file_of(row[3]) in schedule.SERIAL]
    others = [row for row in ran if row not in serial]
    assert len({worker for _, _, worker, _ in serial}) <= 1
    assert not serial or max((end for _, end, _, _ in others), default=0.0) <= min(start for start, *_ in serial)
    if len({schedule.file_of(row[3]) for row in others}) > 1:
        assert len({worker for _, _, worker, _ in others}) == 2


def test_what_is_listed_is_there() -> None:
    root = Path(__file__).parents[1]
    assert [name for name in {*schedule.SERIAL, *schedule.SECONDS} if not (root / name).is_file()] == []
