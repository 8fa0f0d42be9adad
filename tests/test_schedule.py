"""What runs as if alone runs first, on one worker, whatever else was asked for; the other leaves it the cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import schedule
from tests.warm import REPOSITORY

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
def test_serial_files_run_first_on_one_worker(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    shutil.copy(schedule.__file__, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        "2",
        "-q",
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{3 * len(files)} passed" in ended.stdout
    ran = [json.loads(line) for line in (tmp_path / "ran.jsonl").read_text().splitlines()]
    serial = [row for row in ran if schedule.file_of(row[3]) in schedule.SERIAL]
    others = [row for row in ran if row not in serial]
    assert len({worker for _, _, worker, _ in serial}) <= 1
    if len(ran) > len(serial) > 0:
        assert {worker for _, _, worker, _ in serial} == {"gw0"}
        first = [row[3] for row in sorted(ran) if row[2] == "gw0"]
        assert first[: len(serial)] == [row[3] for row in sorted(serial)], "none before them, none between"
    if len({schedule.file_of(row[3]) for row in others}) > 1:
        assert len({worker for _, _, worker, _ in ran}) == 2


LOOP = """
import os, sys, time

os.environ["PYTEST_XDIST_WORKER"] = sys.argv[1]
from tests import schedule

os.sched_setaffinity(0, {min(schedule.ALL_CORES)})
schedule.stand_back()
begin, used = time.monotonic(), time.process_time()
while time.monotonic() < begin + 1.0:
    pass
print(time.process_time() - used, flush=True)
os._exit(0)  # there may be little time to end in
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system weighs no sessions")
def test_a_worker_that_stands_back_takes_no_time() -> None:
    """Also from what runs in a session of its own, as launched ranks do."""
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", LOOP, worker],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=worker == schedule.FIRST,
        )
        for worker in (schedule.FIRST, "gw1")
    ]
    first, second = (float(loop.communicate(timeout=60)[0]) for loop in loops)
    assert second < 0.2 * first


def test_what_is_listed_is_there() -> None:
    assert [name for name in {*schedule.SERIAL, *schedule.SECONDS} if not (REPOSITORY / name).is_file()] == []
