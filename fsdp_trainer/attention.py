"""Attention that stays inside each document of a packed row.

Registered through Transformers' AttentionInterface under names of our own. For a name without a mask function
Transformers builds no mask at all (masking_utils.py, `_preprocess_mask_arguments`), so no value of a tensor is read on
the host and one document per row keeps the causal fast path without a mask.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdp_trainer.errors import ConfigError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # not in every build of torch
    varlen_attn = None

SDPA, EAGER = "document_sdpa", "document_eager"
_VARLEN_ARGUMENTS = {"scale", "window_size", "enable_gqa"}  # the first releases had other names
_VARLEN_HEAD_DIM = 256  # the widest head of the flash kernels


class Documents:
    """The documents of one micro-batch, and the masks made from them (one per sliding window, made once a forward).

    `ids`: int [batch, seq], equal within a document and different between neighbours; None when each row is one
    document. Right padding then needs no mask: under causal attention no real token sees it. `lengths`: the same on the
    host, each row's documents in order, where it is known.
    """

    def __init__(self, ids: torch.Tensor | None, lengths: Sequence[Sequence[int]] | None = None) -> None:
        self.ids, self.lengths = ids, lengths
        self.windows: list[int | None] = []  # of each call of this trainer's attention
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._borders: torch.Tensor | None = None

    def allowed(self, *, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return a bool mask [batch or 1, 1, length, length], True where a query may look, or None for plain causal."""
        self.windows.append(window)
        window = None if window is None or window >= length else window
        if self.ids is None and window is None:
            return None
        if window not in self._masks:
            # Compared, not subtracted: a table of distances would be 8 bytes a pair, 20 GB at 50,000 tokens.
            position = torch.arange(length, device=device, dtype=torch.int32)
            allowed = position[:, None] >= position[None, :]
            if window is not None:
                allowed = allowed & (position[:, None] < position[None, :] + window)
            allowed = allowed[None]
            if self.ids is not None:
                allowed = allowed & (self.ids[:, :, None] == self.ids[:, None, :])
            self._masks[window] = allowed[:, None]
        return self._masks[window]

    def one_by_one(self, *, window: int | None, device: torch.device) -> Sequence[Sequence[int]] | None:
        """Return the documents' lengths where attending to each on its own is the faster way, else None.

        On CPU a kernel with a mask still computes every pair of the row: a row of 512 tokens in documents of 24 to 160
        took 22 % of a step. On a GPU a launch a document and layer would cost more than it saves; `borders` is for it.
        """
        if device.type != "cpu" or self.lengths is None:
            return None
        return self.lengths if window is None or self.longest() <= window else None

    def borders(self, *, device: torch.device) -> torch.Tensor:
        """Return where documents start in the rows laid end to end, and the end: int32 [documents + 1] on the device.

        Made on the host from `lengths` and copied once a forward, so the device is not waited for.
        """
        assert self.lengths is not None
        if self._borders is None:
            starts = accumulate((length for row in self.lengths for length in row), initial=0)
            self._borders = torch.tensor(list(starts), dtype=torch.int32).to(device, non_blocking=True)
        return self._borders

    def longest(self) -> int:
        """Count the tokens of the longest document."""
        assert self.lengths is not None
        return max(length for row in self.lengths for length in row)


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
        documents.windows.append(window)
        del kwargs["documents"]
        return _attend_one_by_one(module, query, key, value, lengths, kwargs), None
    if documents is not None and fits_varlen(query, value, documents, kwargs):
        assert varlen_attn is not None
        documents.windows.append(window)
        scale = kwargs.get("scaling")
        return attend_varlen(query, key, value, documents, window=window, scale=scale, kernel=varlen_attn), None
    return sdpa_attention_forward(module, query, key, value, _allowed(module, query, kwargs), **kwargs)


def _has_flash(device: torch.device) -> bool:
    """Tell whether the flash kernels run on a device: from compute capability 8.0 on."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return True  # fake tensors: made for cards that have the kernels
    module = getattr(torch, device.type, None)  # torch.cuda, or the pretended device's
    capability = getattr(module, "get_device_capability", None)
    return capability is not None and device.type != "xpu" and capability(device.index or 0) >= (8, 0)


@lru_cache
def _has_varlen() -> bool:
    return varlen_attn is not None and set(inspect.signature(varlen_attn).parameters) >= _VARLEN_ARGUMENTS


def fits_varlen(query: torch.Tensor, value: torch.Tensor, documents: Documents, kwargs: dict[str, Any]) -> bool:
    """Tell whether torch's variable-length kernel can attend here: half precision on a GPU from Ampere on.

    It reads each document alone, so a packed row costs the pairs inside its documents and no mask is held.
    """
    return (
        documents.lengths is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _VARLEN_HEAD_DIM
        and query.shape[-1] % 8 == 0
        and not kwargs.get("dropout")
        and kwargs.get("softcap") is None
        and kwargs.get("position_bias") is None
        and _has_varlen()
        and _has_flash(query.device)
    )


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    window: int | None,
    scale: float | None,
    kernel: Callable[..., Any],
) -> torch.Tensor:
    """Attend with a kernel of `torch.nn.attention.varlen.varlen_attn`'s signature; returns [batch, seq, heads, dim].

    query [batch, heads, seq, dim]; key and value may have fewer heads. A window of w keeps the w newest tokens, the
    query's own included, which the kernel calls (w - 1, 0).
    """
    batch, heads, length, _ = query.shape
    borders, longest = documents.borders(device=query.device), documents.longest()
    window = None if window is None or window >= longest else window
    output = kernel(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    return output.unflatten(0, (batch, length))


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
    # A module that is a unit of FSDP's has a class of FSDP's, derived from its own.
    homes = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))
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
