"""Writes docs/combinations.md from the checks of the settings themselves, so that the page cannot say something else.

Run `python docs/make_combinations.py` after a change to a check; a test compares the page with what this writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import find_conflicts
from fsdp_trainer.config_world_checks import check_world_problems

PAGE = Path(__file__).with_name("combinations.md")
RANKS = 4

# What is combined: name -> choices, each with the settings that make it.
DIMENSIONS: dict[str, dict[str, dict[str, Any]]] = {
    "stage": {
        "0": {"sharding.zero_stage": 0},
        "1": {"sharding.zero_stage": 1},
        "2": {"sharding.zero_stage": 2},
        "3": {"sharding.zero_stage": 3},
        "HYBRID (replicate 2)": {"sharding.zero_stage": 3, "sharding.replicate": 2},
        "3, reshard_after_forward 2": {"sharding.zero_stage": 3, "sharding.reshard_after_forward": 2},
    },
    "offload": {
        "none": {"sharding.offload": "none"},
        "params": {"sharding.offload": "params"},
        "optimizer": {"sharding.offload": "optimizer"},
        "optimizer, offload_step device": {"sharding.offload": "optimizer", "optim.offload_step": "device"},
    },
    "optimizer": {
        "adamw": {"optim.name": "adamw"},
        "adamw, state_dtype bf16": {"optim.name": "adamw", "optim.state_dtype": "bf16"},
        "adamw_8bit": {"optim.name": "adamw_8bit"},
        "paged_adamw_8bit": {"optim.name": "paged_adamw_8bit"},
    },
    "precision": {name: {"precision": name} for name in ("fp32", "bf16", "fp16", "bf16_pure")},
    "checkpointing": {
        "none": {"activation_checkpointing.mode": "none"},
        "full": {"activation_checkpointing.mode": "full"},
        "every_n_layers": {"activation_checkpointing.mode": "every_n_layers", "activation_checkpointing.every_n": 2},
        "selective": {"activation_checkpointing.mode": "selective"},
        "full, offload": {"activation_checkpointing.mode": "full", "activation_checkpointing.offload": True},
    },
    "accumulation": {str(steps): {"batch.global_batch_size": steps * RANKS} for steps in (1, 4)},
}
NAMES = tuple(DIMENSIONS)
Combination = tuple[str, ...]  # one choice of each dimension, in order
Problems = Mapping[Combination, frozenset[str]]

INTRODUCTION = f"""\
# What can be combined

Written by `docs/make_combinations.py` from the checks of the settings: change them in `fsdp_trainer/config_checks.py`,
not here. On {RANKS} ranks; everything that is not named is at its default. "yes" means that the settings are accepted;
a number is the reason why they are refused, below the tables. A model or a machine may have reasons of its own, which a
start says before it loads a weight.
"""


def find_problems(combination: Combination) -> frozenset[str]:
    """Return what the settings' own checks say against a combination; nothing where it works."""
    config = Config()
    for name, choice in zip(NAMES, combination, strict=True):
        for path, value in DIMENSIONS[name][choice].items():
            config = _changed(config, path, value)
    return frozenset(problem.what for problem in [*find_conflicts(config), *check_world_problems(config, RANKS)])


def _changed(config: Config, path: str, value: Any) -> Config:
    """Return a copy with one setting changed and not checked: a refused one must get as far as the checks."""
    *sections, name = path.split(".")
    if not sections:
        return config.model_copy(update={name: value})
    section = getattr(config, sections[0]).model_copy(update={name: value})
    return config.model_copy(update={sections[0]: section})


def find_all_problems() -> dict[Combination, frozenset[str]]:
    """Return what is said against every combination there is."""
    return {combination: find_problems(combination) for combination in itertools.product(*DIMENSIONS.values())}


def format_page(problems: Problems) -> str:
    """Format the page: what is refused whatever else is set, a table an optimizer, the reasons, and the counts."""
    alone = _refused_alone(problems)
    refused = {(name, choice) for name, choice, _ in alone}
    left = {
        combination: found for combination, found in problems.items() if refused.isdisjoint(_named(combination).items())
    }
    reasons = sorted(frozenset().union(*left.values()))
    numbers = {reason: number for number, reason in enumerate(reasons, start=1)}
    parts = [INTRODUCTION]
    if alone:
        rows = [f"| {name} | {choice} | {'; '.join(sorted(said))} |" for name, choice, said in alone]
        parts.append(_table("Refused whatever else is set", ("what", "choice", "reason"), rows))
    shown = [optimizer for optimizer in DIMENSIONS["optimizer"] if ("optimizer", optimizer) not in refused]
    parts += [_format_optimizer(optimizer, left, numbers) for optimizer in shown]
    parts.append("\n".join(["## Reasons", "", *(f"{number}. {reason}" for reason, number in numbers.items()), ""]))
    works = sum(not found for found in problems.values())
    parts.append(f"Of {len(problems)} combinations, accumulation of 1 and 4 micro-batches included, {works} work.\n")
    return "\n".join(parts)


def _named(combination: Combination) -> dict[str, str]:
    return dict(zip(NAMES, combination, strict=True))


def _refused_alone(problems: Problems) -> list[tuple[str, str, frozenset[str]]]:
    """Return the choices that are refused in every combination for the same reasons."""
    found = []
    for name, choices in DIMENSIONS.items():
        for choice in choices:
            said = [found for combination, found in problems.items() if _named(combination)[name] == choice]
            if common := frozenset.intersection(*said):
                found.append((name, choice, common))
    return found


def _format_optimizer(
    optimizer: str, problems: Mapping[Combination, frozenset[str]], numbers: Mapping[str, int]
) -> str:
    """Format stage and offload against precision; a cell stands for every checkpointing and accumulation."""
    mine = {combination: found for combination, found in problems.items() if optimizer in combination}
    kept = {name: dict.fromkeys(_named(combination)[name] for combination in mine) for name in NAMES}
    rows = []
    for stage, offload in itertools.product(kept["stage"], kept["offload"]):
        cells = []
        for precision in kept["precision"]:
            chosen = {"stage": stage, "offload": offload, "precision": precision}
            cells.append(_cell([f for c, f in mine.items() if chosen.items() <= _named(c).items()], numbers))
        rows.append(f"| {stage} | {offload} | " + " | ".join(cells) + " |")
    beside = f"checkpointing {', '.join(kept['checkpointing'])} and accumulation {', '.join(kept['accumulation'])}"
    title = f"{optimizer} (each cell: {beside})"
    return _table(title, ("stage", "offload", *kept["precision"]), rows)


def _cell(said: Iterable[frozenset[str]], numbers: Mapping[str, int]) -> str:
    said = list(said)
    if not any(said):
        return "yes"
    reasons = ", ".join(str(number) for number in sorted(numbers[reason] for reason in frozenset().union(*said)))
    return f"no: {reasons}" if all(said) else f"in part: {reasons}"


def _table(title: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    columns = list(columns)
    return "\n".join([f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, ""])


def main() -> None:
    """Write the page beside this script."""
    PAGE.write_text(format_page(find_all_problems()), encoding="utf-8")


if __name__ == "__main__":
    main()
