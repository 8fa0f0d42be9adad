"""How a run stands, as its folder tells it from outside: for `watch` and `runs`, in another process than the run's.

Reads only, and takes every file as missing that is torn, of another version or not there yet.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fsdp_trainer.errors import DistributedError
from fsdp_trainer.run_folder import DEVICES, METRICS, PREDICTION, SETTINGS, STATUS, read_json
from fsdp_trainer.run_lock import OWNER_FILE, is_alive, is_held, read_owner

GIB = 2**30
MEMORY, OUT_OF_MEMORY, LADDER = "memory.json", "out_of_memory.json", "ladder.json"
OUT_OF_MEMORY_CODE = 8  # the exit code of a run that had no memory left
STATES = ("starting", "running", "finished", "interrupted", "failed", "out of memory", "lost")
ENDED = STATES[2:]
_STEP_FOLDER = re.compile(r"step-(\d{8})")
# On another machine only the age of what it wrote is known. A rank that is missing ends a run after
# train.timeout_minutes (30), so a run that lives has written within this or within twenty of its steps.
SILENT_SECONDS = 3600.0


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint of a run, and when it was published (unix seconds)."""

    path: Path
    step: int
    written: float


@dataclass(frozen=True)
class RunRecord:
    """How a run stands; times in unix seconds, None where the folder does not say."""

    folder: Path
    state: str | None  # one of STATES; None before a run has written here
    exit_code: int | None
    message: str
    step: int  # of the last checkpoint while it runs, of the end after it
    started_step: int  # the step it began with at this start
    total_steps: int | None
    started: float | None
    updated: float | None
    host: str | None
    pid: int | None

    @property
    def ended(self) -> bool:
        """True when nothing more is to come from the processes that were at it."""
        return self.state in ENDED

    @property
    def command_code(self) -> int:
        """The exit code of a command that has followed the run: 0 while it runs, then the run's own."""
        if self.state == "lost":
            return DistributedError.exit_code
        return (self.exit_code or 1) if self.ended and self.state != "finished" else 0


@dataclass(frozen=True)
class RunFacts:
    """What else lies in a run folder: JSON objects as they are, None where there are none."""

    devices: Mapping[str, Any] | None
    predicted: Mapping[str, Any] | None  # the chosen candidate of plan.json, with `ranks`
    memory: Mapping[str, Any] | None
    out_of_memory: Mapping[str, Any] | None
    checkpoint: Checkpoint | None
    resident_bytes: int | None  # of rank 0, while it runs on this machine


def read_record(folder: Path, *, step_seconds: float | None = None) -> RunRecord:
    """Read how the run in `folder` stands; `step_seconds`, what a logged step of it takes, where that is known."""
    folder = Path(folder)
    status = read_json(folder / STATUS) or {}
    updated = max((t for name in (METRICS, STATUS) if (t := _modified(folder / name)) is not None), default=None)
    return RunRecord(
        folder=folder,
        state=_state(folder, status, updated, step_seconds),
        exit_code=_whole(status.get("exit_code")),
        message=str(status.get("message") or ""),
        step=_whole(status.get("step")) or 0,
        started_step=_whole(status.get("started_step")) or 0,
        total_steps=_whole(status.get("total_steps")),
        started=_number(status.get("started")),
        updated=updated,
        host=status.get("host") if isinstance(status.get("host"), str) else None,
        pid=_whole(status.get("pid")),
    )


def _state(folder: Path, status: Mapping[str, Any], updated: float | None, step_seconds: float | None) -> str | None:
    written = status.get("state")
    alive = _is_worked_on(folder, status)
    if written == "running":
        if alive is None and updated is not None:
            alive = time.time() - updated < max(SILENT_SECONDS, 20 * (step_seconds or 0.0))
        return "running" if alive else "lost"
    if alive:  # what the status file says is of an earlier start
        return "starting"
    if written == "failed" and status.get("exit_code") == OUT_OF_MEMORY_CODE:
        return "out of memory"
    if written in STATES:
        return written
    return "lost" if (folder / OWNER_FILE).exists() and alive is False else None


