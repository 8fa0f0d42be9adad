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
