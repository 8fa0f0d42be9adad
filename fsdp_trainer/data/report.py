"""What happened to the records of a data set on their way to rows: the counts a user needs to trust a run.

Kept beside the cached rows, so that a run from the cache says the same as the run that built it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_trainer.errors import DataError


@dataclass(frozen=True)
class DataReport:
    """Counts of one prepared data set."""

    records: int  # read, those skipped as bad included
    documents: int
    rows: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int  # the longest document
    truncated: int  # documents cut at seq_len
    dropped: dict[str, int]  # records with nothing to train on, or too long, by reason
    skipped: dict[str, int]  # bad records left out because data.on_bad_record is skip, by kind
    skipped_examples: tuple[str, ...]  # the first few of them: place and reason
    packing_efficiency: float | None  # share of the tokens in packed rows that are not padding; None: not packed
    warnings: tuple[str, ...]

    def format_lines(self) -> list[str]:
        """Return the log's lines, one a fact."""
        packed = "" if self.packing_efficiency is None else f", {self.packing_efficiency:.1%} full"
        lines = [
            f"{_count(self.records, 'record')} gave {_count(self.documents, 'document')} in "
            f"{_count(self.rows, 'row')}{packed}: {self.tokens:,} tokens, {self.supervised_tokens:,} supervised "
            f"({self.supervised_tokens / self.tokens:.0%}), longest document {self.longest_tokens:,}"
        ]
        if self.truncated:
            lines.append(f"{_count(self.truncated, 'document')} cut at data.seq_len")
        lines += [f"{_count(count, 'record')} dropped: {reason}" for reason, count in self.dropped.items()]
        lines += [f"{_count(count, 'bad record')} skipped: {kind}" for kind, count in self.skipped.items()]
        lines += [f"  {example}" for example in self.skipped_examples]
        return lines + [f"warning: {warning}" for warning in self.warnings]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def save_report(report: DataReport, path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")


def load_report(path: Path) -> DataReport:
    """Read a report that `save_report` wrote."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {name: tuple(fields[name]) for name in ("skipped_examples", "warnings")}
        return DataReport(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the report of the cached rows cannot be read",
            values=f"{path}: {error}",
            fix="delete its folder; it is built again",
        ) from error
