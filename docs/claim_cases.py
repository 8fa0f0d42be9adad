"""How docs/claims.py holds a claim against numbers: a case of it, its verdict, and what the closed form says of one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.memory.estimate import GIB, Recipe
from fsdp_trainer.memory.estimate_model import ModelShape, count_layers, count_parameters, read_model_shape
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.quick import recipe_of, simulate_quick

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SEVEN_BILLION = 7e9
SEQ_LEN, MICRO_BATCHES = 2048, 2
MODELS = {
    "Qwen3 0.6B": "qwen3-0.6b",
    "Llama 3.2 1B": "llama-3.2-1b",
    "Llama 2 7B": "llama-2-7b",
    "Qwen2.5 7B": "qwen2.5-7b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "Llama 2 13B": "llama-2-13b",
    "Qwen2.5 14B": "qwen2.5-14b",
}
SEVENS = ("Llama 2 7B", "Qwen2.5 7B", "Llama 3.1 8B")
# Settings by the words used for them on the page.
PURE: dict[str, Any] = {"precision": "bf16_pure", "sharding.reduce_dtype": "bf16"}
PURE_BF16: dict[str, Any] = {**PURE, "optim.state_dtype": "bf16"}
PURE_8BIT: dict[str, Any] = {**PURE, "optim.name": "adamw_8bit"}
MASTERS_8BIT: dict[str, Any] = {"optim.name": "adamw_8bit"}
OPTIMIZER_OFF: dict[str, Any] = {"sharding.offload": "optimizer"}
PARAMS_OFF: dict[str, Any] = {"sharding.offload": "params"}
NOTHING_AGAIN: dict[str, Any] = {"activation_checkpointing.mode": "none"}
STAGE_2: dict[str, Any] = {"sharding.zero_stage": 2}


@dataclass(frozen=True)
class Case:
    """One case that a claim is held against; `holds` is None where the closed form cannot tell."""

    what: str
    number: str
    holds: bool | None
    model: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim in our words, when a case counts as claimed, the cases, what follows, and what others measured.

    `measured` names rows of benchmarks/points.csv.
    """

    said: str
    rule: str
    cases: Sequence[Case]
    advice: str
    measured: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """Right where every case is as claimed, wrong where none is or may be, else right only when."""
        if all(case.holds for case in self.cases):
            return "right"
        return "wrong" if all(case.holds is False for case in self.cases) else "right only when"

    @property
    def conditions(self) -> str:
        """The cases as claimed, where only some are: those of all models without the models' names."""
        if self.verdict != "right only when":
            return ""
        found = []
        for what in dict.fromkeys(case.what for case in self.cases):
            cases = [case for case in self.cases if case.what == what]
            met = [case for case in cases if case.holds is not False]
            words = [f"{case.model}{' perhaps' if case.holds is None else ''}".strip() for case in met]
            if met:
                found.append(what if all(case.holds for case in cases) else f"{what} ({', '.join(words)})")
        return "; ".join(found)


# --- what is computed ------------------------------------------------------------------------------------------------


@cache
def points() -> dict[str, dict[str, str]]:
    """Return the published measurements by id."""
    with (BENCHMARKS / "points.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@cache
def shape_of(model: str) -> ModelShape:
    """Return the shape of a model named on the page."""
    return read_model_shape(BENCHMARKS / "models" / f"{MODELS[model]}.json")


def parameters(model: str) -> int:
    """Return how many parameters a model has."""
    return count_parameters(shape_of(model))


def settings(model: str = "Llama 2 7B", *, ranks: int = 1, seq_len: int = SEQ_LEN, **changes: Any) -> Config:
    """Return the settings of a case, checked as a settings file is; changes are by dotted name."""
    values: dict[str, Any] = {
        "model.path": str(BENCHMARKS / "models" / f"{MODELS[model]}.json"),
        "data.seq_len": seq_len,
        "batch.global_batch_size": MICRO_BATCHES * ranks,
    }
    return Config.from_dict(values | changes)


def recipe(**changes: Any) -> Recipe:
    """Return the bytes a parameter of settings."""
    return recipe_of(settings(**changes))


def predict(model: str, gpus: str, *, seq_len: int = SEQ_LEN, **changes: Any) -> dict[str, Any]:
    """Return what `simulate --quick` says of a case."""
    hardware = parse_gpus(gpus)
    return simulate_quick(settings(model, ranks=hardware.count, seq_len=seq_len, **changes), hardware)


def peak(model: str, gpus: str, **changes: Any) -> float:
    """Return the most bytes alive on a GPU."""
    return predict(model, gpus, **changes)["allocated_gib"] * GIB


def recomputed(model: str, *, every_n: int, seq_len: int = 4096) -> tuple[float, float]:
    """Return what is computed again, as shares of one forward and of a step that computes nothing again.

    Two operations a weight and token; a query meets seq_len / 2 keys on average, in two products. The head is never
    computed again; a backward is two forwards.
    """
    shape = shape_of(model)
    layers = 2 * sum(count_layers(shape)) + shape.layers * 2 * seq_len * shape.query_size
    forward = layers + 2 * shape.vocab * shape.hidden
    again = layers * -(-shape.layers // every_n) / shape.layers
    return again / forward, again / (3 * forward)


# --- how a case is written -------------------------------------------------------------------------------------------


def gb(size: float) -> str:
    """Format bytes as GB."""
    return f"{size / 1e9:.1f} GB"


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.0f} %"


def sized(what: str, size: float, holds: Callable[[float], bool], *, model: str = "") -> Case:
    """Make a case of bytes."""
    return Case(what, gb(size), holds(size), model)


def fitting(what: str, gpus: str, models: Sequence[str], **changes: Any) -> list[Case]:
    """Make the cases of whether a run of each model fits on GPUs."""
    cases = []
    for model in models:
        found = predict(model, gpus, **changes)
        number = f"{found['allocated_gib']:.1f} of {found['limit']:.1f} GiB"
        if changes.get("sharding.offload", "none") != "none":
            number += f", host {max(found['host_node_gib'].values()):.0f} GiB"
        cases.append(Case(what, number, found["fits"], model))
    return cases


def host_gib(model: str, gpus: str, **changes: Any) -> float:
    """Return the host memory of a machine at its fullest."""
    return max(predict(model, gpus, **changes)["host_node_gib"].values())
