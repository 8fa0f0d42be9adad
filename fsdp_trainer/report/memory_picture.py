"""The memory of one run over time, stacked by kind, with the peak marked: as an image, or in a terminal.

Time is the order of allocations, not seconds: a phase is as wide as what happens in it. Takes the timeline of the full
simulation (`Simulation.ledger.timeline`) as well as the closed form's (`quick_timeline`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.memory.recording import CATEGORIES

GIB = 2**30
PICTURES = (".png", ".svg", ".pdf")
SCALE = 9  # columns left of the picture in a terminal
# From what stays (bottom) to what comes and goes; a letter for terminals without colour. Okabe and Ito's colours,
# which people who do not see red and green apart can tell.
LETTERS: dict[str, str] = dict(zip(CATEGORIES, "PGOAUDCTB", strict=True))
COLOURS: dict[str, str] = dict(
    zip(
        CATEGORIES,
        ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#f0e442", "#999999", "#000000"),
        strict=True,
    )
)
Moment = tuple[int, str, Mapping[str, int]]
ORDER = ("parameters", "optimizer_state", "gradients", "buffers", "activations", "unsharded_parameters")
STACK: tuple[str, ...] = (*ORDER, *(category for category in CATEGORIES if category not in ORDER))


def check_picture(path: str | Path) -> None:
    """Refuse a picture whose name does not say how to write it; no work is needed to tell."""
    if Path(path).suffix.lower() not in PICTURES:
        fix = f"end its name in {', '.join(PICTURES)}"
        raise ConfigError("A picture cannot be written in this format.", values=str(path), fix=fix)


def draw_memory(
    timeline: Sequence[Moment], path: str | Path, *, title: str = "", limit_bytes: float | None = None
) -> Path:
    """Write the picture to `path`; its ending says the format (.png, .svg, .pdf). Returns the path.

    `limit_bytes` draws a line at what a GPU has, where it is not far above. ConfigError for an ending that cannot be
    drawn, OutputError where no file can be made.
    """
    from matplotlib.figure import Figure  # half a second, and only for this

    path = Path(path)
    check_picture(path)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    xs = [index for index, _, _ in timeline]
    shown = [category for category in STACK if any(alive.get(category, 0) for _, _, alive in timeline)]
    index, phase, alive = find_peak(timeline)
    unit, size = unit_of_bytes(sum(alive.values()))
    heights = [[alive.get(category, 0) / size for _, _, alive in timeline] for category in shown]
    names = [category.replace("_", " ") for category in shown]
    axes.stackplot(xs, heights, labels=names, colors=[COLOURS[category] for category in shown], linewidth=0)
    mark_phases(axes, timeline)
    top = sum(alive.values()) / size
    # A line far above the run would press it flat.
    limit = limit_bytes / size if limit_bytes is not None and limit_bytes / size < 2 * top else None
    axes.plot([index], [top], marker="v", color="black", markersize=9)
    side = "right" if index > (xs[0] + xs[-1]) / 2 else "left"
    axes.annotate(
        f"peak {top:.2f} {unit} in {phase}", (index, top), xytext=(0, 10), textcoords="offset points", ha=side
    )
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
        axes.text(xs[0], limit, f" {limit:.1f} {unit} can be allocated", va="bottom")
    axes.set(
        xlim=(xs[0], max(xs[-1], xs[0] + 1)), ylabel=f"{unit} on one GPU", xlabel="order of allocations", title=title
    )
    axes.set_ylim(0, 1.18 * max(top, limit or 0.0))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(
            "The picture cannot be written.",
            values=f"{path}: {error.strerror or error}",
            fix="name a file in a folder that can be made and written",
        ) from error
    return path


def unit_of_bytes(most: int) -> tuple[str, int]:
    """Return the unit for a run whose peak is `most`, and its bytes: MiB where GiB would all be 0.00."""
    return ("GiB", GIB) if most >= GIB // 2 else ("MiB", 2**20)


def mark_phases(axes: Any, timeline: Sequence[Moment], *, colour: str = "black", letter: float = 0.01) -> None:
    """Shade every second phase and write its name where there is room; `letter` is a letter's share of the width."""
    width = timeline[-1][0] - timeline[0][0] or 1
    for number, (phase, start, stop) in enumerate(_phases(timeline)):
        axes.axvspan(start, stop, color=colour, alpha=0.06 * (number % 2), linewidth=0, zorder=0)
        if (stop - start) / width > letter * len(phase):
            axes.text((start + stop) / 2, 0.98, phase, transform=axes.get_xaxis_transform(), ha="center", va="top")


