"""Rows that are read, encoded, shuffled and packed while training, one buffer of records at a time, and never stored.

Every rank reads the same stream and takes its own rows of each window, so that a step sees the same rows on any number
of ranks. A place in the stream is a small JSON value; going on from it reads the buffer it lies in again, not more.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.encode import NOT_ENCODED, Encoded, Encoder, encode_examples
from fsdp_trainer.data.loader import Window, prefetched, window_of_rows
from fsdp_trainer.data.order import permutation
from fsdp_trainer.data.prepare import arrange, encoder_of, nothing_left, report_on
from fsdp_trainer.data.readers import START, Mark
from fsdp_trainer.data.report import DataReport
from fsdp_trainer.data.rows import Rows, join_rows
from fsdp_trainer.data.sources import BadRecord, Example, Source, read_examples, read_file, reading_of, resolve_sources
from fsdp_trainer.data.workers import encode_in_processes
from fsdp_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_RECORDS = 256
_SHOWN_RECORDS = 1000  # read before training, to show what the stream holds
# What each rank reads at the start to know the files again. 8 GiB took 1.4 s from the page cache (2 shared cores), and
# take some 10 s from a disk of 1 GB/s; a share of so many bytes is read of what is larger.
_WHOLE_BYTES = 8 << 30
_SAMPLED_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 18
_NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, bool), np.zeros(1, np.int64), np.zeros(1, np.int64))


@dataclass(frozen=True)
class RowStream:
    """Everything the rows of a stream depend on."""

    sources: tuple[Source, ...]
    encoder: Encoder
    data: DataConfig
    seed: int


@dataclass(frozen=True)
class Place:
    """Where a buffer begins: in which file of the epoch's order, and at which bytes and line (or row) of it."""

    epoch: int = 0
    buffer: int = 0
    file: int = 0
    offset: int = 0
    line: int = 0


class _Buffer(NamedTuple):
    place: Place
    rows: Rows  # in the order they are met
    parts: list[Encoded]


