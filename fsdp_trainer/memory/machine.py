"""What this machine has, as far as a plan needs it before torch is imported: its RAM, and any sign of GPUs."""

import shutil
from pathlib import Path

import psutil

# Made by the drivers of NVIDIA, of AMD, and of Windows for its Linux.
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def machine_bytes(*, root: Path = Path("/")) -> int:
    """Return the bytes of RAM that all processes here may use together: the machine's, or less in a container.

    A control group's limit holds for the groups below it, so the least on the way up counts (Linux,
    Documentation/admin-guide/cgroup-v2.rst `memory.max`; cgroup-v1/memory.rst `memory.limit_in_bytes`). `root` is
    where /proc and /sys are looked for.
    """
    limits = [limit for file in _limit_files(root) if (limit := _read_limit(file)) is not None]
    return min([psutil.virtual_memory().total, *limits])


def count_kills(*, root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed so far for want of memory: of the control group, else in all.

    `oom_kill` of memory.events or memory.oom_control counts those of a group, by whatever killer (Linux,
    Documentation/admin-guide/cgroup-v2.rst), and of /proc/vmstat those of the machine. Only a rise says something.
    """
    counters = [
        file.with_name("memory.events" if file.name == "memory.max" else "memory.oom_control")
        for file in _limit_files(root)
    ]
    found = [count for file in counters if (count := _read_kills(file)) is not None]
    return sum(found) if found else _read_kills(root / "proc/vmstat") or 0


def _read_kills(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def may_have_gpus() -> bool:
    """Return False where no driver is in sight, which spares asking torch."""
    return shutil.which("nvidia-smi") is not None or any(Path(name).exists() for name in _DEVICES)


def _limit_files(root: Path) -> list[Path]:
    """Return the files that may limit this process's memory, of both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return []
    found = []
    for line in lines:  # hierarchy:controllers:path
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        # In a container the path is often the host's, and the limit stands at the top of what is mounted.
        found += [base / place / file for place in (group, *group.parents)]
    return found


def _read_limit(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or "max"
        return None