def _phases(timeline: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    """(name, first event, last event) of each stretch of one phase, in order."""
    start, current = timeline[0][0], timeline[0][1]
    for index, phase, _ in timeline:
        if phase != current:
            yield current, start, index
            start, current = index, phase
    yield current, start, timeline[-1][0]


def find_peak(timeline: Sequence[Moment]) -> Moment:
    """Return the moment with the most bytes alive, the first of them."""
    return max(timeline, key=lambda moment: sum(moment[2].values()))


def format_memory(timeline: Sequence[Moment], *, width: int = 80 - SCALE, height: int = 14) -> Text:
    """Return the picture as text of `height` rows: a letter (and colour) for each kind, the peak under a v.

    Each column is the fullest moment of its stretch, so the peak is always there. `width` is the columns drawn at most,
    unless there are more phases than fit with two letters each; those of the scale come on top.
    """
    columns = _columns(timeline, width)
    index, phase, peak = find_peak(timeline)
    top = sum(peak.values()) or 1
    stacks = [_stack(alive, top=top, height=height) for _, _, alive in columns]
    at = next(number for number, column in enumerate(columns) if column[0] == index)
    unit, size = unit_of_bytes(top)
    label = f"peak {top / size:.2f} {unit} in {phase}"
    has_room = at < len(columns) / 2 or len(label) > 8 + at
    text = Text(f"{'':{9 + at}}v {label}\n" if has_room else f"{label:>{8 + at}} v\n")
    for row in reversed(range(height)):
        text.append(
            f"{top * (row + 1) / height / size:7.2f} |"
            if row % 3 == height % 3 - 1 or row == height - 1
            else " " * 8 + "|"
        )
        for stack in stacks:
            category = stack[row] if row < len(stack) else None
            text.append(LETTERS[category] if category else " ", style=COLOURS[category] if category else "")
        text.append("\n")
    text.append(" " * 8 + "+" + "-" * len(columns) + "\n" + " " * 9 + _phase_line(columns) + "\n")
    for category in STACK:
        if peak.get(category, 0) >= 0.005 * size:
            text.append(f"{'':9}{LETTERS[category]} ", style=COLOURS[category])
            text.append(f"{category.replace('_', ' '):22}{peak[category] / size:8.2f} {unit} at the peak\n")
    return text


def _columns(timeline: Sequence[Moment], width: int) -> list[Moment]:
    """`width` moments, each the fullest of its stretch; every phase gets room for its name, or for a part of it."""
    stretches = [[moment for moment in timeline if start <= moment[0] < stop] for _, start, stop in _phases(timeline)]
    stretches[-1].append(timeline[-1])
    columns = []
    widths = _widths([(len(moments[0][1]), len(moments)) for moments in stretches], width)
    for moments, wanted in zip(stretches, widths, strict=True):
        # Few moments are drawn wide: what lies between two does not change.
        picked = min(wanted, len(moments))
        bounds = [len(moments) * number // picked for number in range(picked + 1)]
        fullest = [find_peak(moments[first:last]) for first, last in itertools.pairwise(bounds)]
        columns += [fullest[number * picked // wanted] for number in range(wanted)]
    return columns


def _widths(stretches: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Share `width` columns among stretches of (letters of the name, moments): what the names leave goes by moments."""
    longest = max(letters for letters, _ in stretches)
    while longest > 2 and sum(min(letters, longest) + 1 for letters, _ in stretches) > width:
        longest -= 1
    names = [min(letters, longest) + 1 for letters, _ in stretches]
    spare, total = max(0, width - sum(names)), sum(moments for _, moments in stretches)
    return [name + spare * moments // total for name, (_, moments) in zip(names, stretches, strict=True)]


def _stack(alive: Mapping[str, int], *, top: int, height: int) -> list[str]:
    """The category of each cell from the bottom up: the one that lies at the cell's middle."""
    limits, total = [], 0
    for category in STACK:
        total += alive.get(category, 0)
        limits.append((total, category))
    cells = []
    for row in range(height):
        middle = (row + 0.5) * top / height
        category = next((name for limit, name in limits if middle < limit), None)
        if category is None:
            break
        cells.append(category)
    return cells


def _phase_line(columns: Sequence[Moment]) -> str:
    """The phases' names under the columns, cut to what fits."""
    line, start = "", 0
    for number in range(1, len(columns) + 1):
        if number == len(columns) or columns[number][1] != columns[start][1]:
            width = number - start
            line += columns[start][1][: max(0, width - 1)].ljust(width)
            start = number
    return line.rstrip()
