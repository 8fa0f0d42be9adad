"""Writes the README's table of what fits where, and docs/what_fits.md, from plans of common models on common GPUs.

`python -m docs.make_readme_table` plans what benchmarks/what_fits.json has no plan of yet by closed form, keeps each as
it comes, and writes both pages; with `--simulate` it also runs the full simulation of those plans that have none, which
takes hours. `--again MODEL` plans a model anew. Memory on the pages is simulated where it was; speed is the closed
form's; a test writes the pages anew and simulates a few plans.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.memory.candidate_estimates import Limits
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.plan import quality_of
from fsdp_trainer.memory.planner import plan
from fsdp_trainer.memory.quick import simulate_quick
from fsdp_trainer.memory.simulation_cache import simulate_cached

ROOT = Path(__file__).resolve().parents[1]
MODEL_FILES = ROOT / "benchmarks" / "models"
RESULTS = ROOT / "benchmarks" / "what_fits.json"
README, PAGE = ROOT / "README.md", Path(__file__).with_name("what_fits.md")
BEGIN, END = "<!-- what fits: written by docs/make_readme_table.py -->", "<!-- what fits: end -->"
GIB = 2**30
SEQ_LEN, GLOBAL_BATCH = 4096, 64
MODELS = {
    "Qwen3 0.6B": "qwen3-0.6b",
    "Llama 3.2 1B": "llama-3.2-1b",
    "Llama 3.2 3B": "llama-3.2-3b",
    "Qwen3 4B": "qwen3-4b",
    "Qwen2.5 7B": "qwen2.5-7b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "Qwen2.5 14B": "qwen2.5-14b",
    "Qwen2.5 32B": "qwen2.5-32b",
    "Llama 3.1 70B": "llama-3.1-70b",
}


@dataclass(frozen=True)
class Machine:
    """GPUs, as `--gpus` takes them, the memory a card is sold with, and the host's memory, GiB."""

    gpus: str
    sold_gb: int
    host_gib: int

    @property
    def label(self) -> str:
        """The column's head, such as 2x24."""
        return f"{parse_gpus(self.gpus).count}x{self.sold_gb}"


# Host memory of the usual builds: 128 GiB beside one or two desktop cards, more in a server.
MACHINES = (
    Machine("1xRTX4090", 24, 128),
    Machine("2xRTX4090", 24, 128),
    Machine("4xRTX4090", 24, 256),
    Machine("1xRTX-A6000", 48, 128),
    Machine("2xRTX-A6000", 48, 256),
    Machine("1xH100-80GB", 80, 256),
    Machine("2xH100-80GB", 80, 512),
    Machine("4xH100-80GB", 80, 1024),
    Machine("8xH100-80GB", 80, 2048),
)
# What a plan gives up, in one letter of the README's cells, and in the words of the page.
QUALITY_MARKS = {
    "masters": ("", "fp32 weights and AdamW averages"),
    "masters, bf16 averages": ("a", "fp32 weights, bf16 averages"),
    "8-bit": ("8", "fp32 weights, 8-bit averages"),
    "pure": ("b", "bf16 weights, fp32 averages"),
    "pure, bf16 averages": ("ba", "bf16 weights, gradients and averages"),
    "pure, 8-bit": ("b8", "bf16 weights and gradients, 8-bit averages"),
}
OFFLOAD_MARKS = {"none": "", "optimizer": "o", "params": "p"}
LETTERS = {
    "o": "**o** gradients, averages and fp32 weights rest in host memory (`sharding.offload: optimizer`)",
    "p": "**p** so do all weights (`params`)",
    "a": "**a** averages in bf16",
    "b": "**b** no fp32 weights (`precision: bf16_pure`)",
    "8": "**8** averages in 8 bits",
}

Cell = Mapping[str, Any]


# --- planning --------------------------------------------------------------------------------------------------------


