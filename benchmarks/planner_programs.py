"""What the programs behind published rows do otherwise than this trainer, done to a simulation for as long as it runs.

Each change stands for a line of the row's own program, which planner_rows.yaml names beside the row. Nothing here holds
a number: what a change costs is what the simulation counts.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from fsdp_trainer.memory.estimate_model import ACTIVATION_SAVES, NORM_SAVES

_HELD_BYTES = {"bf16": 2, "fp32": 4}


def held_bytes_per_logit(words: Mapping[str, Any]) -> int:
    """Return what the row's program holds of its output's logits at every moment of a step, 0 where it drops them."""
    return _HELD_BYTES.get(words.get("kept_logits", ""), 0)


@contextlib.contextmanager
def closed_form_of(words: Mapping[str, Any]) -> Iterator[None]:
    """Let the closed form count a layer as the row's kernels keep it."""
    fused_mlp = {"silu": 0} if words.get("fused_mlp") else {}
    norms = {"rms": NORM_SAVES["layer"]} if words.get("fused_norms") else {}
    with patch.dict(ACTIVATION_SAVES, fused_mlp), patch.dict(NORM_SAVES, norms):
        yield


@contextlib.contextmanager
def simulated_as(words: Mapping[str, Any]) -> Iterator[None]:
    """Let a simulation in this process do what the row's program does."""
    changes = {
        "fused_norms": fused_norms,
        "fused_mlp": fused_mlp,
        "kept_logits": lambda: kept_logits(words["kept_logits"]),
        "cut_loss": cut_loss,
        "checkpointed_parts": checkpointed_parts,
    }
    with contextlib.ExitStack() as stack:
        for word, change in changes.items():
            if words.get(word):
                stack.enter_context(change())
        yield


def fused_norms() -> Any:
    """Llama's norm as one kernel, which keeps its input: torch's own stands for it."""
    import torch
    from transformers.models.llama import modeling_llama

    def fused(hidden_size: int, eps: float) -> torch.nn.Module:
        return torch.nn.RMSNorm(hidden_size, eps=eps)

    return patch.object(modeling_llama, "LlamaRMSNorm", fused)


def fused_mlp() -> Any:
    """Llama's gated MLP as one kernel that keeps gate and up, and writes their gradients over them (Liger's SwiGLU)."""
    import torch
    from transformers.models.llama import modeling_llama

    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate).mul_(up)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return ctx.saved_tensors

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(hidden), self.up_proj(hidden)))

    return patch.object(modeling_llama.LlamaMLP, "forward", forward)


def kept_logits(dtype: str) -> Any:
    """The model's output, and with it its logits, is held until the next forward has made others."""
    import torch
    from torch.nn import functional

    from fsdp_trainer import loss

    held: list[torch.Tensor] = []

    def keeping(hidden: Any, weight: Any, bias: Any, supervision: Any, *, transform: Any) -> Any:
        logits = transform.apply(functional.linear(hidden, weight, bias))
        whole = logits.float()
        held[:] = [whole if dtype == "fp32" else logits]
        del logits
        labels = torch.full((hidden.shape[0],), -100, dtype=torch.int64, device=hidden.device)
        labels[supervision.positions] = supervision.targets
        total = functional.cross_entropy(whole, labels, ignore_index=-100, reduction="sum")
        return total * supervision.scale, total.detach()

    return patch.object(loss, "plain_cross_entropy", keeping)


def cut_loss() -> Any:
    """A linear cross-entropy in one kernel: no logits, and gradients in their tensors' dtype, made in the backward.

    The head's table is copied whole for it (NeMo AutoModel: `DTensor.full_tensor()`), beside the gathered one.
    """
    import torch

    from fsdp_trainer import loss

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weight, torch.empty(hidden.shape[0], device=hidden.device))
            return torch.zeros((), device=hidden.device)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            hidden, weight, _ = ctx.saved_tensors
            return torch.empty_like(hidden), torch.empty_like(weight)

    def cut(hidden: Any, weight: Any, bias: Any, targets: Any, scale: Any, **_: Any) -> Any:
        total = Cut.apply(hidden, weight.clone())
        return total * scale, total.detach()

    return patch.object(loss, "chunked_cross_entropy", cut)


def checkpointed_parts() -> Any:
    """Each norm, the attention and the MLP of a layer are recomputed by themselves, and every layer's input is held."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from fsdp_trainer import run

    held: list[Any] = []

    def apply(layers: Any, **_: Any) -> list[int]:
        for index, layer in enumerate(layers):
            for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
                part: nn.Module = getattr(layer, name)
                part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
            layer.forward = functools.partial(hold, layer.forward, index)
        return list(range(len(layers)))

    def hold(forward: Callable[..., Any], index: int, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if index == 0:
            held.clear()
        held.append(hidden)
        return forward(hidden, *args, **kwargs)

    return patch.object(run, "apply_activation_checkpointing", apply)
