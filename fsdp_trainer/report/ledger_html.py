"""What a run held of memory, predicted beside measured, as HTML: a notebook's cell shows it, report.html has it in it.

Takes what memory.json holds. What was not measured or not predicted is a dash, never a zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fsdp_trainer.report.charts import INK, colour_of, css_colour, drawing, make_axes, name_of, to_svg
from fsdp_trainer.report.ledger_text import format_peak
from fsdp_trainer.report.memory_picture import STACK
from fsdp_trainer.report.page import format_piece, render
from fsdp_trainer.units import format_duration

DASH = "–"


def format_ledger_html(ledger: Mapping[str, Any]) -> str:
    """Return the first line, the bars and the tables of a run's memory; `ledger` as memory.json."""
    return format_piece(ledger_section(ledger))


def ledger_section(ledger: Mapping[str, Any], *, with_chart: bool = True) -> Markup:
    """Return the same as a part of a page, which may have the bars of several runs in another place."""
    unit, times = unit_for(*_sizes(ledger))
    figure = draw_ledger({"": ledger}) if with_chart else None
    return render(
        "ledger.html.jinja",
        first=format_peak(ledger),
        chart=to_svg(figure, name="ledger", label="memory at the peak by kind, predicted beside measured")
        if figure
        else "",
        key=[(name_of(kind), css_colour(colour_of(kind))) for kind in ledger_kinds([ledger])],
        unit=unit,
        categories=[
            {
                "name": name_of(row["category"]),
                "colour": css_colour(colour_of(row["category"])),
                "measured": format_range(row["measured_gib"], times),
                "predicted": format_size(row["predicted_gib"], times),
                "difference": format_difference(highest(row["measured_gib"]), row["predicted_gib"]),
            }
            for row in _in_order(ledger["categories"], times)
        ],
        phases=[
            {
                "name": name_of(row["phase"]),
                "measured": format_range(row["measured_gib"], times),
                "reserved": format_range(row["reserved_gib"], times),
                "predicted": format_size(row["predicted_gib"], times),
                "difference": format_difference(highest(row["measured_gib"]), row["predicted_gib"]),
            }
            for row in ledger["phases"]
        ],
        reserves=any(row["reserved_gib"] is not None for row in ledger["phases"]),
        facts=list(_facts(ledger)),
        notes=list(_notes(ledger)),
    )


