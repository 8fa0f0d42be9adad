"""Show prepared data as a person reads it: rows decoded with their targets marked, and how long the records are.

The first thing to look at when a run learns nothing: a mask that is empty, or covers the question, is plain to see.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from fsdp_trainer.data.formats import visible
from fsdp_trainer.data.report import DataReport
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.errors import OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample_pieces(
    rows: Rows, index: int, *, tokenizer: "PreTrainedTokenizerBase", max_tokens: int = 400
) -> list[tuple[str, bool]]:
    """Return the text of one row in stretches, each with whether it is supervised; at most `max_tokens` tokens."""
    borders = rows.documents_of(index)
    start, stop = int(borders[0]), min(int(borders[-1]), int(borders[0]) + max_tokens)
    supervised = np.asarray(rows.supervised[start:stop])
    inside = [int(border) - start for border in borders[1:-1] if border < stop]  # a new document starts a new stretch
    cuts = sorted({0, stop - start, *inside, *(np.flatnonzero(np.diff(supervised)) + 1).tolist()})
    pieces = []
    for first, last in pairwise(cuts):
        text = tokenizer.decode(rows.tokens[start + first : start + last].tolist(), skip_special_tokens=False)
        pieces.append((str(text), bool(supervised[first])))
    if stop < borders[-1]:
        pieces.append((f" ... {int(borders[-1]) - stop} more tokens", False))
    return pieces


def format_sample(
    rows: Rows, index: int, *, tokenizer: "PreTrainedTokenizerBase", max_tokens: int = 400, colour: bool = True
) -> Text:
    """Format one row: supervised text green and underlined, or between ⟦ and ⟧ where there is no colour.

    Control characters of the data stand as escapes.
    """
    text = Text()
    for piece, supervised in sample_pieces(rows, index, tokenizer=tokenizer, max_tokens=max_tokens):
        piece = visible(piece)
        if not supervised:
            text.append(piece)
        elif colour:
            text.append(piece, style="green underline")
        else:
            text.append(f"⟦{piece}⟧")
    return text


def format_length_bars(report: DataReport, *, width: int = 40) -> list[Text]:
    """Format the records' lengths as one bar a line, with its range of tokens and its count."""
    longest = max((count for _, count in report.length_bars), default=0)
    lines = []
    for (start, count), (end, _) in pairwise(report.length_bars):
        bar = "█" * -(-count * width // longest) if longest else ""
        lines.append(Text.assemble(f"{start:>9,} - {end - 1:>7,}  ", (bar, "cyan"), f" {count:,}" if count else ""))
    return lines


def save_length_plot(reports: Sequence[tuple[str, DataReport]], path: Path, *, seq_len: int) -> None:
    """Draw the lengths of each data set's records, with seq_len as a line, into a picture (PNG, SVG or PDF by name)."""
    import matplotlib

    matplotlib.use("agg")  # a machine without a screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(reports), 1, figsize=(8, 3.2 * len(reports)), squeeze=False)
    try:
        for axis, (name, report) in zip(axes[:, 0], reports, strict=True):
            starts = [start for start, _ in report.length_bars]
            counts = [count for _, count in report.length_bars[:-1]]
            axis.stairs(counts, starts, fill=True)
            axis.axvline(seq_len, color="black", linestyle="--", label=f"data.seq_len {seq_len:,}")
            axis.set(title=f"{name}: {report.records:,} records", xlabel="tokens of a record", ylabel="records")
            axis.legend()
        figure.tight_layout()
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OutputError(
            "the picture of the lengths cannot be written",
            values=f"{path}: {error}",
            fix="give --plot a file that ends in .png, .svg or .pdf in a folder that exists",
        ) from error
    finally:
        pyplot.close(figure)
