"""What is known of a rank that ran out of memory: where it was, what it asked for, what was there and who held it.

Read from the exception and from what the run holds. Nothing is allocated on the device, and no object is searched for.
"""

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

GIB = 2**30
Place = Literal["device", "host"]

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|B|KiB|MiB|GiB)"
# c10/cuda/CUDACachingAllocator.cpp, `malloc`, and c10/core/impl/alloc_cpu.cpp (torch 2.14).
_SAID = {
    "requested": (rf"[Tt]ried to allocate {_SIZE}",),
    "total": (rf"total capacity of {_SIZE}",),
    "free": (rf"of which {_SIZE} is free",),
    "allowed": (rf"{_SIZE} allowed",),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
}
# Raised as plain RuntimeErrors: the driver's own words, cuBLAS's, NCCL's and bitsandbytes'.
_DEVICE_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "Error out of memory at line",
    "HIP out of memory",
)
_HOST_WORDS = ("DefaultCPUAllocator", "can't allocate memory", "cudaErrorHostMemory", "Cannot allocate memory")


def find_cause(error: BaseException) -> tuple[BaseException, Place] | None:
    """Return the exception that says memory ran out, and of what; None where `error` comes from something else.

    What it was raised from is looked through, and what each rank failed at while a checkpoint was written.
    """
    for found in _chain(error):
        text = str(found)
        if isinstance(found, torch.OutOfMemoryError):
            return found, "device"
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno == 12):
            return found, "host"
        if isinstance(found, RuntimeError):
            if any(words in text for words in _HOST_WORDS):
                return found, "host"
            if any(words in text for words in _DEVICE_WORDS):
                return found, "device"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, CheckpointException):
            waiting += [failure for failure, _ in found.failures.values()]
        waiting += [other for other in (found.__cause__, found.__context__) if other is not None]


def read_message(text: str) -> dict[str, int]:
    """Return the bytes that an allocator's message names: requested, total, free, allowed, allocated, unallocated."""
    found = {}
    for name, patterns in _SAID.items():
        for pattern in patterns:
            if match := re.search(pattern, text):
                found[name] = round(float(match[1]) * _UNITS[match[2]])
                break
    return found


def find_module(error: BaseException, model: nn.Module | None) -> str | None:
    """Return the name of the innermost module of `model` whose code the exception came through.

    FSDP's own frames, which gather a layer's weights also in the backward, know the layer they work for. None where the
    stack has neither: a kernel of the backward is called by no Python code.
    """
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    found = None
    for part in reversed(list(_chain(error))):
        for frame, _ in traceback.walk_tb(part.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                found = names.get(id(owner)) or found
            elif isinstance(owner, list | dict) or owner is None:
                continue
            elif isinstance(name := getattr(owner, "_module_fqn", None), str) and name:
                found = name
    return found


def layer_of(module: str | None) -> int | None:
    """Return the number of the decoder layer that a module's name lies in: `model.layers.12.mlp` -> 12."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module or "")
    return int(match[1]) if match else None


def drop_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of an exception hold, and of the frames."""
    for part in _chain(error):
        traceback.clear_frames(part.__traceback__)
        part.__traceback__ = None


def measure_device(device: torch.device, said: Mapping[str, int]) -> dict[str, int]:
    """Return free, total, allocated and reserved bytes as the message had them, else as the driver says now."""
    found = dict(said)
    if "allocated" in said:
        found["reserved"] = said["allocated"] + said.get("unallocated", 0)
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
            now = {"free": free, "total": total, "allocated": torch.cuda.memory_allocated(device)}
            found = {**now, "reserved": torch.cuda.memory_reserved(device), **found}
        except RuntimeError:  # a context that cannot answer any more
            pass
    return found


def find_limit(found: Mapping[str, int]) -> int | None:
    """Return the bytes of tensors that the device could not hold: what it had for them, or less where it was in pieces.

    `found` is what `measure_device` returned. The context and other processes are not counted in.
    """
    if "allocated" not in found:
        return None
    asked = found["allocated"] + found.get("requested", 0)
    had = found.get("reserved", found["allocated"]) + found.get("free", 0)
    if "free" not in found:
        return asked or None
    # A share of the GPU that was set (set_per_process_memory_fraction) is less than what is free.
    return min(size for size in (asked, had, found.get("allowed", had)) if size > 0)


def holders(
    *,
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor],
    optimizer_state: Iterable[torch.Tensor],
    host_gradients: Iterable[torch.Tensor],
    device: torch.device,
    allocated: int | None,
) -> list[tuple[str, int]]:
    """Return the bytes on `device` by kind, the largest first; what else is allocated is activations and such."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    sizes = {
        "parameters": _bytes(parameters, device),
        "gradients": _bytes([*gradients, *host_gradients], device),
        "optimizer_state": _bytes(optimizer_state, device),
        "buffers": _bytes(buffers, device),
    }
    if allocated is not None:
        sizes["activations"] = max(0, allocated - sum(sizes.values()))
    return sorted(((name, size) for name, size in sizes.items() if size), key=lambda found: -found[1])


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == device.type:
            storage = local.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def batch_shape(window: Any) -> dict[str, int] | None:
    """Return rows, tokens and longest row of the largest micro-batch of a window."""
    shapes = [tuple(batch.input_ids.shape) for batch in window.micro_batches] if window is not None else []
    if not shapes:
        return None
    rows, longest = max(shapes, key=lambda shape: shape[0] * shape[1])
    return {"rows": rows, "tokens": rows * longest, "longest": longest}
