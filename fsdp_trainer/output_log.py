"""Where the processes of a notebook's run write, and how it is read while they do.

A file and not a pipe: when the notebook's kernel dies, the processes can still write, and so save and stop.
"""

import os
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

OUTPUT = "output.log"  # in the run folder; a run that goes on appends to it
PARENT = "FSDP_TRAINER_PARENT"
_SECONDS_BETWEEN_LOOKS = 0.1
# A kernel sets these so that what it runs writes in colour, which a file would hold as escape codes.
_COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS")


def describe_parent(environ: MutableMapping[str, str]) -> None:
    """Tell the child that it is to stop when this process is gone, and that nobody sees colours."""
    environ[PARENT] = str(os.getpid())
    for name in _COLOURS:
        environ.pop(name, None)


def follow_lines(
    path: Path,
    *,
    start: int,
    is_over: Callable[[], bool],
    on_line: Callable[[str], None],
    on_quiet: Callable[[], None] = lambda: None,
) -> None:
    """Hand over each line that is written to `path` after its byte `start`, until `is_over` and all has been read.

    `on_quiet` is called ten times a second while nothing more is there to read.
    """
    rest = b""
    with path.open("rb") as file:
        file.seek(start)
        while True:
            ended = is_over()  # asked before the reading: what was written until then is read below
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                on_line(_text(line))
            if ended:
                break
            on_quiet()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if rest:
        on_line(_text(rest))


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")
