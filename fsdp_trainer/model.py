"""Build a Hugging Face causal LM without weights and find its parts.

No rank ever holds the whole model: parameters are born on the meta device and sharded there; loading.py fills them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from fsdp_trainer.attention import choose_attention
from fsdp_trainer.config import ModelConfig
from fsdp_trainer.config_checks import check_learned_positions, check_model_path
from fsdp_trainer.custom_code import building_arguments, check_custom_code, one_at_a_time
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.export_checksums import refuse_damaged_sides
from fsdp_trainer.gguf_model import local_model
from fsdp_trainer.hub import refuse_unreachable
from fsdp_trainer.model_config import refuse_hostile_config
from fsdp_trainer.rotary import choose_tables_by_document


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
    if revision is not None and Path(path).exists():
        raise ConfigError(
            "A revision belongs to a hub id; this model is a local folder.",
            values=f"model.path: {path}, model.revision: {revision}",
            fix="leave model.revision out, or give the hub id",
        )
    check_model_path(path)
    refuse_unreachable(path, revision=revision)
    path = local_model(path)
    refuse_damaged_sides(Path(path))
    if trust_remote_code:
        check_custom_code(path, revision=revision)
    refuse_hostile_config(path, file=_config_file(path, revision), trust_remote_code=trust_remote_code)
    try:
        with one_at_a_time(trust_remote_code=trust_remote_code):
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    # The last: a config that contradicts itself is refused by huggingface_hub's own dataclass checks.
    except (OSError, ValueError, RecursionError, StrictDataclassError) as error:
        raise _explain_config(path, error) from error
    if trust_remote_code and revision is not None:
        config._commit_hash = revision  # where the code is read from later; never written (configuration_utils.py)
    return config


def _config_file(path: str, revision: str | None) -> Path | None:
    """Return the config.json that AutoConfig will read; None where there is none to be had."""
    missing = {
        f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    try:
        found = cached_file(path, "config.json", revision=revision, **missing)
    except (OSError, ValueError):  # AutoConfig says it in its own words
        return None
    return Path(found) if found is not None else None


def _explain_config(path: str, error: Exception) -> ConfigError:
    reason = shorten(str(error), width=300, placeholder=" ...")
    if "custom code" in reason:
        what = "The model comes with code of its own."
        fix = "read that code, then set model.trust_remote_code: true and, on the hub, model.revision to a commit"
    elif Path(path).is_dir():
        what = "The model's config.json cannot be used."
        fix = "correct config.json, or take it anew from where the model comes from"
        fix += "; a newer Transformers may know the model" if "does not recognize" in reason else ""
    else:
        what = "The model cannot be had from the hub."
        fix = "correct the hub id or model.revision, log in with `hf auth login` where it is gated, or give a folder"
    return ConfigError(what, values=f"model.path: {path} ({reason})", fix=fix)


def check_positions(hf_config: Any, parts: ModelParts, *, seq_len: int) -> None:
    """Refuse rows longer than a table of learned positions; rotary positions are checked by document, see below."""
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    learned = any(isinstance(m, nn.Embedding) and m is not parts.embedding for m in parts.decoder.modules())
    if learned and limit is not None:
        check_learned_positions(seq_len, limit=limit)


def check_row_length(section: ModelConfig, *, seq_len: int) -> None:
    """Refuse what `check_positions` refuses, from the model's config alone.

    Where rows are longer than the model's positions, the model is built without weights, to see what they are.
    """
    hf_config = load_hf_config(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    if seq_len > (getattr(hf_config.get_text_config(), "max_position_embeddings", None) or seq_len):
        model = build_meta_model(
            hf_config, attention="eager", dtype=torch.float32, trust_remote_code=section.trust_remote_code
        )
        check_positions(model.config, find_parts(model), seq_len=seq_len)


def check_longest_document(hf_config: Any, *, longest_tokens: int) -> None:
    """Refuse documents beyond the positions that the model was made for: it would be trained where it never was."""
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest_tokens > limit:
        raise ConfigError(
            "A document is longer than the positions the model was made for.",
            values=f"longest document {longest_tokens} tokens, max_position_embeddings {limit}",
            fix=f"set data.seq_len to at most {limit}, or raise max_position_embeddings in the model's config.json",
        )


def build_meta_model(hf_config: Any, *, attention: str, dtype: torch.dtype, trust_remote_code: bool = False):
    """Build the model with parameters on meta and real buffers on CPU (rotary tables have no copy in a checkpoint).

    `hf_config` is changed by Transformers (dtype, attention); hand in a copy if it is needed unchanged.
    """
    implementation = choose_attention(attention, hf_config)
    one = one_at_a_time(trust_remote_code=trust_remote_code)
    with one, init_empty_weights(include_buffers=False), no_init_weights():
        try:
            model = AutoModelForCausalLM.from_config(
                hf_config,
                attn_implementation=implementation,
                dtype=dtype,
                **building_arguments(hf_config, trust_remote_code=trust_remote_code),
            )
        # KeyError: an architecture with its own table of attentions (Falcon); RuntimeError: sizes that cannot be.
        except (ValueError, KeyError, RuntimeError, ZeroDivisionError) as error:
            raise _explain_build(hf_config, attention, error) from error
    blind = next((module for module in model.modules() if getattr(module, "is_causal", True) is False), None)
    if blind is not None and hf_config.get_text_config() is not hf_config:
        raise _refuse_wrapper(hf_config)
    if blind is not None:
        raise ConfigError(
            "This model is an encoder: its tokens see those that come after them.",
            values=f"model_type {hf_config.model_type}, {type(blind).__name__} is not causal",
            fix="name a decoder-only causal language model",
        )
    model.tie_weights()
    choose_tables_by_document(model)
    return model.train()


def _refuse_wrapper(hf_config: Any) -> ConfigError:
    parts = [part for part in hf_config.sub_configs if getattr(hf_config, part, None) is not None]
    return ConfigError(
        "This is a model of text and of something else; only models of text are trained.",
        values=f"model_type {hf_config.model_type}, whose config.json has {', '.join(parts)}",
        fix="name a model of text, such as its text part saved as a model of its own",
    )


def _explain_build(hf_config: Any, attention: str, error: Exception) -> ConfigError:
    if hf_config.get_text_config() is not hf_config and "Unrecognized configuration class" in str(error):
        return _refuse_wrapper(hf_config)
    what = "This model cannot be built as a causal language model with the attention asked for."
    values = f"model_type {hf_config.model_type}, attention {attention}: {str(error).splitlines()[0]}"
    fix = "set model.attention: eager, or name a causal language model"
    if "Unrecognized configuration class" in values:
        what, fix = "This is not a causal language model.", "name a decoder-only causal language model"
        values = f"model_type {hf_config.model_type}, which Transformers has no causal language model for"
    elif isinstance(error, RuntimeError | ZeroDivisionError):
        what, fix = "The model's config.json describes no model that can be.", "correct its sizes"
    return ConfigError(what, values=values, fix=fix)


def find_parts(model: Any) -> ModelParts:
    """Find decoder, its layers, embedding, head and final norm; ConfigError with the module tree when there is none."""
    # Llama 4 has the prefix of a wrapper that it may lie in.
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = _find_layers(decoder, model.config.get_text_config().num_hidden_layers)
    if decoder is None or not layers or embedding is None or head is None:
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
    # LongCat counts two layers of attention in each of its layers.
    lists = lists or [module for module in decoder.children() if isinstance(module, nn.ModuleList)]
    by_size = sorted(lists, key=lambda found: -sum(p.numel() for p in found.parameters()))
    return tuple(by_size[0]) if by_size else None


def apply_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters the dtype they rest in, but for the modules that compute in fp32. Before they have memory."""
    kept = {id(p) for module in modules_in_fp32(model, dtype) for p in module.parameters(recurse=False)}
    # A swap would break the tie of two names; the parameter stays and its meta tensor goes.
    for parameter in model.parameters():
        if id(parameter) not in kept:
            assert parameter.is_meta
            parameter.data = parameter.data.to(dtype)


