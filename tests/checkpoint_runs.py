"""Train, save, resume and export tiny runs on the ranks of a test, and hand back digests that show every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import step_runs
from tests.models import Document, make_records
from tests.step_runs import whole, window_of

if TYPE_CHECKING:
    import torch

    from fsdp_trainer.checkpoint import PendingSave, Progress
    from fsdp_trainer.run import Run

FACTS = {"model": "tiny", "seed": 7}
SEED = 7
Digests = dict[str, str]


def documents() -> list[list[Document]]:
    """Return sixteen rows of one document each."""
    return [[document] for document in make_records(16, seed=3)[1]]


def build(settings: dict[str, Any]) -> Run:
    """Build the run that the settings describe, with every generator in a known state."""
    import random

    import numpy as np

    run = step_runs.build(settings)
    random.seed(run.runtime.rank)
    np.random.seed(run.runtime.rank)
    random.gauss(0.0, 1.0)  # leaves a second value behind, which is part of the state
    return run


def take_steps(run: Run, first: int, last: int) -> None:
    """Take optimizer steps `first` up to, not including, `last`; what a step sees depends on its number alone."""
    from fsdp_trainer.step import train_step

    rows = documents()
    for step in range(first, last):
        window = window_of(run, rows[step:] + rows[:step])
        train_step(run, window, learning_rate=1e-2 / (1 + step), optimizer_step=step)


def save(run: Run, step: int, **options: Any) -> PendingSave:
    """Save `run` as its step `step`, with whatever options the test is about."""
    from fsdp_trainer.checkpoint import Progress, save_checkpoint

    return save_checkpoint(
        Path(run.config.output_dir),
        model=run.model,
        optimizer=run.optimizer,
        scaler=run.scaler,
        progress=options.pop("progress", Progress(step=step, optimizer_steps=step, tokens_seen=100 * step)),
        facts=FACTS,
        device=run.runtime.device,
        **options,
    )


def load(run: Run, path: Path, **options: Any) -> Progress:
    """Fill `run` from the checkpoint at `path`."""
    from fsdp_trainer.checkpoint import load_checkpoint

    return load_checkpoint(
        path,
        model=run.model,
        optimizer=run.optimizer,
        scaler=run.scaler,
        device=run.runtime.device,
        seed=SEED,
        **options,
    )


def save_group() -> Any:
    """Make the group that background saves need."""
    from fsdp_trainer.checkpoint import build_save_group

    return build_save_group(timeout=timedelta(seconds=60))


def digest(tensor: torch.Tensor) -> str:
    """Return a short hash of dtype, shape and every bit."""
    import torch

    local = tensor.detach().cpu().contiguous()
    content = local.flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return hashlib.sha256(f"{local.dtype}{list(local.shape)}".encode() + content).hexdigest()[:16]


def local_digests(run: Run) -> Digests:
    """Return a digest of everything this rank must come back with: its shards, its random states, the scaler."""
    from fsdp_trainer.checkpoint import training_tensors
    from fsdp_trainer.checkpoint_rng import rng_tensors

    tensors = training_tensors(run.model, run.optimizer) | rng_tensors(run.runtime.device)
    found = {name: digest(getattr(t, "to_local", lambda t=t: t)()) for name, t in tensors.items()}
    return found | {"scaler": str(run.scaler.state_dict() if run.scaler else None)}


def whole_digests(run: Run) -> Digests:
    """Return a digest of every weight and optimizer entry, gathered, which no sharding may change."""
    from fsdp_trainer.checkpoint import training_tensors

    return {name: digest(whole(tensor)) for name, tensor in training_tensors(run.model, run.optimizer).items()}


def differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Return the names under which two sets of digests differ."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def train_and_save(settings: dict[str, Any], total: int, save_after: int | None, asynchronous: bool) -> dict[str, Any]:
    """Train `total` steps, saving after `save_after` of them; return this rank's digests at the save and at the end."""
    run = build(settings)
    group = save_group()
    first = total if save_after is None else save_after
    take_steps(run, 0, first)
    at_save, gathered, pending = local_digests(run), whole_digests(run), None
    if save_after is not None:
        pending = save(run, save_after, asynchronous=asynchronous, process_group=group)
    take_steps(run, first, total)
    if pending is not None:
        pending.wait()
    return {"at_save": at_save, "whole": gathered, "end": local_digests(run)}


def resume_and_train(settings: dict[str, Any], total: int) -> dict[str, Any]:
    """Go on from the newest checkpoint up to `total` steps, in new processes."""
    from fsdp_trainer.checkpoint_search import find_checkpoint

    run = build(
        {**settings, "model": {**settings["model"], "init": "random"}}
    )  # nothing right is in it before the load
    path = find_checkpoint(Path(run.config.output_dir), resume="auto")
    assert path is not None
    notes: list[str] = []
    progress = load(run, path, log=notes.append)
    loaded, gathered = local_digests(run), whole_digests(run)
    take_steps(run, progress.step, total)
    return {"loaded": loaded, "whole": gathered, "end": local_digests(run), "progress": progress, "notes": notes}
