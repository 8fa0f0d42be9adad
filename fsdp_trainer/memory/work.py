"""What the operations of a run ask of the hardware, in the order they are queued: stretches of compute, and messages.

Shapes and bytes alone, no time: rates.py has those. It works on fake tensors.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from fsdp_trainer.memory.rates import Stretch, causal_pairs


class Message(NamedTuple):
    """Bytes that leave a rank or cross to its host. arrive: a gather is waited for, nothing is sent."""

    kind: Literal["gather", "arrive", "reduce", "sum", "to device", "to host"]
    size: int = 0
    ranks: int = 1


Work = list[Stretch | Message]

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "torch_attn::_varlen_attn",
}
_GROUPED = "aten::_grouped_mm"
_BACKWARD_FACTOR = 2.5  # five products for the forward's two
# Operations that write what they do not read; arguments named `out` are too.
_OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_", "aten::_foreach_copy_"}
_OVERWRITES |= {"aten::random_", "aten::normal_", "aten::uniform_"}
# Those that touch as much of their largest argument as they hand back or are handed.
_SPARSE = {"aten::gather", "aten::index_select", "aten::embedding", "aten::index", "aten::scatter_add_"}
_SPARSE |= {"aten::nll_loss_forward"}
# No kernels: allocations, and views whose schema does not say so.
_NOTHING = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
_NOTHING |= {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}


def count_work(work: Work, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Add one operation to `work`; views and allocations ask nothing."""
    name = func._schema.name
    if name.startswith("c10d::"):
        _add_collective(work, name, args)
        return
    if name == "fsdp::split_with_sizes_copy":
        work.append(Message("arrive"))
    if _is_view(func) or name in _NOTHING or name.startswith(("prim::", "profiler::")):
        return
    inputs, written = list(_tensors((args, kwargs))), list(_written(func, args, kwargs, result))
    if not inputs and not written:
        return
    places = {tensor.device.type for tensor in (*inputs, *written)}
    if places == {"meta"}:
        return
    if "cpu" in places and len(places) > 1:
        _add_transfer(work, inputs, written)
        return
    stretch = _stretch(work)
    if places == {"cpu"}:
        stretch.host += _moved(func, args, inputs, written)
    elif name.removesuffix("_backward") in _ATTENTION:
        stretch.operations += 1
        _add_attention(stretch, name, args, kwargs, func)
    elif func._overloadpacket in flop_registry or name == _GROUPED:
        stretch.operations += 1
        _add_products(stretch, func, args, kwargs, result)
    else:
        stretch.operations += 1
        stretch.moved += _moved(func, args, inputs, written)


def _stretch(work: Work) -> Stretch:
    """The one that operations are added to now."""
    if not work or not isinstance(work[-1], Stretch):
        work.append(Stretch())
    stretch = work[-1]
    assert isinstance(stretch, Stretch)
    return stretch


def _add_collective(work: Work, name: str, args: Any) -> None:
    """Ring algorithms: each rank sends (n - 1) / n of the whole, twice for an all-reduce."""
    if name == "c10d::_allgather_base_":
        kind, whole, part = "gather", args[0], args[1]
    elif name == "c10d::_reduce_scatter_base_":
        kind, part, whole = "reduce", args[0], args[1]
    elif name == "c10d::allreduce_":
        size = sum(_size(leaf) for leaf in _tensors(args[0]))
        ranks = torch.distributed.ProcessGroup.unbox(args[1]).size()
        work.append(Message("sum", 2 * size * (ranks - 1) // ranks, ranks))
        return
    else:
        return
    ranks = whole.numel() // max(1, part.numel())
    work.append(Message(kind, (whole.numel() - part.numel()) * whole.element_size(), ranks))


def _add_transfer(work: Work, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    """A copy between host and GPU; a scalar beside the tensors of the other side is none."""
    size = sum(_size(tensor) for tensor in written)
    if size <= 64 or not written:
        return
    work.append(Message("to host" if written[0].device.type == "cpu" else "to device", size))


def _add_products(stretch: Stretch, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A matrix product by its shape; an operation of another kind as one of middling size with as many FLOPs."""
    operands = [tensor for tensor in _tensors(args) if tensor.dim() >= 2][-2:]
    size = operands[-1].element_size()
    if func._schema.name == _GROUPED:  # rows of each expert: evenly spread
        groups = max(tensor.shape[0] for tensor in (*operands, result) if tensor.dim() == 3)
        left, right = operands
        if right.dim() == 3:
            stretch.matrices[left.shape[-2] // groups, right.shape[-1], left.shape[-1], size] += groups
        else:
            stretch.matrices[left.shape[-2], right.shape[-1], left.shape[-1] // groups, size] += groups
        return
    dims = [tuple(tensor.shape) for tensor in operands]
    if len(dims) == 2 and dims[0][-1] == dims[1][-2] and dims[0][:-2] == dims[1][:-2]:
        stretch.matrices[dims[0][-2], dims[1][-1], dims[0][-1], size] += prod(dims[0][:-2])
        return
    flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
    stretch.matrices[1024, 1024, 1024, size] += flops / 2**31  # type: ignore[assignment]


def _add_attention(stretch: Stretch, name: str, args: Any, kwargs: Any, func: Any) -> None:
    """A fused kernel's products: of rows of one length, or of documents, taken to be equally long."""
    backward = name.endswith("_backward")
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key = named["query"], named["key"]
    if "varlen" in name:
        heads, head = query.shape[-2:]
        length = query.shape[0] // max(1, named["cu_seq_q"].shape[0] - 1)
        tokens, keys = query.shape[0], length
    else:
        rows, heads, length, head = query.shape
        tokens, keys = rows * length, key.shape[2]
    window = (named.get("window_size") or [-1])[0]
    skips = named.get("is_causal", False) or window >= 0
    pairs = causal_pairs(length, window + 1 if window >= 0 else None) if skips else keys
    flops = 4.0 * tokens * pairs * heads * head * (_BACKWARD_FACTOR if backward else 1.0)
    stretch.attention[length, backward, query.element_size()] += flops  # type: ignore[assignment]


def _moved(func: Any, args: Any, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> int:
    """Bytes read and written. What is written in place is among the inputs too, and read unless it is overwritten."""
    name, made = func._schema.name, sum(map(_size, written))
    if name == "fsdp::all_gather_copy_in":  # into this rank's part of the gather's buffer
        return 2 * sum(map(_size, _tensors(args[0])))
    if name in _SPARSE:
        touched = inputs[-1] if name == "aten::scatter_add_" else written[0]
        return 2 * _size(touched) + sum(_size(tensor) for tensor in inputs if not tensor.is_floating_point())
    if name == "aten::_fused_adamw_":  # may change the gradients, and does so only for a scaler of its own
        made -= sum(map(_size, _tensors(args[1])))
    writes_only = name in _OVERWRITES or any(argument.name == "out" for argument in func._schema.arguments)
    return sum(map(_size, inputs)) + (0 if writes_only else made)


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[torch.Tensor]:
    """What an operation makes, and what it changes in place."""
    changed = set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                changed.add(id(tensor))
                yield tensor
    yield from (tensor for tensor in _tensors(result) if id(tensor) not in changed)


def _is_view(func: Any) -> bool:
    return any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns)


def _size(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor: a dimension that is expanded is read once."""
    shape = (length for length, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return prod(shape) * tensor.element_size()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor) and prod(leaf.shape)]
