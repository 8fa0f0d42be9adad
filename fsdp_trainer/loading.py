"""Fill each rank's shards from the files of a model folder, reading only what this rank owns.

What a stored tensor is called in the model, and which ones are merged into one, says Transformers' own table; whatever
is missing, left over, of another shape or not understood is refused by name.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

from fsdp_trainer.agreement import is_main, run_on_all
from fsdp_trainer.checkpoint_pace import waiting_for
from fsdp_trainer.conversions import loading_conversions
from fsdp_trainer.custom_code import building_arguments
from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.export_checksums import refuse_damaged_weights
from fsdp_trainer.model import named_weights
from fsdp_trainer.pieces import Cut, Joined, Piece, Stacked, Transposed
from fsdp_trainer.progress import log_line
from fsdp_trainer.weight_files import BLOCK_BYTES, FLOATING, Ranges, StoredTensor, find_folder, open_weights

_PLACE_ON_MACHINE = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))  # torchrun's words


def load_weights(
    model: Any, path: str, *, revision: str | None = None, targets: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Fill the shards of `model` from a folder, or a hub repository, of safetensors or `.bin` files.

    All ranks call it, and all fail together. `targets` are filled instead of the model's own tensors, by its names.

    Values are cast to the target's dtype. CheckpointError names tensors that are missing, unexpected, of another
    shape, quantised, or different where the model ties them: none of them may be guessed; and a file of an export of
    ours that is not as it was written, before a value of it is used.
    """
    targets = named_weights(model) if targets is None else targets
    size = sum(target.numel() * target.itemsize for target in targets.values())
    with waiting_for(f"Loading {path}", size):
        run_on_all(lambda: _verify(find_folder(path, revision=revision)))
        notes = run_on_all(lambda: _load(model, find_folder(path, revision=revision), targets))
    for note in notes:
        log_line(note, is_main=is_main())


def _verify(folder: Path) -> None:
    # Ranks of one machine see one folder and share the reading; where the launcher does not say who they are, each
    # reads all of it.
    rank, ranks = (int(os.environ.get(name, default)) for name, default in _PLACE_ON_MACHINE)
    refuse_damaged_weights(folder, rank=rank if ranks > 1 else 0, ranks=ranks)


