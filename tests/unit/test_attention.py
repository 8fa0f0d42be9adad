"""Attention inside documents: one document at a time, a block mask and eager attention give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_trainer.attention import Documents, attend_varlen, document_eager, document_sdpa, fits_varlen

LENGTHS = ((5, 1, 9, 1), (16,))


def attend(function: Any, documents: Documents, *, window: int | None, groups: int) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key and value; two rows of 16 tokens, 4 heads."""
    from transformers.models.llama import modeling_llama

    module = nn.Module()
    module.__class__ = type("Attention", (nn.Module,), {"__module__": modeling_llama.__name__})
    module.is_causal, module.num_key_value_groups, module.training = True, groups, False  # type: ignore[assignment]
    source = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 16, 8, generator=source, requires_grad=True)
    key, value = (torch.randn(2, 4 // groups, 16, 8, generator=source, requires_grad=True) for _ in range(2))
    output, _ = function(
        module, query, key, value, None, documents=documents, sliding_window=window, scaling=0.3, dropout=0.0
    )
    (output * torch.randn(output.shape, generator=source)).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in (query, key, value))]  # type: ignore[list-item]


@pytest.mark.parametrize("window", [None, 16, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_ways_to_attend_agree(window: int | None, groups: int) -> None:
    ids = torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in LENGTHS])
    ids[1] += 100
    masked = attend(document_sdpa, Documents(ids), window=window, groups=groups)
    alone = attend(document_sdpa, Documents(ids, LENGTHS), window=window, groups=groups)
    eager = attend(document_eager, Documents(ids), window=window, groups=groups)
    for other in (alone, eager):
        for got, expected in zip(other, masked, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_window_shorter_than_a_document_needs_the_mask() -> None:
    documents = Documents(None, LENGTHS)
    assert documents.one_by_one(window=15, device=torch.device("cpu")) is None
    assert documents.one_by_one(window=16, device=torch.device("cpu")) == LENGTHS
    assert documents.one_by_one(window=None, device=torch.device("meta")) is None


# --- the kernel for documents of any length: its arguments, on a plain form of it and on fake GPU tensors -------------


def plain_varlen(query, key, value, starts, starts_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What `varlen_attn` is documented to compute, a document at a time: tensors of [tokens, heads, dim]."""
    assert starts.tolist() == starts_k.tolist()
    assert (starts.dtype, starts[-1]) == (torch.int32, query.shape[0])
    assert max_q == max_k == max(starts.diff().tolist())
    parts = []
    for start, stop in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        q, k, v = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
        position = torch.arange(stop - start)
        distance = position[:, None] - position[None, :]
        allowed = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        assert window_size[1] == 0
        attended = nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=allowed, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 16, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_varlen_arguments_say_the_same_as_the_mask(window: int | None, groups: int) -> None:
    def through_varlen(module, query, key, value, mask, *, documents, sliding_window, scaling, dropout):
        output = attend_varlen(query, key, value, documents, window=sliding_window, scale=scaling, kernel=plain_varlen)
        return output, None

    ids = torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in LENGTHS])
    ids[1] += 100
    masked = attend(document_sdpa, Documents(ids), window=window, groups=groups)
    varlen = attend(through_varlen, Documents(ids, LENGTHS), window=window, groups=groups)
    for got, expected in zip(varlen, masked, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_packed_row_on_a_gpu_takes_the_varlen_kernel() -> None:
    """On fake tensors, as a plan runs it: arguments and shapes meet the operator's own schema and fake form."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    with FakeTensorMode(), Record():
        query = torch.empty(2, 4, 16, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.empty(2, 2, 16, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        documents = Documents(torch.empty(2, 16, device="cuda"), LENGTHS)
        output, _ = document_sdpa(
            module, query, key, value, None, documents=documents, sliding_window=4, scaling=0.3, dropout=0.0
        )
        assert output.shape == (2, 16, 4, 8)
        assert output.requires_grad
    assert documents.windows
    assert [name for name in seen if "varlen" in name]
    assert not [name for name in seen if "scaled_dot_product" in name]


def test_where_the_kernel_cannot_serve_the_mask_does() -> None:
    documents = Documents(None, LENGTHS)
    on_meta = {"device": "meta"}
    half = torch.empty(1, 1, 16, 8, dtype=torch.bfloat16, **on_meta)
    assert not fits_varlen(half, half, documents, {})  # not a GPU
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        half = torch.empty(1, 1, 16, 8, dtype=torch.bfloat16, device="cuda")
        assert fits_varlen(half, half, documents, {"dropout": 0.0})
        assert not fits_varlen(half, half, documents, {"dropout": 0.1})
        assert not fits_varlen(half, half, documents, {"softcap": 5.0})
        assert not fits_varlen(half, half, Documents(torch.zeros(1, 16)), {})
        assert not fits_varlen(half.float(), half.float(), documents, {})
        wide = torch.empty(1, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
        assert not fits_varlen(wide, wide, documents, {})
