"""Writes configs/recipes: for each model and machine of RECIPES the planner's choice, with the memory that it promises.

    .venv/bin/python -m configs.make_recipes [--again NAME]

A recipe is planned by closed form and simulated in full, both without a GPU; where the simulation says that it does not
fit after all, the planner looks in full. Recipes that are there stay as they are; `--again` makes one anew, and one
that RECIPES lacks is taken away. `python -m benchmarks.sweeps.recipes` compares what is promised with simulations anew.
The shapes in benchmarks/models are those of each model's own config.json; parameters are counted in a test.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.make_readme_table import MODEL_FILES, changed_settings
from fsdp_trainer.config import Config, dump_settings
from fsdp_trainer.config_reading import merge_settings
from fsdp_trainer.memory.candidate_estimates import Limits
from fsdp_trainer.memory.estimate_model import read_model_shape
from fsdp_trainer.memory.hardware import GIB, parse_gpus
from fsdp_trainer.memory.plan import quality_of
from fsdp_trainer.memory.planner import plan
from fsdp_trainer.memory.quick import simulate_quick
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_cache import simulate_cached
from fsdp_trainer.units import format_count

FOLDER = Path(__file__).with_name("recipes")
HAND_WRITTEN = ("demo-cpu",)
# By model: its name on the hub, and the rows of a step, of so many tokens.
MODELS = {
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", 64, 2048),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 64, 4096),
    "gemma-3-1b": ("google/gemma-3-1b-it", 64, 4096),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", 64, 4096),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", 64, 4096),
    "qwen3-4b": ("Qwen/Qwen3-4B", 64, 4096),
    "qwen3-8b": ("Qwen/Qwen3-8B", 64, 4096),
    "qwen3-14b": ("Qwen/Qwen3-14B", 64, 4096),
    "qwen3-32b": ("Qwen/Qwen3-32B", 64, 4096),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", 64, 4096),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B-Instruct", 64, 4096),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", 64, 4096),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", 64, 4096),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", 64, 4096),
}
SHAPES = {"llama-3.3-70b": "llama-3.1-70b", "mistral-7b": "mistral-7b-v0.3"}  # where the file has another name
# A model, GPUs, and the machine's own memory in GiB.
RECIPES: tuple[tuple[str, str, int], ...] = (
    ("smollm2-135m", "1xT4", 32),
    ("smollm2-135m", "1xRTX3090", 64),
    ("smollm2-1.7b", "1xRTX4090", 128),
    ("smollm2-1.7b", "2xRTX3090", 128),
    ("gemma-3-1b", "1xRTX4090", 128),
    ("gemma-3-1b", "2xL4", 96),
    ("qwen3-0.6b", "1xRTX4090", 128),
    ("qwen3-0.6b", "4xT4", 192),
    ("qwen3-1.7b", "2xRTX4090", 128),
    ("qwen3-1.7b", "1xRTX-A6000", 128),
    ("qwen3-4b", "1xRTX4090", 128),
    ("qwen3-4b", "2xRTX4090", 128),
    ("qwen3-4b", "4xA100-40GB", 512),
    ("qwen3-8b", "2xRTX4090", 128),
    ("qwen3-8b", "1xH100-80GB", 256),
    ("qwen3-8b", "4xL40S", 512),
    ("qwen3-8b", "8xH100-80GB", 2048),
    ("qwen3-14b", "4xRTX4090", 256),
    ("qwen3-14b", "8xA100-80GB", 1024),
    ("qwen3-32b", "2xH100-80GB", 512),
    ("qwen3-32b", "8xH200", 2048),
    ("qwen2.5-7b", "2xRTX4090", 128),
    ("qwen2.5-7b", "8xA100-80GB", 1024),
    ("qwen2.5-32b", "8xH100-80GB", 2048),
    ("llama-3.1-8b", "1xRTX4090", 128),
    ("llama-3.1-8b", "2xRTX5090", 192),
    ("llama-3.1-8b", "2xA100-80GB", 512),
    ("llama-3.3-70b", "4xH100-80GB", 1024),
    ("llama-3.3-70b", "8xH100-80GB", 2048),
    ("mistral-7b", "2xRTX-A6000", 256),
    ("mistral-7b", "4xH100-80GB", 1024),
)
_PROMISE = re.compile(
    r"^# A GPU: (?P<allocated>[\d.]+) GiB at the peak, (?P<least>[\d.]+) to get through, of (?P<limit>[\d.]+) GiB; "
    r"closed form (?P<quick>[\d.]+)\. Machine: (?P<host>[\d.]+) of (?P<host_limit>\d+) GiB\.$",
    flags=re.MULTILINE,
)


@dataclass(frozen=True)
class Promise:
    """What stands in a recipe, GiB: the simulated peak and the least a GPU must have, and the closed form's figures."""

    allocated: float
    least: float
    limit: float
    quick: float
    host: float
    host_limit: float

    def line(self) -> str:
        """Return the promise as it stands in a recipe."""
        return (
            f"# A GPU: {self.allocated:.3f} GiB at the peak, {self.least:.3f} to get through, of {self.limit:.2f} GiB; "
            f"closed form {self.quick:.3f}. Machine: {self.host:.1f} of {self.host_limit:.0f} GiB."
        )