@contextmanager
def model_folder(model: str) -> Iterator[str]:
    """Give a folder that holds the model's config.json and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        text = (MODEL_FILES / f"{MODELS[model]}.json").read_text(encoding="utf-8")
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        yield folder


def base_settings(folder: str) -> dict[str, Any]:
    """Return what every plan starts from."""
    return {"model.path": folder, "data.seq_len": SEQ_LEN, "batch.global_batch_size": GLOBAL_BATCH}


def plan_cell(model: str, machine: Machine, *, quick: bool = True) -> dict[str, Any]:
    """Plan one model on one machine; `settings` is null where nothing fits, and `remedies` then says what would."""
    with model_folder(model) as folder:
        config = Config.from_dict(base_settings(folder))
        found = plan(config, parse_gpus(machine.gpus), host_bytes=machine.host_gib * GIB, quick=quick)
    cell: dict[str, Any] = {"model": model, "machine": machine.label, "settings": None, "simulated": None}
    if found.chosen is None:
        return {**cell, "remedies": list(found.remedies)}
    simulated = None if quick else _memory_of(found.chosen.prediction)
    return {**cell, "settings": changed_settings(found.chosen.config), "simulated": simulated}


def _memory_of(prediction: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(prediction[name], 3) for name in ("allocated_gib", "min_capacity_gib")}


def changed_settings(config: Config) -> dict[str, Any]:
    """Return by dotted name what differs from the defaults, without the model's path."""
    ours, defaults = _flat(config.to_dict()), _flat(Config().to_dict())
    return {name: value for name, value in ours.items() if value != defaults[name] and name != "model.path"}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and name != "columns"
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def load_cells() -> list[dict[str, Any]]:
    """Return the plans that are kept."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["cells"] if RESULTS.exists() else []


def save_cells(cells: Collection[Cell]) -> None:
    """Keep plans, in the order of the tables."""
    labels = [machine.label for machine in MACHINES]
    order = sorted(cells, key=lambda cell: (list(MODELS).index(cell["model"]), labels.index(cell["machine"])))
    RESULTS.write_text(json.dumps({"cells": order}, indent=1) + "\n", encoding="utf-8")


def fill_cells(*, again: Collection[str] = ()) -> None:
    """Plan what is not kept yet, and the models named in `again`, keeping each plan as it comes.

    A simulation is kept with its settings: memory does not depend on the rates that may have changed a plan.
    """
    cells = load_cells()
    for model in MODELS:
        for machine in MACHINES:
            old = next((cell for cell in cells if (cell["model"], cell["machine"]) == (model, machine.label)), None)
            if old is not None and model not in again:
                continue
            begun = time.monotonic()
            cell = plan_cell(model, machine)
            if old is not None:
                cells.remove(old)
                if cell["settings"] is not None and cell["settings"] == old["settings"]:
                    cell["simulated"] = old["simulated"]
            cells.append(cell)
            save_cells(cells)
            print(f"{model} on {machine.gpus}: {time.monotonic() - begun:.0f} s", flush=True)


def simulate_cells(*, models: Collection[str] = tuple(MODELS), machines: Collection[str] = ()) -> None:
    """Simulate the plans that were not yet, small models first; one that does not fit after all is planned in full.

    `machines` are labels; none stands for all.
    """
    cells = load_cells()
    for cell in cells:
        wanted = cell["model"] in models and (not machines or cell["machine"] in machines)
        if not wanted or cell["settings"] is None or cell["simulated"] is not None:
            continue
        begun, machine = time.monotonic(), machine_of(cell)
        with model_folder(cell["model"]) as folder:
            config, hardware = Config.from_dict({**cell["settings"], "model.path": folder}), parse_gpus(machine.gpus)
            found = simulate_cached(config, hardware, expandable_segments=True)
        if found.min_capacity <= Limits.of(hardware, None).device:
            cell["simulated"] = _memory_of(found.to_json())
        else:
            cell |= plan_cell(cell["model"], machine, quick=False)
        save_cells(cells)
        print(f"{cell['model']} on {machine.gpus}: simulated in {time.monotonic() - begun:.0f} s", flush=True)


@dataclass(frozen=True)
class Plan:
    """A kept plan with its figures: memory as simulated, or by closed form (`sure` is False); GiB, tokens a second."""

    machine: Machine
    settings: Mapping[str, Any]
    quality: str
    allocated: float
    least: float | None
    limit: float
    host: float
    speed: float
    limited_by: str

    @property
    def marks(self) -> str:
        """What the plan gives up, and what is in host memory, in letters."""
        return QUALITY_MARKS[self.quality][0] + OFFLOAD_MARKS[self.settings.get("sharding.offload", "none")]


# By model and machine: the plan, or what would make one fit.
Plans = Mapping[tuple[str, str], Plan | list[str]]


def machine_of(cell: Cell) -> Machine:
    """Return the machine of a kept plan."""
    return next(machine for machine in MACHINES if machine.label == cell["machine"])


def find_plans(cells: Collection[Cell]) -> Plans:
    """Return the plans that are kept with their figures, by model and machine; where nothing fits, what would help."""
    return {(cell["model"], cell["machine"]): _figure(cell) if cell["settings"] else cell["remedies"] for cell in cells}


def _figure(cell: Cell) -> Plan:
    machine = machine_of(cell)
    path = str(MODEL_FILES / f"{MODELS[cell['model']]}.json")
    config, hardware = Config.from_dict({**cell["settings"], "model.path": path}), parse_gpus(machine.gpus)
    quick, simulated = simulate_quick(config, hardware), cell["simulated"] or {}
    return Plan(
        machine=machine,
        settings=cell["settings"],
        quality=quality_of(config),
        allocated=simulated.get("allocated_gib", quick["allocated_gib"]),
        least=simulated.get("min_capacity_gib"),
        limit=quick["limit"],
        host=max(quick["host_node_gib"].values()),
        speed=quick["tokens_per_second_per_gpu"] * hardware.count,
        limited_by=quick["step_time"]["limited_by"],
    )


# --- the README's table ----------------------------------------------------------------------------------------------


def format_table(plans: Plans) -> str:
    """Format what stands in the README: a small table for each size of card, one row a model."""
    parts = [_wrap(_legend([found for found in plans.values() if isinstance(found, Plan)]))]
    for sold in dict.fromkeys(machine.sold_gb for machine in MACHINES):
        machines = [machine for machine in MACHINES if machine.sold_gb == sold]
        heads = [f"{machine.gpus.replace('x', ' x ', 1)} ({machine.host_gib})" for machine in machines]
        rows = [
            f"| {model} | " + " | ".join(_format_cell(plans[model, machine.label]) for machine in machines) + " |"
            for model in MODELS
        ]
        parts.append("\n".join([f"| | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|", *rows]))
    return "\n\n".join(parts)


def _format_cell(found: Plan | list[str]) -> str:
    """Format a plan as its letters, memory and speed."""
    if not isinstance(found, Plan):
        return "-"
    memory = f"{found.least:.0f}" if found.least is not None else f"~{found.allocated:.0f}"
    return f"{f'**{found.marks}** ' if found.marks else ''}{memory} GiB, {_thousands(found.speed)}"


def _thousands(speed: float) -> str:
    return f"{speed / 1000:.0f}k" if speed >= 9950 else f"{speed / 1000:.1f}k"


def _legend(plans: Collection[Plan]) -> str:
    """Say what the cells mean: only letters that are there, and how many were simulated."""
    used = {letter for found in plans for letter in found.marks}
    letters = "; ".join(words for letter, words in LETTERS.items() if letter in used)
    simulated = sum(found.least is not None for found in plans)
    return (
        f"What fits where, **predicted** (no GPU has confirmed it): the best plan for rows of {SEQ_LEN} tokens and "
        f"{GLOBAL_BATCH} rows a step, by closed form. A cell has the memory of one GPU and the tokens a second of all. "
        f"{simulated} of {len(plans)} plans were simulated in full, and show the least memory in which the run gets "
        "through; the others, marked ~, what is alive at the peak. Cells without a letter train with fp32 weights and "
        f"averages, all on the GPUs; {letters}. Precision is given up only where nothing better fits, however "
        f"slow that is. `-`: nothing fits. In brackets the machine's own memory, GiB. Every plan's settings stand "
        "in [docs/what_fits.md](docs/what_fits.md)."
    )


def _wrap(text: str) -> str:
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False)


def replace_between(text: str, table: str) -> str:
    """Put the table between the two marks of the README, which must be there once."""
    assert text.count(BEGIN) == text.count(END) == 1, "README.md lacks the marks of the table"
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


# --- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = f"""\
# What fits where

