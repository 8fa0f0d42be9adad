"""The runs of a folder as a table: one line a run, as wide as the terminal."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.report.watch_text import STYLES
from fsdp_trainer.units import format_age, format_bytes

GIB = 2**30
# Name, heading, and the order in which columns go where the terminal is too narrow (the highest first).
COLUMNS = (
    *(("name", "run", 0), ("state", "state", 0), ("step", "step", 0), ("loss", "loss", 1), ("eval_loss", "eval", 3)),
    *(("tokens_per_second", "tokens/s", 5), ("peak", "peak", 6), ("disk", "on disk", 7)),
    *(("checkpoint", "resumes at", 2), ("written", "written", 4)),
)


def format_runs(runs: Sequence[Mapping[str, Any]], *, width: int) -> tuple[Table, list[str]]:
    """Return the table for `width` columns, and what is to be said under it of what found no room.

    `runs` are what `runs --json` prints.
    """
    rows = [_cells(run) for run in runs]
    names, notes, dropped = [name for name, _, _ in COLUMNS], [], []
    if _width(rows, names) > width and (shared := os.path.commonpath([os.path.dirname(run["name"]) for run in runs])):
        rows = [{**row, "name": Text(os.path.relpath(row["name"].plain, shared))} for row in rows]
        notes.append(f"all in {shared}/")
    for name, heading, order in sorted(COLUMNS, key=lambda column: -column[2]):
        if order == 0 or _width(rows, names) <= width:
            break
        names.remove(name)
        dropped.insert(0, heading)
    if dropped:
        notes.append(f"no room for: {', '.join(dropped)} (a wider terminal, or --json)")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, heading, _ in COLUMNS:
        if name in names:
            justify = "left" if name in ("name", "state") else "right"
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=name != "name")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table, notes


def _width(rows: Sequence[Mapping[str, Text]], names: Sequence[str]) -> int:
    headings = {name: heading for name, heading, _ in COLUMNS}
    return sum(max(len(headings[name]), *(len(row[name]) for row in rows)) + 3 for name in names) - 3


def _cells(run: Mapping[str, Any]) -> dict[str, Text]:
    state = run["state"] or "unknown"
    total, written = run["total_steps"], run["written"]
    cells = {
        "name": run["name"],
        "step": f"{run['step']:,}" + (f"/{total:,}" if total else ""),
        "loss": _number(run["loss"]),
        "eval_loss": _number(run["eval_loss"]),
        "tokens_per_second": "-" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:,.0f}",
        "peak": "-" if run["peak_gib"] is None else format_bytes(run["peak_gib"] * GIB),
        "disk": format_bytes(run["bytes_on_disk"]),
        "checkpoint": "-" if run["checkpoint_step"] is None else f"{run['checkpoint_step']:,}",
        "written": "-" if written is None else format_age(time.time() - written),
    }
    return {"state": Text(state, style=STYLES.get(state, "")), **{name: Text(text) for name, text in cells.items()}}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
