"""Fused AdamW over FSDP2 shards, with weight decay kept off norms, biases and embeddings by name and module type."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_trainer.errors import ConfigError

_KINDS = ("norm", "bias", "embedding")


def parameter_kind(module: nn.Module, name: str) -> str | None:
    """Return norm | bias | embedding for a parameter that is one of them, else None (a matrix).

    Decided by the owning module's type, not by dimension: sharded or flattened parameters can have any.
    """
    if name == "bias" or name.endswith("_bias"):
        return "bias"
    if "norm" in type(module).__name__.lower():
        return "norm"
    if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower():
        return "embedding"
    return None


def build_parameter_groups(model: nn.Module, *, weight_decay: float, no_decay: Sequence[str]) -> list[dict[str, Any]]:
    """Split trainable parameters into a decayed and an undecayed group, each with its names.

    `no_decay` holds kinds (norm, bias, embedding) or parts of parameter names. A tied head is an embedding. ConfigError
    for an entry that is no kind and matches no name.
    """
    groups: dict[bool, dict[str, Any]] = {
        True: {"params": [], "names": [], "weight_decay": weight_decay},
        False: {"params": [], "names": [], "weight_decay": 0.0},
    }
    unmatched = {entry for entry in no_decay if entry not in _KINDS}
    for name, parameter, kinds in named_kinds(model):
        hits = {entry for entry in no_decay if entry in kinds or (entry not in _KINDS and entry in name)}
        unmatched -= hits
        if parameter.requires_grad:
            group = groups[not hits]
            group["params"].append(parameter)
            group["names"].append(name)
    if unmatched:
        raise ConfigError(
            "A weight-decay exception matches no parameter.",
            values=f"optim.no_decay: {sorted(unmatched)}",
            fix=f"use {', '.join(_KINDS)} or a part of a parameter's name",
        )
    return [group for group in groups.values() if group["params"]]


def named_kinds(model: nn.Module) -> list[tuple[str, nn.Parameter, set[str | None]]]:
    """Return each parameter once, under its first name, with the kinds of every module that holds it."""
    found: dict[int, tuple[str, nn.Parameter, set[str | None]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            entry = found.setdefault(id(parameter), (f"{prefix}.{name}".lstrip("."), parameter, set()))
            entry[2].add(parameter_kind(module, name))
    return list(found.values())


def build_adamw(
    groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, implementation: str
) -> torch.optim.AdamW:
    """Build torch's AdamW on the groups of `build_parameter_groups`; state is fp32, 8 bytes a parameter.

    fused updates in one kernel without temporaries; foreach needs one more shard of memory in the step.
    """
    return torch.optim.AdamW(
        list(groups), lr=lr, betas=betas, eps=eps, fused=implementation == "fused", foreach=implementation == "foreach"
    )
