"""Write the trained weights as a Hugging Face folder that `from_pretrained` loads as it is.

Weights are gathered tensor by tensor and written file by file, so the host holds one file's worth at most, and the
folder takes its name only after everything in it was read back.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from fsdp_trainer.agreement import is_main, run_on_main
from fsdp_trainer.checkpoint_folder import sync
from fsdp_trainer.checkpoint_pace import waiting_for
from fsdp_trainer.conversions import ExportGroup, architecture_of, plan_export, to_checkpoint
from fsdp_trainer.custom_code import local_auto_map, write_custom_code
from fsdp_trainer.errors import FailedSave
from fsdp_trainer.export_folder import make_empty, replace_folder, unfinished
from fsdp_trainer.loading import QUANTIZATION
from fsdp_trainer.model import names_in_fp32
from fsdp_trainer.model_card import CARD
from fsdp_trainer.optim.masters import trained_weights
from fsdp_trainer.run_folder import how_to_go_on
from fsdp_trainer.weight_files import INDEX, SAFETENSORS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9  # what hubs and readers expect of one file, and what rank 0 holds at once
INDEX_FILE = SAFETENSORS + INDEX
Plan = Mapping[str, Sequence[ExportGroup]]  # the groups of tensors in each file


@dataclass(frozen=True)
class ExportedModel:
    """What was written; `total_bytes` counts tensors, without file headers."""

    folder: Path
    dtype: torch.dtype
    files: tuple[str, ...]
    total_bytes: int


def export_model(
    folder: Path,
    *,
    model: nn.Module,
    hf_config: Any,
    optimizer: torch.optim.Optimizer | None = None,
    tokenizer: Any = None,
    dtype: str = "bf16",
    generation_config: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    card: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ExportedModel:
    """Write `model` to `folder` as safetensors, config, generation config, tokenizer, chat template and `card`.

    All ranks call it, with the weights sharded; rank 0 writes, and all raise FailedSave when it fails. Masters
    that `optimizer` keeps are written instead of the weights they stand for. `hf_config` is the source's config as it
    was before training (`use_cache` stays what it says there); only dtype, architectures and the tie are set to what
    the weights are. `dtype` is auto (the source's), fp32, bf16 or fp16: a narrower one than the weights were trained in
    rounds small updates away. An earlier folder is replaced when the new one is whole.
    """
    folder = Path(folder)
    target_dtype = resolve_dtype(dtype, hf_config, model)
    weights = exported_weights(model, optimizer)
    dtypes = exported_dtypes(model, weights, target_dtype)
    plan = plan_files(plan_export(model, weights, dtypes), max_bytes=max_file_bytes)
    part, size = unfinished(folder), total_bytes(plan)
    _on_main(lambda: make_empty(part), folder, process_group)
    for file, groups in plan.items():
        kept = [gather_weights(weights, group.names, dtypes=dtypes, keep=is_main(process_group)) for group in groups]
        write = partial(_write_gathered, part / file, model, kept)
        _on_main(write, folder, process_group, size=total_bytes({file: groups}))
        del kept, write
    config = exported_config(hf_config, model, target_dtype)
    generation_config = generation_config or getattr(model, "generation_config", None)

    def finish() -> None:
        write_index(part, plan)
        write_sides(part, config, generation_config, tokenizer, card)
        write_own_code(part, model)
        replace_folder(folder, part)

    _on_main(finish, folder, process_group, size=size)
    return ExportedModel(folder, target_dtype, tuple(plan), size)


def _write_gathered(path: Path, model: nn.Module, gathered: list[dict[str, torch.Tensor]]) -> None:
    write_file(path, converted(model, gathered))


def _on_main(
    action: Callable[[], None], folder: Path, process_group: dist.ProcessGroup | None, *, size: int = 0
) -> None:
    """Run `action` on rank 0, which moves `size` bytes; a failure of disk or library is a FailedSave on all."""
    with waiting_for(f"The export to {folder}", size, process_group=process_group):
        run_on_main(lambda: guarded(action, folder), process_group=process_group)


def try_writing(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: str,
    hf_config: Any,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Send the smallest tensors of the export to `folder` through what writes and reads its files, and remove them.

    Collective; FailedSave on every rank where that fails. Neither the run nor an earlier folder is changed.
    """
    weights = exported_weights(model, optimizer)
    dtypes = exported_dtypes(model, weights, resolve_dtype(dtype, hf_config, model))
    groups = plan_export(model, weights, dtypes)
    smallest = min(groups, key=lambda group: sum(tensor.nbytes for tensor in group.written.values()))
    kept = [gather_weights(weights, smallest.names, dtypes=dtypes, keep=is_main(process_group))]
    part = unfinished(folder)

    def write() -> None:
        make_empty(part)
        write_file(part / SAFETENSORS, converted(model, kept))
        shutil.rmtree(part)

    _on_main(write, folder, process_group)


def guarded(action: Callable[[], None], folder: Path, *, then: str = "") -> None:
    """Run a part of an export; when it fails, clean up what was written so far and say so in our own error.

    `then` says what to do when there is room; by default what the run's command will do.
    """
    try:
        action()
    except Exception as error:
        shutil.rmtree(unfinished(folder), ignore_errors=True)
        raise FailedSave(
            "The trained model could not be written; an earlier folder is as it was.",
            values=f"{folder}: {type(error).__name__}: {error}",
            fix=f"make room or give write access there; {then or how_to_go_on(folder.parent)}",
        ) from error


def gather_as_exported(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, dtype: str, hf_config: Any, keep: bool, largest: bool = False
) -> None:
    """Gather and convert what `export_model` writes, file by file, and write nothing: for what it takes of memory.

    `keep` is true on the rank that would write; with `largest` it is that file alone.
    """
    weights = exported_weights(model, optimizer)
    dtypes = exported_dtypes(model, weights, resolve_dtype(dtype, hf_config, model))
    plan: Plan = plan_files(plan_export(model, weights, dtypes), max_bytes=MAX_FILE_BYTES)
    if largest:
        plan = dict([max(plan.items(), key=lambda file: total_bytes(dict([file])))])
    for groups in plan.values():
        kept = [gather_weights(weights, group.names, dtypes=dtypes, keep=keep) for group in groups]
        if keep:
            converted(model, kept)
        del kept


def exported_bytes(model: nn.Module, *, dtype: str, hf_config: Any) -> int:
    """Return the bytes of the tensors that `export_model` writes."""
    target = resolve_dtype(dtype, hf_config, model)
    weights = exported_weights(model).values()
    return sum(t.numel() * (target if t.is_floating_point() else t.dtype).itemsize for t in weights)


# What is written


def resolve_dtype(dtype: str, hf_config: Any, model: nn.Module) -> torch.dtype:
    """Return the dtype that auto (the source's), fp32, bf16 or fp16 names."""
    if dtype != "auto":
        return DTYPES[dtype]
    source = getattr(hf_config, "dtype", None) or next(model.parameters()).dtype
    return source if isinstance(source, torch.dtype) else getattr(torch, str(source).removeprefix("torch."))


def exported_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return what is written of a model, by its names in the model: a tied tensor once, masters where there are any."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: tensor for name, tensor in trained_weights(model, optimizer).items() if name not in ignored}


def exported_dtypes(
    model: nn.Module, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtype each tensor is written in: `dtype`, but for what is no float or must not be narrowed.

    The latter are what Transformers itself keeps in fp32, such as the routers' corrections: written narrower, they
    would come back as fp32 with their bits gone.
    """
    kept = names_in_fp32(model, weights, dtype)

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if name in kept else dtype

    return {name: of(name, tensor) for name, tensor in weights.items()}


def plan_files(groups: Sequence[ExportGroup], *, max_bytes: int) -> dict[str, tuple[ExportGroup, ...]]:
    """Return which file holds which tensors, in order, each of at most `max_bytes` unless one group is larger."""
    parts: list[list[ExportGroup]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group.written.values())
        if parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(group)
        filled += size
    if len(parts) == 1:
        return {SAFETENSORS: tuple(parts[0])}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": tuple(part) for i, part in enumerate(parts, start=1)}


def total_bytes(plan: Plan) -> int:
    """Return the bytes of all tensors as written."""
    return sum(tensor.nbytes for tensor in _written(plan).values())


def _written(plan: Plan) -> dict[str, torch.Tensor]:
    return {name: tensor for groups in plan.values() for group in groups for name, tensor in group.written.items()}


def converted(model: nn.Module, gathered: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of one file as a checkpoint has them; `gathered` (one entry a group) is emptied meanwhile."""
    tensors: dict[str, torch.Tensor] = {}
    while gathered:
        tensors |= {name: tensor.contiguous() for name, tensor in to_checkpoint(model, gathered.pop(0)).items()}
    return tensors


@torch.no_grad()
def gather_weights(
    weights: Mapping[str, torch.Tensor], names: Sequence[str], *, dtypes: Mapping[str, torch.dtype], keep: bool
) -> dict[str, torch.Tensor]:
    """Gather the named tensors one at a time on every rank; `keep` them in host memory (rank 0) or drop them."""
    kept = {}
    for name in names:
        whole = _whole(weights[name], dtypes[name])
        if keep:
            kept[name] = whole.cpu().contiguous()
    return kept


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.to(dtype)  # before gathering: half the traffic and half the memory of fp32
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)  # offloaded shards: the mesh's backend works on the device
    return tensor.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor still


def exported_config(hf_config: Any, model: nn.Module, dtype: torch.dtype) -> Any:
    """Return the source's config with dtype, architectures and tie as they are in the weights, which are plain."""
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    for name in QUANTIZATION:  # what is written is plain, and whoever believed the flag would unpack it
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [architecture_of(model).__name__]
    if getattr(config, "auto_map", None):
        # A class of Transformers itself needs no code beside it, and none is there.
        own = architecture_of(model).__module__.startswith("transformers.")
        if own:
            del config.auto_map
        else:
            config.auto_map = local_auto_map(config.auto_map)
    tied = _is_tied(model)
    # The tie is what the tensors say: a head that came apart is written, and a flag left on would drop it on loading.
    if tied is not None and tied != getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = tied
    return config


def _is_tied(model: Any) -> bool | None:
    """Return whether head and embedding are one parameter; None for a model that lacks one of them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return None if embedding is None or head is None else head.weight is embedding.weight


# Rank 0's files


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one file of weights and compare every bit of it, read again, with what was meant."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes its files private; a model is served by other users too
    sync(path)
    with safe_open(path, framework="pt") as opened:
        if set(opened.keys()) != tensors.keys():
            raise OSError(f"{path.name} holds other tensors than were written")
        for name, tensor in tensors.items():
            if not _same_bits(opened.get_tensor(name), tensor):
                raise OSError(f"{name} in {path.name} is not what was written")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # As bytes: a NaN would differ from itself.
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def write_index(part: Path, plan: Plan) -> None:
    """Write the table of names and files, where there are several files."""
    if len(plan) == 1:
        return
    names = {name: file for file, groups in plan.items() for group in groups for name in group.written}
    parameters = sum(tensor.numel() for tensor in _written(plan).values())
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total_bytes(plan)},
        "weight_map": names,
    }
    (part / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_sides(part: Path, config: Any, generation_config: Any, tokenizer: Any, card: str | None) -> None:
    """Write what a model folder holds besides weights: config, generation config, tokenizer and template, card."""
    config.save_pretrained(part)
    write_custom_code(config, part)
    if generation_config is not None:
        # Not save_pretrained, which refuses combinations that some published models ship with.
        generation_config.to_json_file(part / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    if card is not None:
        (part / CARD).write_text(card, encoding="utf-8")


def write_own_code(part: Path, model: nn.Module) -> None:
    """Write the code of a model that brings its own: whoever loads the folder runs what lies there.

    The config's and the tokenizer's code come with them; the model's would come with `model.save_pretrained`, which
    holds the whole model.
    """
    kind = architecture_of(model)
    if kind.__module__.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        custom_object_save(kind, part)
