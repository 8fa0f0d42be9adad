"""Twenty optimizer steps over the same documents: by the trainer, several runs in one group of ranks, and by the plain
reference; and which sets of cases cover every pair of settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tests import models, reference

STEPS, ROWS = 20, 24  # a row is one document, so that one to four ranks take equally many in two micro-batches
RECIPE = reference.Recipe(
    lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, min_lr_ratio=0.1, total_steps=STEPS
)
FROZEN = {"gpt2": "transformer.h.1"}  # else model.layers.1
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def frozen_part(model: str, frozen: bool) -> list[str]:
    """Return the pattern of the layer that a case freezes."""
    return [FROZEN.get(model, "model.layers.1")] if frozen else []


def batch(world: int, micro_batches: int) -> dict[str, Any]:
    """Return the settings that take ROWS rows a step in so many micro-batches."""
    return {"global_batch_size": ROWS, "micro_batch_size": ROWS // (world * micro_batches)}


def rows_by_step() -> list[list[list[models.Document]]]:
    """Return the rows of each step."""
    documents = models.make_records(STEPS * ROWS, seed=0)[1]
    return [[[document] for document in documents[step * ROWS : (step + 1) * ROWS]] for step in range(STEPS)]


def train_all(cases: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Train several runs in one group of ranks, whose settings they are by name.

    Returns of each the losses, the norms, whether any step was skipped, and the whole weights by name.
    """
    from fsdp_trainer.step import train_step
    from tests import checkpoint_runs, step_runs

    rows, found = rows_by_step(), {}
    for name, settings in cases.items():
        run = checkpoint_runs.build(settings)
        outputs = [
            train_step(
                run,
                step_runs.window_of(run, rows[step]),
                learning_rate=reference.learning_rate(step, RECIPE),
                optimizer_step=step,
            )
            for step in range(STEPS)
        ]
        found[name] = {
            "losses": [output.loss.item() for output in outputs],
            "grad_norms": [output.grad_norm.item() for output in outputs],
            "skipped": sum(output.skipped.item() for output in outputs),
            "weights": {key: tensor.float() for key, tensor in step_runs.parameters(run).items()},
        }
    return found


def train_reference(folder: str, frozen: list[str]) -> reference.Result:
    """Train the plain reference on the same steps."""
    load = reference.load

    def load_frozen(path: str) -> torch.nn.Module:
        model = load(path)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    steps = [[document for row in rows for document in row] for rows in rows_by_step()]
    reference.load = load_frozen
    try:
        return reference.train(folder, steps, RECIPE)
    finally:
        reference.load = load


# Sets of cases


def name_of(case: tuple[Any, ...]) -> str:
    """Return a case as the name of a test."""
    return "-".join(map(str, case))


def covered_pairs(cases: Iterable[Mapping[str, Any]]) -> set[Pair]:
    """Return every pair of settings that some case has."""
    return set().union(*(itertools.combinations(case.items(), 2) for case in cases))


def allowed_pairs(values: Mapping[str, tuple[Any, ...]], allowed: Callable[[Mapping[str, Any]], bool]) -> set[Pair]:
    """Return every pair of settings of which `allowed` says that they can occur together."""
    return {
        ((first, a), (second, b))
        for first, second in itertools.combinations(values, 2)
        for a, b in itertools.product(values[first], values[second])
        if allowed({first: a, second: b})
    }
