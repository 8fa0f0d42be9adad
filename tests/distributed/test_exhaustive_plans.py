"""The chosen plan against every other combination of three small search spaces, each simulated in full.

`python -m benchmarks.sweeps.spaces` has ten. In these three the settings of offload, of rows, and of how GPUs share the
model are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sweeps.spaces import SPACES, check_space, empty_cache
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_workers import Ask
from tests.e2e.commands import environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Two processes for all spaces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():  # so that the two begin warm
            patch.setenv(name, value)
        with empty_cache(tmp_path_factory.mktemp("cache")) as found:
            yield found


@pytest.mark.parametrize("name", ["offload", "rows", "two machines"])
def test_no_combination_beats_the_plan(name: str, folder: Path, ask: Ask) -> None:
    found = check_space(SPACES[name], folder, ask)
    assert not found.wrong, found


def test_what_is_refused_comes_back_as_its_error(folder: Path, ask: Ask) -> None:
    config = SPACES["rows"].config(folder)
    refused, found = ask([config, Config.from_dict(config.to_dict() | {"precision": "fp16"})], parse_gpus("2xT4"))
    assert isinstance(refused, ConfigError) and "bf16" in str(refused)
    assert isinstance(found, Simulation)
