"""Run train.py's own `main` on the ranks of a test, where one rank has a device of so many bytes and no more.

The device is a dispatch mode that counts live tensors and fails as CUDA's allocator does, its words included.
"""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path
from typing import Any

from tests.fault_runs import _load_main
from tests.ranks import RankFailed, run_ranks


def _limited(limit: int | None, phase: str | None) -> Any:
    """Return the mode; with `phase` the limit holds in that phase alone, without `limit` never."""
    import torch

    from benchmarks.live_bytes import LiveBytes
    from fsdp_trainer.memory.recording import PHASES

    class Limited(LiveBytes):
        def __init__(self) -> None:
            super().__init__()
            self.phase, self.peaks = "load", dict.fromkeys(PHASES, 0)

        def _resize(self, key: int, size: int) -> None:
            more = size - self._sizes.get(key, 0)
            if limit is not None and more > 0 and phase in (None, self.phase) and self.current + more > limit:
                raise torch.OutOfMemoryError(words(more, limit=limit, allocated=self.current))
            super()._resize(key, size)
            self.peaks[self.phase] = max(self.peaks[self.phase], self.current)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "profiler::_record_function_enter_new" and args[0] in PHASES:
                gc.collect()  # a cycle of a functional collective's wrapper: when it goes is chance
                self.phase = args[0]
                self.peaks[self.phase] = max(self.peaks[self.phase], self.current)
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Limited()


def words(asked: int, *, limit: int, allocated: int) -> str:
    """Say what c10/cuda/CUDACachingAllocator.cpp says (torch 2.14)."""
    return (
        f"CUDA out of memory. Tried to allocate {_size(asked)}. GPU 0 has a total capacity of {_size(limit)} of which "
        f"{_size(limit - allocated)} is free. Including non-PyTorch memory, this process has {_size(allocated)} memory "
        f"in use. Of the allocated memory {_size(allocated)} is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def train(settings: dict[str, Any], limit: int | None, phase: str | None) -> dict[str, int]:
    """Run train.py; rank 1 has `limit` bytes. Return this rank's peak of live bytes by phase; end with a bad code."""
    rank, folder = int(os.environ["RANK"]), Path(settings["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"settings-of-rank{rank}.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    mode = _limited(limit if rank == 1 else None, phase)
    with mode:
        code = _load_main()(["--config", str(file)])
    if code:
        os._exit(code)  # as the script does: nothing is closed that others wait for
    return mode.peaks


def run(settings: dict[str, Any], *, limit: int | None = None, phase: str | None = None) -> list[dict[str, int]]:
    """Train on two ranks and return the peaks of each; RankFailed where one ends with a code."""
    return run_ranks(train, 2, settings, limit, phase, timeout=120.0)


def run_out(settings: dict[str, Any], *, limit: int, phase: str) -> dict[int, int]:
    """Train where memory runs out and return the exit code of each rank that failed."""
    try:
        run_ranks(train, 2, settings, limit, phase, timeout=60.0, grace=20.0)
    except RankFailed as error:
        found = re.findall(r"--- rank (\d+)\n.*?died with exit code (-?\d+)", str(error))
        return {int(rank): int(code) for rank, code in found}
    return {}
