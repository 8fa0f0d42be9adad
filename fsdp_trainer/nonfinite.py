"""Which tensor was the first that was not finite, when a run ends for it: the step is looked at once more.

A step reads no tensor on the host, so it knows only that something was not finite. The weights were left as they were,
and the same rows go through them again with eyes on every module. It costs a step, at the end of a run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_trainer.agreement import gather_from_all
from fsdp_trainer.data.loader import Window
from fsdp_trainer.loading import local_part
from fsdp_trainer.run import Run
from fsdp_trainer.step import accumulate_gradients


def find_first_nonfinite(run: Run, window: Window) -> str:
    """Return the first weight, output (in the order of the forward) or gradient (of the backward), and whose it is.

    Collective. "" where nothing is found: with other dropout, or where weights have moved by it (not the fused AdamW).
    """
    if run.config.optim.implementation != "fused":
        return ""
    named = list(run.model.named_parameters())
    if found := _first(lambda: next((name for name, p in named if not _is_finite(local_part(p.detach())[0])), "")):
        return f"the weight {found}"
    outputs: list[str] = []
    turns: dict[str, int] = {}
    with _watched(run, outputs, turns):
        accumulate_gradients(run, window)
    try:
        if found := _first(lambda: next(iter(outputs), "")):
            return f"the output of {found}"
        # The backward meets last what the forward met first; what was not seen is the head, in which the loss is taken.
        named.sort(key=lambda entry: -turns.get(entry[0].rpartition(".")[0], len(turns)))
        found = _first(lambda: next((name for name, p in named if not _has_finite_gradient(run, p)), ""))
        return f"the gradient of {found}" if found else ""
    finally:
        run.optimizer.zero_grad(set_to_none=True)


def _first(look: Callable[[], str]) -> str:
    found = gather_from_all(look)
    return next((f"{name} (rank {rank})" for rank, name in enumerate(found) if name), "")


@contextmanager
def _watched(run: Run, outputs: list[str], turns: dict[str, int]) -> Iterator[None]:
    """Note in `turns` when each module had its first output, and in `outputs` the first of which it is not finite.

    A module inside another one ends first, so the innermost is noted.
    """
    # A hook on a compiled module would have it compiled again.
    modules = [] if run.config.compile.enabled else [(name, m) for name, m in run.model.named_modules() if name]
    handles = [module.register_forward_hook(partial(_note, name, outputs, turns)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(name: str, outputs: list[str], turns: dict[str, int], _module: nn.Module, _: Any, output: Any) -> None:
    turns.setdefault(name, len(turns))
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else [output]
    if not outputs and not all(_is_finite(part.detach()) for part in parts if isinstance(part, torch.Tensor)):
        outputs.append(name)


def _has_finite_gradient(run: Run, parameter: nn.Parameter) -> bool:
    held = run.host_gradients
    if held is not None:
        held.settle()
        return parameter not in held or _is_finite(held[parameter])
    return parameter.grad is None or _is_finite(local_part(parameter.grad)[0])


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
