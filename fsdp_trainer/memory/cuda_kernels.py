"""What CUDA kernels keep and take that a pretended device would not show: attention, fused operations, workspaces.

Memory only. Which attention kernel torch takes is decided as torch's sdp_utils.cpp does; what a kernel allocates inside
itself follows its source. Constants that are no formula stand in overheads.csv.
"""

import contextlib
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

MIB = 2**20
_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    masked: bool,
    compute_capability: float,
) -> str:
    """Return flash | efficient | math: what `scaled_dot_product_attention` runs on a GPU of this capability.

    From aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.14). The efficient kernel takes no grouped
    query heads, so a model that has them falls to math, which keeps every score, where flash is not to be had: GPUs
    before Ampere, and fp32. cuDNN's kernel, which some builds prefer on Hopper, saves what flash saves.
    """
    head = query.shape[-1]
    grouped = key.shape[1] != query.shape[1]
    half = query.dtype in _HALF
    same_head = key.shape[-1] == value.shape[-1] == head
    # Too little shared memory for the backward of such heads on the small chips of a generation.
    too_wide = 192 < head <= 224 and (compute_capability in (8.6, 8.9) or compute_capability >= 12.0)
    if compute_capability >= 8.0 and half and not masked and same_head and head <= 256 and not too_wide:
        return "flash"
    known_dtype = query.dtype in (torch.float16, torch.float32) or (half and compute_capability >= 8.0)
    alignment = 8 if half and compute_capability >= 7.5 else 4
    if known_dtype and not grouped and head % alignment == 0 and value.shape[-1] % alignment == 0:
        return "efficient"
    return "math"


@contextlib.contextmanager
def cuda_attention(compute_capability: float) -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` run the operations that CUDA would, undone on exit.

    On a device that torch does not know it takes the math form, which saves [heads, seq, seq] scores.
    """
    original = F.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        backend = attention_backend(
            query, key, value, masked=attn_mask is not None, compute_capability=compute_capability
        )
        if backend == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if backend == "efficient":
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _flash(query, key, value, dropout: float, causal: bool, scale: float | None) -> torch.Tensor:
    head = query.shape[-1]
    scale = head**-0.5 if scale is None else scale
    if padding := -head % 8:  # sdpa pads, and the copies are saved
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :head]


def _efficient(query, key, value, mask, dropout: float, causal: bool, scale: float | None) -> torch.Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:  # sdpa makes the additive form, once a call
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -float("inf"))
        if padding := -mask.shape[-1] % 8:  # the kernel reads 16 bytes at a time
            mask = F.pad(mask, (0, padding))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_grad, dropout, causal, scale=scale
    )[0]


# What CUDA runs as one kernel and other backends as several: found by comparing torch's dispatch tables.
_FUSED = ("silu_backward", "silu_backward.grad_input", "mish_backward", "_fused_rms_norm")


@cache  # a registration lasts as long as its library object
def keep_operations_fused() -> torch.library.Library:
    """Keep operations whole on the pretended device that a CUDA kernel does in one, for the life of the process."""
    library = torch.library.Library("aten", "IMPL")
    for name in _FUSED:
        library.impl(name, _never, "PrivateUse1")
    return library


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an operation on fake tensors computes nothing")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def backward_workspaces(name: str, args: Any) -> list[int]:
    """Return the bytes of what a backward kernel allocates inside itself and frees at its end."""
    kernel = _WORKSPACES.get(name)
    return kernel(args) if kernel is not None else []


def _flash_backward(args: Any) -> list[int]:
    """mha_bwd of flash_api.cpp (flash-attention 2, which torch has): softmax_d, dq_accum in fp32; dk, dv by head."""
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    rounded = _round_up(length, 128)
    head_rounded = _round_up(head, 32) if head <= 192 else 256
    sizes = [4 * batch * heads * rounded, 4 * batch * rounded * heads * head_rounded]
    if key.shape[1] != heads:
        sizes += [query.element_size() * batch * key.shape[2] * heads * head] * 2
    return sizes


def _varlen_backward(args: Any) -> list[int]:
    """mha_varlen_bwd of flash_api.cpp: as above over all rows' tokens, 128 rows more for each document."""
    query, key, borders = args[1], args[2], args[6]
    tokens, heads, head = query.shape
    rows = tokens + 128 * (borders.shape[0] - 1)
    head_rounded = _round_up(head, 32) if head <= 192 else 256
    sizes = [4 * heads * rows, 4 * rows * heads * head_rounded]
    if key.shape[1] != heads:
        sizes += [query.element_size() * key.shape[0] * heads * head] * 2
    return sizes


def _efficient_backward(args: Any) -> list[int]:
    """attention_backward.cu and kernel_backward.h: delta, and gradients that are summed over blocks, in fp32.

    Those of the queries always (kEnableSplitKeys); of keys and values where a head does not stay in registers.
    """
    query, key = args[1], args[2]
    batch, heads, length, head = query.shape
    summed = [length] if head <= 128 or query.dtype not in _HALF else [length, key.shape[2], key.shape[2]]
    return [
        4 * batch * heads * length,
        sum(4 * batch * heads * _round_up(rows, 64) * _round_up(head, 64) for rows in summed),
    ]


_WORKSPACES: dict[str, Callable[[Any], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}


@dataclass(frozen=True)
class Overheads:
    """Memory besides tensors, in bytes.

    cublas_workspace: one a thread that multiplies matrices, kept, inside the caching allocator. context, distributed:
    outside of it, taken from what a GPU can use; distributed only where there is more than one rank. process: host
    memory of a rank before it holds anything.
    """

    cublas_workspace: int
    context: int
    distributed: int
    process: int

    def outside(self, world_size: int) -> int:
        """Return the bytes that the caching allocator never sees."""
        return self.context + (self.distributed if world_size > 1 else 0)


def find_overheads(compute_capability: float) -> Overheads:
    """Read overheads.csv for a GPU of this capability."""
    found: dict[str, int] = {}
    with (Path(__file__).parent / "overheads.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["from_capability"]) <= compute_capability < float(row["below_capability"]):
                found[row["name"]] = round(float(row["mib"]) * MIB)
    return Overheads(**found)
