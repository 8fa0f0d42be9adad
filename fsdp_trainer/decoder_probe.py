"""Run a decoder once on fake tensors, before a weight is loaded, to see that it runs here and keeps documents apart.

Only this trainer's attention knows where a document ends; a layer that mixes tokens in another way (a convolution, a
state-space scan, linear attention) carries one document of a packed row into the next, and no number shows it.
"""

import copy
import json
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_trainer.attention import Documents
from fsdp_trainer.caches import remembered
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.model import ModelParts

PROBE_TOKENS = 8

# What a forward does that has no answer without values: nothing is said about the model.
UNKNOWN_ON_FAKES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.MetadataMismatchError,
    NotImplementedError,
)


def check_decoder(model: nn.Module, parts: ModelParts, *, packing: bool, seq_len: int) -> None:
    """Refuse a decoder that cannot run as a step runs it, or that would leak between the documents of packed rows.

    Rows of one document each need no attention of ours: what a causal layer reads there is the document's own.
    """
    windows = _attention_windows(model, parts)
    _check_windows(model, windows, seq_len=seq_len)
    if not packing:
        return
    mixing = [
        index for index, layer in enumerate(parts.layers) if not windows.get(index, [None]) or _mixes_tokens(layer)
    ]
    if mixing:
        layer = parts.layers[mixing[0]]
        kinds = [type(module).__name__ for module in layer.children() if "norm" not in type(module).__name__.lower()]
        how = "otherwise than by attention" if _mixes_tokens(layer) else "by attention that knows no documents"
        raise ConfigError(
            f"{type(model).__name__} has layers that carry one document of a packed row into the next.",
            values=f"data.packing: true; {len(mixing)} of {len(parts.layers)} decoder layers mix tokens {how}, such as "
            f"layer {mixing[0]} ({', '.join(kinds)})",
            fix="set data.packing: false",
        )


def _check_windows(model: Any, windows: dict[int, list[int | None]], *, seq_len: int) -> None:
    """Refuse a sliding window that the architecture puts into a mask only, which nobody makes here (Qwen2-MoE)."""
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(window, int) or seq_len <= window:
        return
    for index, seen in windows.items():
        slides = kinds is None or (index < len(kinds) and kinds[index] == "sliding_attention")
        if slides and None in seen:
            raise ConfigError(
                f"{type(model).__name__} has a sliding window that does not reach its attention here.",
                values=f"sliding_window {window}, data.seq_len: {seq_len}, decoder layer {index} would see every token",
                fix=f"set data.seq_len to at most {window}, or use another architecture",
            )


def _mixes_tokens(layer: nn.Module) -> bool:
    """Return whether a layer has a convolution over tokens or the decay of a recurrent state (Mamba, delta rules)."""
    modules = list(layer.modules())
    convolves = any(isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 for module in modules)
    return convolves or any(hasattr(module, "A_log") for module in modules)


def _attention_windows(model: Any, parts: ModelParts) -> dict[int, list[int | None]]:
    """Return the window of each call of this trainer's attention by decoder layer; nothing where fakes cannot tell."""
    if not type(model).__module__.startswith("transformers."):  # code that may change under the same name
        return _find_windows(model, parts)
    config = {**model.config.to_dict(), "_name_or_path": None, "attention": model.config._attn_implementation}
    key = [type(model).__qualname__, json.dumps(config, sort_keys=True, default=str)]
    modules = ("attention", "decoder_probe", "model")
    return dict(remembered("windows", key, modules, lambda: list(_find_windows(model, parts).items())))


def _find_windows(model: nn.Module, parts: ModelParts) -> dict[int, list[int | None]]:
    documents = Documents(torch.tensor([[0] * (PROBE_TOKENS // 2) + [1] * (PROBE_TOKENS // 2)]))
    before: dict[int, int] = {}
    after: dict[int, list[int | None]] = {}
    # A copy that is thrown away: a module may keep what it made in a forward (a rotary table), which is a fake here.
    copies: dict[int, Any] = {}
    with _disable_current_modes():  # a simulation that is being traced is not to count it
        decoder = copy.deepcopy(parts.decoder, copies)
    for index, layer in enumerate(parts.layers):
        hooked = copies[id(layer)]
        hooked.register_forward_pre_hook(lambda *_, i=index: before.update({i: len(documents.windows)}))
        hooked.register_forward_hook(lambda *_, i=index: after.update({i: documents.windows[before[i] :]}))
    # On fakes the product of stacked experts takes bf16 alone, and logs what it is refused (torch 2.14,
    # meta_registrations.py); what a recurrence keeps in fp32 by itself takes fp32 alone.
    stacked = any(parameter.dim() == 3 for parameter in parts.decoder.parameters())
    first, second = (torch.bfloat16, torch.float32) if stacked else (torch.float32, torch.bfloat16)
    try:
        try:
            _run_on_fakes(decoder, documents, first)
        except RuntimeError:
            _run_on_fakes(decoder, documents, second)
    except UNKNOWN_ON_FAKES:
        return {}
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, RuntimeError) and ("dtype" in str(error) or "BFloat16" in str(error)):
            return {}  # neither of the two does: causality.py tries a small copy with numbers
        raise ConfigError(
            f"The decoder of {type(model).__name__} does not run without a mask and a cache, as training needs it.",
            values=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="use another architecture, or set model.attention: eager where the error is about attention",
        ) from error
    return after


def find_fakes(model: nn.Module) -> list[str]:
    """Return the names of all fake tensors that a model's modules hold, as plain attributes too; none may train."""
    found = []
    for name, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for key, value in held.items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            found += [f"{name}.{key}" for one in values if isinstance(one, FakeTensor)]
    return found


def _run_on_fakes(decoder: Any, documents: Documents, dtype: torch.dtype) -> None:
    # A simulation that is being traced is not to count these.
    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        tensors = {
            name: torch.empty(parameter.shape, dtype=dtype)
            for name, parameter in decoder.named_parameters(remove_duplicate=False)
        }
        tensors |= {name: mode.from_tensor(buffer) for name, buffer in decoder.named_buffers(remove_duplicate=False)}
        positions = torch.arange(PROBE_TOKENS)[None]
        functional_call(
            decoder,
            tensors,
            kwargs={
                "input_ids": torch.zeros_like(positions),
                "position_ids": positions,
                "use_cache": False,
                "documents": documents,
            },
            tie_weights=False,
        )
