"""The gloo ranks' own reduce-scatter gives what the library's gives."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks


def scatter_both_ways(world: int, dtype: torch.dtype, average: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the exact result in fp64, the library's and ours, each [n]."""
    import torch.distributed as dist

    from fsdp_trainer.gloo_reduce_scatter import GlooReduceScatter
    from fsdp_trainer.runtime import build_runtime

    rank = build_runtime(timeout_minutes=1).rank
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    inputs = [torch.randn(world * 1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    exact = torch.stack([whole.double() for whole in inputs]).sum(0).chunk(world)[rank] / (world if average else 1)
    default, ours = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
    dist.reduce_scatter_single(default, inputs[rank].clone(), op=op)
    GlooReduceScatter()(ours, inputs[rank], dist.group.WORLD, op)
    return exact, default, ours


@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_sums_as_the_default_does(world: int, dtype: torch.dtype, average: bool) -> None:
    for exact, default, ours in run_ranks(scatter_both_ways, world, world, dtype, average):
        if dtype == torch.float32:
            torch.testing.assert_close(ours, default, rtol=1e-6, atol=1e-6)
            if world == 2:  # one addition has one result
                assert torch.equal(ours, default)
        # One rounding, from an fp32 sum: never further from the truth than the default, which rounds every addition.
        assert torch.equal(ours, exact.float().to(dtype)) or dtype == torch.float32
        assert (ours.double() - exact).abs().max() <= (default.double() - exact).abs().max() + 1e-6
