"""A run as a terminal shows it while it trains: where it stands, its curves as text, its memory and the time left.

Takes what `run_record` and `run_metrics` have read, and gives something that rich prints at any width.
"""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from plotille import Canvas
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_trainer.run_folder import how_to_go_on
from fsdp_trainer.run_metrics import Curve, Metrics
from fsdp_trainer.run_record import GIB, RunFacts, RunRecord, peak_gib, usable_gib
from fsdp_trainer.units import format_age, format_bytes, format_duration, format_number

STYLES = {
    "starting": "yellow",
    "running": "green",
    "finished": "bold green",
    "interrupted": "bold yellow",
    **dict.fromkeys(("failed", "out of memory", "lost"), "bold red"),
}
_LOST = "no process of it is left: killed, or the machine went down"
SCALE = 10  # columns left of a curve
_BAR = 24


def format_watch(
    record: RunRecord, metrics: Metrics, facts: RunFacts, *, width: int, height: int | None, curves: bool = True
) -> Group:
    """Return the whole picture for a terminal of `width` columns and `height` rows (None: as high as it likes).

    `curves` is False where the terminal has no characters to draw them with.
    """
    now = time.time()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, shown in _lines(record, metrics, facts, width=width, now=now):
        grid.add_row(name, shown)
    parts: list[RenderableType] = [_heading(record, facts, width=width), grid]
    if curves:
        rows = None if height is None else height - len(grid.rows) - 3
        parts += _curves(metrics, width=width, rows=rows)
    return Group(*parts)


def _heading(record: RunRecord, facts: RunFacts, *, width: int) -> Text:
    state = record.state or "waiting"
    text = Text(str(record.folder), style="bold", overflow="ellipsis", no_wrap=True)
    # The end of a path says more than its beginning.
    if len(text) + len(state) + 2 > width:
        text = Text("..." + str(record.folder)[-(max(8, width - len(state) - 5)) :], style="bold")
    text.append("  ").append(state, style=STYLES.get(state, "yellow"))
    ranks, device = (facts.devices or {}).get("ranks"), (facts.devices or {}).get("device")
    on = f"  on {ranks} x {device}" if ranks and device else ""
    return text.append(on) if len(text) + len(on) <= width else text


def _lines(
    record: RunRecord, metrics: Metrics, facts: RunFacts, *, width: int, now: float
) -> Iterator[tuple[str, RenderableType]]:
    """What is known, as (name, text), in the order of what is looked for first."""
    yield "step", _progress(record, metrics, width=width, now=now)
    if metrics.last:
        yield "loss", _loss(metrics)
    if metrics.last_evaluation:
        yield "evaluation", _evaluation(metrics)
    if metrics.last:
        yield "speed", _speed(metrics, facts)
    if (memory := _memory(record, metrics, facts, width=width)) is not None:
        yield "memory", memory
    if (found := facts.checkpoint) is not None:
        yield "checkpoint", f"step {found.step:,}, {format_age(now - found.written)}"
    if record.updated is not None:
        by = f", process {record.pid} on {record.host}" if record.pid and not record.ended else ""
        yield "written", format_age(now - record.updated) + by
    yield from _end(record, facts)


def _progress(record: RunRecord, metrics: Metrics, *, width: int, now: float) -> RenderableType:
    step, total = metrics.step or record.step, record.total_steps
    if not total:
        return f"{step:,}" if step else _waiting(record)
    left = None if record.ended else _seconds_left(record, metrics, now)
    after = f"{step / total:.0%}" + (f", about {format_duration(left)} left" if left is not None else "")
    return _beside(f"{step:,} of {total:,}", _bar(step, total, "green"), after, width=width)


def _waiting(record: RunRecord) -> str:
    if record.state == "starting":
        return "not yet: it reads data and weights"
    return "nothing written yet" if not record.ended else f"{record.step}"


def _seconds_left(record: RunRecord, metrics: Metrics, now: float) -> float | None:
    return metrics.seconds_left(
        total_steps=record.total_steps,
        started=record.started,
        started_step=record.started_step,
        updated=record.updated,
        now=now,
    )


def _beside(before: str, bar: RenderableType, after: str, *, width: int) -> RenderableType:
    """One line of text, bar and text; without the bar where there is no room for it."""
    if len(before) + len(after) + _BAR + 16 > width:
        return f"{before}, {after}"
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(before, bar, after)
    return line


def _bar(done: float, total: float, style: str) -> ProgressBar:
    return ProgressBar(total=total, completed=min(done, total), width=_BAR, complete_style=style, finished_style=style)


