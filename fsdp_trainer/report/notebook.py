"""A run in a notebook's cell while it goes: bar, loss curve and the last lines, in one display that is updated.

IPython is taken from the kernel that has it and imported by nothing here, so that scripts and terminals need none.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.report.result_html import format_result_html, format_run_so_far, prepare_to_draw

LINES = 500  # of the output that are kept in the cell; all of it is in the run folder
SECONDS_BETWEEN_UPDATES, SECONDS_WITHOUT_NEWS = 2.0, 5.0
SHARE_OF_TIME = 0.1  # that drawing may take of this process, where a curve of many steps is slow to draw


def execution_count() -> int | None:
    """Return the number of the cell that is being executed, None outside of a kernel."""
    shell = _shell()
    return shell.execution_count if shell is not None else None


def in_kernel() -> bool:
    """Return whether this process is a notebook's kernel, which shows HTML."""
    return _shell() is not None


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


@contextmanager
def show_run(folder: Path) -> Iterator["Cell"]:
    """Show a run in this cell until the context closes; what is yielded is to be told of its output.

    What stays is the run's result, or where it ended by an error what was last seen of it.
    """
    cell = Cell(folder)
    cell.update()
    try:
        yield cell
    except BaseException:
        cell.show(format_run_so_far(folder, lines=cell.lines, seconds=cell.seconds, is_over=True))
        raise
    cell.show(format_result_html(folder, lines=cell.lines))


@dataclass
class Cell:
    """One display of a cell, updated as often as a person looks at it."""

    folder: Path
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    _has_news: bool = False
    _started: float = field(default_factory=time.monotonic)
    _next_update: float = 0.0
    _handle: Any = None

    @property
    def seconds(self) -> float:
        """Seconds since the run was started."""
        return time.monotonic() - self._started

    def add(self, line: str) -> None:
        """Take a line of output, and update the display where it is time."""
        self.lines.append(line)
        self._has_news = True
        if time.monotonic() >= self._next_update:
            self.update()

    def rest(self) -> None:
        """Use a moment without output: show what has come since the last update, or that time goes by."""
        prepare_to_draw()
        if time.monotonic() >= self._next_update + (0.0 if self._has_news else SECONDS_WITHOUT_NEWS):
            self.update()

    def update(self) -> None:
        """Show the run as its folder tells it now."""
        before = time.monotonic()
        self.show(format_run_so_far(self.folder, lines=self.lines, seconds=self.seconds))
        now = time.monotonic()
        self._has_news = False
        self._next_update = now + max(SECONDS_BETWEEN_UPDATES, (now - before) / SHARE_OF_TIME)

    def show(self, html: str) -> None:
        """Replace what is shown."""
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))
