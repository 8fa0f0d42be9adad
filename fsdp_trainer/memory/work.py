"""What the operations of a run ask of the hardware: floating-point operations, bytes moved, bytes sent."""

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_FUSED = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
}


@dataclass
class Work:
    """Sums over operations. `moved` counts the bytes that operations without a matrix product read and write; `sent`
    the bytes one rank sends, by the number of ranks in the group."""

    flops: int = 0
    moved: int = 0
    sent: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Work", *, times: int = 1) -> None:
        """Add another sum, `times` over."""
        self.flops += times * other.flops
        self.moved += times * other.moved
        for group, size in other.sent.items():
            self.sent[group] += times * size


def count_work(work: Work, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Add one operation to `work`; shapes alone count, so it works on fake tensors."""
    name = func._schema.name
    if name.startswith("c10d::"):
        _count_collective(work, name, args)
    elif func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        work.flops += flops // 2 if _is_causal(func, name, args, kwargs) else flops
    elif not _is_view(func):
        work.moved += sum(leaf.numel() * leaf.element_size() for leaf in _tensors((args, kwargs, result)))


def _count_collective(work: Work, name: str, args: Any) -> None:
    """Ring algorithms: each rank sends (n - 1) / n of the whole, twice for an all-reduce."""
    if name == "c10d::_allgather_base_":
        whole, part = args[0], args[1]
    elif name == "c10d::_reduce_scatter_base_":
        part, whole = args[0], args[1]
    elif name == "c10d::allreduce_":
        size = sum(leaf.numel() * leaf.element_size() for leaf in _tensors(args[0]))
        ranks = torch.distributed.ProcessGroup.unbox(args[1]).size()
        work.sent[ranks] += 2 * size * (ranks - 1) // ranks
        return
    else:
        return
    ranks = whole.numel() // max(1, part.numel())
    work.sent[ranks] += (whole.numel() - part.numel()) * whole.element_size()


def _is_causal(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Half of the scores are never computed; the formulas count all of them."""
    if name.removesuffix("_backward") not in _FUSED:
        return False
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _is_view(func: Any) -> bool:
    return any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor) and prod(leaf.shape)]
