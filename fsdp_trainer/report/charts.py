"""Charts by matplotlib, as SVG inside a page or as PNG files: the same figures for both.

In a page text and lines take the page's own colour, so that one chart is right in light and dark, and the letters are
text; charts are small, so that the letters can be read when one fills the width of a phone.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fsdp_trainer.report.memory_picture import COLOURS
from fsdp_trainer.run_folder import writing

# Drawn in this colour, nearly black; in a page it becomes the colour of the text around.
INK = "#010203"
# Of Okabe and Ito's colours those that are seen on white as on black; one a run.
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
RUN_DASHES = ("-", "--", ":", "-.")
MEASURED, PREDICTED, RESERVED, SPEED = "#0072b2", "#e69f00", "#56b4e9", "#009e73"
SIZE = (4.2, 2.7)  # inches; 302 points wide, so that 8 point letters are 9.5 pixels on a phone of 390
_STYLE: Mapping[Any, Any] = {
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.titlesize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "text.parse_math": False,  # a run may be named $x$
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
}


def colour_of(category: str) -> str:
    """Return the colour of a kind of memory; what is black elsewhere takes the text's colour, to be seen on black."""
    colour = COLOURS.get(category, "#999999")
    return INK if colour == "#000000" else colour


def css_colour(colour: str) -> str:
    """Return a chart's colour as a page writes it."""
    return "currentColor" if colour == INK else colour


def name_of(kind: str) -> str:
    """Return a kind of memory or a phase as a person reads it."""
    return kind.replace("_", " ")


@contextmanager
def drawing() -> Iterator[None]:
    """Hold the style of our charts while one is made; the user's own settings of matplotlib are as they were after."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in letters the font has not
        yield


def make_axes(*, size: tuple[float, float] = SIZE, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """Return (figure, axes) with both axes named; call it within `drawing`."""
    from matplotlib.figure import Figure  # half a second, and only for this

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def draw_bars(
    names: Sequence[str], bars: Mapping[str, Sequence[float | None]], *, colours: Mapping[str, str], xlabel: str
) -> tuple[Any, Any]:
    """Return (figure, axes) with a group of flat bars a name; `bars` holds for each kind a length a name, or None."""
    with drawing():
        figure, axes = make_axes(size=(SIZE[0], 0.8 + 0.42 * len(names)), xlabel=xlabel, ylabel="")
        height = 0.76 / len(bars)
        for number, (kind, lengths) in enumerate(bars.items()):
            for place, length in enumerate(lengths):
                if length is not None:
                    at = place + (number - (len(bars) - 1) / 2) * height
                    axes.barh(at, length, height=0.94 * height, color=colours[kind])
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    return figure, axes


def to_svg(figure: Any, *, name: str, label: str) -> Markup:
    """Return the figure as SVG for a page; `name` keeps its ids apart from other charts', `label` is read out."""
    import matplotlib as mpl

    with drawing(), mpl.rc_context({"svg.hashsalt": name}):
        file = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return Markup(_for_page(file.getvalue(), label=label))


def _for_page(svg: str, *, label: str) -> str:
    """Drop what a page does not need of matplotlib's file: head, size, unused ids, digits behind the second."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]).replace(INK, "currentColor"), svg)
    # The page's own font: letters and numbers are about as wide as in matplotlib's.
    svg = re.sub(r"font: ([^;\"]*?)'[^;\"]*", lambda found: f"font: {found[1]}system-ui, sans-serif", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None  # matplotlib writes it
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view[0]} role="img"'
    return re.sub(r"<svg[^>]*>", lambda _: f'{head} aria-label="{Markup.escape(label)}">', svg, count=1)


def save_png(figure: Any, path: Path, *, title: str, legend: Mapping[str, tuple[str, str]]) -> Path:
    """Write the figure as a picture of its own, on white: with a title, and a legend of name -> (colour, dashes)."""
    with drawing(), writing(path):
        figure.suptitle(title, parse_math=False)
        if legend:
            columns = 2 if max(map(len, legend)) > 14 else 3
            rows = -(-len(legend) // columns)
            figure.set_figheight(figure.get_figheight() + 0.1 + 0.17 * rows)
            figure.legend(*_handles(legend), loc="outside lower center", ncols=min(columns, len(legend)))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, facecolor="white")
    return path


def _handles(legend: Mapping[str, tuple[str, str]]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, ls=dashes, linewidth=2.5) for colour, dashes in legend.values()]
    return lines, [f" {name}" for name in legend]  # a name that begins with _ would be left out


def run_styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return name -> (colour, dashes) for runs that are drawn over one another."""
    count = len(RUN_COLOURS)
    return {
        name: (RUN_COLOURS[place % count], RUN_DASHES[place // count % len(RUN_DASHES)])
        for place, name in enumerate(names)
    }
