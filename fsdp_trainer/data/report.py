"""What happened to the records of a data set on their way to rows: the counts a user needs to trust a run.

Kept beside the cached rows, so that a run from the cache says the same as the run that built it.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsdp_trainer.data.chat import (
    END_INSIDE_ANSWER,
    HEADER_TRAINED,
    PART_LOST,
    REWRITTEN,
    TYPED_CONTROL,
    UNREAD_VARIABLE,
)
from fsdp_trainer.data.encode import NOT_ENCODED
from fsdp_trainer.data.formats import visible
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.errors import DataError
from fsdp_trainer.run_folder import parse_json

if TYPE_CHECKING:
    from fsdp_trainer.config import DataConfig
    from fsdp_trainer.data.encode import Encoded, Encoder
    from fsdp_trainer.data.sources import BadRecord

_SHOWN_BAD_RECORDS = 20
_LOST_SHARE = 0.1  # more than this share of records dropped or cut is worth a warning
_FEW_TARGETS = 0.05  # fewer supervised tokens than this share: most of the compute trains nothing
_PERCENTILES = (5, 25, 50, 75, 95, 99)
_BARS = 24


@dataclass(frozen=True)
class DataReport:
    """Counts of one prepared data set."""

    records: int  # read, those skipped as bad included
    documents: int
    rows: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int  # the longest document
    truncated: int  # records cut at seq_len
    split: int  # records cut into several documents
    duplicates: int  # records that stand in the data before, word for word
    dropped: dict[str, int]  # records with nothing to train on, or too long, by reason
    skipped: dict[str, int]  # bad records left out because data.on_bad_record is skip, by kind
    skipped_examples: tuple[str, ...]  # the first few of them: place and reason
    notes: dict[str, int]  # what else is worth knowing, by kind
    unread: tuple[str, ...]  # columns of the records that nothing reads
    length_percentiles: dict[str, int]  # of the records in tokens, before anything was cut
    length_bars: tuple[tuple[int, int], ...]  # (shortest of the bar, records in it), equally wide; the last is a border
    packing_efficiency: float | None  # share of the tokens in packed rows that are not padding; None: not packed
    warnings: tuple[str, ...]

    def format_lines(self) -> list[str]:
        """Return the log's lines: one a fact, then the warnings."""
        return self.format_facts() + [f"warning: {warning}" for warning in self.warnings]

    def format_facts(self) -> list[str]:
        """Return the counts, one line a fact."""
        packed = "" if self.packing_efficiency is None else f", {self.packing_efficiency:.1%} full"
        lines = [
            f"{_count(self.records, 'record')} gave {_count(self.documents, 'document')} in "
            f"{_count(self.rows, 'row')}{packed}: {self.tokens:,} tokens, {self.supervised_tokens:,} supervised "
            f"({self.supervised_tokens / self.tokens:.0%}), longest document {self.longest_tokens:,}"
        ]
        if self.length_percentiles:
            shares = ", ".join(f"{length:,} ({share} %)" for share, length in self.length_percentiles.items())
            lines.append(f"record lengths in tokens: {shares}")
        if self.truncated:
            lines.append(f"{_count(self.truncated, 'record')} cut at data.seq_len")
        if self.split:
            lines.append(f"{_count(self.split, 'record')} split into documents of at most data.seq_len tokens")
        lines += [f"{_count(count, 'record')} dropped: {reason}" for reason, count in self.dropped.items()]
        lines += [f"{_count(count, 'bad record')} skipped: {kind}" for kind, count in self.skipped.items()]
        lines += [f"  {example}" for example in self.skipped_examples]
        lines += [f"columns that are not read: {', '.join(self.unread)}"] if self.unread else []
        return lines + [f"{kind}: {count:,}" for kind, count in self.notes.items()]


