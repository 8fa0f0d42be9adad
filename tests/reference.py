"""A plain single-process training loop to compare with. It shares no code with fsdp_trainer and must not import it.

Every document runs alone: no packing, no padding, whole logits, eager attention, fp32, one process, plain AdamW. What
it computes is what the trainer must compute, whatever way the trainer goes about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Document(Protocol):
    """Tokens and which of them are targets; the first never is."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def supervised(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a reference run."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-6
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    total_steps: int = 20


@dataclass
class Result:
    """What a reference run gives: loss, gradient norm (before clipping) and learning rate a step, and the weights."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Step s of w warm-up steps runs at lr * (s + 1) / w. After it the cosine (or the line) leaves lr and arrives at
    lr * min_lr_ratio in the last step.
    """
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.total_steps - 1 - recipe.warmup_steps)
    share = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[recipe.schedule]
    return recipe.lr * (recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * share)


def decays(name: str, module: torch.nn.Module) -> bool:
    """Return whether a parameter decays: no bias, no norm, no embedding does."""
    return not (name.endswith("bias") or "Norm" in type(module).__name__ or isinstance(module, torch.nn.Embedding))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the two AdamW groups of a model, each parameter once (a tied head is an embedding)."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    seen: set[int] = set()
    for module in model.modules():  # embeddings come before the head that shares their weight
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and parameter.requires_grad:
                seen.add(id(parameter))
                groups[decays(name, module)].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def load(folder: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load a model folder the plain way, with eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.config.use_cache = False
    return model.train()


def document_loss(model: torch.nn.Module, document: Document) -> torch.Tensor:
    """Return the summed cross-entropy of a document's supervised tokens."""
    tokens = torch.tensor([list(document.tokens)])
    logits = model(input_ids=tokens).logits.float()[0, :-1]
    targets = torch.where(torch.tensor(list(document.supervised))[1:], tokens[0, 1:], -100)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def gradients(model: torch.nn.Module, documents: Sequence[Document]) -> float:
    """Fill `.grad` with the gradient of the mean loss over all supervised tokens of the documents; return that loss."""
    n_supervised = sum(sum(document.supervised) for document in documents)
    total = 0.0
    for document in documents:
        if any(document.supervised):
            loss = document_loss(model, document) / n_supervised
            loss.backward()
            total += loss.item()
    return total


def train(folder: str, steps: Sequence[Sequence[Document]], recipe: Recipe) -> Result:
    """Train the model in `folder` on one list of documents per optimizer step."""
    model = load(folder)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        foreach=False,
        fused=False,
    )
    result = Result(initial=snapshot(model))
    for step, documents in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        optimizer.zero_grad()
        result.losses.append(gradients(model, documents))
        norm = grad_norm(model)
        if recipe.max_grad_norm and norm > recipe.max_grad_norm:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(recipe.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        result.grad_norms.append(norm)
        result.lrs.append(learning_rate(step, recipe))
    result.final = snapshot(model)
    return result


def grad_norm(model: torch.nn.Module) -> float:
    """Return the norm of all gradients together, summed in double precision."""
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return math.sqrt(sum(square.item() for square in squares))


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter by name, a tied one once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradient_snapshot(folder: str, documents: Sequence[Document]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and every gradient of one window of documents, from the weights in `folder`."""
    model = load(folder)
    loss = gradients(model, documents)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Comparing


def without_key_bias(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor worth comparing: without rotary positions softmax ignores a key bias, so that its
    gradient is rounding noise."""
    if name.endswith("c_attn.bias"):  # GPT-2 keeps query, key and value biases in one tensor
        query, _, value = tensor.chunk(3)
        return torch.cat([query, value])
    return tensor


def movement_errors(final: dict[str, torch.Tensor], result: Result) -> dict[str, float]:
    """Return for each tensor |ours - reference| / |reference - initial|: the error as a share of the change."""
    assert final.keys() == result.final.keys(), sorted(final.keys() ^ result.final.keys())
    errors = {}
    for name, reference in result.final.items():
        ours, theirs, start = (
            without_key_bias(name, t.double()) for t in (final[name], reference, result.initial[name])
        )
        if theirs.numel():
            errors[name] = ((ours - theirs).norm() / (theirs - start).norm()).item()
    return errors


def relative_errors(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return for each tensor |ours - reference| / |reference|."""
    assert ours.keys() == reference.keys(), sorted(ours.keys() ^ reference.keys())
    errors = {}
    for name, theirs in reference.items():
        mine, theirs = without_key_bias(name, ours[name].double()), without_key_bias(name, theirs.double())
        if theirs.numel():
            errors[name] = ((mine - theirs).norm() / theirs.norm()).item()
    return errors
