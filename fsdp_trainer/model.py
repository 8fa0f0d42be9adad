"""Build a Hugging Face causal LM without weights, find its parts, and fill each rank's shards from safetensors.

No rank ever holds the whole model: parameters are born on the meta device, sharded there, and each rank reads only
its own slices.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from fsdp_trainer.attention import choose_attention
from fsdp_trainer.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class ModelParts:
    """The modules that sharding, checkpointing and the loss act on, found through the model's own attributes."""

    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    embedding: nn.Module
    head: nn.Module
    final_norm: nn.Module | None
    tied: bool


def load_hf_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Read the model's config.json; ConfigError when `path` is no model folder that can be trained."""
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "The model's config cannot be read.",
            values=f"model.path: {path} ({str(error).splitlines()[0]})",
            fix="set model.path to a folder with config.json and safetensors, or to a hub id that can be reached",
        ) from error
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "The router loss of mixture-of-experts models comes later.",
            values=f"output_router_logits: true in {path}",
            fix="set output_router_logits to false in the model's config.json",
        )
    return config


def build_meta_model(hf_config: Any, *, attention: str, dtype: torch.dtype, trust_remote_code: bool = False):
    """Build the model with parameters on meta and real buffers on CPU (rotary tables have no copy in a checkpoint).

    `hf_config` is changed by Transformers (dtype, attention); hand in a copy if it is needed unchanged.
    """
    implementation = choose_attention(attention, hf_config)
    with init_empty_weights(include_buffers=False), no_init_weights():
        try:
            model = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=implementation, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except (ValueError, KeyError) as error:  # KeyError: an architecture with its own table of attentions (Falcon)
            raise ConfigError(
                "This model cannot be built as a causal language model with the attention asked for.",
                values=f"model_type {hf_config.model_type}, attention {attention}: {str(error).splitlines()[0]}",
                fix="set model.attention: eager, or name a causal language model",
            ) from error
    model.tie_weights()
    return model.train()


