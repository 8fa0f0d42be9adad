"""The chosen plan against every other combination of ten small search spaces, each simulated in full.

    python -m benchmarks.sweeps.spaces [NAME ...]

The models have the layers of large ones, and few of them: a layer of the sizes people train costs a second to simulate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsdp_trainer.config import Config
from fsdp_trainer.memory.candidate_estimates import Limits
from fsdp_trainer.memory.candidates import SEARCHED, enumerate_candidates
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.plan import GIB, QUALITIES, Candidate, quality_of
from fsdp_trainer.memory.planner import plan
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_workers import Ask, simulation_workers

MODELS = Path(__file__).resolve().parents[1] / "models"
QUALITY = {"precision", "optim.name", "optim.state_dtype", "sharding.reduce_dtype"}
CHECKPOINTING = {"activation_checkpointing.mode", "activation_checkpointing.every_n"}
OFFLOAD = {"sharding.offload", "optim.offload_step"}
ROWS, STAGE = {"batch.micro_batch_size"}, {"sharding.zero_stage"}
# How much slower than the fastest combination a plan may be.
SLOWER = 1.03


@dataclass(frozen=True)
class Space:
    """A question with few answers: what is free, on GPUs whose memory is cut to `usable_gib`."""

    model: str
    gpus: str
    usable_gib: float
    free: set[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    prefer: Any = "quality"

    @property
    def hardware(self) -> Hardware:
        return replace(parse_gpus(self.gpus), usable_bytes=int(self.usable_gib * GIB))

    @property
    def fixed(self) -> set[str]:
        return set(SEARCHED) - self.free

    def config(self, folder: Path) -> Config:
        path = folder / f"{self.model}-{self.layers}"
        if not path.exists():
            path.mkdir()
            values = json.loads((MODELS / f"{self.model}.json").read_text(encoding="utf-8"))
            (path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": self.layers}), encoding="utf-8")
        rows = {"data.seq_len": 2048, "batch.global_batch_size": 4}
        return Config.from_dict({"model": {"path": str(path)}, **rows, **self.settings})


NONE = {"activation_checkpointing.mode": "none"}
SPACES = {
    "rows": Space("llama-3.2-1b", "2xRTX4090", 9.0, ROWS, NONE | {"batch.global_batch_size": 16}),
    "stages": Space("llama-3.2-1b", "2xRTX4090", 9.5, STAGE),
    "stages over links": Space("qwen2.5-1.5b", "4xA100-80GB", 9.0, STAGE, {"batch.global_batch_size": 8}),
    "checkpointing": Space(
        "llama-3.1-8b",
        "2xA100-80GB",
        20.7,
        CHECKPOINTING,
        {"batch.micro_batch_size": 4, "batch.global_batch_size": 8},
        layers=3,
    ),
    "mode and rows": Space("qwen3-0.6b", "1xRTX4090", 4.85, {"activation_checkpointing.mode"} | ROWS),
    "offload": Space("llama-3.1-8b", "2xRTX4090", 13.5, OFFLOAD, {"batch.micro_batch_size": 2}),
    "offload and rows": Space("llama-3.2-3b", "1xRTX4090", 8.0, {"sharding.offload"} | ROWS),
    "quality": Space("llama-3.1-8b", "2xRTX4090", 15.5, QUALITY),
    "speed": Space("llama-3.2-3b", "2xRTX4090", 8.7, QUALITY, {"batch.micro_batch_size": 2}, prefer="speed"),
    "two machines": Space(
        "llama-3.2-1b",
        "2x2xA100-40GB",
        9.0,
        {*STAGE, "sharding.replicate", "sharding.reshard_after_forward"},
        {"batch.global_batch_size": 8},
    ),
}


@dataclass(frozen=True)
class Found:
    """A space's combinations, how many fit, the plan's seconds over those of the best one, and what is wrong."""

    combinations: int
    fitting: int
    slower: float | None
    wrong: str


@contextmanager
def empty_cache(folder: Path) -> Iterator[Ask]:
    """Give what simulates in two processes; what they find is in a cache in `folder`, which the planner reads."""
    with patch.dict(os.environ, XDG_CACHE_HOME=str(folder)), simulation_workers() as ask:
        yield ask


def check_space(space: Space, folder: Path, ask: Ask) -> Found:
    """Simulate every combination of a space and compare the plan with them; the model's config goes into `folder`."""
    config, hardware = space.config(folder), space.hardware
    every = [Config.from_dict(made.to_dict()) for made in enumerate_candidates(config, hardware, fixed=space.fixed)]
    answers = ask(every, hardware)
    simulated = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Simulation)}
    if len(simulated) < len(every):
        errors = [str(answer) for answer in answers if not isinstance(answer, Simulation)]
        return Found(len(every), 0, None, f"not simulated: {errors}")
    # All of it is in the cache, so a plan needs no process and no torch.
    with patch.object(sys, "executable", "/nonexistent"):
        chosen = plan(config, hardware, fixed=space.fixed, prefer=space.prefer).chosen
    limit = Limits.of(hardware, None).device
    fitting = {index: answer for index, answer in simulated.items() if answer.min_capacity <= limit}
    if not 0 < len(fitting) < len(every):
        return Found(len(every), len(fitting), None, "memory decides nothing here")
    if chosen is None or chosen.source != "simulation" or chosen.config not in every:
        return Found(len(every), len(fitting), None, f"no combination was chosen by its simulation: {chosen}")
    slower, wrong = compare(space, chosen, [(every[index], answer) for index, answer in fitting.items()])
    if chosen.prediction["min_capacity_gib"] * GIB > limit:
        wrong.append(f"needs {chosen.prediction['min_capacity_gib']:.3f} GiB of {limit / GIB:.3f}")
    return Found(len(every), len(fitting), slower, "; ".join(wrong))


