"""A run in a notebook's cell while it goes: bar, loss curve and the last lines, in one display that is updated.

IPython is taken from the kernel that has it and imported by nothing here, so that scripts and terminals need none.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.report.result_html import format_result_html, format_run_so_far

LINES = 500  # of the output that are kept in the cell; all of it is in the run folder
SECONDS_BETWEEN_UPDATES = 2.0
SHARE_OF_TIME = 0.05  # that drawing may take of this process, where a curve of many steps is slow to draw


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
def show_run(folder: Path) -> Iterator[Callable[[str], None]]:
    """Show a run in this cell until the context closes; yields what each line of its output is to be given to.

    What stays is the run's result, or where it ended by an error what was last seen of it.
    """
    cell = _Cell(folder)
    try:
        yield cell.add
    except BaseException:
        cell.show(format_run_so_far(folder, lines=cell.lines, seconds=cell.seconds, is_over=True))
        raise
    cell.show(format_result_html(folder, lines=cell.lines))


@dataclass
class _Cell:
    folder: Path
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    started: float = field(default_factory=time.monotonic)
    next_update: float = 0.0
    handle: Any = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def add(self, line: str) -> None:
        """Take a line of output, and update the display where it is time."""
        self.lines.append(line)
        before = time.monotonic()
        if before < self.next_update:
            return
        self.show(format_run_so_far(self.folder, lines=self.lines, seconds=self.seconds))
        now = time.monotonic()
        self.next_update = now + max(SECONDS_BETWEEN_UPDATES, (now - before) / SHARE_OF_TIME)

    def show(self, html: str) -> None:
        from IPython.display import HTML, display

        if self.handle is None:
            self.handle = display(HTML(html), display_id=True)
        else:
            self.handle.update(HTML(html))
