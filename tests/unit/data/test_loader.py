"""Windows: what a step sees depends on seed, epoch and index alone, and the tensors equal a plain per-token loop."""

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.data.loader import (
    MicroBatch,
    Window,
    build_window,
    evaluation_windows,
    iterate_windows,
    prefetched,
    steps_per_epoch,
)
from fsdp_trainer.data.rows import Rows, load_rows, save_rows
from fsdp_trainer.errors import DataError


def make_rows(row_documents: list[list[int]], *, seed: int = 0) -> Rows:
    """Rows from the lengths of their documents; every token of the set is another number, from 1."""
    lengths = [length for row in row_documents for length in row]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    supervised = np.random.default_rng(seed).random(starts[-1]) < 0.5
    supervised[starts[:-1]] = False
    return Rows(
        tokens=np.arange(1, starts[-1] + 1, dtype=np.int32),
        supervised=supervised,
        document_starts=starts,
        row_documents=np.concatenate([[0], np.cumsum([len(row) for row in row_documents])]),
    )


def windows(rows: Rows, *, step: int = 0, world: int = 1, micro: int = 1, batch: int = 4, **settings) -> list[Window]:
    defaults = {"seed": 0, "shuffle": True, "seq_len": 32, "packing": False}
    return [
        build_window(
            rows,
            step=step,
            global_batch_size=batch,
            micro_batch_size=micro,
            rank=rank,
            world_size=world,
            **(defaults | settings),
        )
        for rank in range(world)
    ]


def token_targets(window_of_ranks: list[Window]) -> list[tuple[int, int]]:
    """All (token, next token) pairs that are trained on, over ranks and micro-batches."""
    pairs = []
    for window in window_of_ranks:
        for batch in window.micro_batches:
            inputs = batch.input_ids.reshape(-1)[batch.supervised_positions]
            pairs += list(zip(inputs.tolist(), batch.targets.tolist(), strict=True))
    return sorted(pairs)


@st.composite
def row_sets(draw) -> Rows:
    documents = st.lists(st.integers(1, 8), min_size=1, max_size=4)
    return make_rows(draw(st.lists(documents, min_size=1, max_size=30)), seed=draw(st.integers(0, 9)))


@settings(deadline=None)
@given(rows=row_sets(), seed=st.integers(0, 2**32), step=st.integers(0, 20), shuffle=st.booleans())
def test_a_step_sees_the_same_whatever_the_world_and_the_micro_batch(rows, seed, step, shuffle):
    seen = []
    for world in (1, 2, 4):
        for micro in (1, 2, 4):
            ranks = windows(rows, step=step, world=world, micro=micro, batch=16, seed=seed, shuffle=shuffle)
            assert len({len(window.micro_batches) for window in ranks}) == 1
            assert len({(w.supervised_tokens, w.tokens, w.epoch, w.row_indices) for w in ranks}) == 1
            targets = token_targets(ranks)
            assert len(targets) == ranks[0].supervised_tokens
            fed = sorted(
                token
                for window in ranks
                for batch in window.micro_batches
                for token in batch.input_ids[real(batch)].tolist()
            )
            assert len(fed) == ranks[0].tokens
            seen.append((ranks[0].row_indices, targets, fed))
    assert all(entry == seen[0] for entry in seen)


def real(batch: MicroBatch) -> torch.Tensor:
    """Which tokens are no padding."""
    return torch.arange(batch.input_ids.shape[1])[None] < lengths_of(batch)[:, None]


def lengths_of(batch: MicroBatch) -> torch.Tensor:
    assert batch.lengths is not None
    return batch.lengths


@settings(deadline=None)
@given(rows=row_sets(), batch=st.sampled_from([1, 4, 8]))
def test_an_epoch_holds_each_row_once_and_its_last_window_counts_its_own_tokens(rows, batch):
    steps = steps_per_epoch(rows.n_rows, global_batch_size=batch)
    epoch = [windows(rows, step=step, batch=batch)[0] for step in range(steps)]
    assert sorted(index for window in epoch for index in window.row_indices) == list(range(rows.n_rows))
    assert sum(window.supervised_tokens for window in epoch) == np.count_nonzero(rows.supervised)
    last = list(epoch[-1].row_indices)
    assert len(last) == rows.n_rows - batch * (steps - 1)
    assert epoch[-1].supervised_tokens == rows.row_supervised()[last].sum()
    assert windows(rows, step=steps, batch=batch)[0].epoch == 1


def naive_micro_batch(rows: Rows, batch: MicroBatch) -> tuple[list[int], list[int], list[int], list[int]]:
    """Position ids, document numbers, supervised positions and targets of the real tokens, token by token."""
    document_of = np.repeat(np.arange(rows.n_documents), np.diff(rows.document_starts))
    positions, documents, supervised, targets = [], [], [], []
    flat = batch.input_ids.reshape(-1).tolist()
    for at in real(batch).reshape(-1).nonzero().reshape(-1).tolist():
        token = flat[at]
        index = token - 1  # the tokens of make_rows
        positions.append(index - int(rows.document_starts[document_of[index]]))
        documents.append(int(document_of[index]))
        following = index + 1
        if (
            following < rows.total_tokens
            and document_of[following] == document_of[index]
            and rows.supervised[following]
        ):
            supervised.append(at)
            targets.append(following + 1)
    return positions, documents, supervised, targets