@torch.no_grad()
def _load(model: Any, folder: Path, targets: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    plan = plan_loading(model, folder)
    for name, target in targets.items():
        local, ranges = local_part(target)
        if local.numel():
            plan.pieces[name].copy_into(local, ranges)
    for first, (second, piece) in plan.ties.items():
        _check_tie(targets[first], piece, names=(first, second), folder=folder)
    return plan.notes


def initialize_randomly(
    targets: Mapping[str, torch.Tensor], hf_config: Any, *, seed: int, trust_remote_code: bool = False
) -> None:
    """Fill the shards of a model's weights, by name, with its architecture's own random initialisation.

    It is the same for every world size. Each rank builds the whole model once on the host and keeps its slices: meant
    for tests and benchmarks.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        arguments = building_arguments(hf_config, trust_remote_code=trust_remote_code)
        whole = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, **arguments)
    source = dict(whole.named_parameters())
    with torch.no_grad():
        for name in source.keys() & targets.keys():
            local, ranges = local_part(targets[name])
            local.copy_(source[name].detach()[tuple(slice(*limits) for limits in ranges)])


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Ranges]:
    """Return this rank's own part of a tensor, and where in the whole it lies (start and stop of each dimension)."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple((0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    ranges = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    return tensor.to_local(), ranges


# Which stored tensors make which tensor of the model


@dataclass(frozen=True)
class LoadingPlan:
    """What every tensor of the model is made of, and the second copies of tied ones: first name -> (second, piece).

    `notes` say what was done to make the files fit.
    """

    pieces: Mapping[str, Piece]
    ties: Mapping[str, tuple[str, Piece]]
    notes: tuple[str, ...] = ()


# What torch.compile, activation checkpointing and FSDP1 put into a name, and DDP and DeepSpeed before it.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"}
_BEFORE = {"module"}


# Where a config says how its weights are quantised.
QUANTIZATION = ("quantization_config", "compression_config")


def quantization_of(hf_config: Any) -> str:
    """Return the method by which a config says that its weights are quantised, or "" where it says nothing."""
    for said in filter(None, (getattr(hf_config, name, None) for name in QUANTIZATION)):
        held = said if isinstance(said, dict) else vars(said)
        return str(held.get("quant_method") or "of no named method")
    return ""


def plain_name(name: str) -> str:
    """Return a stored name without what wrappers of other trainers have put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _BEFORE:
        parts = parts[1:]
    return ".".join(parts)


def describe_mixed(folder: Path, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return a line about files whose floating tensors are not all of one dtype, such as norms in fp32 among bf16."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in stored.values():
        if tensor.dtype in FLOATING:
            sizes[tensor.dtype] += math.prod(tensor.shape)
    if len(sizes) < 2:
        return []
    usual = max(sizes, key=lambda dtype: sizes[dtype])
    others = [tensor for tensor in stored.values() if tensor.dtype in FLOATING and tensor.dtype != usual]
    shown = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in others[:3]) + (", ..." if len(others) > 3 else "")
    return [
        f"{folder}: {len(others)} of {len(stored)} tensors are not stored as {usual} ({shown}): they train as the "
        "others do, and the export writes all in export.dtype"
    ]


@dataclass
class _Sources:
    """The stored tensors that go into one tensor of the model (or the first of several), by source pattern."""

    converter: WeightConverter | None
    found: dict[str, list[StoredTensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensors in self.found.values() for tensor in tensors]


def plan_loading(model: Any, folder: Path) -> LoadingPlan:
    """Return how the tensors of `model` are made of those in `folder`; CheckpointError by name where they cannot be."""
    stored = open_weights(folder)
    plain = {plain_name(name): replace(tensor, name=plain_name(name)) for name, tensor in stored.items()}
    notes = [_stale_quantization(model, folder)] if quantization_of(model.config) else []
    notes += describe_mixed(folder, stored)
    if plain.keys() != stored.keys() and len(plain) == len(stored):
        wrapped = [name for name in stored if name not in plain]
        try:
            made = _plan(model, plain, folder)
        except CheckpointError as error:
            with suppress(CheckpointError):
                return replace(_plan(model, stored, folder), notes=tuple(notes))  # a model that has such names itself
            raise error
        notes.append(
            f"{folder}: {len(wrapped)} of {len(stored)} names carry what another trainer wrapped the model in "
            f"({wrapped[0]}): read as {plain_name(wrapped[0])}"
        )
        return replace(made, notes=tuple(notes))
    return replace(_plan(model, stored, folder), notes=tuple(notes))


def _plan(model: Any, stored: Mapping[str, StoredTensor], folder: Path) -> LoadingPlan:
    targets = named_weights(model)
    aliases = _aliases(model, targets)
    shapes = {name: tuple(tensor.shape) for name, tensor in targets.items()}
    shapes |= {alias: shapes[first] for alias, first in aliases.items()}
    pieces: dict[str, Piece] = {}
    unexpected: list[str] = []
    for name, sources in _group_by_target(model, stored, known=shapes).items():
        if name in targets and targets[name].is_floating_point():
            _check_floating(sources, folder)
        made = _convert(name, sources, shapes, folder)
        unexpected += [key for key in sources.names if not made.keys() <= shapes.keys()]
        pieces |= {key: piece for key, piece in made.items() if key in shapes}
    ties: dict[str, tuple[str, Piece]] = {}
    for alias, first in aliases.items():
        if alias in pieces and first in pieces:
            ties[first] = alias, pieces[alias]
        elif alias in pieces:
            pieces[first] = pieces[alias]
    _check_names(model, folder, missing=sorted(targets.keys() - pieces.keys()), unexpected=unexpected)
    _check_shapes({name: (piece.shape, shapes[name]) for name, piece in pieces.items()}, folder)
    return LoadingPlan(pieces, ties)


def _aliases(model: nn.Module, targets: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names of tied parameters, each with the name the parameter is known by."""
    first = {id(tensor): name for name, tensor in targets.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name not in targets}


def _group_by_target(
    model: Any, stored: Mapping[str, StoredTensor], *, known: Mapping[str, Any]
) -> dict[str, _Sources]:
    """Return the stored tensors by the name Transformers gives them in the model, in the order it collects them."""
    renamings, converters = loading_conversions(model)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, _Sources] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)  # type: ignore[arg-type]
        if name not in known and key in known:  # saved in the model's own layout, not in the hub's
            name, pattern = key, None
        group = groups.setdefault(name, _Sources(by_pattern[pattern] if pattern else None))
        group.found[pattern or key].append(stored[key])
    return groups


