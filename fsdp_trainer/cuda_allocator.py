"""Expandable segments for torch's CUDA allocator: what is freed in one size can be used in another. No torch here.

The allocator reads its settings from the environment at the first allocation, so each way of starting a run sets them
before: launch.py for the processes it starts, train.py under a bare `accelerate launch`, and `build_runtime` for a
script or a notebook.
"""

from collections.abc import MutableMapping

SETTING = "expandable_segments:True"
# The first is the name since torch 2.9; the others are older and still read (2.14, c10/cuda/CUDAAllocatorConfig.h).
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_expandable_segments(environ: MutableMapping[str, str]) -> bool:
    """Turn expandable segments on, unless something is said about the allocator already; return whether it was done."""
    if any(name in environ for name in NAMES):
        return False
    environ[NAMES[0]] = SETTING
    return True
