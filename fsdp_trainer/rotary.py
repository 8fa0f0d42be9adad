"""Rotary tables that depend on a document's length, chosen for each document of a micro-batch.

Transformers chooses one table for a whole batch, by its largest position (modeling_rope_utils.py, 5.24,
`dynamic_rope_update`): a document's would depend on its neighbours, and `dynamic` reads that position on the host.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LONG = "of_long_documents"  # the name of a buffer, behind the name of that for short ones


def choose_tables_by_document(model: nn.Module) -> None:
    """Replace, where a model has tables of several lengths, the choice among them.

    `longrope` has two, below and beyond the original length. `dynamic` changes beyond `max_position_embeddings` only,
    where no document is let in, so it keeps the one it was built with. Before buffers are placed.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, Mapping) else {None: kinds}
        if not hasattr(type(module).forward, "__wrapped__") or not any(map(_depends_on_length, by_layer.values())):
            continue
        for layer_type, kind in by_layer.items():
            if kind == "longrope":
                _add_long_table(module, layer_type)
        module.forward = MethodType(_forward, module)


def _depends_on_length(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _parameters(module: Any, layer_type: str | None) -> Mapping[str, Any]:
    found = module.config.rope_parameters
    return found if layer_type is None else found[layer_type]


def _table_name(layer_type: str | None) -> str:
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def _add_long_table(module: Any, layer_type: str | None) -> None:
    beyond = _parameters(module, layer_type)["original_max_position_embeddings"] + 1
    words = {} if layer_type is None else {"layer_type": layer_type}
    table, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, torch.device("cpu"), seq_len=beyond, **words)
    module.register_buffer(f"{_table_name(layer_type)}_{_LONG}", table, persistent=False)


def _forward(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of x's dtype, [batch, seq, dim], as the module's own forward makes them of one table."""
    words = {} if layer_type is None else {"layer_type": layer_type}
    plain = type(self).forward.__wrapped__
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    if kind != "longrope":
        return plain(self, x, position_ids, **words)
    given = _parameters(self, layer_type)
    limit = given["original_max_position_embeddings"]
    if "short_mscale" in given:  # Phi-3.5-MoE: one table, two scales
        scales = [given["short_mscale"], given["long_mscale"]]
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        short, long = (((emb.cos() * scale).to(x.dtype), (emb.sin() * scale).to(x.dtype)) for scale in scales)
    else:
        short, long = plain(self, x, position_ids, **words), None
    if position_ids.shape[-1] <= limit:  # no document can be longer than its row
        return short
    if long is None:
        name = _table_name(layer_type)
        below = self._buffers[name]
        self._buffers[name] = self._buffers[f"{name}_{_LONG}"]
        try:
            long = plain(self, x, position_ids, **words)
        finally:
            self._buffers[name] = below
    is_long = (document_lengths(position_ids) > limit)[..., None]
    return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the length of the document that each token is in, of positions [batch, seq] that begin at 0 in each."""
    length = position_ids.shape[-1]
    index = torch.arange(length, device=position_ids.device)
    starts = torch.where(position_ids == 0, index, length)
    # The first start at or after each token, from the right; the next one after a token ends its document.
    following = starts.flip(-1).cummin(-1).values.flip(-1)
    ends = torch.cat((following[..., 1:], torch.full_like(following[..., :1], length)), dim=-1)
    return ends - index + position_ids
