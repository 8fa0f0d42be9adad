"""From `data.train` or `data.eval` to rows on disk: read, encode, pack, and keep the result under a hash of all of it.

One process builds; every process maps the same files.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.cache import (
    Split,
    cache_path,
    compares_with_training,
    evaluation_share,
    remove_damaged,
    write_hashes,
)
from fsdp_trainer.data.encode import Encoded, Encoder, build_encoder
from fsdp_trainer.data.order import share_rows
from fsdp_trainer.data.packing import arrange_documents
from fsdp_trainer.data.report import DataReport, build_report, load_report, save_report
from fsdp_trainer.data.rows import Rows, join_rows, load_rows, save_rows
from fsdp_trainer.data.sources import (
    BadRecord,
    Example,
    Named,
    Source,
    read_examples,
    reading_of,
    resolve_paths,
    resolve_sources,
)
from fsdp_trainer.data.template_files import read_chat_template
from fsdp_trainer.data.workers import encode_in_processes, encode_in_threads
from fsdp_trainer.errors import DataError, OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_RECORDS = 128  # what is being tokenised takes some 100 bytes a token, of several blocks at once
_WORKERS_PAY_FROM_RECORDS = 5000  # starting them costs seconds
_WORKERS_PAY_FROM = 3  # two do no more than threads beside a tokenizer that works without Python's lock


def prepare_rows(
    source: Named,
    *,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    split: Split = "train",
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
    is_writer: bool = True,
    wait: Callable[[], None] = lambda: None,
    on_records: Callable[[int], None] = lambda count: None,
) -> tuple[Rows, DataReport]:
    """Return the rows of a source, built when the cache does not hold them whole.

    `stop_ids` are the tokens at which the model's generation stops. In a distributed run every rank calls this; only
    the one with `is_writer` verifies and builds, and `wait` (a barrier) is called once by each between building and
    loading. `on_records` gets the number of records done since its last call.
    """
    path = cache_path(
        source, data=data, tokenizer=tokenizer, seed=seed, split=split, vocab_size=vocab_size, stop_ids=stop_ids
    )
    damage = remove_damaged(path) if is_writer else None
    if is_writer and not path.exists():
        build_cache(
            path,
            source,
            data=data,
            tokenizer=tokenizer,
            seed=seed,
            split=split,
            vocab_size=vocab_size,
            stop_ids=stop_ids,
            on_records=on_records,
        )
    wait()
    rows, report = load_prepared(path)
    if damage is not None:
        warning = f"the prepared rows in {path} were damaged ({damage}) and have been built anew"
        report = replace(report, warnings=(*report.warnings, warning))
    if split == "train":
        rows = _with_weights(rows, sources=resolve_sources(source))
    return rows, report


def build_cache(
    path: Path,
    source: Named,
    *,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    split: Split = "train",
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
    on_records: Callable[[int], None] = lambda count: None,
) -> None:
    """Build the rows and put them at `path`, complete or not at all."""
    encoder = encoder_of(data, tokenizer=tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
    rows, report = build_rows(source, data=data, encoder=encoder, seed=seed, split=split, on_records=on_records)
    building: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        save_rows(rows, building)
        save_report(report, building / "report.json")
        write_hashes(building)
        building.chmod(0o755)  # mkdtemp makes it private; a shared cache serves other users too
        if not path.exists():
            building.rename(path)
    except OSError as error:
        raise OutputError(
            "The cache of prepared rows cannot be written.",
            values=f"{path.parent}: {error.strerror or error}",  # NumPy says how much of an array it could write
            fix="make room there, or set data.cache_dir to a folder on another disk",
        ) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def encoder_of(
    data: DataConfig,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
) -> Encoder:
    """Build the encoder that the settings ask for."""
    return build_encoder(
        tokenizer,
        chat_template=read_chat_template(data.chat_template, tokenizer=tokenizer),
        train_on=data.train_on,
        seq_len=data.seq_len,
        on_too_long=data.on_too_long,
        vocab_size=vocab_size,
        sanitize_control_tokens=data.sanitize_control_tokens,
        stop_ids=stop_ids,
    )


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
    source: Named,
    *,
    data: DataConfig,
    encoder: Encoder,
    seed: int,
    split: Split = "train",
    on_records: Callable[[int], None] = lambda count: None,
) -> tuple[Rows, DataReport]:
    """Read, encode and pack a source in memory; what is mixed by weight is packed apart."""
    sources = resolve_sources(source)
    read = partial(read_examples, **reading_of(data))
    held_out: set[int] | None = None
    if share := evaluation_share(data):
        held_out = _held_out_digests(read(resolve_paths(source)), share=share, seed=seed)

    digests: set[int] = set()
    encoded: list[list[Encoded]] = [[] for _ in sources]
    for one, parts in zip(sources, encoded, strict=True):
        examples = read(one.files)
        if held_out is not None:
            examples = _on_side(examples, split, held_out=held_out)
        if compares_with_training(data, split=split):
            examples = _noted(examples, digests)
        with closing(encode_all(examples, encoder=encoder, workers=data.workers)) as encoding:
            for part in encoding:
                if part.bad and data.on_bad_record == "error":
                    raise part.bad[0].error()
                parts.append(part)
                on_records(part.records)
        if split == "train" and not _has_documents(parts):
            raise nothing_left(one.files, parts=parts, split=split)
    together = list(chain(*encoded))
    if not _has_documents(together):
        raise nothing_left(resolve_paths(source), parts=together, split=split)
    rows = [arrange(parts, seq_len=data.seq_len, packing=data.packing) for parts in encoded if _has_documents(parts)]
    joined = rows[0] if len(sources) == 1 else join_rows(rows)
    report = report_on(joined, together, data=data, encoder=encoder)
    if held_out is not None and split == "eval" and len(held_out) == 1:
        warning = f"data.eval: {evaluation_share(data):g} holds out a single record, the least: its loss says little"
        report = replace(report, warnings=(*report.warnings, warning))
    if (
        leaked := sum(example.digest in digests for example in _examples(read(resolve_paths(data.train))))
        if digests
        else 0
    ):
        stand = "record of data.train also stands" if leaked == 1 else "records of data.train also stand"
        warning = f"{leaked:,} {stand} in data.eval: the loss there says less about new data"
        report = replace(report, warnings=(*report.warnings, warning))
    return joined, report


def _has_documents(parts: Sequence[Encoded]) -> bool:
    return any(len(part.lengths) for part in parts)


def _with_weights(rows: Rows, *, sources: Sequence[Source]) -> Rows:
    weights = tuple(one.weight for one in sources if one.weight is not None)
    if not weights:
        return rows
    for one, weight, count in zip(sources, weights, share_rows(rows.n_rows, weights=weights), strict=True):
        if not count:
            raise DataError(
                "a source has too little weight to give a single row of an epoch",
                values=f"{one.files[0]}: weight {weight:g} of {sum(weights):g}, {rows.n_rows} rows an epoch",
                fix="raise its weight in data.train, or leave the source out",
            )
    return replace(rows, weights=weights)


def encode_all(
    examples: Iterator[Example | BadRecord], *, encoder: Encoder, workers: int
) -> Generator[Encoded, None, None]:
    """Encode records in order, in worker processes where there are many of both, else in threads."""
    workers_pay = workers >= (_WORKERS_PAY_FROM if encoder.tokenizer.is_rust else 1)
    first = list(islice(examples, _WORKERS_PAY_FROM_RECORDS)) if workers_pay else []
    chunks = _chunks(chain(first, examples))
    if len(first) == _WORKERS_PAY_FROM_RECORDS:
        yield from encode_in_processes(chunks, encoder=encoder, workers=workers)
    else:
        yield from encode_in_threads(chunks, encoder=encoder)


def _chunks(examples: Iterable[Example | BadRecord]) -> Iterator[list[Example | BadRecord]]:
    iterator = iter(examples)
    while chunk := list(islice(iterator, _CHUNK_RECORDS)):
        yield chunk


def _on_side(
    examples: Iterator[Example | BadRecord], split: Split, *, held_out: set[int]
) -> Iterator[Example | BadRecord]:
    for example in examples:
        side = "eval" if isinstance(example, Example) and example.digest in held_out else "train"
        if side == split:
            yield example


def _noted(examples: Iterator[Example | BadRecord], digests: set[int]) -> Iterator[Example | BadRecord]:
    for example in examples:
        if isinstance(example, Example):
            digests.add(example.digest)
        yield example


def _examples(records: Iterable[Example | BadRecord]) -> Iterator[Example]:
    return (record for record in records if isinstance(record, Example))


def _held_out_digests(examples: Iterable[Example | BadRecord], *, share: float, seed: int) -> set[int]:
    """Choose which records evaluate: the share with the smallest seeded hashes of their content.

    By content, not by place: a record that stands twice falls on one side with both copies, so nothing leaks.
    """
    digests: set[int] = set()
    bad: list[BadRecord] = []
    for example in examples:
        if isinstance(example, Example):
            digests.add(example.digest)
        else:
            bad.append(example)
    if not digests:  # the share is not what is wrong: the encoding of the broken records says what is
        return digests
    drawn = sorted(digests, key=lambda digest: xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little"), seed=seed))
    held_out = set(drawn[: max(1, round(share * len(drawn)))])
    if len(held_out) == len(drawn):
        raise DataError(
            "data.eval takes every record and leaves none to train on",
            values=f"share {share} of {len(drawn)} different records"
            + (f", beside {len(bad)} bad ones; first: {bad[0].where}: {bad[0].what}" if bad else ""),
            fix="lower data.eval, give a file of its own, or add records",
        )
    return held_out


def arrange(parts: Sequence[Encoded], *, seq_len: int, packing: bool) -> Rows:
    """Join the documents of all parts (at least one document) and put them into rows."""
    return arrange_documents(
        [part.tokens for part in parts],
        [part.supervised for part in parts],
        [part.lengths for part in parts],
        seq_len=seq_len,
        packing=packing,
    )


def report_on(rows: Rows, parts: Sequence[Encoded], *, data: DataConfig, encoder: Encoder) -> DataReport:
    """Count what happened to the records of the given parts, which the rows were made of."""
    records, dropped, bad = _count(parts)
    return build_report(rows, parts, records=records, dropped=dropped, bad=bad, data=data, encoder=encoder)


def _count(parts: Sequence[Encoded]) -> tuple[int, Counter, list[BadRecord]]:
    dropped = sum((part.dropped for part in parts), Counter())
    return sum(part.records for part in parts), dropped, [record for part in parts for record in part.bad]


def nothing_left(paths: Sequence[Path], *, parts: Sequence[Encoded], split: Split) -> DataError:
    """Return the error for files that give no document, with what became of their records."""
    records, dropped, bad = _count(parts)
    counts = [f"{count} {reason}" for reason, count in dropped.items()]
    counts += [f"{count} {kind} (skipped)" for kind, count in Counter(record.kind for record in bad).items()]
    first = f"; first: {bad[0].where}: {bad[0].what}" if bad else ""
    return DataError(
        "no record is left to train on" if split == "train" else "no record is left to evaluate on",
        values=f"{records} records in {', '.join(map(str, paths[:5]))}: {', '.join(counts)}{first}",
        fix="raise data.seq_len if answers are cut off, or look at the records and at data.format and data.train_on"
        + ("" if split == "train" else "; a larger share in data.eval holds more of them"),
    )
