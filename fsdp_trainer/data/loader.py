"""The rows of one optimizer step, as tensors, for one rank.

Which rows a step sees depends on (seed, epoch, index) alone: never on the world size, the micro-batch or a resume.
"""

import queue
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from fsdp_trainer.data.order import rows_of_epoch
from fsdp_trainer.data.rows import Rows


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes, on the CPU.

    `document_ids` is None when every row is one document: right padding needs no mask under causal attention.
    Otherwise ids count up through the whole micro-batch (none in two rows) and each row's padding has one of its own.
    """

    input_ids: torch.Tensor  # int64 [batch, seq]
    position_ids: torch.Tensor  # int64 [batch, seq]; restart at each document, 0 on padding
    document_ids: torch.Tensor | None  # int32 [batch, seq]
    supervised_positions: torch.Tensor  # int64 [n]: flat indices into batch * seq whose NEXT token is a target
    targets: torch.Tensor  # int64 [n]: the token to predict there
    lengths: torch.Tensor | None = None  # int64 [batch]: real tokens of each row; None when there is no padding
    document_lengths: tuple[tuple[int, ...], ...] | None = None  # host copy of document_ids: each row's, padding last


@dataclass(frozen=True)
class Window:
    """What ONE rank feeds in ONE optimizer step; the counts are of ALL ranks, known without a collective."""

    micro_batches: tuple[MicroBatch, ...]  # as many on every rank; a rank without rows gets padding and no target
    supervised_tokens: int
    tokens: int
    epoch: int
    row_indices: tuple[int, ...]  # the rows of the window, all ranks; of a stream, counted from its start
    resume_at: Mapping[str, Any] | None = None  # of a stream: where the window after this one begins
    notes: tuple[str, ...] = ()  # for the log


def steps_per_epoch(n_rows: int, *, global_batch_size: int) -> int:
    """Count the optimizer steps of an epoch; the short last window is one of them."""
    return -(-n_rows // global_batch_size)


def build_window(
    rows: Rows,
    *,
    step: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    shuffle: bool,
    seq_len: int,
    packing: bool,
) -> Window:
    """Build what `rank` feeds in 0-based optimizer step `step`; a pure function of its arguments."""
    assert rows.n_rows > 0, "prepare_rows refuses an empty data set"
    assert 0 <= rank < world_size
    epoch, place = divmod(step, steps_per_epoch(rows.n_rows, global_batch_size=global_batch_size))
    order = rows_of_epoch(rows, seed=seed, epoch=epoch, shuffle=shuffle)
    return window_of_rows(
        rows,
        np.sort(order[place * global_batch_size : (place + 1) * global_batch_size]),
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        seq_len=seq_len,
        packing=packing,
        epoch=epoch,
    )


def window_of_rows(
    rows: Rows,
    indices: np.ndarray,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    seq_len: int,
    packing: bool,
    epoch: int,
) -> Window:
    """Build what `rank` feeds of a window of the given rows."""
    lengths = rows.document_starts[rows.row_documents[indices + 1]] - rows.document_starts[rows.row_documents[indices]]
    by_length = indices[np.argsort(-lengths, kind="stable")]
    dealt = deal_rows(by_length, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)
    return Window(
        micro_batches=tuple(build_micro_batch(rows, share, seq_len=seq_len, packing=packing) for share in dealt),
        supervised_tokens=int(rows.supervised_in(indices).sum()),
        tokens=int(lengths.sum()),
        epoch=epoch,
        row_indices=tuple(indices.tolist()),
    )


def deal_rows(by_length: np.ndarray, *, micro_batch_size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """Deal a window's rows, longest first, and return the micro-batches of one rank; the same number on every rank.

    Micro-batch i of every rank is cut from the same stretch of lengths, because ranks wait for each other there.
    Ranks change direction every micro-batch, so that none gets the longer half each time.
    """
    count = -(-len(by_length) // (micro_batch_size * world_size))
    shares = np.array_split(by_length, count * world_size)  # a short window is spread evenly before a rank goes empty
    return [shares[index * world_size + (rank if index % 2 == 0 else world_size - 1 - rank)] for index in range(count)]


def build_micro_batch(rows: Rows, indices: np.ndarray, *, seq_len: int, packing: bool) -> MicroBatch:
    """Lay the given rows out as padded tensors; no rows give one row of padding without targets.

    Padding repeats the first token of its row, and so sees what that one sees, itself alone: a pad token may embed to
    zeros, of which a root has no finite gradient.
    Packed rows are padded to seq_len, others to the longest row rounded up to a multiple of 8 (at most seq_len).
    """
    borders = [rows.documents_of(int(index)) for index in indices]
    longest = max((int(border[-1] - border[0]) for border in borders), default=1)
    assert longest <= seq_len, "a prepared row is longer than data.seq_len"
    width = seq_len if packing else min(seq_len, -(-longest // 8) * 8)
    one_document_rows = all(len(border) == 2 for border in borders)

    shape = (max(1, len(borders)), width)
    input_ids = np.full(shape, rows.tokens[0], dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    document_ids = np.zeros(shape, dtype=np.int32)
    targets_here = np.zeros(shape, dtype=bool)
    lengths = np.zeros(shape[0], dtype=np.int64)
    document_lengths: list[tuple[int, ...]] = []
    next_id = 0
    for row, border in enumerate(borders):
        lengths[row] = length = int(border[-1] - border[0])
        input_ids[row, :length] = rows.tokens[border[0] : border[-1]]
        input_ids[row, length:] = input_ids[row, 0]
        targets_here[row, : length - 1] = rows.supervised[border[0] + 1 : border[-1]]
        position_ids[row, :length] = np.arange(length) - np.repeat(border[:-1] - border[0], np.diff(border))
        if one_document_rows:
            continue
        starts = np.append(border - border[0], width) if length < width else border - border[0]
        spans = np.diff(starts)  # the documents, then the padding as one more
        document_ids[row] = next_id + np.repeat(np.arange(len(spans)), spans)
        next_id += len(spans)
        document_lengths.append(tuple(spans.tolist()))
    positions = np.flatnonzero(targets_here)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        document_ids=None if one_document_rows else torch.from_numpy(document_ids),
        supervised_positions=torch.from_numpy(positions),
        targets=torch.from_numpy(input_ids.reshape(-1)[positions + 1]),
        lengths=torch.from_numpy(lengths),
        document_lengths=None if one_document_rows else tuple(document_lengths),
    )


def iterate_windows(
    rows: Rows,
    *,
    start: int,
    stop: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    shuffle: bool,
    seq_len: int,
    packing: bool,
    prefetch: int = 2,
) -> Generator[Window, None, None]:
    """Yield the windows of steps start..stop-1, built `prefetch` ahead in a thread that ends with the generator."""

    def windows() -> Iterator[Window]:
        for step in range(start, stop):
            yield build_window(
                rows,
                step=step,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                rank=rank,
                world_size=world_size,
                seed=seed,
                shuffle=shuffle,
                seq_len=seq_len,
                packing=packing,
            )

    return prefetched(windows(), depth=prefetch)


def evaluation_windows(
    rows: Rows,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    seq_len: int,
    packing: bool,
    prefetch: int = 2,
) -> Generator[Window, None, None]:
    """Yield windows of one micro-batch a rank that hold every row once, in order; the last may be short."""
    batch = micro_batch_size * world_size
    return iterate_windows(
        rows,
        start=0,
        stop=steps_per_epoch(rows.n_rows, global_batch_size=batch),
        global_batch_size=batch,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=0,
        shuffle=False,
        seq_len=seq_len,
        packing=packing,
        prefetch=prefetch,
    )


@dataclass(frozen=True)
class _Failed:
    error: BaseException


_DONE = object()
Item = TypeVar("Item")


def prefetched(source: Iterator[Item], *, depth: int) -> Generator[Item, None, None]:
    """Run an iterator in a thread, at most `depth` items ahead; its exceptions are raised where the items are used."""
    waiting: queue.Queue = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def offer(item: object) -> bool:
        while not closed.is_set():
            with suppress(queue.Full):
                waiting.put(item, timeout=0.1)  # a bounded wait: the consumer may close while the queue is full
                return not closed.is_set()
        return False

    def work() -> None:
        try:
            for item in source:
                if not offer(item):
                    return
            offer(_DONE)
        except BaseException as error:  # whatever it is, it is re-raised in the consumer
            offer(_Failed(error))

    thread = threading.Thread(target=work, name="build-windows", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not _DONE:
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        closed.set()
        with suppress(queue.Empty):  # whoever waits to put something finds room at once
            waiting.get_nowait()
        thread.join()
        if isinstance(source, Generator):
            source.close()  # it may hold threads, processes and files of its own
