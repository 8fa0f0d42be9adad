"""Runs with 8-bit moments on the ranks of a test: which tensors have them, their bytes, and losses over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import checkpoint_runs as runs
from tests.step_runs import window_of

LR = 1e-3


def losses(run: Any, first: int, last: int) -> list[float]:
    """Take optimizer steps `first` up to, not including, `last`, and return their losses."""
    from fsdp_trainer.step import train_step

    rows, found = runs.documents(), []
    for step in range(first, last):
        window = window_of(run, rows[step % 16 :] + rows[: step % 16])
        found.append(train_step(run, window, learning_rate=LR, optimizer_step=step).loss.item())
    return found


def train_and_save(settings: dict[str, Any], saved: int, total: int) -> dict[str, Any]:
    """Train `total` steps, save after `saved` of them; return the moments then and the losses from there on."""
    run = runs.build(settings)
    losses(run, 0, saved)
    runs.save(run, saved).wait()
    moments = whole_moments(run)
    return {"moments": moments, "losses": losses(run, saved, total)}


def resume(settings: dict[str, Any], folder: str, total: int) -> dict[str, Any]:
    """Go on from the checkpoint of another run up to `total` steps; return the losses and the moments as loaded."""
    from fsdp_trainer.checkpoint_search import find_checkpoint

    run = runs.build({**settings, "model": {**settings["model"], "init": "random"}})
    path = find_checkpoint(Path(folder), resume="auto")
    assert path is not None
    notes: list[str] = []
    progress = runs.load(run, path, log=notes.append)
    return {"moments": whole_moments(run), "notes": notes, "losses": losses(run, progress.step, total)}


def whole_moments(run: Any) -> dict[str, Any]:
    """Return the values that all 8-bit moments stand for, whole, by parameter and moment; a collective."""
    import torch

    from fsdp_trainer.optim.eight_bit import BLOCK, MOMENTS, build_tables, local_part

    tables, found = build_tables(run.runtime.device), {}
    for name, parameter in run.model.named_parameters():
        state = run.optimizer.state[parameter]
        for moment in MOMENTS:
            if f"{moment}_codes" in state:
                codes, scales = (local_part(state[f"{moment}_{part}"]) for part in ("codes", "absmax"))
                values = torch.ops.bitsandbytes.dequantize_blockwise(
                    codes, scales.view(-1), getattr(tables, moment), BLOCK, torch.float32
                )
                found[f"{name}.{moment}"] = _gather(parameter, values)
    return found


def _gather(parameter: Any, values: Any) -> Any:
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    made = DTensor.from_local(values, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return made.full_tensor()


def state_kinds(settings: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    """Return, after some steps, each parameter's state by key and dtype, local bytes, and what the optimizer is."""
    from fsdp_trainer.optim.eight_bit import local_part

    run = runs.build(settings)
    before = run.optimizer
    losses(run, 0, steps)
    kinds: dict[str, dict[str, str]] = {}
    sizes: dict[str, int] = {}
    numels: dict[str, tuple[int, int]] = {}
    for name, parameter in run.model.named_parameters():
        state = run.optimizer.state.get(parameter, {})
        kinds[name] = {key: str(value.dtype).removeprefix("torch.") for key, value in state.items()}
        sizes[name] = sum(local_part(value).nbytes for value in state.values())
        numels[name] = parameter.numel(), local_part(parameter).numel()
    accelerated = run.runtime.accelerator._optimizers
    return {
        "kinds": kinds,
        "sizes": sizes,
        "numels": numels,
        "optimizer": type(run.optimizer).__name__,
        "same": run.optimizer is before and all(other.optimizer is before for other in accelerated),
        "facts": run.facts,
    }


def eight_bit_names(kinds: dict[str, dict[str, str]]) -> set[str]:
    """Return the parameters whose codes are bytes."""
    return {name for name, state in kinds.items() if "uint8" in state.values()}