Written by `docs/make_readme_table.py` from the planner; nothing here has been measured on a GPU. Each row is the best
plan by closed form for rows of {SEQ_LEN} tokens and {GLOBAL_BATCH} rows a step: quality first, then speed.

- **needs**: GiB of a GPU that are alive at the peak, by closed form; where the plan was simulated in full, by the
  simulation, with the least memory in which the run gets through. **of**: what the GPU leaves.
- **host**: GiB of the machine's memory at its fullest, saves included.
- **tokens/s**: of all GPUs together, and what the step spends most of its time on.
- **rows**: rows a GPU computes at once x micro-batches of a step.
"""


def format_page(plans: Plans) -> str:
    """Format the page: a table a machine, one row a model."""
    parts = [INTRODUCTION]
    heads = ("model", "kept in", "settings", "rows", "needs", "of", "host", "tokens/s")
    for machine in MACHINES:
        rows = [_format_row(model, plans[model, machine.label]) for model in MODELS]
        title = f"## {machine.gpus.replace('x', ' x ', 1)}, {machine.host_gib} GiB of host memory"
        parts.append("\n".join([title, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, ""]))
    return "\n".join(parts)


def _format_row(model: str, found: Plan | list[str]) -> str:
    if not isinstance(found, Plan):
        what = "; ".join(found) or "nothing that was tried"
        return f"| {model} | nothing fits | it would with: {what} | | | | | |"
    size = found.settings.get("batch.micro_batch_size", 1)
    least = f", {found.least:.1f} to get through" if found.least is not None else ""
    fields = (
        model,
        QUALITY_MARKS[found.quality][1],
        _format_settings(found.settings),
        f"{size} x {GLOBAL_BATCH // (size * parse_gpus(found.machine.gpus).count)}",
        f"{found.allocated:.1f}{least}",
        f"{found.limit:.1f}",
        f"{found.host:.0f}",
        f"{found.speed:,.0f}, {found.limited_by}",
    )
    return f"| {' | '.join(fields)} |"


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Name the settings that a plan decides; those of precision and rows stand in other columns."""
    words = [f"stage {settings.get('sharding.zero_stage', 3)}"]
    mode = settings.get("activation_checkpointing.mode", "full")
    every_n = settings.get("activation_checkpointing.every_n", 1)
    again = {"none": "nothing recomputed", "full": "all layers recomputed"}
    words.append(again.get(mode, f"one layer in {every_n} recomputed"))
    offload = settings.get("sharding.offload", "none")
    if offload != "none":
        step = f" (step on the {settings.get('optim.offload_step', 'host')})" if offload == "optimizer" else ""
        words.append(f"offload {offload}{step}")
    if settings.get("checkpoint.async_save") is False:
        words.append("`async_save: false`")
    return ", ".join(words)


def write_pages() -> None:
    """Write both pages from what is kept."""
    plans = find_plans(load_cells())
    PAGE.write_text(format_page(plans), encoding="utf-8")
    README.write_text(replace_between(README.read_text(encoding="utf-8"), format_table(plans)), encoding="utf-8")


def main() -> None:
    """Plan what is missing, simulate if asked to, and write both pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="append", default=[], choices=list(MODELS), help="plan this model anew")
    parser.add_argument("--simulate", action="store_true", help="also run the full simulations that are missing")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="simulate only this model")
    words = parser.parse_args()
    fill_cells(again=words.again)
    if words.simulate:
        simulate_cells(models=words.model or tuple(MODELS))
    write_pages()


if __name__ == "__main__":
    main()