def _is_worked_on(folder: Path, status: Mapping[str, Any]) -> bool | None:
    """Return whether the process lives that holds the folder, or that wrote `running`; None if only another host knows.

    The lock is asked last: a process that lives in another container of this machine cannot be seen by its number.
    """
    owner, since = read_owner(folder), _modified(folder / OWNER_FILE)
    known = []
    if owner is not None and since is not None:
        known.append(is_alive(owner, since=since))
    if status.get("state") == "running" and (started := _number(status.get("started"))) is not None:
        known.append(is_alive(status, since=started))
    if True in known or is_held(folder):
        return True
    return None if None in known else False


def read_facts(record: RunRecord) -> RunFacts:
    """Read what else lies in the folder of a run."""
    folder = record.folder
    return RunFacts(
        devices=read_json(folder / DEVICES),
        predicted=_predicted(read_json(folder / PREDICTION)),
        memory=read_json(folder / MEMORY),
        out_of_memory=read_json(folder / OUT_OF_MEMORY) if record.state == "out of memory" else None,
        checkpoint=find_newest_checkpoint(folder),
        resident_bytes=_resident(record) if record.state == "running" else None,
    )


def _predicted(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    try:
        assert plan is not None
        return {**plan["candidates"][plan["chosen"]], "ranks": int(plan["hardware"]["count"])}
    except (AssertionError, KeyError, IndexError, TypeError, ValueError):
        return None


def _resident(record: RunRecord) -> int | None:
    if record.started is None or not is_alive({"host": record.host, "pid": record.pid}, since=record.started):
        return None
    try:
        return psutil.Process(record.pid).memory_info().rss
    except psutil.Error:
        return None


def find_newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint by its name, which a save gives only to a complete one; its bytes are not read."""
    try:
        with os.scandir(folder / "checkpoints") as entries:
            steps = [(int(match[1]), entry) for entry in entries if (match := _STEP_FOLDER.fullmatch(entry.name))]
        step, entry = max(steps, key=lambda found: found[0])
        return Checkpoint(Path(entry.path), step, entry.stat().st_mtime)
    except (OSError, ValueError):  # none yet, or pruned while they were listed
        return None


def peak_gib(facts: RunFacts, last: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the measured peak of a run and whose it is: the device's allocator, or the live bytes of a traced step.

    `last` is the last row of metrics.jsonl.
    """
    if (allocated := _number(last.get("max_allocated_gib"))) is not None:
        return allocated, "allocator"
    peak = (facts.memory or {}).get("peak")
    measured = _number(peak.get("measured_gib")) if isinstance(peak, Mapping) else None
    return measured, str((facts.memory or {}).get("source") or "trace")


def usable_gib(facts: RunFacts) -> float | None:
    """Return what one device has for a run to use; None on CPU, and where nothing says it yet."""
    if (usable := _number((facts.memory or {}).get("usable_gib"))) is not None:
        return usable
    size = _number((facts.devices or {}).get("memory_bytes"))
    return size / GIB if size is not None else None


# --- several runs ----------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Return whether a run has written into `folder`, or is about to."""
    has = {name for name in (STATUS, OWNER_FILE, METRICS, SETTINGS) if (folder / name).is_file()}
    return bool(has & {STATUS, OWNER_FILE}) or {METRICS, SETTINGS} <= has


def find_runs(folders: Sequence[Path], *, depth: int = 3) -> list[Path]:
    """Return the runs that `folders` are or hold, down to `depth` levels: a ladder's rungs lie two below."""
    found: dict[Path, Path] = {}
    for folder in folders:
        for run in _runs_below(Path(folder), depth):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        if not (folder / LADDER).is_file():  # what a run itself holds is many files and no run
            return
    if depth == 0:
        return
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for path in inside:
        yield from _runs_below(Path(path), depth - 1)


def measure_disk(folder: Path) -> int:
    """Return the bytes that a folder's files take, each counted once however many names it has."""
    total, seen = 0, set()
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except OSError:  # pruned meanwhile
                continue
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                total += found.st_size
    return total


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
