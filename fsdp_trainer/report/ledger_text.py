"""The measured memory of a run beside its prediction, as a person reads it in a terminal: plain text, no colour needed.

Takes plain values as memory.json holds them. Every line keeps to the width that is asked for.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fsdp_trainer.report.plan_text import RULED
from fsdp_trainer.units import format_duration

Range = Mapping[str, float]
NARROW = 60  # below it the first line says it all
_SOURCES = {
    "allocator": "measured by torch's allocator over the whole run",
    "trace": "measured as live tensor bytes of the traced step",
}


def format_ledger_text(ledger: Mapping[str, Any], *, width: int = 80) -> str:
    """Return the ledger in lines of at most `width`; the first one alone where that is narrow.

    Ranks that differ show as smallest - largest. Nothing but the first line where nothing was measured.
    """
    unit, size = _unit(ledger)
    lines = [format_peak(ledger)]
    if width < NARROW:
        return lines[0]
    tables = [_phases(ledger, unit=unit, size=size), _categories(ledger, unit=unit, size=size)]
    shown = [table for table in tables if table is not None]
    for table in shown:
        lines += ["", *_drawn(table, width)]
    lines += ["", *_notes(ledger)] if shown else []
    return "\n".join(lines)


def format_peak(ledger: Mapping[str, Any]) -> str:
    """Return the first line, such as "peak 17.9 GiB of 23.5 (predicted 17.6, -1.7 %)"; MiB where it is less than 0.5.

    "peak not measured (predicted 17.6 GiB of 23.5)" on CPU without a traced step.
    """
    peak, usable = ledger["peak"], ledger["usable_gib"]
    measured, predicted = peak["measured_gib"], peak["predicted_gib"]
    unit, size = _unit(ledger)
    of = f" of {usable * size:,.1f}" if usable is not None else ""
    if measured is None:
        said = f"predicted {predicted * size:,.1f} {unit}{of}" if predicted is not None else "no prediction"
        return f"peak not measured ({said})"
    said = "no prediction"
    if predicted is not None:
        said = f"predicted {predicted * size:,.1f}"
        if peak["difference"] is not None:
            said += f", {_percent(peak['difference'])}"
    return f"peak {measured * size:,.1f} {unit}{of} ({said})"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")


def _unit(ledger: Mapping[str, Any]) -> tuple[str, float]:
    """Return the unit that tensors are shown in, and GiB in it."""
    peak = ledger["peak"]
    most = peak["measured_gib"] if peak["measured_gib"] is not None else peak["predicted_gib"]
    return ("MiB", 1024.0) if most is not None and most < 0.5 else ("GiB", 1.0)


def _phases(ledger: Mapping[str, Any], *, unit: str, size: float) -> Table | None:
    rows = [row for row in ledger["phases"] if row["measured_gib"] or row["predicted_gib"] is not None]
    if not any(row["measured_gib"] for row in rows):
        return None
    reserves = any(row["reserved_gib"] for row in rows)
    table = _table(f"peak by phase, {unit}", "measured", *(["reserved"] if reserves else []), "predicted", "difference")
    for row in rows:
        reserved = [_range(row["reserved_gib"], size)] if reserves else []
        measured, predicted = row["measured_gib"], row["predicted_gib"]
        table.add_row(row["phase"], _range(measured, size), *reserved, *_compared(measured, predicted, size))
    return table


def _categories(ledger: Mapping[str, Any], *, unit: str, size: float) -> Table | None:
    rows = [row for row in ledger["categories"] if (row["measured_gib"] or {}).get("max") or row["predicted_gib"]]
    if not any(row["measured_gib"] for row in rows):
        return None
    table = _table(f"at the peak, {unit}", "measured", "predicted", "difference")
    for row in sorted(rows, key=lambda row: -(row["measured_gib"] or {"max": 0.0})["max"]):
        measured, predicted = row["measured_gib"], row["predicted_gib"]
        name = row["category"].replace("_", " ")
        table.add_row(name, _range(measured, size), *_compared(measured, predicted, size))
    return table


def _compared(measured: Range | None, predicted: float | None, size: float) -> tuple[str, str]:
    """Return the predicted size and how far it is from the measured one, of the fullest rank."""
    if predicted is None:
        return "-", ""
    said = f"{predicted * size:,.2f}"
    return said, _percent(predicted / measured["max"] - 1) if measured and measured["max"] else ""


def _range(found: Range | None, size: float) -> str:
    if found is None:
        return "-"
    least, most = (f"{found[name] * size:,.2f}" for name in ("min", "max"))
    return least if least == most else f"{least} - {most}"


def _notes(ledger: Mapping[str, Any]) -> Iterator[str]:
    if ledger["source"] is not None:
        by = f"; predicted by {_PREDICTED[ledger['prediction']]}" if ledger["prediction"] is not None else ""
        yield _SOURCES[ledger["source"]] + by
    if (fragmentation := ledger["fragmentation"]) is not None:
        retries = ledger["allocator_retries"]
        again = f"{retries['max']:.0f} times" if retries and retries["max"] else "never"
        share = f"{100 * fragmentation['max']:.1f} %"
        yield f"of what is reserved {share} holds no tensor; the allocator gave memory back to go on: {again}"
    host = ledger["host_gib"]
    expected = f" (predicted {host['predicted']:.2f})" if host["predicted"] is not None else ""
    yield f"host: {_range(host['measured'], 1.0)} GiB resident in each process{expected}"
    if (traced := ledger["traced_step"]) is not None:
        usual = f", a usual one {format_duration(traced['usual_seconds'])}" if traced["usual_seconds"] else ""
        yield f"step {traced['step']} was traced: {format_duration(traced['seconds'])}{usual}"


_PREDICTED = {"simulation": "the plan's simulation", "closed form": "the closed form"}


def _table(title: str, *columns: str) -> Table:
    table = Table(box=RULED, pad_edge=False, padding=0, show_edge=False)
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _drawn(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
