"""Packing: no document lost or doubled, no row over-full, as good as the plain algorithm it speeds up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_trainer.data.packing import pack_documents


def best_fit_decreasing(lengths: list[int], *, seq_len: int) -> int:
    """The textbook algorithm, one document at a time: the number of rows it needs."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(space, row) for row, space in enumerate(free) if space >= length]
        if not fitting:
            free.append(seq_len - length)
        else:
            space, row = min(fitting)
            free[row] = space - length
    return len(free)


@st.composite
def documents(draw) -> tuple[list[int], int]:
    seq_len = draw(st.integers(2, 50))
    return draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=80)), seq_len


@given(documents())
def test_rows_hold_every_document_and_are_as_few_as_the_plain_algorithm_makes(case):
    lengths, seq_len = case
    rows = pack_documents(np.array(lengths), seq_len=seq_len)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= seq_len
    assert filled.min() > 0  # numbered without gaps
    assert len(filled) == best_fit_decreasing(lengths, seq_len=seq_len)
    first = [int(np.flatnonzero(rows == row)[0]) for row in range(len(filled))]
    assert first == sorted(first)


def test_a_long_tail_of_lengths_fills_rows():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1, 100_000).astype(int) + 1, 2048)
    rows = pack_documents(lengths, seq_len=2048)
    assert lengths.sum() / ((rows.max() + 1) * 2048) > 0.99


@pytest.mark.parametrize("packing", [True, False])
def test_prepared_rows_hold_each_record_once(prepared, shown, packing: bool):
    rows, report = prepared("d21_uneven_last_batch", packing=packing, seq_len=128)
    text = "".join(shown(rows))
    assert [text.count(f"user\nq{index}<|im_end|>") for index in range(13)] == [1] * 13
    assert report.documents == 13
    assert rows.row_tokens().max() <= 128
    assert rows.row_tokens().sum() == rows.total_tokens == report.tokens
    assert rows.row_supervised().sum() == report.supervised_tokens
    assert not rows.supervised[rows.document_starts[:-1]].any()
    if packing:
        assert report.rows < 13
        assert report.packing_efficiency == rows.total_tokens / (rows.n_rows * 128)
        assert report.packing_efficiency > 0.7
    else:
        assert (report.rows, report.packing_efficiency) == (13, None)
