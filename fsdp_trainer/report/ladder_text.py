"""A ladder as a person reads it in a terminal or a file: one line a rung, and what the numbers say together.

Takes plain values, as ladder.json holds them. Needs neither colour nor a terminal.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_trainer.report.plan_text import RULED
from fsdp_trainer.units import format_number


def format_ladder(ladder: Mapping[str, Any], *, width: int = 80) -> str:
    """Return the whole answer in lines of at most `width`."""
    drawn = io.StringIO()
    console = Console(width=width, file=drawn, color_system=None, legacy_windows=False)
    console.print(build_table(ladder))
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    notes = [line.plain.rstrip() for note in format_notes(ladder) for line in Text(note).wrap(console, width)]
    return "\n".join([*_wrap(_heading(ladder), console, width), "", *lines, "", *notes])


def _wrap(text: str, console: Console, width: int) -> list[str]:
    return [line.plain.rstrip() for line in Text(text).wrap(console, width)]


def _heading(ladder: Mapping[str, Any]) -> str:
    rows = format_number(ladder["global_batch_size"], "row")
    return (
        f"{ladder['model']} on {ladder['hardware']}; {rows} of {ladder['seq_len']:,} tokens a step, "
        f"{format_number(ladder['steps'], 'step')} a rung"
    )


def build_table(ladder: Mapping[str, Any], *, live: bool = False, running: str | None = None) -> Table:
    """Return one line a rung: peak memory predicted and measured, speed of all ranks, and the loss of both ends.

    In a `live` table the rung `running` runs, and others wait for it.
    """
    unit, times = unit_of(ladder["rungs"])
    table = Table(box=RULED, pad_edge=False, padding=0, show_edge=False)
    table.add_column("\nrung", no_wrap=True)
    names = (f"predicted\n{unit}", f"measured\n{unit}", "\noff by", "\ntokens/s", "first\nloss", "last\nloss")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nended")
    for rung in ladder["rungs"]:
        predicted, measured = rung["predicted_gib"], rung["measured_gib"]
        off = f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "-"
        table.add_row(
            Text(rung["name"]),
            *("-" if size is None else f"{size * times:,.{_DIGITS[unit]}f}" for size in (predicted, measured)),
            off,
            _number(rung["tokens_per_second"], ",.0f"),
            _number(rung["first_loss"], ".4f"),
            _number(rung["last_loss"], ".4f"),
            Text("running ..." if rung["name"] == running else "waiting" if live and _waits(rung) else rung["outcome"]),
        )
    return table


def _waits(rung: Mapping[str, Any]) -> bool:
    return rung["outcome"] == "not run" and not rung["message"]


_DIGITS = {"GiB": 2, "MiB": 1}


def unit_of(rungs: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """Return the unit memory is shown in, and how many of it a GiB has: MiB for a model that is tiny."""
    most = max((rung[name] or 0.0 for rung in rungs for name in ("predicted_gib", "measured_gib")), default=0.0)
    return ("GiB", 1.0) if most >= 0.5 or not most else ("MiB", 1024.0)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_notes(ladder: Mapping[str, Any]) -> Iterator[str]:
    """Say why rungs were not measured or did not get through, which fits first, and whether the loss is the same."""
    for rung in ladder["rungs"]:
        if rung["message"]:
            yield f"{rung['name']}, {rung['outcome']}: {rung['message']}"
    sources = {rung["source"] for rung in ladder["rungs"] if rung["source"]}
    if "trace" in sources:
        yield "measured: live bytes of the traced step on the fullest rank; there is no allocator to ask."
    if "allocator" in sources:
        yield "measured: the most that torch's allocator gave out, over the whole rung, on the fullest rank."
    if (spread := first_loss_spread(ladder["rungs"])) is not None:
        least, most = spread
        same = f"{least:.4f} on every rung" if f"{least:.4f}" == f"{most:.4f}" else f"from {least:.4f} to {most:.4f}"
        yield f"first loss: {same} (largest difference {most - least:.1g}); a technique must not change it."
    first = next((rung for rung in ladder["rungs"] if rung["name"] == ladder["fits"]), None)
    yield f"first to fit: {first['name']} ({first['what']})." if first is not None else "no rung got through."


def first_loss_spread(rungs: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the smallest and the largest first loss; None with fewer than two rungs that have one."""
    losses = [rung["first_loss"] for rung in rungs if rung["first_loss"] is not None]
    return (min(losses), max(losses)) if len(losses) > 1 else None
