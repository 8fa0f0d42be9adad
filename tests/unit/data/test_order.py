"""The order of rows: shuffled per epoch, mixed by weight with counts kept, and the same for ever."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.data.order import epoch_order, rows_of_epoch, share_rows
from fsdp_trainer.data.rows import Rows, join_rows


def one_token_rows(*counts: int, weights: tuple[float, ...] | None = None) -> Rows:
    """Sources of so many rows, each of one document of two tokens."""
    parts = [
        Rows(
            tokens=np.arange(2 * count, dtype=np.int32),
            supervised=np.tile([False, True], count),
            document_starts=np.arange(count + 1) * 2,
            row_documents=np.arange(count + 1),
        )
        for count in counts
    ]
    joined = join_rows(parts)
    return Rows(
        joined.tokens, joined.supervised, joined.document_starts, joined.row_documents, joined.source_rows, weights
    )


def test_epochs_differ_and_repeat():
    orders = [epoch_order(100, seed=0, epoch=epoch, shuffle=True) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(100)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], epoch_order(100, seed=1, epoch=0, shuffle=True))
    epoch_order.cache_clear()
    assert np.array_equal(orders[1], epoch_order(100, seed=0, epoch=1, shuffle=True))
    assert epoch_order(5, seed=0, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_fixed_for_ever():
    """A resume may come with another numpy or another version of this package: the order must not move."""
    assert epoch_order(10, seed=0, epoch=0, shuffle=True).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    mixed = rows_of_epoch(one_token_rows(2, 6, weights=(1.0, 1.0)), seed=0, epoch=1, shuffle=True)
    assert mixed.tolist() == [2, 1, 3, 0, 7, 0, 1, 2]


sources = st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=2, max_size=4)


@settings(deadline=None)
@given(given_sources=sources, seed=st.integers(0, 2**32 - 1), shuffle=st.booleans(), first=st.integers(0, 5))
def test_a_mix_keeps_its_counts(given_sources, seed, shuffle, first):
    """Each epoch has as many rows as all sources together, each source its share, and each row of it evenly often."""
    counts, weights = [count for count, _ in given_sources], tuple(weight for _, weight in given_sources)
    rows = one_token_rows(*counts, weights=weights)
    shares = share_rows(sum(counts), weights=weights)
    assert sum(shares) == sum(counts)
    assert all(abs(got - sum(counts) * w / sum(weights)) < 1 for got, w in zip(shares, weights, strict=True))
    met = Counter()
    assert rows.source_rows is not None
    source_of = np.repeat(np.arange(len(counts)), np.diff(rows.source_rows))
    for epoch in range(first + 3):
        order = rows_of_epoch(rows, seed=seed, epoch=epoch, shuffle=shuffle)
        assert np.bincount(source_of[order], minlength=len(counts)).tolist() == shares
        met.update(order.tolist())
    for source in range(len(counts)):
        times = [met[row] for row in np.flatnonzero(source_of == source)]
        assert max(times) - min(times) <= 1


def test_without_shuffling_a_mix_is_spread_evenly_and_in_order():
    rows = one_token_rows(6, 6, weights=(3.0, 1.0))
    first = rows_of_epoch(rows, seed=0, epoch=0, shuffle=False)
    assert first.tolist() == [0, 1, 6, 2, 3, 4, 7, 5, 0, 1, 8, 2]
    assert [row for row in first.tolist() if row < 6] == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert [row for row in first.tolist() if row >= 6] == [6, 7, 8]
    second = rows_of_epoch(rows, seed=0, epoch=1, shuffle=False)
    assert [row for row in second.tolist() if row >= 6] == [9, 10, 11]  # goes on, until all have been met
    assert [row for row in second.tolist() if row < 6] == [3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_mixed_epochs_and_seeds_differ():
    rows = one_token_rows(20, 20, weights=(1.0, 3.0))
    orders = [
        rows_of_epoch(rows, seed=seed, epoch=epoch, shuffle=True).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] != sorted(orders[0])