def build_stream(
    data: DataConfig,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
) -> RowStream:
    """Find the files of `data.train` and learn what the tokenizer and the template do."""
    encoder = encoder_of(data, tokenizer=tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
    return RowStream(resolve_sources(data.train), encoder=encoder, data=data, seed=seed)


def first_rows(stream: RowStream) -> tuple[Rows, DataReport]:
    """Return the rows and the report of the first records of each source, which stand for the stream before it runs."""
    data = stream.data
    parts = []
    for source in stream.sources:
        records = read_examples(source.files, **reading_of(data))
        parts.append(encode_examples(list(islice(records, _SHOWN_RECORDS)), encoder=stream.encoder))
        _refuse_bad(parts[-1], data=data)
        if not len(parts[-1].lengths):
            raise nothing_left(source.files, parts=parts[-1:], split="train")
    rows = arrange(parts, seq_len=data.seq_len, packing=data.packing)
    return rows, report_on(rows, parts, data=data, encoder=stream.encoder)


def stream_digest(stream: RowStream, *, first: str) -> str:
    """Identify a stream by its files' names, sizes and bytes, and by `first`, its first rows.

    Files of up to _WHOLE_BYTES together are read whole. Of more, evenly spaced blocks of each file are read, its first
    and its last among them: a change of equal size that touches none of them is not noticed.
    """
    digest = xxhash.xxh3_128(first.encode())
    sizes = {path: path.stat().st_size for source in stream.sources for path in source.files}
    total = sum(sizes.values())
    share = 1.0 if total <= _WHOLE_BYTES else _SAMPLED_BYTES / total
    for source in stream.sources:
        digest.update(repr(source.weight).encode())
        for path in source.files:
            digest.update(f"{path.name} {sizes[path]}".encode())
            with path.open("rb") as file:
                for at in _blocks(sizes[path], share=share):
                    file.seek(at)
                    digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _blocks(size: int, *, share: float) -> Iterable[int]:
    """Return where the blocks begin of which a file's digest is made: a share of them, from the first to the last."""
    count = -(-size // _BLOCK_BYTES)
    taken = max(2, round(share * count))
    if taken >= count:
        return range(0, size, _BLOCK_BYTES)
    return (index * (size - _BLOCK_BYTES) // (taken - 1) for index in range(taken))


def stream_windows(
    stream: RowStream,
    *,
    start: int,
    stop: int,
    resume_at: Mapping[str, Any] | None,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    prefetch: int = 2,
) -> Generator[Window, None, None]:
    """Yield the windows of steps start..stop-1; `resume_at` is what the window before `start` carried, None at 0.

    The next buffer is made in a thread while one is used; threads and worker processes end with the generator.
    """
    known = len(resume_at["sources"]) if resume_at else 0
    if known != (len(stream.sources) if start else 0):
        raise CheckpointError(
            "The checkpoint does not say where the sources of this data stream stood.",
            values=f"step {start}, places of {known} sources for the {len(stream.sources)} of data.train",
            fix="resume with the settings it was saved with, or start afresh in another output_dir",
        )

    def windows() -> Iterator[Window]:
        places = resume_at["sources"] if resume_at else [None] * len(stream.sources)
        with ExitStack() as opened:
            cursors = [
                opened.enter_context(closing(_Cursor(stream, source, resume_at=place)))
                for source, place in zip(stream.sources, places, strict=True)
            ]
            for _ in range(start, stop):
                first = sum(cursor.taken for cursor in cursors)
                parts = _take(cursors, global_batch_size)
                window = window_of_rows(
                    join_rows(parts),
                    np.arange(global_batch_size),
                    micro_batch_size=micro_batch_size,
                    rank=rank,
                    world_size=world_size,
                    seq_len=stream.data.seq_len,
                    packing=stream.data.packing,
                    epoch=min(cursor.epoch for cursor in cursors),
                )
                yield replace(
                    window,
                    row_indices=tuple(range(first, first + global_batch_size)),
                    resume_at={"sources": [cursor.position() for cursor in cursors]},
                    notes=tuple(note for cursor in cursors for note in cursor.new_notes()),
                )

    return prefetched(windows(), depth=prefetch)


def _take(cursors: "Sequence[_Cursor]", count: int) -> list[Rows]:
    """Take the next rows, each from the source that is furthest behind its weight's share of all rows so far."""
    total = sum(cursor.weight for cursor in cursors)
    taken = [cursor.taken for cursor in cursors]
    wanted = [0] * len(cursors)
    first = sum(taken)
    for row in range(first + 1, first + count + 1):
        behind = [
            cursor.weight / total * row - had - want for cursor, had, want in zip(cursors, taken, wanted, strict=True)
        ]
        wanted[behind.index(max(behind))] += 1
    return [part for cursor, want in zip(cursors, wanted, strict=True) for part in cursor.take(want)]


class _Cursor:
    """How far one source has been read, in rows; it opens the next buffer when one is used up."""

    def __init__(self, stream: RowStream, source: Source, *, resume_at: Mapping[str, Any] | None) -> None:
        self.weight = source.weight or 1.0
        self.taken: int = resume_at["taken"] if resume_at else 0
        self._name = source.files[0].name if len(source.files) == 1 else f"{len(source.files)} files"
        self._counts = Counter(resume_at["counts"] if resume_at else {})  # of the buffers before this one
        self._row: int = resume_at["row"] if resume_at else 0
        self._notes: list[str] = []
        place = Place(**resume_at["place"]) if resume_at else Place()
        self._buffers = _buffers(stream, source, place=place)
        self._buffer = next(self._buffers)
        if self._row > self._buffer.rows.n_rows:
            self.close()
            raise CheckpointError(
                "The data stream is not the one that the checkpoint was saved in.",
                values=f"row {self._row} of a buffer that has {self._buffer.rows.n_rows} rows now ({self._name})",
                fix="bring back the data files and settings, or start afresh in another output_dir",
            )
        if not self._row:
            self._note()

    @property
    def epoch(self) -> int:
        return self._buffer.place.epoch

    def take(self, count: int) -> Iterator[Rows]:
        while count:
            while self._row == self._buffer.rows.n_rows:
                self._counts += _count(self._buffer.parts)
                self._buffer, self._row = next(self._buffers), 0
                self._note()
            indices = np.arange(self._row, min(self._row + count, self._buffer.rows.n_rows))
            self._row, self.taken, count = self._row + len(indices), self.taken + len(indices), count - len(indices)
            yield self._buffer.rows.take(indices)

    def position(self) -> dict[str, Any]:
        """Return what goes into a checkpoint: a few numbers, whatever the size of the buffer."""
        return {
            "place": asdict(self._buffer.place),
            "row": self._row,
            "taken": self.taken,
            "counts": dict(self._counts),
        }

    def new_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        self._buffers.close()

    def _note(self) -> None:
        counts = self._counts + _count(self._buffer.parts)
        lost = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()) if what != "records")
        self._notes.append(
            f"data stream: {counts['records']:,} records of {self._name} read, epoch {self._buffer.place.epoch}"
            + (f"; {lost}" if lost else "")
        )


def _count(parts: Sequence[Encoded]) -> Counter:
    counts = Counter({"records": sum(part.records for part in parts)})
    for part in parts:
        counts.update({f"dropped: {reason}": count for reason, count in part.dropped.items()})
        counts.update(f"bad and skipped: {record.kind}" for record in part.bad)
        counts.update({NOT_ENCODED: part.notes[NOT_ENCODED]} if part.not_encoded else {})
    return counts


# From records to buffers


def _buffers(stream: RowStream, source: Source, *, place: Place) -> Generator[_Buffer, None, None]:
    """Yield the buffers of a source from a place on, epoch after epoch without end; one may be without rows."""
    parts: list[Encoded] = []
    found, whole = False, place == Place(epoch=place.epoch)
    # One buffer ahead, by chunks: whoever stops the run waits for one chunk, not for a buffer.
    ahead = -(-stream.data.shuffle_buffer // _CHUNK_RECORDS)
    with closing(prefetched(_encoded(stream, source, place=place), depth=ahead)) as encoded:
        for part, after in encoded:
            _refuse_bad(part, data=stream.data)
            parts.append(part)
            if (after.epoch, after.buffer) == (place.epoch, place.buffer):
                continue
            buffer = _Buffer(place, _shuffled(parts, stream=stream, place=place), parts)
            found = found or buffer.rows.n_rows > 0
            yield buffer
            if after.epoch != place.epoch:
                if whole and not found:
                    raise nothing_left(source.files, parts=parts, split="train")
                found, whole = False, True
            parts, place = [], after


def _refuse_bad(part: Encoded, *, data: DataConfig) -> None:
    if part.bad and data.on_bad_record == "error":
        raise part.bad[0].error()


def _shuffled(parts: Sequence[Encoded], *, stream: RowStream, place: Place) -> Rows:
    """Pack a buffer's documents and put its rows into the order in which they are met."""
    data = stream.data
    if not any(len(part.lengths) for part in parts):
        return _NO_ROWS
    rows = arrange(parts, seq_len=data.seq_len, packing=data.packing)
    return rows.take(
        permutation(rows.n_rows, seed=stream.seed, epoch=place.epoch, shuffle=data.shuffle, stream=place.buffer + 1)
    )


def _encoded(stream: RowStream, source: Source, *, place: Place) -> Iterator[tuple[Encoded, Place]]:
    """Yield encoded records with the place behind them, made in worker processes where data.workers says so."""
    chunks = _chunks(stream, source, place=place)
    if not stream.data.workers:
        yield from ((encode_examples(examples, encoder=stream.encoder), after) for examples, after in chunks)
        return
    places: deque[Place] = deque()

    def sent() -> Iterator[list[Example | BadRecord]]:
        for examples, after in chunks:
            places.append(after)
            yield examples

    with closing(encode_in_processes(sent(), encoder=stream.encoder, workers=stream.data.workers)) as encoded:
        for part in encoded:
            yield part, places.popleft()


def _chunks(stream: RowStream, source: Source, *, place: Place) -> Iterator[tuple[list[Example | BadRecord], Place]]:
    """Yield records with the place behind them, never of two buffers or two epochs together."""
    size = stream.data.shuffle_buffer
    while True:
        records, left = _records(stream, source, place=place), size  # a place is where a buffer begins
        chunk = list(islice(records, min(_CHUNK_RECORDS, left)))
        while chunk:
            examples, (_, after) = [example for example, _ in chunk], chunk[-1]
            left -= len(chunk)
            if not left:
                left, place = size, replace(place, buffer=place.buffer + 1)
            chunk = list(islice(records, min(_CHUNK_RECORDS, left)))
            yield examples, replace(after, buffer=place.buffer) if chunk else Place(epoch=place.epoch + 1)
        place = Place(epoch=place.epoch + 1)


def _records(stream: RowStream, source: Source, *, place: Place) -> Iterator[tuple[Example | BadRecord, Place]]:
    """Yield the rest of an epoch's records, each with the place behind it."""
    data = stream.data
    order = permutation(len(source.files), seed=stream.seed, epoch=place.epoch, shuffle=data.shuffle)
    start = Mark(place.offset, place.line)
    for index in range(place.file, len(source.files)):
        path = source.files[order[index]]
        for example, mark in read_file(path, start=start, **reading_of(data)):
            yield example, Place(epoch=place.epoch, file=index, offset=mark.offset, line=mark.line)
        start = START