def _loss(metrics: Metrics) -> str:
    last = metrics.last
    said = [f"{_short(last.get('loss'))} at step {last['step']:,}"]
    said += [f"gradient norm {_short(last.get('grad_norm'))}", f"lr {_short(last.get('lr'))}"]
    return ", ".join(said)


def _evaluation(metrics: Metrics) -> str:
    row, curve = metrics.last_evaluation, metrics.curves["eval_loss"]
    said = f"{_short(row.get('eval_loss'))} after step {row['step']:,}"
    if len(curve.values) > 1:
        best = min(curve.values)
        said += f", best {_short(best)} after step {curve.steps[curve.values.index(best)]:,}"
    return said


def _speed(metrics: Metrics, facts: RunFacts) -> str:
    said = f"{_count(metrics.curves['tokens_per_second'].recent())} tokens/s"
    if (seconds := metrics.curves["step_seconds"].recent()) is not None:
        said += f", {format_duration(seconds)} a step"
    predicted = facts.predicted or {}
    each = predicted.get("tokens_per_second_per_gpu")
    return f"{said} (predicted {_count(each * predicted['ranks'])} tokens/s)" if each else said


def _memory(record: RunRecord, metrics: Metrics, facts: RunFacts, *, width: int) -> RenderableType | None:
    """The measured peak of a device beside what it has; on CPU, where no allocator can be asked, what else is known."""
    peak, source = peak_gib(facts, metrics.last)
    usable, predicted = usable_gib(facts), _predicted_gib(facts)
    after = f", predicted {format_bytes(predicted * GIB)}" if predicted is not None else ""
    if peak is not None and source == "allocator" and usable:
        share = f"{peak / usable:.0%} of {format_bytes(usable * GIB)}{after}"
        style = "green" if peak < 0.9 * usable else "yellow" if peak < 0.97 * usable else "red"
        return _beside(f"peak {format_bytes(peak * GIB)}", _bar(peak, usable, style), share, width=width)
    said = []
    if peak is not None:
        of = "peak" if source == "allocator" else "peak of the traced step"
        said.append(f"{of} {format_bytes(peak * GIB)}{after}")
    elif after:
        said.append(after.removeprefix(", "))
    if facts.resident_bytes is not None:
        said.append(f"rank 0 holds {format_bytes(facts.resident_bytes)} of RAM")
    elif (host := _host_gib(facts)) is not None:
        said.append(f"a rank held {format_bytes(host * GIB)} of RAM")
    return ", ".join(said) or None


def _predicted_gib(facts: RunFacts) -> float | None:
    found = (facts.predicted or {}).get("allocated_gib")
    if found is None and isinstance(peak := (facts.memory or {}).get("peak"), Mapping):
        found = peak.get("predicted_gib")
    return found if isinstance(found, int | float) else None


def _host_gib(facts: RunFacts) -> float | None:
    try:
        return float((facts.memory or {})["host_gib"]["measured"]["max"])
    except (KeyError, TypeError, ValueError):
        return None


def _lost(record: RunRecord) -> str:
    return f"{_LOST}; {how_to_go_on(record.folder)}"


def _end(record: RunRecord, facts: RunFacts) -> Iterator[tuple[str, RenderableType]]:
    """What is to be said of a run that is over: why, and how to go on."""
    if record.state == "lost":
        yield "", Text(_lost(record), style="red")
    elif record.message and record.state != "finished":
        yield "", Text(record.message, style="red" if record.state != "interrupted" else "yellow")
    if facts.out_of_memory is not None and isinstance(command := facts.out_of_memory.get("command"), str):
        yield "go on with", command
    if record.state == "finished" and (record.folder / "model").is_dir():
        yield "model", str(record.folder / "model")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not finite"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(metrics: Metrics, *, width: int, rows: int | None) -> list[RenderableType]:
    """The curves that there are numbers and room for: beside each other in a wide terminal, else under each other."""
    known = metrics.curves
    shown = [
        ("loss" + ("  (o: evaluation)" if known["eval_loss"].values else ""), known["loss"], known["eval_loss"]),
        ("gradient norm", known["grad_norm"], None),
        ("tokens/s", known["tokens_per_second"], None),
    ]
    shown = [(title, curve, marks) for title, curve, marks in shown if len(curve.values) > 1]
    if not shown:
        return []
    if width >= 100:
        high = min(12, max(3, (rows or 16) - 3))
        if rows is not None and rows < 6:
            return []
        side = (width - 2 * (len(shown) - 1)) // len(shown)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(*(format_curve(t, c, marks=m, width=side, height=high) for t, c, m in shown))
        return [Text(), grid]
    parts: list[RenderableType] = []
    left = 100 if rows is None else rows
    for title, curve, marks in shown:
        high = min(8 if not parts else 4, left - 3)
        if high < 3:
            break
        parts += [Text(), format_curve(title, curve, marks=marks, width=width, height=high)]
        left -= high + 3
    return parts


