"""Attention inside documents: one document at a time, a block mask and eager attention give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_trainer.attention import Documents, document_eager, document_sdpa

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
