"""The charts of one run, or of several over one another: what a report shows and what its pictures are.

Each is a figure with a name, a title and what must be known to read it. A chart that nothing is known for is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_trainer.report.charts import (
    INK,
    MEASURED,
    PREDICTED,
    RESERVED,
    colour_of,
    draw_bars,
    drawing,
    make_axes,
    name_of,
    run_styles,
)
from fsdp_trainer.report.curves import COLUMNS, needs_log, smooth, smoothing_rows, thin
from fsdp_trainer.report.ledger_html import draw_ledger, highest, ledger_kinds, unit_for
from fsdp_trainer.report.memory_picture import STACK, find_peak, mark_phases, unit_of_bytes
from fsdp_trainer.report.run_record import Curve, RunRecord

ALONE, PALE, EVALUATION = ("#0072b2", "-"), "#56b4e9", "#d55e00"  # of a run that is drawn by itself
Legend = Mapping[str, tuple[str, str]]  # name -> (colour, dashes)


@dataclass(frozen=True)
class Chart:
    """A figure; `name` is its file's, `caption` says how it is read, `legend` names its colours."""

    name: str
    title: str
    caption: str
    figure: Any
    legend: Legend


@dataclass(frozen=True)
class _Kind:
    """A number over steps: `ylabel` has its unit, `smoothed` lays its mean over it, `from_zero` is of the axis."""

    key: str
    name: str
    title: str
    ylabel: str
    smoothed: bool = False
    from_zero: bool = False
    digits: str = ".4g"


_KINDS = (
    _Kind("loss", "loss", "Loss", "loss, nats a token", smoothed=True),
    _Kind("grad_norm", "gradient_norm", "Gradient norm", "L2 norm before clipping"),
    _Kind("lr", "learning_rate", "Learning rate", "learning rate a step", from_zero=True),
    _Kind("tokens_per_second", "tokens_per_second", "Speed", "tokens/s of all ranks", True, True, ",.0f"),
)


def build_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts that something is known for, runs over one another where there are several."""
    charts = [chart for kind in _KINDS if (chart := _draw_curves(runs, kind))]
    charts += [chart for chart in (_draw_memory(runs), _draw_phases(runs), _draw_ledgers(runs)) if chart]
    return charts + [chart for run in runs if (chart := _draw_step(run, alone=len(runs) == 1))]


def styles_of(runs: Sequence[RunRecord]) -> dict[str, tuple[str, str]]:
    """Return name -> (colour, dashes) of each run, as its curves are drawn."""
    return {runs[0].name: ALONE} if len(runs) == 1 else run_styles([run.name for run in runs])


# --- numbers over steps ----------------------------------------------------------------------------------------------


def _draw_curves(runs: Sequence[RunRecord], kind: _Kind) -> Chart | None:
    curves = {run.name: run.curve(kind.key) for run in runs}
    evaluations = {run.name: run.curve("eval_loss") for run in runs} if kind.key == "loss" else {}
    values = np.concatenate([curve.known for curve in (*curves.values(), *evaluations.values())])
    if not len(values):
        return None
    styles = styles_of(runs)
    with drawing():
        figure, axes = make_axes(xlabel="step", ylabel=kind.ylabel)
        for name, curve in curves.items():
            colour, dashes = styles[name]
            _draw_curve(axes, curve, kind, colour=colour, dashes=dashes)
        for name, curve in evaluations.items():
            colour = EVALUATION if len(runs) == 1 else styles[name][0]
            shown = thin(curve)
            mark = "o" if len(shown.steps) <= 40 else ""  # more would hide the line
            axes.plot(shown.steps, shown.values, color=colour, linestyle="--", linewidth=1.2, marker=mark, markersize=3)
        _scale(axes, values, kind)
    caption = "; ".join(_caption(list(curves.values()), kind, has_evaluation=any(map(_is_known, evaluations.values()))))
    return Chart(kind.name, kind.title, caption, figure, styles if len(runs) > 1 else {})


def _draw_curve(axes: Any, curve: Curve, kind: _Kind, *, colour: str, dashes: str) -> None:
    mark = "o" if len(curve.known) == 1 else ""
    is_smoothed = kind.smoothed and len(curve.known) >= 10
    shown = thin(curve)
    pale = PALE if (colour, dashes) == ALONE else colour
    look = {"color": pale, "alpha": 0.6, "linewidth": 0.8} if is_smoothed else {"color": colour, "linewidth": 1.3}
    axes.plot(shown.steps, shown.values, linestyle=dashes, marker=mark, **look)
    if is_smoothed:
        shown = thin(smooth(curve, rows=smoothing_rows(len(curve.known))))
        axes.plot(shown.steps, shown.values, color=colour, linewidth=1.6, linestyle=dashes)


def _scale(axes: Any, values: np.ndarray, kind: _Kind) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    first, last = axes.get_xlim()
    axes.set_xlim(min(first, (first + last) / 2 - 1), max(last, (first + last) / 2 + 1))  # of a single step too
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    digits = kind.digits
    if kind.from_zero:
        axes.set_ylim(0, 1.08 * values.max() or 1.0)
    elif needs_log(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        digits = "g"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format(value, digits)))


def _caption(curves: Sequence[Curve], kind: _Kind, *, has_evaluation: bool) -> Iterator[str]:
    counts = [len(curve.known) for curve in curves if len(curve.known) >= 10]
    if kind.smoothed and counts:
        over = sorted({smoothing_rows(count) for count in counts})
        spans = f"{over[0]:,}" if len(over) == 1 else f"{over[0]:,} to {over[-1]:,}"
        yield f"pale: each logged step; strong: smoothed over {spans}"
    if has_evaluation:
        yield "broken line: evaluation"
    longest = max(len(curve.steps) for curve in curves)
    if longest > 4 * COLUMNS:
        yield f"{longest:,} steps, drawn as the lowest and highest of each of {COLUMNS} stretches"


def _is_known(curve: Curve) -> bool:
    return len(curve.known) > 0


# --- memory ----------------------------------------------------------------------------------------------------------


def _draw_memory(runs: Sequence[RunRecord]) -> Chart | None:
    """What rank 0's allocator says: the most that was allocated and reserved up to each step."""
    curves = {run.name: (run.curve("max_allocated_gib"), run.curve("max_reserved_gib")) for run in runs}
    values = np.concatenate([curve.known for pair in curves.values() for curve in pair])
    if not len(values):
        return None
    styles, (unit, times) = styles_of(runs), unit_for(values.max())
    with drawing():
        figure, axes = make_axes(xlabel="step", ylabel=f"{unit} at most so far, rank 0")
        for name, (allocated, reserved) in curves.items():
            colour, dashes = styles[name]
            for curve, line, width in ((allocated, dashes, 1.5), (reserved, ":", 1.2)):
                shown = thin(curve)
                axes.plot(shown.steps, shown.values * times, color=colour, linestyle=line, linewidth=width)
        _scale(axes, values * times, _Kind("", "", "", "", from_zero=True, digits=".4g"))
    caption = "line: allocated; dotted: reserved"
    return Chart("memory", "Memory over steps", caption, figure, styles if len(runs) > 1 else {})