def build_report(
    rows: Rows,
    parts: "Sequence[Encoded]",
    *,
    records: int,
    dropped: Counter,
    bad: "Sequence[BadRecord]",
    data: "DataConfig",
    encoder: "Encoder",
) -> DataReport:
    """Add up what happened to the records of the given parts, which the rows were made of."""
    notes = sum((part.notes for part in parts), Counter())
    lengths = np.concatenate([part.record_lengths for part in parts])
    digests = np.concatenate([part.digests for part in parts])
    truncated = sum(part.truncated for part in parts)
    duplicates = len(digests) - len(np.unique(digests))
    supervised_tokens = int(np.count_nonzero(rows.supervised))
    warnings = [
        *_stop_warnings(sum(part.endless for part in parts), records=len(lengths), notes=notes, encoder=encoder),
        *_template_warnings(notes, encoder=encoder),
        *_loss_warnings(sum(dropped.values()) + len(bad), truncated=truncated, records=records, data=data),
    ]
    if (first := next((part.not_encoded for part in parts if part.not_encoded), None)) is not None:
        warnings.append(
            f"{_count(notes[NOT_ENCODED], 'record')} with text that the tokenizer cannot encode and leaves out, first "
            f"{visible(first)} (model.tokenizer: one with a token for every byte keeps it)"
        )
    if duplicates:
        warnings.append(f"{duplicates:,} of {records:,} records stand in the data more than once, word for word")
    if supervised_tokens < _FEW_TARGETS * rows.total_tokens:
        warnings.append(
            f"only {supervised_tokens / rows.total_tokens:.1%} of the tokens are trained on: the rest costs time and "
            f"teaches nothing (data.train_on: {data.train_on})"
        )
    return DataReport(
        records=records,
        documents=rows.n_documents,
        rows=rows.n_rows,
        tokens=rows.total_tokens,
        supervised_tokens=supervised_tokens,
        longest_tokens=int(np.diff(rows.document_starts).max()),
        truncated=truncated,
        split=sum(part.split for part in parts),
        duplicates=duplicates,
        dropped=dict(sorted(dropped.items())),
        skipped=dict(sorted(Counter(record.kind for record in bad).items())),
        skipped_examples=tuple(f"{record.where}: {record.what}" for record in bad[:_SHOWN_BAD_RECORDS]),
        notes=dict(sorted(notes.items())),
        unread=tuple(visible(name) for name in sorted(frozenset().union(*(part.unread for part in parts)))),
        length_percentiles=_percentiles(lengths),
        length_bars=_bars(lengths),
        packing_efficiency=rows.total_tokens / (rows.n_rows * data.seq_len) if data.packing else None,
        warnings=tuple(warnings),
    )


def _stop_warnings(endless: int, *, records: int, notes: Counter, encoder: "Encoder") -> Iterator[str]:
    if endless:
        yield (
            f"{endless:,} of {records:,} records do not end with a token the model can stop at; it will not learn to "
            f"stop from them (such tokens, by the tokenizer and the generation config: {encoder.end_tokens()}; look at "
            "how the template ends a turn)"
        )
    turn_end = encoder.template.turn_end if encoder.template else None
    if count := notes[END_INSIDE_ANSWER]:
        yield f"{_count(count, 'record')} with {turn_end} inside an answer: the model learns to stop there"
    if count := notes[TYPED_CONTROL]:
        sanitized = encoder.template is not None and encoder.template.sanitize
        yield f"{_count(count, 'record')} with the text of control tokens in a message, encoded as " + (
            "plain text (data.sanitize_control_tokens: false makes tokens of them)"
            if sanitized
            else "control tokens: a message can then end its own turn (data.sanitize_control_tokens: true)"
        )


def _template_warnings(notes: Counter, *, encoder: "Encoder") -> Iterator[str]:
    if count := notes[PART_LOST]:
        yield (
            f"{_count(count, 'record')} with an answer of which the chat template leaves a part out (the reasoning of "
            "earlier answers, mostly): that part is not trained on"
        )
    if count := notes[UNREAD_VARIABLE]:
        yield f"{_count(count, 'record')} with chat_template_kwargs that the chat template does not read"
    if count := notes[REWRITTEN]:
        yield (
            f"{_count(count, 'record')} in which the template writes an earlier answer otherwise than a last one "
            "(thinking left out); data.train_on: last_assistant trains on the last one alone"
        )
    if count := notes[HEADER_TRAINED]:
        yield (
            f"{_count(count, 'record')} trained on with the header of each answer as part of it: the chat template "
            "writes none where it asks for one (it does not know add_generation_prompt)"
        )
    if encoder.template is not None and encoder.template.writes_the_date:
        yield "the chat template writes today's date, so the same data prepared on another day gives other tokens"


def _loss_warnings(lost: int, *, truncated: int, records: int, data: "DataConfig") -> Iterator[str]:
    if lost > _LOST_SHARE * records:
        yield f"{lost:,} of {records:,} records are not trained on"
    if truncated > _LOST_SHARE * records:
        yield f"{truncated:,} of {records:,} records are cut at data.seq_len {data.seq_len}"


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    # The nearest rank: a length that a record really has, and that so many of them are no longer than
    return {str(share): int(np.percentile(lengths, share, method="inverted_cdf")) for share in _PERCENTILES}


def _bars(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    if not len(lengths):
        return ()
    shortest, longest = int(lengths.min()), int(lengths.max())
    # From the shortest record on, in widths and at borders that a person reads off: 1, 2 or 5 times a power of ten.
    sizes = (times * 10**power for power in itertools.count() for times in (1, 2, 5))
    width = next(size for size in sizes if longest // size - shortest // size < _BARS)
    first = shortest // width
    counts = np.bincount(lengths // width - first)
    return (
        *(((first + index) * width, int(count)) for index, count in enumerate(counts)),
        ((first + len(counts)) * width, 0),
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def save_report(report: DataReport, path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")


def load_report(path: Path) -> DataReport:
    """Read a report that `save_report` wrote."""
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
        fields |= {name: tuple(fields[name]) for name in ("skipped_examples", "warnings", "unread")}
        fields["length_bars"] = tuple((start, count) for start, count in fields["length_bars"])
        return DataReport(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the report of the cached rows cannot be read",
            values=f"{path}: {error}",
            fix="delete its folder; it is built again",
        ) from error
