"""Attention that stays inside each document of a packed row.

Registered through Transformers' AttentionInterface under names of our own. For a name without a mask function
Transformers builds no mask at all (masking_utils.py, `_preprocess_mask_arguments`), so no value of a tensor is read on
the host and one document per row keeps the causal fast path without a mask.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_trainer.errors import ConfigError

SDPA, EAGER = "document_sdpa", "document_eager"


class Documents:
    """The documents of one micro-batch, and the masks made from them (one per sliding window, made once a forward).

    `ids`: int [batch, seq], equal within a document and different between neighbours; None when each row is one
    document. Right padding then needs no mask: under causal attention no real token sees it. `lengths`: the same on the
    host, each row's documents in order, where it is known.
    """

    def __init__(self, ids: torch.Tensor | None, lengths: Sequence[Sequence[int]] | None = None) -> None:
        self.ids, self.lengths = ids, lengths
        self.calls = 0  # of this trainer's attention
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def allowed(self, *, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return a bool mask [batch or 1, 1, length, length], True where a query may look, or None for plain causal."""
        self.calls += 1
        window = None if window is None or window >= length else window
        if self.ids is None and window is None:
            return None
        if window not in self._masks:
            position = torch.arange(length, device=device)
            distance = position[:, None] - position[None, :]
            allowed = distance >= 0
            if window is not None:
                allowed = allowed & (distance < window)
            allowed = allowed[None]
            if self.ids is not None:
                allowed = allowed & (self.ids[:, :, None] == self.ids[:, None, :])
            self._masks[window] = allowed[:, None]
        return self._masks[window]

    def one_by_one(self, *, window: int | None, device: torch.device) -> Sequence[Sequence[int]] | None:
        """Return the documents' lengths where attending to each on its own is the faster way, else None.

        On CPU a kernel with a mask still computes every pair of the row: a row of 512 tokens in documents of 24 to 160
        took 22 % of a step. On a GPU a launch a document and layer would cost more than it saves.
        """
        if device.type != "cpu" or self.lengths is None:
            return None
        longest = max(length for row in self.lengths for length in row)
        return self.lengths if window is None or longest <= window else None


def _allowed(module: nn.Module, query: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    documents = kwargs.pop("documents", None) or Documents(None)
    window = kwargs.get("sliding_window")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal; only causal language models are trained")
    return documents.allowed(length=query.shape[2], window=window, device=query.device)


def _refuse_mask(module: nn.Module, attention_mask: torch.Tensor | None) -> None:
    """Refuse a mask that an architecture makes by itself (Doge): it knows nothing of documents, ours nothing of it."""
    if attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} makes an attention mask of its own, which this trainer does not know.",
            values=f"a mask of shape {list(attention_mask.shape)}",
            fix="use another architecture, or report this one",
        )


def document_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run torch's scaled dot product attention inside documents; shapes as Transformers' attention functions."""
    _refuse_mask(module, attention_mask)
    documents = kwargs.get("documents")
    window = kwargs.get("sliding_window")
    if documents is not None and (lengths := documents.one_by_one(window=window, device=query.device)) is not None:
        documents.calls += 1
        del kwargs["documents"]
        return _attend_one_by_one(module, query, key, value, lengths, kwargs), None
    return sdpa_attention_forward(module, query, key, value, _allowed(module, query, kwargs), **kwargs)


def _attend_one_by_one(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[Sequence[int]],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attend to each document alone; returns [batch, seq, heads, head_dim] as Transformers' attention functions do."""
    rows = []
    for row, row_lengths in enumerate(lengths):
        # split, not slices: its backward joins the parts once, where each slice would fill a whole row with zeros.
        parts = (tensor[row : row + 1].split(list(row_lengths), dim=2) for tensor in (query, key, value))
        outputs = [sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in zip(*parts, strict=True)]
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def document_eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the architecture's own eager attention (soft-capping, sinks) inside documents, with an additive mask."""
    _refuse_mask(module, attention_mask)
    allowed = _allowed(module, query, kwargs)
    if allowed is None:  # eager attention knows no causal flag
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    lowest = torch.finfo(query.dtype).min
    mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(~allowed, lowest)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **kwargs)


AttentionInterface.register(SDPA, document_sdpa)
AttentionInterface.register(EAGER, document_eager)


def choose_attention(requested: str, hf_config: Any) -> str:
    """Return the registered implementation for `model.attention`: auto | sdpa | eager.

    auto is sdpa, except for models whose attention torch's sdpa cannot compute: soft-capped scores (Gemma 2), sinks
    (GPT-OSS), and whatever else Transformers marks so. Those have an eager form of their own.
    """
    needs_eager = _needs_eager(hf_config)
    if requested not in ("auto", "sdpa", "eager") or (requested == "sdpa" and needs_eager):
        raise ConfigError(
            "This attention cannot be used here" + (f": {needs_eager}." if needs_eager else " yet."),
            values=f"model.attention: {requested}, model_type {hf_config.model_type}",
            fix="set model.attention: auto",
        )
    return EAGER if requested == "eager" or needs_eager else SDPA


def describe_fallback(requested: str, hf_config: Any) -> tuple[str, ...]:
    """Return the log's line about auto having taken the slower way, if it did."""
    reason = _needs_eager(hf_config) if requested == "auto" else ""
    cost = "it is slower and holds seq_len x seq_len scores a head"
    return (f"attention: the model's own eager form, since {reason}; {cost}",) if reason else ()


def _needs_eager(hf_config: Any) -> str:
    """Return why torch's sdpa cannot compute this model's attention; "" where it can."""
    if getattr(hf_config, "attn_logit_softcapping", None) is not None:
        return "torch's sdpa has no soft-cap"
    found = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    for model_class in found if isinstance(found, tuple) else (found,):
        # Without `_supports_attention_backend` no function of ours is called at all, eager or not.
        if model_class is None:
            continue
        if getattr(model_class, "_supports_attention_backend", False) and not model_class._supports_sdpa:
            return f"{model_class.__name__} computes what torch's sdpa cannot"
    return ""
