"""A ladder of techniques as HTML: what each rung holds and how fast it is, as bars and as a table.

Takes what ladder.json holds, finished or not: a rung that ran out of memory or was not run is shown as such.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_trainer.report.charts import INK, MEASURED, PREDICTED, SPEED, draw_bars, to_svg
from fsdp_trainer.report.ledger_html import DASH, format_difference, format_size, unit_for
from fsdp_trainer.report.page import format_page, format_piece, render

COLOURS = {"measured": MEASURED, "predicted": PREDICTED}


def format_ladder_html(ladder: Mapping[str, Any], *, page: bool = True) -> str:
    """Return a whole page, or with `page` False the same for a notebook's cell; `ladder` as ladder.json."""
    unit, times = unit_for(*_sizes(ladder["rungs"]))
    title = f"{ladder['model']} on {ladder['hardware']}"
    memory, speed = draw_ladder_memory(ladder["rungs"]), draw_ladder_speed(ladder["rungs"])
    part = render(
        "ladder.html.jinja",
        title=title,
        ladder=ladder,
        unit=unit,
        memory=to_svg(memory, name="ladder-memory", label="peak memory of each rung") if memory else "",
        speed=to_svg(speed, name="ladder-speed", label="tokens per second of each rung") if speed else "",
        colours=COLOURS,
        rungs=[_cells(rung, times) for rung in ladder["rungs"]],
    )
    return format_page(f"ladder: {title}", part) if page else format_piece(part)


def _cells(rung: Mapping[str, Any], times: float) -> dict[str, Any]:
    speed, step = rung["tokens_per_second"], rung["step_seconds"]
    loss = (rung["first_loss"], rung["last_loss"])
    return {
        "name": rung["name"],
        "what": rung["what"],
        "settings": [f"{name}: {value}" for name, value in rung["settings"].items()],
        "outcome": rung["outcome"],
        "message": rung["message"] or "",
        "predicted": format_size(rung["predicted_gib"], times),
        "measured": format_size(rung["measured_gib"], times),
        "difference": format_difference(rung["measured_gib"], rung["predicted_gib"]),
        "speed": DASH if speed is None else f"{speed:,.0f}",
        "step": DASH if step is None else f"{step:.2f}",
        "loss": DASH if None in loss else f"{loss[0]:.3f} to {loss[1]:.3f}",
        "folder": rung["folder"] or "",
    }


def _sizes(rungs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [size for rung in rungs for size in (rung["measured_gib"], rung["predicted_gib"]) if size is not None]


def draw_ladder_memory(rungs: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure with the predicted beside the measured peak of each rung; None where neither is known."""
    sizes = _sizes(rungs)
    if not sizes:
        return None
    unit, times = unit_for(*sizes)
    bars = {
        "measured": [_times(rung["measured_gib"], times) for rung in rungs],
        "predicted": [_times(rung["predicted_gib"], times) for rung in rungs],
    }
    figure, axes = draw_bars(
        [rung["name"] for rung in rungs], bars, colours=COLOURS, xlabel=f"peak of the fullest rank, {unit}"
    )
    _say_outcomes(axes, bars["measured"], rungs, offset=-0.19)
    usable = max((rung["usable_gib"] or 0.0 for rung in rungs), default=0.0)
    if max(sizes) / 2 < usable < 2 * max(sizes):  # a line far away would press the bars flat
        axes.axvline(usable * times, color=INK, linestyle="--", linewidth=0.8)
    return figure


def draw_ladder_speed(rungs: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure with the tokens per second of each rung; None where no rung has any."""
    speeds = [rung["tokens_per_second"] for rung in rungs]
    if not any(speeds):
        return None
    names = [rung["name"] for rung in rungs]
    figure, axes = draw_bars(names, {"speed": speeds}, colours={"speed": SPEED}, xlabel="tokens/s of all ranks")
    _say_outcomes(axes, speeds, rungs, offset=0.0)
    return figure


def _times(size: float | None, times: float) -> float | None:
    return None if size is None else size * times


def _say_outcomes(
    axes: Any, lengths: Sequence[float | None], rungs: Sequence[Mapping[str, Any]], *, offset: float
) -> None:
    """Write the outcome where a bar is missing."""
    for place, (length, rung) in enumerate(zip(lengths, rungs, strict=True)):
        if length is None:
            at = (0, place + offset)
            axes.annotate(rung["outcome"], at, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
