"""What a run leaves in `output_dir` beside checkpoints and model: settings, metrics and the state it ended in."""

import errno
import json
import math
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_trainer.errors import OutOfMemory, OutputError

METRICS, STATUS, SETTINGS = "metrics.jsonl", "status.json", "config.yaml"
CHECKPOINTS = "checkpoints"
CHECKSUMS = "checksums.json"  # in which an exported model lists its files
PREDICTION, DEVICES = "plan.json", "devices.json"  # what was predicted, and what it ran on
# Set by the launcher for its ranks: the command that was typed, and a folder for the status of a refused start.
COMMAND, REFUSALS = "FSDP_TRAINER_COMMAND", "FSDP_TRAINER_REFUSALS"
_TORN = re.compile(r"\..+\.[0-9a-f]{8}")  # how `write_text_atomically` names what it has not finished
_TORN_SECONDS = 3600.0  # a write takes seconds: what is older was left by a kill


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader sees the old or the new file whole, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp, whose files only this user can read: these are read by whoever may read the rest of the folder.
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with name.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # Ctrl-C too
        name.unlink(missing_ok=True)
        raise
    remove_torn(path.parent, older_than=_TORN_SECONDS)


def remove_torn(folder: Path, *, older_than: float = 0.0) -> None:
    """Remove what `write_text_atomically` left in `folder` when it was killed; all of it only where nobody else writes.

    Never raises: what stays is a few kilobytes.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not _TORN.fullmatch(entry.name):
                continue
            with suppress(OSError):
                if older_than == 0 or time.time() - entry.stat(follow_symlinks=False).st_mtime > older_than:
                    os.unlink(entry.path)


def how_to_go_on(output_dir: Path) -> str:
    """Say what the same command will do in a run folder: no message promises a checkpoint that is not there."""
    saved = sorted(path.name for path in (Path(output_dir) / CHECKPOINTS).glob("step-" + 8 * "[0-9]"))
    if not saved:
        return "no checkpoint is there yet: the same command starts anew"
    return f"the same command goes on from the last checkpoint, {saved[-1]}"


def again(what: str = "") -> str:
    """Return how the user starts the same run again: the command itself where it is known."""
    return os.environ.get(COMMAND) or f"start the same command again{what}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while the context is open into an OutputError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        # Of a failed replacement the second name counts: the first is a temporary file's, which says nothing.
        named = Path(os.fsdecode(error.filename2 or error.filename or path))
        raise OutputError(
            "A file of the run cannot be written.",
            values=f"{named if error.filename2 or named in path.parents else path}: {error.strerror or error}",
            fix=_FIXES.get(error.errno or 0, "set output_dir to a folder on a disk that works")
            + f"; {how_to_go_on(path if path.is_dir() else path.parent)}",
        ) from error


def explain_no_room(error: BaseException) -> OutputError | None:
    """Return a full disk or a spent quota as the error that it is, wherever it was met; None for anything else.

    What writes for us may tell the system's error in its own words (safetensors), or raise another over it (zipfile).
    """
    found: BaseException | None = error
    while found is not None:
        number = found.errno if isinstance(found, OSError) else None
        if number in _FULL or any(word in str(found) for word in (os.strerror(errno.ENOSPC), "os error 28)")):
            named = isinstance(found, OSError) and (found.filename2 or found.filename)
            return OutputError(
                "There is no room to write a file.",
                values=f"{os.fsdecode(named)}: {os.strerror(number or errno.ENOSPC)}" if named else str(found),
                fix="make room on that disk, or set output_dir, data.cache_dir or, for the caches, XDG_CACHE_HOME and "
                "HF_HOME on another one; a quota or `ulimit -f` may be the limit",
            )
        found = found.__cause__ or found.__context__
    return None


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM = "make room on that disk, or set output_dir on another one"
_NO_RIGHT = "give this user the right to write there, or set another output_dir"
_IN_THE_WAY = "move away what stands in its place, or set another output_dir"
_FIXES = {
    **dict.fromkeys(_FULL, _NO_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_RIGHT),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), _IN_THE_WAY),
}


def check_writable(output_dir: Path) -> None:
    """Make the run folder, and raise OutputError when no file can be made in it; leaves none."""
    with writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            return


def write_status(
    output_dir: Path, *, state: str, exit_code: int, step: int, message: str = "", total_steps: int | None = None
) -> None:
    """Record how the run stands: running | finished | interrupted | failed, with the exit code it ends with.

    The elastic agent turns every worker's exit code into 1, so whoever started the run reads the code here. Beside it
    stand who runs it and since when: `host`, `pid`, `started` (a time and a step) are of the process that wrote
    `running` first, whoever writes the end.

    A start that ends before it began leaves the status of the run that was here before, and says to the launcher alone
    how it ended (`REFUSALS`). Only one that was out of memory is written all the same: that is no refusal.
    """
    before, now = read_json(output_dir / STATUS) or {}, time.time()
    if (
        state in ("failed", "interrupted")
        and _is_of_an_earlier_start(output_dir / STATUS, before)
        and exit_code != OutOfMemory.exit_code
    ):
        if (refusals := os.environ.get(REFUSALS)) is None:
            return
        output_dir, before = Path(refusals), {}
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    start = {"started": now if state == "running" else None, "started_step": step, "total_steps": total_steps, **here}
    if state != "running" or (before.get("state") == "running" and here.items() <= before.items()):
        start |= {key: before[key] for key in start if before.get("started") and before.get(key) is not None}
    status = {"state": state, "exit_code": exit_code, "step": step, "message": message, **start, "updated": now}
    with writing(output_dir / STATUS):
        write_text_atomically(output_dir / STATUS, json.dumps(status) + "\n")


def _is_of_an_earlier_start(path: Path, status: Mapping[str, Any]) -> bool:
    """Return whether a run that had begun wrote this status, and it was over when this process began."""
    return status.get("started") is not None and not is_of_this_start(path)


def is_of_this_start(path: Path) -> bool:
    """Return whether a file was written after this process began, by it or by another rank."""
    try:
        return path.stat().st_mtime >= _process_began()
    except OSError:
        return False


def _process_began() -> float:
    """Return when this process began, in unix seconds; psutil rounds, and a restart may follow at once."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):  # no Linux
        return psutil.Process().create_time()
    return time.time() - age


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of somebody else's; ValueError for what is none, and for brackets within brackets without end."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a run; None where there is none, or none that can be read."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_settings(output_dir: Path, text: str) -> None:
    """Keep the settings of the run, fully resolved."""
    with writing(output_dir / SETTINGS):
        write_text_atomically(output_dir / SETTINGS, text)