def format_curve(title: str, curve: Curve, *, marks: Curve | None = None, width: int, height: int) -> Text:
    """Draw a curve in braille, `height` rows high and with a title above and the steps below; `marks` as single o."""
    columns = max(8, width - SCALE)
    steps, values = _thinned(curve, 2 * columns)
    marked = _thinned(marks, columns // 2) if marks is not None else ([], [])
    low, high = min(values + marked[1]), max(values + marked[1])
    if low == high:
        low, high = low - 0.1 * abs(low) - 1e-9, high + 0.1 * abs(high) + 1e-9
    first, last = steps[0], steps[-1]
    # The canvas leaves out what lies on its upper ends: a character has 2 x 4 dots, and the last dot is to be one.
    canvas = Canvas(
        width=columns,
        height=height,
        xmin=first,
        xmax=first + (last - first) * 2 * columns / (2 * columns - 1),
        ymin=low,
        ymax=low + (high - low) * 4 * height / (4 * height - 1),
    )
    for index in range(1, len(steps)):
        canvas.line(steps[index - 1], values[index - 1], steps[index], values[index])
    for step, value in zip(*marked, strict=True):
        canvas.point(step, value, marker="o")  # one of before the first logged step is outside, and left out
    text = Text(f"{'':{SCALE}}{title}\n")
    for number, line in enumerate(canvas.plot().replace("\u2800", " ").split("\n")):
        at = high - (high - low) * number / max(1, height - 1)
        label = _label(at, high - low) if number in (0, height // 2, height - 1) else ""
        text.append(f"{label:>{SCALE - 2}} |").append(line.rstrip(), style="cyan").append("\n")
    left, right = f"{first:,.0f}", f"step {last:,.0f}"
    return text.append(f"{'':{SCALE}}{left}{right:>{columns - len(left)}}")


def _thinned(curve: Curve, most: int) -> tuple[list[float], list[float]]:
    """At most `most` points: the mean of each stretch, and the first and the last point as they are."""
    size = len(curve.values)
    if size <= most:
        return [float(step) for step in curve.steps], list(curve.values)
    steps, values = [float(curve.steps[0])], [curve.values[0]]
    inner = most - 2
    for number in range(inner):
        start, stop = 1 + (size - 2) * number // inner, 1 + (size - 2) * (number + 1) // inner
        steps.append((curve.steps[start] + curve.steps[stop - 1]) / 2)
        values.append(sum(curve.values[start:stop]) / (stop - start))
    return [*steps, float(curve.steps[-1])], [*values, curve.values[-1]]


def _label(value: float, span: float) -> str:
    """The value with as many digits as tell the rows of the curve apart."""
    digits = min(5, max(0, 1 - math.floor(math.log10(span))))
    text = f"{value:,.{digits}f}"
    return text if len(text) <= SCALE - 2 and span >= 1e-4 else f"{value:.2g}"


# --- without a terminal ----------------------------------------------------------------------------------------------


def format_row(row: Mapping[str, Any], *, total_steps: int | None) -> str:
    """Return one row of metrics.jsonl as a line, as the log of the run has it."""
    if "eval_loss" in row:
        return f"step {row['step']}: eval_loss {_short(row['eval_loss'])}"
    of = f"/{total_steps}" if total_steps else ""
    said = [f"step {row['step']}{of}", f"loss {_short(row.get('loss'))}", f"grad_norm {_short(row.get('grad_norm'))}"]
    if isinstance(seconds := row.get("step_seconds"), int | float):
        said.append(f"{seconds:.2f} s")
    if isinstance(speed := row.get("tokens_per_second"), int | float):
        said.append(f"{speed:,.0f} tokens/s")
    if isinstance(peak := row.get("max_allocated_gib"), int | float):
        said.append(format_bytes(peak * GIB))
    return "  ".join(said)


def format_end(record: RunRecord) -> str:
    """Return the last line about a run that is over."""
    why = _lost(record) if record.state == "lost" else record.message if record.state != "finished" else ""
    steps = format_number(record.step, "step")
    return f"{record.state}: {why}" if why else f"{record.state} after {steps}"
