"""The bars of the records' lengths: from the shortest on, at borders that a person reads off."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fsdp_trainer.data.report import _BARS, _bars


@pytest.mark.parametrize(
    ("lengths", "borders"),
    [
        ([7], [7, 8]),
        ([9, 11, 24], list(range(9, 26))),
        ([105, 190], [*range(105, 200, 5)]),
        ([900, 1000], [*range(900, 1010, 5)]),
        ([0, 23], list(range(25))),
        ([0, 24], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26]),
        ([37, 8123], [*range(0, 8501, 500)]),
    ],
)
def test_bars_begin_at_the_shortest_and_end_at_the_longest(lengths: list[int], borders: list[int]) -> None:
    bars = _bars(np.array(lengths))
    assert [start for start, _ in bars] == borders
    assert sum(count for _, count in bars) == len(lengths)
    assert bars[0][1] > 0 and bars[-2][1] > 0


def test_bars_hold_every_record_whatever_the_lengths() -> None:
    random = np.random.default_rng(3)
    for most in (1, 3, 60, 4096, 2**20):
        lengths = random.integers(most // 3, most + 1, size=200)
        bars = _bars(lengths)
        assert len(bars) <= _BARS + 1
        for (start, count), (end, _) in itertools.pairwise(bars):
            assert count == np.count_nonzero((lengths >= start) & (lengths < end))
    assert _bars(np.array([], dtype=np.int64)) == ()
