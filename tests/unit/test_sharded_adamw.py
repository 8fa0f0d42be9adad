"""ShardedAdamW is torch's AdamW where both can do the same, and moves bf16 weights and averages right on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_trainer.optim import sharded_adamw
from fsdp_trainer.optim.sharded_adamw import ShardedAdamW

NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def build(parameters: list[torch.nn.Parameter], *, state_dtype: torch.dtype = torch.float32) -> ShardedAdamW:
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "weight_decay": 0.1}, {"params": parameters[half:], "weight_decay": 0.0}]
    optimizer = ShardedAdamW(groups, **NUMBERS, state_dtype=state_dtype, seed=0, shard=0)
    optimizer.create_state()
    return optimizer


def make_parameters(sizes: tuple[tuple[int, ...], ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def take(optimizer: Any, parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], moves: int, skip: bool):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.optimizer_step = moves
    optimizer.found_inf = torch.tensor(float(skip))
    optimizer.step()


@pytest.mark.parametrize("piece", [256, 2**22])
def test_equals_torch_adamw_in_fp32(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any shape, also none at all; pieces change nothing; a skipped step leaves weights, averages and count alone."""
    monkeypatch.setattr(sharded_adamw, "PIECE", piece)
    sizes = ((30, 40), (7,), (0, 5), (513,))
    ours, theirs = make_parameters(sizes), make_parameters(sizes)
    optimizer = build(ours)
    half = len(theirs) // 2
    groups = [{"params": theirs[:half], "weight_decay": 0.1}, {"params": theirs[half:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, **NUMBERS, fused=True)
    generator, moves = torch.Generator().manual_seed(1), 0
    for step in range(20):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        skip = step in (0, 7)
        if skip:
            gradients[0][0] = float("nan")
        take(optimizer, ours, gradients, moves, skip)
        take(reference, theirs, gradients, moves, skip)
        moves += not skip
    for our, their in zip(ours, theirs, strict=True):
        assert torch.allclose(our, their, rtol=0, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(optimizer.state[our][key], reference.state[their][key], rtol=1e-6, atol=1e-9)


def test_bf16_weights_arrive_where_fp32_ones_do() -> None:
    """A tenth of bf16's grid a step: lost each time when rounded to nearest, all there when rounded stochastically."""
    sizes = ((200_000,),)
    whole, narrow = make_parameters(sizes), make_parameters(sizes)
    for parameters in (whole, narrow):
        parameters[0].data.fill_(1.0)
    narrow[0] = torch.nn.Parameter(narrow[0].data.bfloat16())
    narrow[0].grad_dtype = torch.float32
    before = whole[0].detach().clone()
    for parameters in (whole, narrow):
        optimizer = build(parameters)
        generator = torch.Generator().manual_seed(2)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / 128
        for step in range(5):
            gradients = [torch.rand(sizes[0], generator=generator) + 0.5]
            take(optimizer, parameters, gradients, step, skip=False)
    moved = (narrow[0].detach().double() - before).mean() / (whole[0].detach().double() - before).mean()
    assert moved.item() == pytest.approx(1.0, abs=0.02)


def test_bf16_averages_follow_fp32_ones() -> None:
    sizes = ((200_000,),)
    exact, narrow = make_parameters(sizes), make_parameters(sizes)
    optimizers = [build(exact), build(narrow, state_dtype=torch.bfloat16)]
    for parameters, optimizer in zip((exact, narrow), optimizers, strict=True):
        generator = torch.Generator().manual_seed(2)
        for step in range(30):
            # The square falls by far: an average rounded to nearest would stay at 128 steps of its grid above it.
            gradients = [torch.randn(sizes[0], generator=generator) * (1.0 if step < 3 else 0.01)]
            take(optimizer, parameters, gradients, step, skip=False)
    for key in ("exp_avg", "exp_avg_sq"):
        reference, mine = (
            optimizer.state[parameters[0]][key].double().abs().mean().item()
            for optimizer, parameters in zip(optimizers, (exact, narrow), strict=True)
        )
        assert mine == pytest.approx(reference, rel=0.01)


def test_a_skipped_step_leaves_bf16_alone() -> None:
    parameters = [torch.nn.Parameter(torch.randn(1000).bfloat16())]
    parameters[0].grad_dtype = torch.float32
    optimizer = build(parameters, state_dtype=torch.bfloat16)
    take(optimizer, parameters, [torch.randn(1000)], 0, skip=False)
    kept = [t.clone() for t in (parameters[0].detach(), *optimizer.state[parameters[0]].values())]
    take(optimizer, parameters, [torch.full((1000,), float("nan"))], 1, skip=True)
    for now, before in zip((parameters[0].detach(), *optimizer.state[parameters[0]].values()), kept, strict=True):
        assert torch.equal(now, before)
