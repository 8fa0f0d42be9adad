"""Stochastic rounding to bf16: to the two neighbours only, right on average, the same again from the same seed."""

from __future__ import annotations

import pytest
import torch

from fsdp_trainer.optim.stochastic_rounding import round_stochastically_, seeded_generator

CPU = torch.device("cpu")


def rounded(source: torch.Tensor, *, step: int = 0, shard: int = 0) -> torch.Tensor:
    target = torch.empty_like(source, dtype=torch.bfloat16)
    round_stochastically_(target, source, seeded_generator(CPU, seed=3, step=step, shard=shard))
    return target


def neighbours(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 numbers towards zero and away from it, as fp32."""
    below = source.view(torch.int32) & -(2**16)
    return below.view(torch.float32), (below + 2**16).view(torch.float32)


def test_values_go_to_a_neighbour_and_both_are_taken() -> None:
    source = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 7).repeat(1000)
    below, above = neighbours(source)
    got = rounded(source).float()
    assert ((got == below) | (got == above)).all()
    assert 0.4 < (got == above).float().mean().item() < 0.6


@pytest.mark.parametrize("value", [1.0 + 1e-5, -0.3, 3.0e-39, 1.0 + 0.6 / 128])
def test_the_mean_is_the_value(value: float) -> None:
    """Within five standard errors of a two-sided coin; rounding to nearest is 30 or more away on the first."""
    source = torch.full((400_000,), value)
    below, above = (float(side[0]) for side in neighbours(source))
    chance = (value - below) / (above - below)
    error = 5 * (chance * (1 - chance) / source.numel()) ** 0.5 * abs(above - below)
    assert rounded(source).double().mean().item() == pytest.approx(float(source[0]), rel=0, abs=error)


def test_what_bf16_holds_and_what_is_not_finite_stays() -> None:
    exact = torch.randn(5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)
    quiet_nan_of_all_bits = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert rounded(quiet_nan_of_all_bits.repeat(1000)).isnan().all()
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(signalling.repeat(1000)).isnan().all()
    endless = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0]).repeat(1000)
    got = rounded(endless)
    assert torch.equal(got.float(), endless) and torch.equal(got.signbit(), endless.signbit())
    assert rounded(torch.empty(0)).numel() == 0


def test_numbers_follow_from_seed_step_and_shard() -> None:
    source = torch.full((1000,), 1.0 + 0.5 / 128)
    assert torch.equal(rounded(source), rounded(source))
    for other in (rounded(source, step=1), rounded(source, shard=1)):
        share = (other != rounded(source)).float().mean().item()
        assert 0.4 < share < 0.6  # of two independent coins
