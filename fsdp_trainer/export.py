"""Write the trained weights as a Hugging Face folder that `from_pretrained` loads as it is.

Weights are gathered tensor by tensor and written file by file, so the host holds one file's worth at most, and the
folder takes its name only after everything in it was read back.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_trainer.agreement import is_main, run_on_main
from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.model import named_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9  # what hubs and readers expect of one file, and what rank 0 holds at once
INDEX_FILE = "model.safetensors.index.json"


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
    tokenizer: Any = None,
    dtype: str = "bf16",
    generation_config: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> ExportedModel:
    """Write `model` to `folder` as safetensors, config, generation config, tokenizer and chat template.

    All ranks call it, with the weights sharded; rank 0 writes, and all raise CheckpointError when it fails. `hf_config`
    is the source's config as it was before training (`use_cache` stays what it says there); only dtype, architectures
    and the tie are set to what the weights are. `dtype` is auto (the source's), fp32, bf16 or fp16: a narrower one than
    the weights were trained in rounds small updates away. An earlier folder is replaced when the new one is whole.
    """
    folder = Path(folder)
    target_dtype = _resolve_dtype(dtype, hf_config, model)
    weights = _exported_weights(model)
    plan = _plan_files(weights, dtype=target_dtype, max_bytes=max_file_bytes)
    part = _unfinished(folder)
    _on_main(lambda: _make_empty(part), folder, process_group)
    for file, names in plan.items():
        tensors = _gather(weights, names, dtype=target_dtype, keep=is_main(process_group))
        _on_main(lambda file=file, tensors=tensors: _write_file(part / file, tensors), folder, process_group)
        del tensors
    config = _exported_config(hf_config, model, target_dtype)
    generation_config = generation_config or getattr(model, "generation_config", None)
    total = sum(_bytes(tensor, target_dtype) for tensor in weights.values())

    def finish() -> None:
        _write_index(part, plan, weights, total_bytes=total)
        _write_sides(part, config, generation_config, tokenizer)
        _check_written(part, plan, weights, dtype=target_dtype)
        _replace(folder, part)

    _on_main(finish, folder, process_group)
    return ExportedModel(folder, target_dtype, tuple(plan), total)


def _on_main(action: Callable[[], None], folder: Path, process_group: dist.ProcessGroup | None) -> None:
    """Run `action` on rank 0; a failure of disk or library becomes one CheckpointError on every rank."""

    def guarded() -> None:
        try:
            action()
        except Exception as error:
            shutil.rmtree(_unfinished(folder), ignore_errors=True)
            raise CheckpointError(
                "The trained model could not be written; an earlier folder is as it was.",
                values=f"{folder}: {type(error).__name__}: {error}",
                fix="make room or give write access in output_dir, then resume: only the export is done again",
            ) from error

    run_on_main(guarded, process_group=process_group)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def exported_bytes(model: nn.Module, *, dtype: str, hf_config: Any) -> int:
    """Return the bytes of the tensors that `export_model` writes."""
    target = _resolve_dtype(dtype, hf_config, model)
    return sum(_bytes(tensor, target) for tensor in _exported_weights(model).values())


# What is written


def _resolve_dtype(dtype: str, hf_config: Any, model: nn.Module) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    source = getattr(hf_config, "dtype", None) or next(model.parameters()).dtype
    return source if isinstance(source, torch.dtype) else getattr(torch, str(source).removeprefix("torch."))


def _exported_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: tensor for name, tensor in named_weights(model).items() if name not in ignored}


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize


def _plan_files(weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, max_bytes: int) -> dict[str, list[str]]:
    """Return which file holds which tensors, in order, each of at most `max_bytes` unless one tensor is larger."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, tensor in weights.items():
        size = _bytes(tensor, dtype)
        if parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, start=1)}


@torch.no_grad()
def _gather(
    weights: Mapping[str, torch.Tensor], names: Sequence[str], *, dtype: torch.dtype, keep: bool
) -> dict[str, torch.Tensor]:
    """Gather the named tensors one at a time on every rank; `keep` them in host memory (rank 0) or drop them."""
    kept = {}
    for name in names:
        whole = _whole(weights[name], dtype)
        if keep:
            kept[name] = whole.cpu().contiguous()
    return kept


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)  # before gathering: half the traffic and half the memory of fp32
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)  # offloaded shards: the mesh's backend works on the device
    return tensor.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor still


def _exported_config(hf_config: Any, model: nn.Module, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    # fully_shard gives the model a class of its own, FSDP<name>, whose first other base is the architecture.
    config.architectures = [next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))]
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


def _make_empty(part: Path) -> None:
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _sync(path)


def _write_index(
    part: Path, plan: Mapping[str, Sequence[str]], weights: Mapping[str, torch.Tensor], *, total_bytes: int
) -> None:
    if len(plan) == 1:
        return
    parameters = sum(tensor.numel() for tensor in weights.values())
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total_bytes},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    (part / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_sides(part: Path, config: Any, generation_config: Any, tokenizer: Any) -> None:
    config.save_pretrained(part)
    if generation_config is not None:
        # Not save_pretrained, which refuses combinations that some published models ship with.
        generation_config.to_json_file(part / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(part)


def _check_written(
    part: Path, plan: Mapping[str, Sequence[str]], weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> None:
    """Re-open every weight file and compare names, shapes and dtypes with what was meant to be in it."""
    for file, names in plan.items():
        with safe_open(part / file, framework="pt") as opened:
            if set(opened.keys()) != set(names):
                raise OSError(f"{file} holds other tensors than were written")
            for name in names:
                written = opened.get_slice(name)
                expected = dtype if weights[name].is_floating_point() else weights[name].dtype
                if written.get_shape() != list(weights[name].shape) or _DTYPE_NAMES[written.get_dtype()] != expected:
                    raise OSError(f"{name} in {file} has another shape or dtype than was written")


_DTYPE_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _replace(folder: Path, part: Path) -> None:
    """Give `part` the name `folder`; what had it is moved aside first and deleted last."""
    for path in [*part.iterdir(), part]:
        _sync(path)
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
