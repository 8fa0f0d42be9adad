"""What a device and a process say about their memory; nothing where there is no device allocator to ask."""

import re
from pathlib import Path

import psutil
import torch

from fsdp_trainer.memory.phase_peaks import PhasePeaks


def measure_memory(device: torch.device, *, phases: PhasePeaks | None = None) -> dict[str, float | int | None]:
    """Return peak allocated and reserved memory in GiB (2**30) and allocation retries since the process started.

    `phases` has the peaks that were read and set back meanwhile. All None on CPU: the resident size of a process says
    little about its tensors.
    """
    if device.type != "cuda":
        return {"max_allocated_gib": None, "max_reserved_gib": None, "num_alloc_retries": None}
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = phases.most if phases is not None else (0, 0)
    return {
        "max_allocated_gib": max(allocated, stats["allocated_bytes.all.peak"]) / 2**30,
        "max_reserved_gib": max(reserved, stats["reserved_bytes.all.peak"]) / 2**30,
        "num_alloc_retries": stats["num_alloc_retries"],
    }


def measure_host_peak() -> int:
    """Return the most bytes that were ever resident of this process; those of now where no kernel says.

    Linux, proc(5), VmHWM. Not ru_maxrss, which a process takes over from the one that started it.
    """
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else psutil.Process().memory_info().rss
