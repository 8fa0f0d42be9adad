"""The load-balancing loss of mixture-of-experts models, kept where the model's config asks for it.

It is Transformers' own function on the decoder's own router logits. [Note: router loss] The function is not linear in
the tokens it sees, so a window cut into micro-batches has no one right value: each micro-batch's value counts by its
share of the window's supervised tokens, over all ranks. One micro-batch is thus exactly what Transformers computes, and
the sum does not grow with accumulation. It moves the weights only: logged and evaluation losses are cross-entropy.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_trainer.errors import ConfigError


@dataclass(frozen=True)
class RouterLoss:
    """What Transformers' forward gives its load-balancing function, and the factor it multiplies the result by."""

    function: Callable[..., torch.Tensor]
    coefficient: float
    num_experts: int
    num_experts_per_tok: int

    def compute(self, router_logits: Any, *, lengths: torch.Tensor | None, width: int) -> torch.Tensor:
        """Return the loss of one micro-batch, padding left out; `lengths` (int64 [batch]) counts real tokens a row."""
        mask = None
        if lengths is not None:
            mask = (torch.arange(width, device=lengths.device)[None] < lengths[:, None]).long()
        value = self.function(router_logits, self.num_experts, self.num_experts_per_tok, mask)
        return self.coefficient * value.float()


def find_router_loss(model: nn.Module) -> RouterLoss | None:
    """Return the model's router loss, None where its config has `output_router_logits` off.

    ConfigError for an architecture whose forward does not compute it the common way.
    """
    if not getattr(model.config, "output_router_logits", False):
        return None
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    values = [getattr(model, name, None) for name in names]
    if function is None or None in values:
        raise ConfigError(
            f"{type(model).__name__} has no router loss that this trainer knows.",
            values=f"output_router_logits: true, {dict(zip(names, values, strict=True))}",
            fix="set output_router_logits: false in the model's config.json",
        )
    return RouterLoss(function, *values)  # type: ignore[arg-type]


def check_router_logits(outputs: Any) -> Any:
    """Return the decoder's router logits; ConfigError where it hands none out."""
    found = getattr(outputs, "router_logits", None)
    if not found:
        raise ConfigError(
            "The decoder hands out no router logits, so the router loss would be zero.",
            values=f"output_router_logits: true, {type(outputs).__name__}",
            fix="set output_router_logits: false in the model's config.json",
        )
    return found
