"""What a person sees while long work runs: single lines, and a bar where a terminal can draw one.

In a notebook, a file or a pipe a bar becomes one line at the start and one at the end. Only the main rank shows any.
"""

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from fsdp_trainer.units import format_count, format_duration, printable


class SafeConsole(Console):
    """A console that never obeys what it shows: texts of data, models and run folders may hold escape sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with the characters that a terminal would obey written out."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def bear_any_text() -> None:
    """Let both streams write out what their encoding has no letter for (LC_ALL=C, latin-1) instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def make_console(*, stderr: bool = False) -> Console:
    """Make a console that never reads markup or breaks a line: paths and tracebacks come out as they are."""
    # Made anew each time: sys.stdout is another object in a notebook, under a test, and while a bar is drawn.
    # A notebook gets lines of text as well: rich would make each a display of its own, with a scroll bar.
    bear_any_text()
    return SafeConsole(stderr=stderr, soft_wrap=True, markup=False, highlight=False, emoji=False, force_jupyter=False)


def log_line(text: str | Text, *, is_main: bool = True) -> None:
    """Show one line on the main rank."""
    if is_main:
        make_console().print(text)


def log_error(text: str) -> None:
    """Show a message on standard error, from whichever rank has it."""
    make_console(stderr=True).print(text)


@contextmanager
def show_progress(description: str, *, total: int | None, is_main: bool = True) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work; call what it yields with the number of items done since the last call.

    `total` may be None where the amount is not known. Other ranks than the main one show nothing.
    """
    if not is_main:
        yield lambda count: None
        return
    console = make_console()
    started, done = time.monotonic(), 0
    # A kernel sets FORCE_COLOR, by which rich takes its output for a terminal, and nothing there moves a cursor.
    if console.is_terminal and console.file.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # transient: what stays on the screen is the one line below, the same as in a log file.
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(description, total=total)

            def advance_bar(count: int) -> None:
                nonlocal done
                done += count
                bar.advance(task, count)

            yield advance_bar
    else:
        console.print(f"{description} ..." if total is None else f"{description}: {format_count(total)} ...")

        def advance(count: int) -> None:
            nonlocal done
            done += count

        yield advance
    amount = format_count(done) if done else "done"  # nothing was counted where the result was there already
    console.print(f"{description}: {amount} in {format_duration(time.monotonic() - started)}")