def find_parts(model: Any) -> ModelParts:
    """Find decoder, its layers, embedding, head and final norm; ConfigError with the module tree when there is none."""
    decoder = getattr(model, model.base_model_prefix, None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = _find_layers(decoder, model.config.get_text_config().num_hidden_layers)
    if decoder is None or layers is None or embedding is None or head is None:
        children = [f"{name}: {type(module).__name__}" for name, module in model.named_modules() if name.count(".") < 2]
        raise ConfigError(
            "The repeated decoder layers, embedding or output head of this model were not found.",
            values=f"{type(model).__name__} with {'; '.join(children[:20])}",
            fix="use a decoder-only causal LM from Transformers whose config gives num_hidden_layers",
        )
    norms = [
        module
        for module in decoder.children()
        if "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))
    ]
    return ModelParts(
        decoder=decoder,
        layers=layers,
        embedding=embedding,
        head=head,
        final_norm=norms[-1] if norms else None,
        tied=embedding.weight is head.weight,
    )


def _find_layers(decoder: nn.Module | None, count: int) -> tuple[nn.Module, ...] | None:
    if decoder is None:
        return None
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    by_size = sorted(lists, key=lambda found: -sum(p.numel() for p in found.parameters()))
    return tuple(by_size[0]) if by_size else None


def place_buffers(model: Any, place: Any) -> None:
    """Move every buffer with `place(tensor)`; FSDP neither shards nor casts buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = place(buffer)


def materialize_parameters(model: Any, device: torch.device) -> None:
    """Give every sharded meta parameter memory on `device`, values undefined.

    nn.Module._apply swaps tensor subclasses in place, so ties hold and FSDP keeps its references;
    `to_empty` would also wipe the buffers, of which a checkpoint has no copy.
    """
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def initialize_randomly(model: Any, hf_config: Any, *, seed: int, trust_remote_code: bool = False) -> None:
    """Fill the shards with the architecture's own random initialisation, the same for every world size.

    Each rank builds the whole model once on the host and keeps its slices: meant for tests and benchmarks.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    source = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _copy_slice(parameter, source[name].detach())


def load_weights(model: Any, path: str | Path) -> None:
    """Fill each rank's shards from the folder's safetensors, reading only the slices this rank owns.

    Values are cast to the parameter's dtype. CheckpointError names tensors that are missing, unexpected or of another
    shape: none of them may be guessed.
    """
    folder = Path(path)
    files = _tensor_files(folder)
    prefix = model.base_model_prefix + "."
    targets = named_weights(model)
    renamed = {_stored_name(name, files, prefix): target for name, target in targets.items()}
    _check_names(renamed, files, model, folder, prefix)
    by_file: dict[Path, list[str]] = {}
    for stored in renamed:
        by_file.setdefault(files[stored], []).append(stored)
    with torch.no_grad():
        for file, names in sorted(by_file.items()):
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    _check_shape(name, opened.get_slice(name).get_shape(), renamed[name], file)
                    _copy_slice(renamed[name], opened.get_slice(name))


def _stored_name(name: str, files: Mapping[str, Path], prefix: str) -> str:
    """Return `name` as the checkpoint spells it: some were saved from the bare decoder, without its prefix."""
    if name not in files and name.removeprefix(prefix) in files:
        return name.removeprefix(prefix)
    return name


def _tensor_files(folder: Path) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in weight_map.values() if Path(file).name != file]
        if outside:
            raise CheckpointError(
                "The weight index points outside its folder.", values=f"{index}: {outside[0]}", fix="use a clean copy"
            )
        return {name: folder / file for name, file in weight_map.items()}
    if single.is_file():
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    raise CheckpointError(
        "The model folder holds no safetensors.",
        values=f"{folder}: neither model.safetensors nor model.safetensors.index.json",
        fix="set model.path to a folder saved with save_pretrained, or model.init: random to start without weights",
    )


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters (a tied one once, under its first name) and persistent buffers, by their names in the model."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    if isinstance(model, FSDPModule):
        whole = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        assert not whole, f"{len(whole)} weights are gathered, such as {whole[0]}: reshard before saving or loading"
    return named | dict(_persistent_buffers(model))


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _check_names(
    targets: Mapping[str, torch.Tensor], files: Mapping[str, Path], model: Any, folder: Path, prefix: str
) -> None:
    missing = sorted(set(targets) - set(files))
    tied = {name for name in _all_parameter_names(model) if name not in targets}
    ignorable = [re.compile(p) for p in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    ignorable.append(re.compile(r"rotary_emb\.inv_freq$"))
    unexpected = sorted(
        name
        for name in set(files) - set(targets) - tied
        if prefix + name not in tied and not any(pattern.search(name) for pattern in ignorable)
    )
    if missing or unexpected:
        raise CheckpointError(
            "The weights do not belong to this model.",
            values=f"{folder}: missing {missing[:5]} ({len(missing)}), unexpected {unexpected[:5]} ({len(unexpected)})",
            fix="use the config.json and the safetensors of one and the same model",
        )


def _all_parameter_names(model: Any) -> Iterator[str]:
    return (name for name, _ in model.named_parameters(remove_duplicate=False))


def _check_shape(name: str, stored: list[int], target: torch.Tensor, file: Path) -> None:
    if list(stored) != list(target.shape):
        raise CheckpointError(
            "A tensor has another shape than the model.",
            values=f"{name} in {file}: {list(stored)} stored, {list(target.shape)} in the model",
            fix="use the config.json and the safetensors of one and the same model",
        )


def _copy_slice(target: torch.Tensor, source: Any) -> None:
    """Copy this rank's part of `source` (a tensor or a safetensors slice) into `target`."""
    if not isinstance(target, DTensor):
        target.copy_(source[:] if target.dim() else source[...])
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if local.numel():
        local.copy_(source[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])
