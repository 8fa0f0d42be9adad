"""Six of the kills of `python -m benchmarks.sweeps.kill`, seeded, at several kinds of moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sweeps import kill


@pytest.mark.slow
def test_six_killed_runs_end_as_the_quiet_one(tmp_path: Path) -> None:
    outcomes = kill.kill_often(tmp_path, times=6, seed=5)
    assert [outcome for outcome in outcomes if outcome.differences] == []
    assert len({outcome.moment for outcome in outcomes if outcome.came_in_time}) >= 4, outcomes
    assert max(outcome.lost_steps for outcome in outcomes) <= kill.SAVE_EVERY
