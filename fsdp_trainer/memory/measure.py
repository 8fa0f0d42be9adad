"""What a device says about its memory; nothing where there is no device allocator to ask."""

import torch


def measure_memory(device: torch.device) -> dict[str, float | int | None]:
    """Return peak allocated and reserved memory in GiB (2**30) and allocation retries since the process started.

    All None on CPU: the resident size of a process says little about its tensors.
    """
    if device.type != "cuda":
        return {"max_allocated_gib": None, "max_reserved_gib": None, "num_alloc_retries": None}
    stats = torch.cuda.memory_stats(device)
    return {
        "max_allocated_gib": stats["allocated_bytes.all.peak"] / 2**30,
        "max_reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
        "num_alloc_retries": stats["num_alloc_retries"],
    }