def _convert(name: str, sources: _Sources, shapes: Mapping[str, Any], folder: Path) -> dict[str, Piece]:
    """Return what the stored tensors become, by name in the model."""
    keys = sources.names
    if sources.converter is None:
        if len(keys) > 1:
            raise _refusal("Two stored tensors have one name in the model.", f"{folder}: {keys} -> {name}", _CLEAN)
        return {name: sources.found[keys[0]][0]}
    lists: dict[str, list[Piece]] = {pattern: list(found) for pattern, found in sources.found.items()}
    lacking = [pattern for pattern in sources.converter.source_patterns if pattern not in lists]
    if lacking and name in shapes:
        raise _refusal("Tensors to be merged are missing.", f"{folder}: no {lacking} beside {keys[:3]}", _CLEAN)
    for found in sources.found.values():
        _check_numbering([tensor.name for tensor in found], folder)
    return _apply_operations(name, sources.converter, lists, shapes, keys, folder)


def _apply_operations(
    name: str,
    converter: WeightConverter,
    lists: dict[str, list[Piece]],
    shapes: Mapping[str, tuple[int, ...]],
    keys: Sequence[str],
    folder: Path,
) -> dict[str, Piece]:
    """Follow a converter's operations (core_model_loading.py) on pieces instead of tensors.

    Operations are known by the names of their classes, of which older versions of Transformers lack some.
    """
    target, *others = converter.target_patterns
    names = [name, *(name.replace(target, other) for other in others)]
    operations: list[Any] = list(converter.operations)
    while operations:
        operation = operations.pop(0)
        kind, alone = type(operation).__name__, len(lists) == 1
        if kind == "MergeModulelist":
            lists = {pattern: [Stacked(found, operation.dim)] for pattern, found in lists.items()}
        elif kind == "Concatenate":
            ordered = [piece for pattern in converter.source_patterns for piece in lists[pattern]]
            lists = {target: [Joined(ordered, operation.dim % len(ordered[0].shape))]}
        elif kind == "Transpose" and alone:
            (piece,) = next(iter(lists.values()))
            if not (operation.check_dims and piece.shape == shapes.get(name)):
                lists = {target: [Transposed(piece, (operation.dim0, operation.dim1))]}
        elif kind in ("Chunk", "Split") and alone and not getattr(operation, "num_shards_attribute", None):
            (piece,) = next(iter(lists.values()))
            lists = {target: _cut(piece, operation.dim % len(piece.shape), [shapes.get(other) for other in names])}
        else:
            raise _not_known(kind, name, keys, folder)
    results = [piece for pieces in lists.values() for piece in pieces]
    if len(results) != len(names):
        raise _not_known(", ".join(type(one).__name__ for one in converter.operations), name, keys, folder)
    return dict(zip(names, results, strict=True))


