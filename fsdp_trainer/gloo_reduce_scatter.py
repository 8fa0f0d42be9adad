"""Reduce-scatter for gloo ranks that sends each gradient element once."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class GlooReduceScatter(DefaultReduceScatter):
    """An all-to-all of the shards, then a local sum in rank order.

    Gloo's own reduce-scatter all-reduces a clone of the whole input and keeps one part of it. Measured with 7.1 million
    fp32 elements on two ranks: 27.7 ms against 8.0 ms for the all-to-all. Sums are taken in fp32 and rounded once, so
    they do not depend on how gloo orders its ring. Its numbers are those of the default: see
    tests/distributed/test_gloo_reduce_scatter.py.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` [ranks * n] into `output_tensor` [n] of the same dtype, by SUM or AVG."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduce-scatter by {op}, async_op={async_op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, second, *others = received.chunk(group.size())
        if output_tensor.dtype == torch.float32:
            total = torch.add(first, second, out=output_tensor)
        else:
            total = first.float().add_(second)
        for part in others:
            total.add_(part)
        if op == dist.ReduceOp.AVG:
            total.div_(group.size())
        if total is not output_tensor:
            output_tensor.copy_(total)
