"""Some of the random configurations of `python -m benchmarks.sweeps.configurations`, beside plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sweeps import configurations as sweep

ROTARY = ("phi3_longrope", "llama_dynamic", "llama_yarn", "qwen2")


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_a_random_configuration_trains_what_the_reference_does(seed: int, tmp_path: Path) -> None:
    """Three steps in fp32: losses and norms to 1e-6, the movement of every tensor to 1e-3."""
    made = sweep.draw(seed, ranks=(1, 2), models_of=ROTARY)
    errors = sweep.compare(made, sweep.folders(tmp_path)(made.model), str(tmp_path))
    assert sweep.agrees(errors), (made, errors)


def test_every_model_and_every_rotary_type_is_drawn() -> None:
    drawn = {sweep.draw(seed).model for seed in range(1, 101)}
    assert drawn == set(sweep.MODELS) and drawn.issuperset(ROTARY)
