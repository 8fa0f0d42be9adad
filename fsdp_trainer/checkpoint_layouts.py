"""8-bit moments of a checkpoint that was saved over another number of shards: read with its scales, then made ours.

Codes reshard as every tensor does. Their scales belong to the blocks of the shards they were saved from, so all of them
are read beside (1/32 byte a parameter, on the host, until the load is over); see [Note: blocks follow the shard].
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_trainer.optim.eight_bit import CODES, SCALES, build_tables, cut, local_part, regroup
from fsdp_trainer.units import format_number


def scales_of_other_layouts(
    tensors: Mapping[str, torch.Tensor], stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, torch.Size]:
    """Return the shape of those scales in `stored` that belong to another number of shards than this run's.

    `tensors` are this run's, `stored` what the checkpoint's table says, both by name. Scales that no number of shards
    explains are left out, so that they count as not fitting.
    """
    found = {}
    for name, tensor in tensors.items():
        codes = tensors.get(_codes_beside(name))
        entry = stored.get(name)
        if codes is None or entry is None or entry.size == tensor.shape:
            continue
        if entry.properties.dtype == torch.float32 and _is_explained(entry, codes.shape):
            found[name] = entry.size
    return found


def regroup_moments(tensors: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor]) -> None:
    """Make the codes in `tensors`, read as they were saved, and their scales this run's, in place; local work.

    `scales`: the whole of those of `scales_of_other_layouts`.
    """
    if not scales:
        return
    tables = None
    for parameter in sorted({name.rpartition(".")[0] for name in scales}):
        state = {key: tensors[f"{parameter}.{key}"] for key in (*CODES, *SCALES)}
        tables = tables or build_tables(local_part(state[CODES[0]]).device)
        regroup(state, {key: scales[f"{parameter}.{key}"] for key in SCALES}, tables)


def describe_regrouping(path: Path, scales: Mapping[str, torch.Tensor]) -> str:
    """Return the log's line about moments that came from other shards."""
    shards = sorted({scale.shape[0] for scale in scales.values()})
    return (
        f"{path} has 8-bit moments of {format_number(len(scales) // len(SCALES), 'tensor')} in "
        f"{' or '.join(map(str, shards))} shards, other than this run's: quantised anew where a border cuts a block"
    )


def _codes_beside(name: str) -> str:
    """Return the name of the codes that the scales `name` belong to; no tensor's name where it names no scales."""
    prefix, _, key = name.rpartition(".")
    return f"{prefix}.{dict(zip(SCALES, CODES, strict=True)).get(key)}"


def _is_explained(entry: TensorStorageMetadata, shape: torch.Size) -> bool:
    """Tell whether some number of shards of a tensor of `shape` has scales of this form, one stored part a shard."""
    if len(entry.size) != 2 or entry.size[0] != len(entry.chunks):
        return False  # the parts are in the table one by one, so what is made for them stays in proportion to it
    row = torch.Size((1, cut(shape, shards=entry.size[0]).blocks))
    return entry.size[1] == row[1] and all(chunk.sizes == row for chunk in entry.chunks)