def compare(
    space: Space, chosen: Candidate, fitting: Sequence[tuple[Config, Simulation]]
) -> tuple[float | None, list[str]]:
    """Return the plan's seconds over the least of what fits in the best quality (any for speed), and what is wrong."""
    wrong = []
    if space.prefer == "quality":
        best = min(place(quality_of(config)) for config, _ in fitting)
        if place(chosen.quality) != best:
            wrong.append(f"{chosen.quality} was chosen, {list(QUALITIES)[best]} fits")
        fitting = [(config, answer) for config, answer in fitting if place(quality_of(config)) == best]
    seconds = [answer.step_seconds for _, answer in fitting if answer.step_seconds is not None]
    if len(seconds) < len(fitting) or chosen.step_seconds is None:
        return None, [*wrong, "a combination has no time"]
    slower = chosen.step_seconds / min(seconds)
    if slower > SLOWER:
        wrong.append(f"takes {chosen.step_seconds:.4f} s a step, another one {min(seconds):.4f} s")
    return slower, wrong


def place(quality: str) -> int:
    return list(QUALITIES).index(quality)


def main() -> int:
    """Check the spaces; 1 when a plan is beaten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SPACES)}; all by default")
    names = parser.parse_args().names or list(SPACES)
    if unknown := set(names) - set(SPACES):
        parser.error(f"no such space: {', '.join(sorted(unknown))}")
    failed, combinations, begun = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, empty_cache(Path(scratch) / "cache") as ask:
        for name in names:
            since = time.monotonic()
            found = check_space(SPACES[name], Path(scratch), ask)
            failed, combinations = failed + bool(found.wrong), combinations + found.combinations
            times = "" if found.slower is None else f", the plan takes {found.slower:.3f} of the least time"
            print(
                f"{name}: {found.combinations} combinations, {found.fitting} fit{times}: "
                f"{found.wrong or 'not beaten'}, {time.monotonic() - since:.1f} s",
                flush=True,
            )
    print(
        f"{len(names) - failed} of {len(names)} spaces ({combinations} combinations): no combination beats the plan; "
        f"{time.monotonic() - begun:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
