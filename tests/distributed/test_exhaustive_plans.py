"""The chosen plan against every other combination of ten small search spaces, each simulated in full.

The models have the layers of large ones, and few of them: a layer of the sizes people train costs a second to simulate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.candidate_estimates import Limits
from fsdp_trainer.memory.candidates import SEARCHED, enumerate_candidates
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.plan import GIB, QUALITIES, Candidate, quality_of
from fsdp_trainer.memory.planner import plan
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_workers import Ask, simulation_workers

MODELS = Path(__file__).resolve().parents[2] / "benchmarks" / "models"
QUALITY = {"precision", "optim.name", "optim.state_dtype", "sharding.reduce_dtype"}
CHECKPOINTING = {"activation_checkpointing.mode", "activation_checkpointing.every_n"}
OFFLOAD = {"sharding.offload", "optim.offload_step"}
ROWS, STAGE = {"batch.micro_batch_size"}, {"sharding.zero_stage"}


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Simulate in two processes for all spaces; what they find is in the cache that the planner reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with simulation_workers() as found:
            yield found


@pytest.mark.parametrize("name", SPACES)
def test_no_combination_beats_the_plan(name: str, folder: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    space = SPACES[name]
    config, hardware = space.config(folder), space.hardware
    limits = Limits.of(hardware, None)
    every = [Config.from_dict(made.to_dict()) for made in enumerate_candidates(config, hardware, fixed=space.fixed)]
    answers = ask(every, hardware)
    assert all(isinstance(answer, Simulation) for answer in answers), answers
    # All of it is in the cache, so a plan needs no process and no torch.
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    found = plan(config, hardware, fixed=space.fixed, prefer=space.prefer)
    chosen = found.chosen
    assert chosen is not None and chosen.source == "simulation"
    assert chosen.config in every
    fitting = {
        index: answer
        for index, answer in enumerate(answers)
        if isinstance(answer, Simulation) and answer.min_capacity <= limits.device
    }
    assert 0 < len(fitting) < len(every), f"{len(fitting)} of {len(every)} fit: memory decides nothing here"
    if space.prefer == "quality":
        best = min(place(every[index]) for index in fitting)
        assert QUALITY_ORDER.index(chosen.quality) == best
        fitting = {index: answer for index, answer in fitting.items() if place(every[index]) == best}
    seconds = [answer.step_seconds for answer in fitting.values() if answer.step_seconds is not None]
    assert len(seconds) == len(fitting)
    assert needed_seconds(chosen) <= min(seconds) * 1.03
    assert chosen.prediction["min_capacity_gib"] * GIB <= limits.device


QUALITY_ORDER = list(QUALITIES)


def place(config: Config) -> int:
    return QUALITY_ORDER.index(quality_of(config))


def needed_seconds(candidate: Candidate) -> float:
    assert candidate.step_seconds is not None
    return candidate.step_seconds


def test_what_is_refused_comes_back_as_its_error(folder: Path, ask: Ask) -> None:
    config = SPACES["rows"].config(folder)
    refused, found = ask([config, Config.from_dict(config.to_dict() | {"precision": "fp16"})], parse_gpus("2xT4"))
    assert isinstance(refused, ConfigError) and "bf16" in str(refused)
    assert isinstance(found, Simulation)
