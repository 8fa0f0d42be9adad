"""Every place where another library is changed from outside, one function each.

Each names the upstream reason, the versions it was needed on, and when it can go.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def promote_cpu_ranks_to_fsdp() -> None:
    """Let Accelerate treat gloo ranks on CPU as FSDP ranks.

    Accelerate promotes a process to `DistributedType.FSDP` only from one of its MULTI_<accelerator> types
    (accelerate/state.py, `AcceleratorState.__init__`); MULTI_CPU is not among them, so on CPU the FSDP plugin is
    dropped in silence. Needed on accelerate 1.15.0; can go when MULTI_CPU is in that list
    (tests/distributed/test_runtime.py fails then). Must run after `PartialState()` and before `Accelerator()`.
    """
    state = PartialState()
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def keep_reduced_gradients(unit: Any, dtype: torch.dtype) -> None:
    """Let an FSDP2 unit of narrower parameters keep its sharded gradients in `dtype`, in which they were reduced.

    FSDP2 casts a reduced gradient to the dtype of its parameter, and sums micro-batches in that: of bf16 weights, a
    gradient would be rounded once a micro-batch (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    `foreach_reduce`: `_to_dtype_if_needed(reduce_output, orig_dtype)`). Needed on torch 2.14 and before; can go when a
    unit heeds `grad_dtype` of its sharded parameters (tests/distributed/test_pure_bf16.py fails then). Call it before
    the first forward, which decides about dtypes.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    decide = group._init_mp_dtypes

    def decide_and_keep() -> None:
        decide()
        if group._orig_dtype is not None and group._orig_dtype.itemsize < dtype.itemsize:
            group._orig_dtype = dtype

    group._init_mp_dtypes = decide_and_keep


def skip_padding_warning(decoder: Any) -> None:
    """Let a model's own forward not ask whether its input is padded.

    GPT-2's looks for pad tokens in every batch that comes without a mask, which waits for the device, and then warns of
    what is meant: padding stands behind each row's tokens, where causal attention cannot see it, and is no target
    (transformers/modeling_utils.py, `warn_if_padding_and_no_attention_mask`). Needed on transformers 5.24 and before;
    can go when GPT-2 asks no more (tests/distributed/test_architectures.py fails then).
    """
    if hasattr(decoder, "warn_if_padding_and_no_attention_mask"):
        decoder.warn_if_padding_and_no_attention_mask = lambda *_: None


@contextlib.contextmanager
def reading_gguf_once() -> Iterator[None]:
    """Let Transformers parse a GGUF file once while it is converted, and make each table of names once.

    It opens the file anew for the config, the tokenizer and the weights (2.5 s each for a vocabulary of 49k words),
    and asks for the names of all tensors once a module (transformers/modeling_gguf_pytorch_utils.py,
    `load_gguf_checkpoint` and `get_gguf_hf_weights_map`). Needed on transformers 5.24 and before; can go when it keeps
    them (tests/distributed/test_gguf.py passes without it then).
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in kept.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in kept.items():
            setattr(gguf, name, function)
