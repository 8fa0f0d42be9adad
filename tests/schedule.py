"""Which test file runs when: what measures time or strikes processes first and as if alone, then the longest.

`./launch.sh test` gives pytest two workers. Each takes whole files. The first takes the serial ones, one after the
other on all cores; the other stands back and has what those leave, which wait half of their time.

Otherwise each worker, with all that it starts, keeps to its own share of the cores. Ranks that wait for each other in
every collective cost half as much on one core as on two that they share with others: two ranks building a run and
taking a step needed 1.3 s either way (2026-12-01, torch 2.14.1).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

# Tests of time, faults and signals: what they wait for, and how long, is what they are about.
SERIAL = {
    "tests/distributed/test_kind_n_hangs.py",
    "tests/distributed/test_ranks.py",
    "tests/distributed/test_runtime.py",
    "tests/e2e/test_lost_ranks.py",
    "tests/e2e/test_second_signal.py",
    "tests/e2e/test_signals.py",
    "tests/test_schedule.py",
    "tests/test_warm.py",
    "tests/unit/memory/test_simulation_workers.py",
    "tests/unit/test_hub.py",
    "tests/unit/test_launch.py",
    "tests/unit/test_watch.py",
}

# Seconds that a file takes on one of two busy workers, where it is more than a few: only their order matters.
SECONDS: dict[str, int] = {
    "tests/e2e/test_demo.py": 339,
    "tests/distributed/test_offload_optimizer.py": 234,
    "tests/e2e/test_ladder.py": 122,
    "tests/distributed/test_pure_bf16.py": 92,
    "tests/e2e/test_signals.py": 89,
    "tests/distributed/test_parity.py": 86,
    "tests/distributed/test_simulate.py": 79,
    "tests/e2e/test_lost_ranks.py": 77,
    "tests/distributed/test_checkpoint.py": 75,
    "tests/distributed/test_eight_bit.py": 74,
    "tests/distributed/test_simulate_exact.py": 74,
    "tests/unit/memory/test_quick.py": 67,
    "tests/distributed/test_kind_n_hangs.py": 58,
    "tests/e2e/test_resume.py": 58,
    "tests/e2e/test_examples.py": 54,
    "tests/distributed/test_simulated.py": 46,
    "tests/distributed/test_ledger.py": 41,
    "tests/unit/interop/test_commands.py": 40,
    "tests/e2e/test_kill.py": 39,
    "tests/distributed/test_architectures.py": 38,
    "tests/distributed/test_exhaustive_plans.py": 35,
    "tests/distributed/test_out_of_memory.py": 35,
    "tests/e2e/test_elastic_resume.py": 34,
    "tests/e2e/test_start.py": 32,
    "tests/e2e/test_notebook.py": 32,
    "tests/distributed/test_deepspeed_parity.py": 32,
    "tests/distributed/test_kind_l_loading.py": 29,
    "tests/e2e/test_second_signal.py": 28,
    "tests/e2e/test_plan.py": 27,
    "tests/test_warm.py": 26,
    "tests/distributed/test_kind_m_offload.py": 24,
    "tests/distributed/test_stages.py": 24,
    "tests/distributed/test_run_folder.py": 24,
    "tests/distributed/test_kind_h_schedule.py": 23,
    "tests/distributed/test_rehearsal.py": 23,
    "tests/distributed/test_evaluation.py": 23,
    "tests/distributed/test_kind_q_configuration.py": 23,
    "tests/unit/data/test_damaged_cache.py": 22,
    "tests/unit/memory/test_simulation_cache.py": 22,
    "tests/unit/data/test_templates.py": 20,
    "tests/unit/test_recipes.py": 18,
    "tests/unit/memory/test_planner.py": 17,
    "tests/distributed/test_step_time.py": 16,
    "tests/distributed/test_kind_f_writing.py": 15,
    "tests/distributed/test_kind_a_loss.py": 15,
    "tests/distributed/test_kind_j_8bit.py": 15,
    "tests/unit/data/test_known_keys.py": 14,
    "tests/distributed/test_before_the_first_step.py": 14,
    "tests/unit/data/test_streaming.py": 13,
    "tests/distributed/test_planner_programs.py": 13,
    "tests/distributed/test_simulate_process.py": 13,
    "tests/unit/data/test_prepare.py": 13,
    "tests/e2e/test_last_words.py": 12,
    "tests/distributed/test_kind_g_resume.py": 12,
    "tests/distributed/test_runtime.py": 12,
    "tests/distributed/test_gloo_reduce_scatter.py": 12,
    "tests/distributed/test_integrity.py": 12,
    "tests/unit/memory/test_monotone.py": 12,
    "tests/distributed/test_kind_k_checkpointing.py": 11,
    "tests/test_layout.py": 10,
}


ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
FIRST = "gw0"


def keep_to_own_cores() -> None:
    """Bind this process, where it is one of several workers, to its share of the cores, and with it what it starts."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if ALL_CORES and worker.startswith("gw") and (own := sorted(ALL_CORES)[int(worker[2:]) % count :: count]):
        _use_cores(set(own))


def use_all_cores() -> None:
    """Undo `keep_to_own_cores`, for what runs as if alone."""
    if ALL_CORES:
        _use_cores(ALL_CORES)


def _use_cores(cores: set[int]) -> None:
    if os.sched_getaffinity(0) != cores:
        os.sched_setaffinity(0, cores)


def stand_back() -> None:
    """Leave a core to whoever else wants it, if this process is a worker but not the first, with all that it starts.

    In a session of its own: what another session does Linux weighs against this one as a whole (autogroups, sched(7)),
    whatever the priorities in it. A loop beside one that stands back had 0.98 of the core (Linux 6.18, 2026-12-01).
    """
    from tests import warm_zygote

    if os.environ.get("PYTEST_XDIST_WORKER", FIRST) != FIRST:
        with suppress(OSError):  # the leader of a session already
            os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, warm_zygote.STANDS_BACK)
        warm_zygote.weigh_session()


def file_of(nodeid: str) -> str:
    """Return the file that a test is in."""
    return nodeid.split("::", 1)[0]


def place(nodeid: str) -> tuple[bool, int]:
    """Return what tests are sorted by: serial ones first, then those of a long file."""
    file = file_of(nodeid)
    return file not in SERIAL, -SECONDS.get(file, 0)


class Scheduling(LoadFileScheduling):
    """xdist's scheduling by file, but only the first of the workers that are left is given serial files.

    The files come in the order of the collection, which conftest.py sorts by `place`.
    """

    def _assign_work_unit(self, node: Any) -> None:
        if node is not min(self.nodes, key=lambda other: other.gateway.id):
            others = (scope for scope in self.workqueue if scope not in SERIAL)
            if (scope := next(others, None)) is None:
                node.shutdown()  # it still runs what it has
                return
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Return what deals out the files, in the order in which they were collected."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)
