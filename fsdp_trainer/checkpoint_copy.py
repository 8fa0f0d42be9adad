"""Copy the state to save into host memory beside training, which only the optimizer's next step has to wait for.

[Note: who changes what] Between two optimizer steps weights and optimizer state stand still. FSDP gathers whole weights
into memory of its own, or, where one rank holds all, reads the shard itself; forward and backward write neither. What
they may change, buffers and random states, is copied at once, which is little. So the large copy can go on beside the
next forward and backward: before, it blocked training for 0.15 s of a save of 1.36 s (135M, two CPU ranks).
"""

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_trainer.errors import OutOfMemory
from fsdp_trainer.optim.transfers import pin

# The host memory that the background saves of a run share, by the names of what is copied into it; {} at first. It
# grows to this rank's parameters and optimizer state at the first save and stays until it is cleared: the steps that
# follow a save hold that copy in any case, and pinning anew, or new pages on a busy machine, would cost more than it.
HostMemory = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HostCopy:
    """A copy that `make` makes, in another thread. Until it is made, a step of the optimizer waits for it."""

    _tensors: Mapping[str, torch.Tensor]
    _memory: HostMemory
    _device: torch.device
    _ready: Any  # the device's work up to the call of `plan_copy`, as an event; None on CPU
    _made: threading.Event
    _hook: RemovableHandle

    def make(self) -> dict[str, torch.Tensor]:
        """Copy; call it exactly once. OutOfMemory where there is none for it: the step waits no longer."""
        try:
            return self._make()
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemory(
                "The state to save could not be copied to host memory.",
                values=f"{type(error).__name__}: {error}",
                fix="set checkpoint.async_save: false, which saves without a copy; the checkpoints before are as "
                "they were",
            ) from error
        finally:
            self._made.set()

    def release(self) -> None:
        """Take the hook off the optimizer; not while it steps, so from the thread that trains."""
        self._hook.remove()

    @torch.no_grad()
    def _make(self) -> dict[str, torch.Tensor]:
        stream = None
        if self._device.type == "cuda":
            # The current device is a thread's own; on the default one every rank would open a context on GPU 0.
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream()
            stream.wait_event(self._ready)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for name, tensor in self._tensors.items():
                # Tensors, not their storages as torch's DefaultStager: UntypedStorage.copy_ keeps the GIL (torch 2.14),
                # so the thread that trains would stand still all the same.
                local_part(_host_tensor(self._memory, name, tensor)).copy_(local_part(tensor), non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return {name: self._memory[name] for name in self._tensors}


def plan_copy(
    tensors: Mapping[str, torch.Tensor],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    memory: HostMemory | None = None,
) -> HostCopy:
    """Return a copy of `tensors` as they are now, for another thread to make; see [Note: who changes what].

    `memory` is what an earlier copy was made in, and nobody reads any more.
    """
    buffers = {id(buffer) for buffer in model.buffers()}
    still = {name: t.detach().clone() if id(t) in buffers else t for name, t in tensors.items()}
    ready = None
    if device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    made = threading.Event()

    def wait(*_: Any) -> None:
        made.wait()

    return HostCopy(
        still, {} if memory is None else memory, device, ready, made, optimizer.register_step_pre_hook(wait)
    )


def _host_tensor(memory: HostMemory, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return what `tensor` is copied into; a shard stays one, of the same whole, in host memory."""
    kept = memory.get(name)
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        kept = memory[name] = torch.empty_like(tensor, device="cpu", requires_grad=False)
        if local_part(tensor).is_cuda:
            pin([local_part(kept)])  # where the driver refuses, the copy goes through its own buffers
    return kept


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
