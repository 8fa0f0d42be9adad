"""Which test file runs when: the longest first, on two workers, and what measures time or strikes processes alone.

`./launch.sh test` gives pytest two workers. Each takes whole files; when only the serial ones are left, one worker ends
and the other runs them, so that they never see another test's load.

Until then each worker, with all that it starts, keeps to its own share of the cores. Ranks that wait for each other in
every collective cost half as much on one core as on two that they share with others: two ranks building a run and
taking a step needed 1.3 s either way (2026-12-01, torch 2.14.1).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

# Tests of time, faults and signals: what they wait for, and how long, is what they are about.
SERIAL = {
    "tests/distributed/test_kind_n_hangs.py",
    "tests/distributed/test_step_time.py",
    "tests/e2e/test_lost_ranks.py",
    "tests/e2e/test_signals.py",
    "tests/unit/test_launch.py",
}

# Seconds that a file takes on one of two busy workers, where it is more than a few: only their order matters.
SECONDS: dict[str, int] = {}


ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def keep_to_own_cores() -> None:
    """Bind this process, where it is one of several workers, to its share of the cores, and with it what it starts."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if ALL_CORES and worker.startswith("gw") and (own := sorted(ALL_CORES)[int(worker[2:]) % count :: count]):
        os.sched_setaffinity(0, own)


def use_all_cores() -> None:
    """Undo `keep_to_own_cores`, for what runs alone."""
    if ALL_CORES and os.sched_getaffinity(0) != ALL_CORES:
        os.sched_setaffinity(0, ALL_CORES)


def file_of(nodeid: str) -> str:
    """Return the file that a test is in."""
    return nodeid.split("::", 1)[0]


def place(nodeid: str) -> tuple[bool, int]:
    """Return what tests are sorted by: serial ones last, those of a long file first."""
    file = file_of(nodeid)
    return file in SERIAL, -SECONDS.get(file, 0)


class Scheduling(LoadFileScheduling):
    """xdist's scheduling by file, but for what comes last: the serial files run when every other worker has ended.

    The files come in the order of the collection, which conftest.py sorts by `place`.
    """

    def _reschedule(self, node: Any) -> None:
        if not node.shutting_down and self.workqueue and self._only_serial_are_left():
            if any(not other.shutting_down for other in self.nodes if other is not node):
                node.shutdown()  # it still runs what it has
            elif len(self.nodes) == 1:
                self._assign_all(node)
            return
        super()._reschedule(node)

    def _only_serial_are_left(self) -> bool:
        return all(scope in SERIAL for scope in self.workqueue)

    def _assign_all(self, node: Any) -> None:
        while self.workqueue:
            self._assign_work_unit(node)
        node.shutdown()  # no more comes: it need not wait for a next test

    def remove_node(self, node: Any) -> str | None:
        """Forget a worker that has ended; the last one then goes on with the serial files."""
        crashed = super().remove_node(node)
        for other in self.nodes:
            if self.workqueue:
                self._reschedule(other)
        return crashed

    def _assign_work_unit(self, node: Any) -> None:
        # The first units are dealt out without a question; where all of them are serial, one worker has them.
        if self._only_serial_are_left() and len(self.nodes) > 1:
            return
        super()._assign_work_unit(node)


def make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Return what deals out the files, in the order in which they were collected."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)
