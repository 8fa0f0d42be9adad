"""A run as a notebook's cell shows it: while it goes, and what came of it. Read from the run folder each time."""

import statistics
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.report.charts import to_svg
from fsdp_trainer.report.ledger_html import ledger_section
from fsdp_trainer.report.page import format_piece, render
from fsdp_trainer.report.run_charts import Chart, build_charts
from fsdp_trainer.report.run_html import run_facts, run_trouble
from fsdp_trainer.report.run_record import RunRecord, read_run
from fsdp_trainer.units import format_duration

CURVES = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")


def format_result_html(folder: Path, *, lines: Collection[str] = ()) -> str:
    """Return a run's numbers, curves and memory; `lines` of its output are there to be unfolded."""
    run = read_run(folder)
    return format_piece(
        render(
            "result.html.jinja",
            title=str(folder),
            facts=list(run_facts(run)),
            trouble=run_trouble(run),
            notes=run.notes,
            charts=[_figure(chart) for chart in build_charts([run]) if chart.name in CURVES],
            ledger=ledger_section(run.ledger) if run.ledger else "",
            lines=list(lines),
        )
    )


def format_run_so_far(folder: Path, *, lines: Collection[str], seconds: float, is_over: bool = False) -> str:
    """Return bar, loss curve and output of a run that goes on, or ended without a result; `seconds` since its start."""
    run = _read(folder)
    charts = [] if run is None else [chart for chart in build_charts([run]) if chart.name == "loss"]
    return format_piece(
        render(
            "run_so_far.html.jinja",
            title=str(folder),
            bar=None if run is None or is_over else _bar(run),
            words=", ".join(_words(run, seconds=seconds, is_over=is_over)) if lines or is_over else "starting",
            charts=[_figure(chart) for chart in charts],
            lines=list(lines),
        )
    )


def format_shown_above(folder: Path) -> str:
    """Return the note that stands in place of a result where its cell has shown it already."""
    return format_piece(render("shown_above.html.jinja", folder=str(folder)))


def prepare_to_draw() -> None:
    """Import what draws curves, a second of work, while there is nothing else to do."""
    import matplotlib.figure  # noqa: F401


def _read(folder: Path) -> RunRecord | None:
    try:
        return read_run(folder)
    except ConfigError:  # its files come when data and model are ready
        return None


def _total_steps(run: RunRecord) -> int | None:
    total = run.status.get("total_steps") or (run.settings.get("train") or {}).get("max_steps")
    return total if isinstance(total, int) else None


def _bar(run: RunRecord) -> dict[str, Any] | None:
    total, step = _total_steps(run), run.rows[-1]["step"] if run.rows else 0
    if not total or run.status.get("state") != "running":
        return None
    return {"step": step, "total": total, "percent": 100 * min(step / total, 1.0)}


def _words(run: RunRecord | None, *, seconds: float, is_over: bool) -> Iterator[str]:
    if run is not None and run.rows:
        total = _total_steps(run)
        yield f"step {run.rows[-1]['step']:,}" + (f" of {total:,}" if total else "")
    yield f"{'ended after' if is_over else 'running for'} {format_duration(seconds)}"
    bar = _bar(run) if run is not None and not is_over else None
    times = run.curve("step_seconds").known[-20:].tolist() if run is not None else []
    if bar is not None and times and bar["step"] < bar["total"]:
        yield f"about {format_duration(statistics.median(times) * (bar['total'] - bar['step']))} left"


def _figure(chart: Chart) -> dict[str, Any]:
    label = f"{chart.title}. {chart.caption}".strip(". ")
    return {
        "title": chart.title,
        "caption": chart.caption,
        "svg": to_svg(chart.figure, name=chart.name, label=label),
    }