def apply_freezing(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Stop the gradients of the parameters that `patterns` name, before sharding; return the names of all frozen ones.

    A pattern is a shell pattern (* ? [...]) for a whole parameter name as in the checkpoint's model, or for a module,
    whose parameters it then covers. A tied weight has two names and is one parameter: naming either freezes both.
    ConfigError for a pattern that matches nothing, and when nothing would be left to train.
    """
    unmatched = []
    for pattern in patterns:
        found = [
            parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        for parameter in found:
            parameter.requires_grad_(False)
        unmatched += [] if found else [pattern]
    names = [name for name, _ in model.named_parameters()]
    if unmatched:
        raise ConfigError(
            "A pattern of frozen parameters matches none.",
            values=f"model.freeze: {unmatched}; the parameters are {', '.join(names[:4])} ... {names[-1]}",
            fix="use whole names with * for what varies, such as model.embed_tokens or model.layers.0.*",
        )
    frozen = tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    if len(frozen) == len(names):
        raise ConfigError(
            "Every parameter is frozen, so nothing would train.",
            values=f"model.freeze: {list(patterns)} matches all {len(names)} parameters",
            fix="leave out a pattern of model.freeze",
        )
    return frozen


def place_buffers(model: Any, place: Any) -> None:
    """Move every buffer with `place(tensor)`; FSDP neither shards nor casts buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = place(buffer)


def materialize_parameters(model: Any, device: torch.device) -> None:
    """Give every meta parameter memory on `device`, values undefined.

    nn.Module._apply swaps tensor subclasses in place, so ties hold and FSDP keeps its references;
    `to_empty` would also wipe the buffers, of which a checkpoint has no copy.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    else:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        for module in model.modules():
            module._parameters |= {name: made[p] for name, p in module._parameters.items() if p is not None}


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters (a tied one once, under its first name) and persistent buffers, by their names in the model."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    if any(module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)):
        whole = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        assert not whole, f"{len(whole)} weights are gathered, such as {whole[0]}: reshard before saving or loading"
    return named | dict(_persistent_buffers(model))


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def names_in_fp32(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Return which weights Transformers keeps in fp32 in a model of `dtype` (modeling_utils.py, `_get_dtype_plan`)."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    patterns = [re.compile(name.replace("*", ".*")) for name in kept]
    return {name for name in names if any(pattern.search(name) for pattern in patterns)}


def modules_in_fp32(model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Return the modules whose own parameters compute in fp32 in a model of `dtype`, such as a router's gate.

    Inner ones first. What lies in modules below them does not, unless they are named too.
    """
    if dtype == torch.float32:
        return []
    kept = names_in_fp32(model, (name for name, _ in model.named_parameters()), dtype)
    owners = {name.rpartition(".")[0] for name in kept}
    return [model.get_submodule(owner) for owner in sorted(owners, key=lambda name: (-name.count("."), name))]