def _draw_step(run: RunRecord, *, alone: bool) -> Chart | None:
    """The traced step's memory, stacked by kind."""
    timeline = [(int(event), str(phase), alive) for event, phase, alive in run.ledger.get("timeline") or ()]
    if not timeline:
        return None
    first, last = timeline[0][0], timeline[-1][0]
    index, phase, peak = find_peak(timeline)
    top = sum(peak.values())
    unit, size = unit_of_bytes(top)
    kinds = [kind for kind in STACK if any(alive.get(kind) for _, _, alive in timeline)]
    with drawing():
        figure, axes = make_axes(xlabel="order of allocations", ylabel=f"{unit} alive, rank 0")
        xs = [event for event, _, _ in timeline]
        heights = [[alive.get(kind, 0) / size for _, _, alive in timeline] for kind in kinds]
        axes.stackplot(xs, heights, colors=[colour_of(kind) for kind in kinds], linewidth=0)
        mark_phases(axes, timeline, colour=INK, letter=0.02)
        axes.plot([index], [top / size], marker="v", color=INK, markersize=5)
        axes.set(xlim=(first, max(last, first + 1)), ylim=(0, 1.2 * top / size or 1.0))
        axes.tick_params(labelbottom=False, bottom=False)
    step = (run.ledger.get("traced_step") or {}).get("step")
    title = f"Memory in step {step}" if step is not None else "Memory in one step"
    caption = f"by kind; the mark: peak {top / size:.2f} {unit} in {name_of(phase)}"
    name = "memory_step" if alone else f"memory_step_{run.name.replace('/', '_')}"
    legend = {name_of(kind): (colour_of(kind), "-") for kind in kinds}
    return Chart(name, title if alone else f"{title}: {run.name}", caption, figure, legend)


def _draw_phases(runs: Sequence[RunRecord]) -> Chart | None:
    rows = [
        (name_of(row["phase"]) if len(runs) == 1 else f"{run.name}, {name_of(row['phase'])}", row)
        for run in runs
        for row in run.ledger.get("phases", ())
    ]
    found = {
        "measured": [highest(row["measured_gib"]) for _, row in rows],
        "reserved": [highest(row["reserved_gib"]) for _, row in rows],
        "predicted": [row["predicted_gib"] for _, row in rows],
    }
    found = {kind: sizes for kind, sizes in found.items() if any(size is not None for size in sizes)}
    if not found:
        return None
    unit, times = unit_for(*(size for sizes in found.values() for size in sizes if size is not None))
    bars = {kind: [None if size is None else size * times for size in sizes] for kind, sizes in found.items()}
    colours = {"measured": MEASURED, "reserved": RESERVED, "predicted": PREDICTED}
    figure, _ = draw_bars([name for name, _ in rows], bars, colours=colours, xlabel=f"{unit} at most, fullest rank")
    return Chart("phases", "Peak of each phase", "", figure, {kind: (colours[kind], "-") for kind in bars})


def _draw_ledgers(runs: Sequence[RunRecord]) -> Chart | None:
    ledgers = {run.name if len(runs) > 1 else "": run.ledger for run in runs if run.ledger}
    figure = draw_ledger(ledgers)
    if figure is None:
        return None
    legend = {name_of(kind): (colour_of(kind), "-") for kind in ledger_kinds(list(ledgers.values()))}
    return Chart("ledger", "Memory at the peak by kind", "", figure, legend)