@settings(deadline=None)
@given(rows=row_sets(), packing=st.booleans(), micro=st.sampled_from([1, 2, 4]))
def test_tensors_equal_a_loop_over_tokens(rows, packing, micro):
    for window in windows(rows, world=2, micro=micro, batch=8, packing=packing):
        for batch in window.micro_batches:
            positions, documents, supervised, targets = naive_micro_batch(rows, batch)
            assert batch.position_ids[real(batch)].tolist() == positions
            assert not batch.position_ids[~real(batch)].any()
            for row, length in enumerate(lengths_of(batch).tolist()):
                assert set(batch.input_ids[row, length:].tolist()) <= {int(batch.input_ids[row, 0])}
            assert batch.supervised_positions.tolist() == supervised
            assert batch.targets.tolist() == targets
            if packing:
                assert batch.input_ids.shape[1] == 32
            else:
                assert batch.input_ids.shape[1] % 8 == 0
            check_document_ids(batch, documents)


def check_document_ids(batch: MicroBatch, documents: list[int]) -> None:
    if batch.document_ids is None:
        rows_of_real = np.nonzero(real(batch).numpy())[0].tolist()
        assert len(set(documents)) == len(set(zip(documents, rows_of_real, strict=True))) == len(set(rows_of_real))
        return
    ids = batch.document_ids[real(batch)].tolist()
    assert len(set(ids)) == len(set(documents)) == len(set(zip(ids, documents, strict=True)))
    for row, length in enumerate(lengths_of(batch).tolist()):
        padding = set(batch.document_ids[row][length:].tolist())
        assert len(padding) <= 1
        assert not padding & set(ids)


def test_ranks_without_rows_get_padding_and_no_target():
    ranks = windows(make_rows([[3], [5]]), world=4, batch=8, micro=2)
    assert [len(window.micro_batches) for window in ranks] == [1, 1, 1, 1]
    for window in ranks[2:]:
        (batch,) = window.micro_batches
        assert not real(batch).any()
        assert batch.supervised_positions.shape == batch.targets.shape == (0,)
    assert {window.tokens for window in ranks} == {8}


def test_a_micro_batch_holds_rows_of_similar_length():
    lengths = [2, 30, 3, 29, 4, 28, 5, 27]
    ranks = windows(make_rows([[length] for length in lengths]), world=2, micro=2, batch=8)
    widths = [[batch.input_ids.shape[1] for batch in window.micro_batches] for window in ranks]
    assert widths == [[32, 8], [32, 8]]  # both ranks work on long rows at once, then on short ones
    tokens = [sum(int(lengths_of(batch).sum()) for batch in window.micro_batches) for window in ranks]
    assert abs(tokens[0] - tokens[1]) <= 2


def test_unpacked_rows_are_padded_to_a_multiple_of_eight_but_not_past_seq_len():
    rows = make_rows([[9], [10]])
    widths = [
        {b.input_ids.shape[1] for w in windows(rows, seq_len=seq_len) for b in w.micro_batches} for seq_len in (32, 12)
    ]
    assert widths == [{16}, {12}]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (2, 2), (4, 2)])
def test_evaluation_covers_each_row_once_in_order(world, micro):
    rows = make_rows([[length] for length in range(2, 15)])  # 13 rows, as d21
    ranks = [
        list(
            evaluation_windows(
                rows,
                micro_batch_size=micro,
                rank=rank,
                world_size=world,
                seq_len=32,
                packing=False,
            )
        )
        for rank in range(world)
    ]
    assert {len(steps) for steps in ranks} == {-(-13 // (world * micro))}
    assert [index for window in ranks[0] for index in window.row_indices] == list(range(13))
    assert all(len(window.micro_batches) == 1 for steps in ranks for window in steps)
    fed = [
        token
        for steps in ranks
        for window in steps
        for batch in window.micro_batches
        for token in batch.input_ids[real(batch)].tolist()
    ]
    assert sorted(fed) == list(range(1, rows.total_tokens + 1))
    assert sum(window.supervised_tokens for window in ranks[0]) == np.count_nonzero(rows.supervised)


def iterate(rows: Rows, *, start: int, stop: int):
    return iterate_windows(
        rows,
        start=start,
        stop=stop,
        global_batch_size=4,
        micro_batch_size=1,
        rank=0,
        world_size=1,
        seed=0,
        shuffle=True,
        seq_len=32,
        packing=False,
    )


def test_a_resumed_iterator_gives_the_rest_exactly():
    rows = make_rows([[length] for length in range(2, 15)])
    whole = [window.row_indices for window in iterate(rows, start=0, stop=9)]
    assert [window.row_indices for window in iterate(rows, start=5, stop=9)] == whole[5:]
    assert whole == [windows(rows, step=step)[0].row_indices for step in range(9)]


def building_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "build-windows"]


def test_closing_the_iterator_ends_its_thread():
    iterator = iterate(make_rows([[3]] * 9), start=0, stop=10**9)
    assert len(list(islice(iterator, 3))) == 3
    assert building_threads()
    iterator.close()  # type: ignore[attr-defined]
    assert not building_threads()


def test_an_error_in_the_thread_reaches_the_consumer_after_what_came_before():
    def source():
        yield "first"
        raise DataError("broken page")

    iterator = prefetched(source(), depth=2)  # type: ignore[arg-type]
    assert next(iterator) == "first"
    with pytest.raises(DataError, match="broken page"):
        next(iterator)
    assert not building_threads()


def test_rows_survive_the_disk(tmp_path):
    rows = make_rows([[3, 4], [5]])
    save_rows(rows, tmp_path)
    loaded = load_rows(tmp_path)
    assert isinstance(loaded.tokens, np.memmap)
    for name in ("tokens", "supervised", "document_starts", "row_documents"):
        assert np.array_equal(getattr(loaded, name), getattr(rows, name))
        assert getattr(loaded, name).dtype == getattr(rows, name).dtype
    (tmp_path / "tokens.npy").write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(tmp_path)
