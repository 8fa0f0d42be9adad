"""8-bit codes in CUDA managed memory: the driver moves its pages to the host where the GPU runs full, and back.

bitsandbytes allocates it, once for the life of the process. Torch sees ordinary tensors of the GPU but counts nothing
of them: `memory_allocated` is what must stay, not what may leave.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

LABEL = "managed memory"  # what is made under it is the host's in a memory ledger


@dataclass(frozen=True)
class _Managed:
    """What `torch.as_tensor` takes a CUDA tensor from without a copy.

    bitsandbytes' own tensor of the same memory says that it is on the CPU, where torch's kernels would run.
    """

    memory: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self.memory.shape),
            "typestr": "|u1",
            "data": (self.memory.data_ptr(), False),
            "version": 3,
        }


def managed_zeros(numel: int, *, device: torch.device) -> torch.Tensor:
    """Return uint8 zeros [numel] of `device` in managed memory; on a pretended device plain ones under LABEL."""
    if device.type != "cuda":
        with record_function(LABEL):
            return torch.zeros(numel, dtype=torch.uint8, device=device)
    from bitsandbytes.functional import get_paged

    memory = get_paged(numel, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Managed(memory), device=device).zero_()


def fetch(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the driver to bring managed tensors to their GPU in one go: a kernel that finds them away waits page by page.

    In the order of the default stream, on which the optimizer steps.
    """
    for tensor in tensors:
        if not tensor.is_cuda:
            continue
        from bitsandbytes.functional import prefetch_tensor

        marked: Any = tensor  # what bitsandbytes writes on the tensors that it makes
        marked.is_paged, marked.page_deviceid = True, tensor.device.index
        prefetch_tensor(marked)