def name_of(model: str, gpus: str) -> str:
    """Return a recipe's name, such as qwen3-8b-2xrtx4090."""
    return f"{model}-{gpus.lower().replace('rtx-', '')}"


def read_promise(path: Path) -> Promise:
    """Return what a recipe promises; ValueError where it promises nothing."""
    found = _PROMISE.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} has no line that promises memory")
    return Promise(**{name: float(size) for name, size in found.groupdict().items()})


@contextmanager
def local_model(model: str) -> Iterator[str]:
    """Give a folder that holds the model's config.json and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        text = (MODEL_FILES / f"{SHAPES.get(model, model)}.json").read_text(encoding="utf-8")
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        yield folder


def localised(path: Path, folder: str) -> Config:
    """Load a recipe with its model taken from `folder`, since a hub id needs the network."""
    config = Config.load(path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})


def check_closed_form(model: str, gpus: str) -> dict[str, Any]:
    """Return what `simulate --quick` says of a recipe now."""
    with local_model(model) as folder:
        return simulate_quick(localised(FOLDER / f"{name_of(model, gpus)}.yaml", folder), parse_gpus(gpus))


def simulate_recipe(model: str, gpus: str) -> Simulation:
    """Return what `simulate` says of a recipe now, simulated anew."""
    from fsdp_trainer.memory.simulate import simulate  # here only: the closed form needs no torch

    with local_model(model) as folder:
        return simulate(localised(FOLDER / f"{name_of(model, gpus)}.yaml", folder), parse_gpus(gpus))


def extrapolate_recipe(model: str, gpus: str) -> float:
    """Return the peak of a recipe, GiB, from runs with few layers and micro-batches, which take two seconds.

    Every further layer adds the same bytes, and every micro-batch after the second the same as the second.
    """
    from fsdp_trainer.memory.extrapolate import find_peaks

    hardware = parse_gpus(gpus)
    with local_model(model) as folder:
        config = localised(FOLDER / f"{name_of(model, gpus)}.yaml", folder)
        steps, checkpointing = config.check_world(hardware.count), config.activation_checkpointing
        rows = config.batch.global_batch_size // steps * min(steps, 2)
        config = config.model_copy(update={"batch": config.batch.model_copy(update={"global_batch_size": rows})})
        every = checkpointing.every_n if checkpointing.mode == "every_n_layers" else 1
        few, more = (4, 6) if every <= 2 else (every, 2 * every)
        low, high = (find_peaks(config, hardware, layers=layers) for layers in (few, more))
        layers = read_model_shape(folder).layers
    return max(low[phase] + (high[phase] - low[phase]) * (layers - few) / (more - few) for phase in low) / GIB


# --- making ----------------------------------------------------------------------------------------------------------


def base_settings(model: str, gpus: str) -> dict[str, Any]:
    """Return what a recipe asks for, which the planner leaves as it is."""
    hub, rows, seq_len = MODELS[model]
    return {
        "model": {"path": hub},
        "data": {"train": "data/train.jsonl", "eval": 0.02, "seq_len": seq_len},
        "batch": {"global_batch_size": rows},
        "output_dir": f"runs/{model}",
        **({} if parse_gpus(gpus).bf16_flops else {"precision": "fp16"}),
    }


def make_recipe(model: str, gpus: str, host_gib: int) -> str:
    """Plan and simulate one recipe and return its text; SystemExit where nothing fits."""
    hardware = parse_gpus(gpus)
    limit = Limits.of(hardware, None).device
    with local_model(model) as folder:
        local = Config.from_dict(merge_settings(base_settings(model, gpus), {"model.path": folder}))
        for quick in (True, False):
            chosen = plan(local, hardware, host_bytes=host_gib * GIB, quick=quick).chosen
            if chosen is None:
                raise SystemExit(f"{model} does not fit on {gpus} with {host_gib} GiB")
            found = simulate_cached(chosen.config, hardware)
            if found.min_capacity <= limit:
                break
        closed = simulate_quick(chosen.config, hardware)
        settings = merge_settings(base_settings(model, gpus), changed_settings(chosen.config))
    promise = Promise(
        allocated=found.allocated / GIB,
        least=found.min_capacity / GIB,
        limit=limit / GIB,
        quick=closed["allocated_gib"],
        host=max(closed["host_node_gib"].values()),
        host_limit=host_gib,
    )
    return format_recipe(model, gpus, settings, promise=promise, closed=closed)


def format_recipe(
    model: str, gpus: str, settings: Mapping[str, Any], *, promise: Promise, closed: Mapping[str, Any]
) -> str:
    """Return a recipe's text; `closed` is what `simulate --quick` says of it."""
    hardware, config = parse_gpus(gpus), Config.from_dict(settings)
    micro, steps = config.batch.micro_batch_size, config.check_world(hardware.count)
    speed = closed["tokens_per_second_per_gpu"] * hardware.count
    return "\n".join(
        [
            f"# {config.model.path}, {format_count(closed['parameters'])} parameters, on {hardware}: as planned.",
            "# Written by configs/make_recipes.py. Predicted; no GPU has confirmed it.",
            promise.line(),
            f"# {_kept_in(config)}; on each GPU {steps} micro-batch{'es' if steps > 1 else ''} of {micro} "
            f"row{'s' if micro > 1 else ''} a step; about {speed:,.0f} tokens/s in all.",
            f"#   fsdp-trainer train --config configs/recipes/{name_of(model, gpus)}.yaml --processes {hardware.count}",
            dump_settings(settings),
        ]
    )