def write_json(output_dir: Path, name: str, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Keep one JSON object in the run folder; `indent` None: on one line."""
    with writing(output_dir / name):
        write_text_atomically(output_dir / name, json.dumps(content, indent=indent) + "\n")


def append_metrics(output_dir: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object to metrics.jsonl; a number that is not finite becomes null, which JSON has."""
    row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    path = output_dir / METRICS
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def has_evaluation(output_dir: Path, *, step: int) -> bool:
    """Return whether metrics.jsonl holds an evaluation after `step`; call `trim_metrics` first, for whole lines."""
    path = output_dir / METRICS
    rows = map(parse_json, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
    return any(row["step"] == step and "eval_loss" in row for row in rows)


def last_evaluation(output_dir: Path, *, step: int) -> tuple[int, float] | None:
    """Return step and loss of the last evaluation up to `step`; None where there is none to read."""
    found = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        for row in map(parse_json, (output_dir / METRICS).read_text(encoding="utf-8").splitlines()):
            if row["step"] <= step and row.get("eval_loss") is not None:
                found = row["step"], float(row["eval_loss"])
    return found


def trim_metrics(output_dir: Path, *, after_step: int) -> int:
    """Drop rows of steps that a resume will do again, and a torn last line; return how many rows went."""
    path = output_dir / METRICS
    if not path.is_file():
        return 0
    kept, dropped = [], 0
    with writing(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            keep = parse_json(line)["step"] <= after_step
        except (ValueError, KeyError, TypeError):
            keep = False
        kept.append(line) if keep else None
        dropped += not keep
    if dropped:
        with writing(path):
            write_text_atomically(path, "".join(line + "\n" for line in kept))
    return dropped
