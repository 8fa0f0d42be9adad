"""One run a folder: whoever writes to an output_dir holds a lock on it, and a second run is refused at once.

The lock is the system's own (flock), which ends with the process that holds it, however that ends. On a file system
without working locks between machines (some NFS mounts) it holds between the processes of one machine only.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from fsdp_trainer.errors import FolderInUse
from fsdp_trainer.run_folder import read_json, write_text_atomically

LOCK_FILE, OWNER_FILE = ".lock", ".lock-owner.json"
_OWNER_SECONDS = 2.0  # between taking the lock and saying so, on a busy machine


def lock_folder(output_dir: Path, *, log: Callable[[str], None]) -> FileLock:
    """Take the lock on `output_dir`, making the folder if need be, and return it; `release()` gives it back.

    FolderInUse when another process holds it, saying which. What a killed run left is taken over, with a line.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(output_dir / LOCK_FILE), output_dir / OWNER_FILE
    _acquire(lock)
    if (before := read_owner(owner.parent)) is not None:
        log(f"took over {output_dir} from a run that did not end by itself: {_describe(before)}")
    write_text_atomically(owner, json.dumps(_this_process()) + "\n")
    return lock


def refuse_held_folder(output_dir: Path) -> None:
    """Raise FolderInUse when another run holds `output_dir`, before ranks are started for nothing.

    Only rank 0's lock decides: another run can come in between.
    """
    if not (Path(output_dir) / LOCK_FILE).exists():
        return
    lock = FileLock(Path(output_dir) / LOCK_FILE)
    _acquire(lock)
    lock.release()


def read_owner(output_dir: Path) -> dict[str, Any] | None:
    """Return host, pid and boot of the process that holds the folder or, after a kill, held it; None where none did."""
    return read_json(Path(output_dir) / OWNER_FILE)


def is_held(output_dir: Path) -> bool:
    """Return whether some process holds the folder, without making a file or keeping the lock."""
    try:
        import fcntl

        with (Path(output_dir) / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back as the file is closed
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no such lock here; nobody ever took it, or it cannot be looked at
        return False
    return False


def is_alive(process: Mapping[str, Any], *, since: float) -> bool | None:
    """Return whether a process (`host`, `pid`, `boot` where known) that was there at `since` still is.

    None where it is another machine's, which nothing here can tell.
    """
    pid, boot = process.get("pid"), process.get("boot")
    if process.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    if boot is not None and boot != _boot_id():
        return False
    try:
        found = psutil.Process(pid)
        # A number is given again: a process that began later is another one. Two seconds, for clocks are rounded.
        return found.status() != psutil.STATUS_ZOMBIE and found.create_time() <= since + 2
    except psutil.Error:
        return False


def unlock_folder(lock: FileLock) -> None:
    """Give the lock back at the end of a run, whatever the end."""
    Path(lock.lock_file).with_name(OWNER_FILE).unlink(missing_ok=True)
    lock.release()


def _acquire(lock: FileLock) -> None:
    folder = Path(lock.lock_file).parent
    try:
        # Not 0: a launcher that only looks holds it for a moment too.
        lock.acquire(timeout=0.2, poll_interval=0.02)
    except Timeout as error:
        raise FolderInUse(
            "Another run is writing to this output_dir.",
            values=f"{folder}: {_describe(_wait_for_owner(folder / OWNER_FILE))}",
            fix="set another output_dir, or end that run first",
        ) from error


def _wait_for_owner(owner: Path) -> dict[str, Any] | None:
    """Return who holds the lock, once that process has written it down; None if it does not."""
    deadline = time.monotonic() + _OWNER_SECONDS
    while (found := read_owner(owner.parent)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot_id()}


def _boot_id() -> str | None:
    # Without it a pid from before a restart of the machine would look like one of now.
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else None


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "held by a process that has not said yet who it is"
    return f"process {owner.get('pid')} on {owner.get('host')} (boot {owner.get('boot')})"