def _kept_in(config: Config) -> str:
    words = {
        "masters": "Weights and AdamW averages in fp32",
        "masters, bf16 averages": "Weights in fp32, AdamW averages in bf16",
        "8-bit": "Weights in fp32, AdamW averages in 8 bits",
        "pure": "Weights in bf16, AdamW averages in fp32",
        "pure, bf16 averages": "Weights, gradients and AdamW averages in bf16",
        "pure, 8-bit": "Weights and gradients in bf16, AdamW averages in 8 bits",
    }
    return words[quality_of(config)]


def write_recipes(again: Sequence[str]) -> None:
    """Make what is missing or named, and take away what RECIPES no longer has."""
    names = {name_of(model, gpus) for model, gpus, _ in RECIPES} | set(HAND_WRITTEN)
    for stale in {path.stem for path in FOLDER.glob("*.yaml")} - names:
        (FOLDER / f"{stale}.yaml").unlink()
    for model, gpus, host_gib in RECIPES:
        path = FOLDER / f"{name_of(model, gpus)}.yaml"
        if path.exists() and path.stem not in again:
            continue
        begun = time.monotonic()
        path.write_text(make_recipe(model, gpus, host_gib), encoding="utf-8")
        print(f"{path.stem}: {time.monotonic() - begun:.0f} s", flush=True)


# --- checking --------------------------------------------------------------------------------------------------------

# Another torch keeps other temporaries; within one release the simulation gives the same bytes each time.
TOLERANCE = 0.005


def difference(found: Simulation, promise: Promise) -> str:
    """Return what a simulation does not keep of a promise; empty where it keeps all."""
    allocated, least = found.allocated / GIB, found.min_capacity / GIB
    kept = (
        abs(allocated - promise.allocated) <= TOLERANCE * promise.allocated
        and abs(least - promise.least) <= TOLERANCE * promise.least
        and least <= promise.limit
    )
    return "" if kept else f"{allocated:.3f} GiB at the peak, {least:.3f} to get through; {promise.line()}"


def main() -> None:
    """Make the recipes that are not there, and those named with --again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name_of(model, gpus) for model, gpus, _ in RECIPES]
    parser.add_argument("--again", action="append", default=[], choices=names, help="make this one anew")
    write_recipes(parser.parse_args().again)


if __name__ == "__main__":
    main()