def draw_ledger(ledgers: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a figure with two stacked bars a run, measured and predicted, by kind; None where no kind is known."""
    bars = [bar for name, ledger in ledgers.items() for bar in _bars(name, ledger)]
    if not bars:
        return None
    usable = max((ledger["usable_gib"] or 0.0 for ledger in ledgers.values()), default=0.0)
    most = max(sum(bar.values()) for _, bar in bars)
    unit, times = unit_for(most)
    with drawing():
        figure, axes = make_axes(size=(4.2, 0.75 + 0.33 * len(bars)), xlabel=f"{unit} at the peak", ylabel="")
        for place, (_, bar) in enumerate(bars):
            left = 0.0
            for kind in STACK:
                size = bar.get(kind, 0.0) * times
                axes.barh(place, size, left=left, color=colour_of(kind), edgecolor=INK, linewidth=0.3, height=0.7)
                left += size
        axes.set_yticks(range(len(bars)), [name for name, _ in bars], parse_math=False)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        if most < usable < 2 * most:  # a line far away would press the bars flat
            axes.axvline(usable * times, color=INK, linestyle="--", linewidth=0.8)
    return figure


def _bars(name: str, ledger: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    before = f"{name}\n" if name else ""
    for what, size_of in (
        ("measured", lambda row: highest(row["measured_gib"])),
        ("predicted", lambda row: row["predicted_gib"]),
    ):
        bar = {row["category"]: size for row in ledger["categories"] if (size := size_of(row))}
        if bar:
            yield f"{before}{what}", bar


def ledger_kinds(ledgers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds that `draw_ledger` draws of these, from what stays to what comes and goes."""
    found = {kind for ledger in ledgers for _, bar in _bars("", ledger) for kind in bar}
    return [kind for kind in STACK if kind in found]


def _in_order(rows: Sequence[Mapping[str, Any]], times: float) -> list[Mapping[str, Any]]:
    """The kinds as they lie in the bars, without those that would read 0.00 both measured and predicted."""
    sizes = [max(highest(row["measured_gib"]) or 0.0, row["predicted_gib"] or 0.0) for row in rows]
    shown = [row for row, size in zip(rows, sizes, strict=True) if size * times >= 0.005]
    return sorted(shown, key=lambda row: STACK.index(row["category"]) if row["category"] in STACK else len(STACK))


def _sizes(ledger: Mapping[str, Any]) -> list[float]:
    rows = [*ledger["categories"], *ledger["phases"], ledger["peak"] | {"measured_gib": None}]
    found = [size for row in rows for size in (highest(row.get("measured_gib")), row.get("predicted_gib"))]
    return [size for size in (*found, ledger["peak"]["measured_gib"]) if size is not None]


def _facts(ledger: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What else is known, by name."""
    for name, entry in (("allocated at most", ledger["allocated_gib"]), ("reserved at most", ledger["reserved_gib"])):
        if entry is not None:
            unit, times = unit_for(highest(entry) or 0.0)
            yield name, f"{format_range(entry, times)} {unit}"
    if ledger["fragmentation"] is not None:
        low, high = 100 * ledger["fragmentation"]["min"], 100 * ledger["fragmentation"]["max"]
        yield "reserved, not allocated", f"{high:.1f} %" if low == high else f"{low:.1f} to {high:.1f} %"
    if ledger["allocator_retries"] is not None:
        yield "allocator retries", f"{ledger['allocator_retries']['max']:,}"
    host = ledger["host_gib"]
    if host is not None and highest(host["measured"]) is not None:
        predicted = "" if host["predicted"] is None else f" (predicted {host['predicted']:.2f})"
        yield "host RAM of a rank", f"{format_range(host['measured'], 1.0)} GiB{predicted}"


def _notes(ledger: Mapping[str, Any]) -> Iterator[str]:
    """How the numbers were made."""
    yield {
        "allocator": "Measured by the CUDA allocator over the whole run; by kind at the peak of the traced step.",
        "trace": "Measured as the bytes alive in the traced step: a CPU has no allocator to ask.",
        None: "Nothing was measured: no step was traced.",
    }[ledger["source"]]
    if ledger["prediction"] is not None:
        yield f"Predicted by the {ledger['prediction']}."
    traced = ledger["traced_step"]
    if traced is not None:
        usual = traced["usual_seconds"]
        beside = "" if usual is None else f", a usual one {format_duration(usual)}"
        yield f"Step {traced['step']} was traced: it took {format_duration(traced['seconds'])}{beside}."
    if ledger["ranks"] > 1:
        yield f"Two numbers are the least and the most of {ledger['ranks']} ranks; the differences are of the most."


# --- numbers ---------------------------------------------------------------------------------------------------------


def unit_for(*sizes: float) -> tuple[str, float]:
    """Return the unit for sizes in GiB, and how many of it a GiB is: MiB where GiB would be 0.00."""
    return ("GiB", 1.0) if max(sizes, default=1.0) >= 0.5 else ("MiB", 1024.0)


def highest(entry: Mapping[str, float] | float | None) -> float | None:
    """Return the most over ranks."""
    return entry["max"] if isinstance(entry, Mapping) else entry


def format_size(gib: float | None, times: float) -> str:
    """Return a size in the unit that has `times` to a GiB, or a dash."""
    return DASH if gib is None else f"{gib * times:.2f}"


def format_range(entry: Mapping[str, float] | float | None, times: float) -> str:
    """Return the least and the most over ranks, one number where they read the same, or a dash."""
    if not isinstance(entry, Mapping):
        return format_size(entry, times)
    low, high = format_size(entry["min"], times), format_size(entry["max"], times)
    return high if low == high else f"{low} to {high}"


def format_difference(measured: float | None, predicted: float | None) -> str:
    """Return how far the prediction lies from what was measured, in percent of the latter, or a dash."""
    if not measured or predicted is None:
        return DASH
    return f"{100 * (predicted / measured - 1):+.1f} %".replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")
