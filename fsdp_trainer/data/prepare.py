"""From `data.train` or `data.eval` to rows on disk: read, encode, pack, and keep the result under a hash of all of it.

One process builds; every process maps the same files.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.cache import Source, Split, cache_path, evaluation_share
from fsdp_trainer.data.chat import read_chat_template
from fsdp_trainer.data.encode import Encoded, Encoder, build_encoder, encode_examples
from fsdp_trainer.data.packing import arrange_documents
from fsdp_trainer.data.report import DataReport, build_report, load_report, save_report
from fsdp_trainer.data.rows import Rows, load_rows, save_rows
from fsdp_trainer.data.sources import BadRecord, Example, read_examples, resolve_paths
from fsdp_trainer.data.workers import encode_in_processes
from fsdp_trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_RECORDS = 256
_WORKERS_PAY_FROM_RECORDS = 5000  # starting them costs seconds; until there the tokenizer's own threads serve


def prepare_rows(
    source: Source,
    *,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    split: Split = "train",
    vocab_size: int | None = None,
    is_writer: bool = True,
    wait: Callable[[], None] = lambda: None,
    on_records: Callable[[int], None] = lambda count: None,
) -> tuple[Rows, DataReport]:
    """Return the rows of a source, built when the cache does not hold them.

    In a distributed run every rank calls this; only the one with `is_writer` builds, and `wait` (a barrier) is called
    once by each between building and loading. `on_records` gets the number of records done since its last call.
    """
    path = cache_path(source, data=data, tokenizer=tokenizer, seed=seed, split=split, vocab_size=vocab_size)
    if is_writer and not path.exists():
        build_cache(
            path,
            source,
            data=data,
            tokenizer=tokenizer,
            seed=seed,
            split=split,
            vocab_size=vocab_size,
            on_records=on_records,
        )
    wait()
    return load_prepared(path)


def build_cache(
    path: Path,
    source: Source,
    *,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    split: Split = "train",
    vocab_size: int | None = None,
    on_records: Callable[[int], None] = lambda count: None,
) -> None:
    """Build the rows and put them at `path`, complete or not at all."""
    encoder = build_encoder(
        tokenizer,
        chat_template=read_chat_template(data.chat_template, tokenizer=tokenizer),
        train_on=data.train_on,
        seq_len=data.seq_len,
        on_too_long=data.on_too_long,
        vocab_size=vocab_size,
        sanitize_control_tokens=data.sanitize_control_tokens,
    )
    rows, report = build_rows(source, data=data, encoder=encoder, seed=seed, split=split, on_records=on_records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise DataError(
            "the cache of prepared rows cannot be written",
            values=str(error),
            fix="set data.cache_dir to another folder",
        ) from error
    try:
        save_rows(rows, building)
        save_report(report, building / "report.json")
        building.chmod(0o755)  # mkdtemp makes it private; a shared cache serves other users too
        if not path.exists():
            building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def load_prepared(path: Path) -> tuple[Rows, DataReport]:
    """Map the rows that `build_cache` left at `path`, and read their report."""
    if not path.exists():
        raise DataError(
            "the prepared rows are not there",
            values=f"{path}, to be built by the first process of this machine or shared file system",
            fix="look at that process's own error; data.cache_dir must be a folder that both see",
        )
    return load_rows(path), load_report(path / "report.json")


def build_rows(
    source: Source,
    *,
    data: DataConfig,
    encoder: Encoder,
    seed: int,
    split: Split = "train",
    on_records: Callable[[int], None] = lambda count: None,
) -> tuple[Rows, DataReport]:
    """Read, encode and pack a source in memory."""
    paths = resolve_paths(source)
    examples = read_examples(paths, record_format=data.format)
    if share := evaluation_share(data):
        held_out = _held_out_digests(paths, data=data, share=share, seed=seed)
        examples = (example for example in examples if _side(example, held_out) == split)

    parts: list[Encoded] = []
    records = 0
    for part in _encode(examples, encoder=encoder, workers=data.workers):
        if part.bad and data.on_bad_record == "error":
            raise part.bad[0].error()
        parts.append(part)
        records += part.records
        on_records(part.records)
    bad = [record for part in parts for record in part.bad]
    dropped = sum((part.dropped for part in parts), Counter())
    if not any(len(part.lengths) for part in parts):
        raise _nothing_left(paths, split=split, records=records, dropped=dropped, bad=bad)
    rows = arrange_documents(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.supervised for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        seq_len=data.seq_len,
        packing=data.packing,
    )
    return rows, build_report(rows, parts, records=records, dropped=dropped, bad=bad, data=data, encoder=encoder)


def _encode(examples: Iterator[Example | BadRecord], *, encoder: Encoder, workers: int) -> Iterator[Encoded]:
    first = list(islice(examples, _WORKERS_PAY_FROM_RECORDS)) if workers else []
    chunks = _chunks(chain(first, examples))
    if workers and len(first) == _WORKERS_PAY_FROM_RECORDS:
        yield from encode_in_processes(chunks, encoder=encoder, workers=workers)
    else:
        yield from (encode_examples(chunk, encoder=encoder) for chunk in chunks)


def _chunks(examples: Iterable[Example | BadRecord]) -> Iterator[list[Example | BadRecord]]:
    iterator = iter(examples)
    while chunk := list(islice(iterator, _CHUNK_RECORDS)):
        yield chunk


def _side(example: Example | BadRecord, held_out: set[int]) -> Split:
    return "eval" if isinstance(example, Example) and example.digest in held_out else "train"


def _held_out_digests(paths: Sequence[Path], *, data: DataConfig, share: float, seed: int) -> set[int]:
    """Choose which records evaluate: the share with the smallest seeded hashes of their text.

    By text, not by place: a record that stands twice falls on one side with both copies, so nothing leaks.
    """
    examples = read_examples(paths, record_format=data.format)
    digests = {example.digest for example in examples if isinstance(example, Example)}
    drawn = sorted(digests, key=lambda digest: xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), seed=seed))
    held_out = set(drawn[: max(1, round(share * len(drawn)))])
    if len(held_out) == len(drawn):
        raise DataError(
            "data.eval takes every record and leaves none to train on",
            values=f"share {share} of {len(drawn)} different records",
            fix="lower data.eval, give a file of its own, or add records",
        )
    return held_out


def _nothing_left(
    paths: Sequence[Path], *, split: Split, records: int, dropped: Counter, bad: Sequence[BadRecord]
) -> DataError:
    counts = [f"{count} {reason}" for reason, count in dropped.items()]
    counts += [f"{count} {kind} (skipped)" for kind, count in Counter(record.kind for record in bad).items()]
    first = f"; first: {bad[0].where}: {bad[0].what}" if bad else ""
    return DataError(
        "no record is left to train on" if split == "train" else "no record is left to evaluate on",
        values=f"{records} records in {', '.join(map(str, paths))}: {', '.join(counts)}{first}",
        fix="raise data.seq_len if answers are cut off, or look at the records and at data.format and data.train_on"
        + ("" if split == "train" else "; a larger share in data.eval holds more of them"),
    )
