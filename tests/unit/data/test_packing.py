"""Packing and splitting: no token lost or doubled, masks go with their tokens, rows as full as plain best-fit makes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_trainer.data.encode import SPLIT_REMAINDER, split_document
from fsdp_trainer.data.packing import arrange_documents, pack_documents


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


# --- properties of the arrays, from documents to rows ----------------------------------------------------------------

BOS = 9_999_999


@st.composite
def masked_documents(draw) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents whose tokens are all different numbers, with any mask."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=25))
    starts = np.cumsum([0, *lengths])
    masks = [np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool) for n in lengths]
    return [np.arange(start, start + n, dtype=np.int32) for start, n in zip(starts, lengths, strict=False)], masks


@given(masked_documents(), st.integers(60, 90), st.booleans(), st.integers(0, 25))
def test_rows_hold_each_token_once_with_its_own_mask(case, seq_len: int, packing: bool, border: int):
    documents, masks = case
    blocks = [slice(border), slice(border, border), slice(border, None)]  # the middle one holds none
    nothing = np.empty(0, np.int32)
    rows = arrange_documents(
        [np.concatenate([nothing, *documents[block]]) for block in blocks],
        [np.concatenate([nothing.astype(bool), *masks[block]]) for block in blocks],
        [np.array([len(document) for document in documents[block]], dtype=np.int64) for block in blocks],
        seq_len=seq_len,
        packing=packing,
    )
    whole = dict(zip(np.concatenate(documents).tolist(), np.concatenate(masks).tolist(), strict=True))
    assert dict(zip(rows.tokens.tolist(), rows.supervised.tolist(), strict=True)) == whole
    assert len(rows.tokens) == len(whole)
    found = {tuple(part.tolist()) for part in np.split(rows.tokens, rows.document_starts[1:-1])}
    assert found == {tuple(document.tolist()) for document in documents}  # each still whole and in order
    assert rows.row_tokens().max() <= seq_len


@given(
    st.integers(2, 300).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.booleans(), min_size=n, max_size=n))),
    st.integers(3, 40),
    st.booleans(),
)
def test_splitting_keeps_every_token_once_and_in_order(case, seq_len: int, starts_with_bos: bool):
    length, flags = case
    ids, mask = np.arange(length, dtype=np.int32), np.array(flags)
    bos = BOS if starts_with_bos else None
    if starts_with_bos:
        ids[0] = BOS
    mask[0] = False
    pieces = list(split_document(ids, mask, seq_len=seq_len, bos_id=bos))
    skip = int(starts_with_bos)
    assert np.concatenate([piece.ids[skip:] for piece in pieces]).tolist() == ids[skip:].tolist()
    assert all(0 < len(piece.ids) <= seq_len for piece in pieces)
    assert [piece.ids[0] for piece in pieces if starts_with_bos] == [BOS] * (len(pieces) * skip)
    kept = np.concatenate([piece.mask[skip:] for piece in pieces])
    lost = np.flatnonzero(mask[skip:] & ~kept)
    firsts = np.cumsum([0, *(len(piece.ids) - skip for piece in pieces)])[1:-1]
    assert set(lost.tolist()) <= set(firsts.tolist())  # the first of a later piece, which nothing of its own precedes
    assert not (kept & ~mask[skip:]).any()
    assert not any(piece.mask[0] for piece in pieces)
    if seq_len - skip > 2:
        assert all(len(piece.ids) - skip > 1 for piece in pieces[1:])  # a lone token could not be trained on


def test_split_records_are_whole_in_the_rows_and_counted(prepared, jsonl, tokenizer):
    text = " ".join(f"word{number}" for number in range(200))
    path = jsonl({"text": text}, {"text": "short"})
    rows, report = prepared(path, packing=True, seq_len=64, on_too_long="split")
    parts = np.split(rows.tokens, rows.document_starts[1:-1])
    long = [part for part in parts if tokenizer.decode(part) != "short<|im_end|>"]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert sorted(np.concatenate(long).tolist()) == sorted(whole)
    assert (report.split, report.truncated, report.records) == (1, 0, 2)
    assert report.documents == 1 + -(-len(whole) // 64)
    assert "1 record split" in "\n".join(report.format_lines())
    assert not [warning for warning in report.warnings if "stop" in warning]  # only its last piece ends the record


def test_pieces_without_a_target_are_left_out_and_counted(prepared, jsonl):
    question, answer = "why " * 80, " because"
    rows, report = prepared(
        jsonl({"prompt": question, "completion": answer}), packing=True, seq_len=64, on_too_long="split"
    )
    assert (rows.row_supervised() > 0).all()
    assert report.notes[SPLIT_REMAINDER] >= 1
    assert report.documents == 1
