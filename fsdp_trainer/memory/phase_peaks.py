"""The most memory in each phase of a run, as torch's CUDA allocator counts it; nothing is counted on CPU.

Its peaks are read and set back where one phase ends and the next begins, without waiting for the device: the host is
ahead of the GPU, but the allocator hands memory out when the host asks for it, so its counts are the host's in time.
"""

import torch


class PhasePeaks:
    """The largest allocated and reserved bytes by phase; `close(phase)` is called where one ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)

    def close(self, phase: str) -> None:
        """Count what was held since the last call as that of `phase`."""
        if not self._on_gpu:
            return
        found = torch.cuda.memory_stats_as_nested_dict(self._device)  # half the price of the flat memory_stats
        for peaks, name in ((self.allocated, "allocated_bytes"), (self.reserved, "reserved_bytes")):
            peaks[phase] = max(peaks.get(phase, 0), found[name]["all"]["peak"])
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def most(self) -> tuple[int, int]:
        """The most bytes allocated and reserved in the phases that have ended."""
        return max(self.allocated.values(), default=0), max(self.reserved.values(), default=0)

    @property
    def retries(self) -> int | None:
        """How often the allocator has had to give cached memory back to go on; None on CPU."""
        return torch.cuda.memory_stats_as_nested_dict(self._device)["num_alloc_retries"] if self._on_gpu else None
