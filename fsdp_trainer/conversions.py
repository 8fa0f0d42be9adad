"""Between the names in a checkpoint and those in the model, by Transformers' own table of conversions.

Mixture-of-experts models keep one tensor per expert on the hub and one for all experts in memory; some heads and norms
were renamed. Loading follows the table forwards, the export follows it back, as `save_pretrained` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


def architecture_of(model: nn.Module) -> type[nn.Module]:
    """Return the model's own class: `fully_shard` gives an instance a class of its own, FSDP<name>, derived from it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _as_built(model: nn.Module) -> Any:
    """Return the same modules under the model's own class, whose name Transformers looks conversions up by."""
    kind = architecture_of(model)
    view = kind.__new__(kind)
    view.__dict__ = model.__dict__
    return view


def loading_conversions(model: nn.Module) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return what renames and what converts stored tensors on their way into `model`, in order."""
    found = get_model_conversion_mapping(_as_built(model))
    renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in found if isinstance(entry, WeightConverter)]


@dataclass(frozen=True)
class ExportGroup:
    """Tensors of the model that are written together, because the file's layout splits or joins them.

    `written` holds a meta tensor, of the shape and dtype in the file, for every name in the file.
    """

    names: tuple[str, ...]
    written: Mapping[str, torch.Tensor]


def plan_export(
    model: nn.Module, weights: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> list[ExportGroup]:
    """Return how `weights`, by their names in the model, appear in a checkpoint of this architecture, in order."""
    converters: list[Any] = [
        entry.reverse_transform()
        for entry in reversed(get_model_conversion_mapping(_as_built(model), add_legacy=False))
        if isinstance(entry, WeightConverter)
    ]
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(rename_source_key(name, [], converters, reverse=True)[0], []).append(name)
    return [
        ExportGroup(
            tuple(names),
            to_checkpoint(model, {n: torch.empty(weights[n].shape, dtype=dtypes[n], device="meta") for n in names}),
        )
        for names in groups.values()
    ]


def to_checkpoint(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of one `ExportGroup` by the names and in the shapes of a checkpoint."""
    view = _as_built(model)
    # What a loader left on the model would win over the table, and a resumed run would export otherwise.
    view.__dict__ = {key: value for key, value in model.__dict__.items() if key != "_weight_conversions"}
    return revert_weight_conversion(view, dict(tensors))
