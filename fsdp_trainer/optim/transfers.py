"""Copies between a device and the host that overlap with computing: a stream of their own, and pinned host memory.

On a CPU, which has no memory apart, the same calls copy at once.
"""

import ctypes
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

_SMALL = 2**20  # bytes


class Arrival(Protocol):
    """What a queued copy is waited for with."""

    def synchronize(self) -> None:
        """Block the host until the copy is done."""


class _Arrived:
    def synchronize(self) -> None:
        pass


class Lane:
    """A stream that copies go through in order."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self._stream: Any = None if self._module is None else self._module.Stream()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Queue a copy behind all that the current stream has queued.

        Nothing may touch either tensor's memory, nor may the caller let go of it, until the copy was waited for.
        """
        if self._module is None:
            target.copy_(source)
            return _Arrived()
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def join(self) -> None:
        """Let what the current stream queues from here on wait for every copy queued so far."""
        if self._module is not None:
            self._module.current_stream().wait_stream(self._stream)


def host_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised host tensor of the same shape, sharded as `tensor` is."""
    return torch.empty_like(tensor, dtype=dtype, device="cpu", requires_grad=False)


def can_pin() -> bool:
    """Tell whether the driver pins host memory at all: under WSL or a small memlock limit it may not."""
    try:
        torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True


def pin(tensors: Iterable[torch.Tensor]) -> bool:
    """Pin host tensors where they lie; False when the driver refuses one, whose copies then go through its own buffers.

    In place, because torch's pinned allocator rounds every size up to a power of two (c10, CachingHostAllocator). Those
    below 1 MiB are left: they travel at once in any case, and several may lie in one page.
    """
    if not torch.cuda.is_available():
        return False
    runtime: Any = torch.cuda.cudart()
    pinned = True
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALL:
            continue
        address = storage.data_ptr()
        if int(runtime.cudaHostRegister(address, storage.nbytes(), 1)) != 0:  # 1: portable, for every context
            forget_cuda_error()
            pinned = False
            continue
        weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
    return pinned


def forget_cuda_error() -> None:
    """Take back the error that a refused call left in this thread: the next kernel's launch check would raise it.

    `cudaGetLastError` of the CUDA runtime that torch has loaded, which torch.cuda.cudart() does not offer (2.14).
    """
    maps = Path("/proc/self/maps")
    loaded = re.findall(r"(/\S*/libcudart\S*\.so[.\d]*)$", maps.read_text(), re.MULTILINE) if maps.exists() else []
    for library in dict.fromkeys(loaded):
        ctypes.CDLL(library).cudaGetLastError()