def _cut(piece: Piece, dim: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Piece]:
    """Return one stretch of `piece` for each target, as long as the target; equal ones where a target is unknown."""
    lengths = [shape[dim] if shape else piece.shape[dim] // len(shapes) for shape in shapes]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [Cut(piece, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def _check_numbering(keys: Sequence[str], folder: Path) -> None:
    """Refuse a list of experts with a gap: what comes after it would take another's place in silence."""
    columns = [column for column in zip(*(key.split(".") for key in keys), strict=False) if len(set(column)) > 1]
    if len(keys) > 1 and (len(columns) != 1 or list(columns[0]) != [str(index) for index in range(len(keys))]):
        raise _refusal("A list of tensors to be merged has gaps.", f"{folder}: {list(keys)[:5]}", _CLEAN)


# Refusing

_CLEAN = "use the config.json and the weights of one and the same model"


def _refusal(what: str, values: str, fix: str) -> CheckpointError:
    return CheckpointError(what, values=values, fix=fix)


def _not_known(operation: str, name: str, keys: Sequence[str], folder: Path) -> CheckpointError:
    return _refusal(
        "A conversion that this checkpoint needs is not known here.",
        f"{folder}: {operation} makes {name} of {list(keys)[:3]}",
        "load it with from_pretrained once and save it with save_original_format=False, or report this model",
    )


def _stale_quantization(model: Any, folder: Path) -> str:
    return (
        f"{folder}: config.json says quantization_config ({quantization_of(model.config)}), and the weights are plain: "
        "they train as they are, and the export is without it"
    )


def _check_floating(sources: _Sources, folder: Path) -> None:
    for tensor in (tensor for tensors in sources.found.values() for tensor in tensors):
        if tensor.dtype not in FLOATING:
            raise _refusal(
                "A stored tensor is quantised.",
                f"{folder}: {tensor.name} is {tensor.dtype}",
                "use the unquantised model: full fine-tuning moves every weight",
            )


def _check_names(model: Any, folder: Path, *, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    ignorable = [re.compile(p) for p in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    ignorable.append(re.compile(r"rotary_emb\.inv_freq$"))
    unexpected = sorted(name for name in unexpected if not any(pattern.search(name) for pattern in ignorable))
    if not missing and not unexpected:
        return
    head = getattr(model.get_output_embeddings(), "weight", None)
    lacks_head = any(parameter is head and [name] == list(missing) for name, parameter in model.named_parameters())
    fix = "use the unquantised model: full fine-tuning moves every weight" if quantization_of(model.config) else _CLEAN
    raise _refusal(
        "The weights do not belong to this model.",
        f"{folder}: missing {list(missing[:5])} ({len(missing)}), unexpected {unexpected[:5]} ({len(unexpected)})",
        "the files hold no output head and config.json unties it: set tie_word_embeddings: true only where that is so"
        if lacks_head and not unexpected
        else fix,
    )


def _check_shapes(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], folder: Path) -> None:
    """Compare the shape stored with the one in the model, for every name."""
    wrong = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    if not wrong:
        return
    shown = [f"{name}: {list(stored)} stored, {list(here)} in the model" for name, (stored, here) in wrong.items()]
    tables = [stored[0] for stored, here in wrong.values() if len(stored) == len(here) == 2 and stored[1] == here[1]]
    raise _refusal(
        "A tensor has another shape than the model.",
        f"{folder}: {'; '.join(shown[:3])} ({len(wrong)})",
        f"where these are tables of tokens that were grown or padded, set vocab_size: {tables[0]} in config.json"
        if len(tables) == len(wrong)
        else _CLEAN,
    )


def _check_tie(target: torch.Tensor, piece: Piece, *, names: tuple[str, str], folder: Path) -> None:
    """Compare the second copy of a tied parameter with the first, on this rank's part and a block at a time."""
    local, ranges = local_part(target)
    if not local.numel():
        return
    step = max(1, BLOCK_BYTES // max(1, local[0].nbytes))
    for start in range(0, local.shape[0], step):
        rows = local[start : start + step]
        other = torch.empty_like(rows)
        first = ranges[0][0] + start
        piece.copy_into(other, ((first, first + rows.shape[0]), *ranges[1:]))
        if not torch.equal(rows, other):
            raise _refusal(
                "The config ties two tensors that differ in the files: one of them would be lost.",
                f"{folder}: tie_word_embeddings: true, but {names[0]} and {names[1]} are not equal",
                "set tie_word_embeddings: false in config.json, or delete the one that was not trained",
            )
