"""The held-out loss: over all supervised tokens, whatever the world size and the micro-batch."""

from contextlib import closing

import torch
import torch.distributed as dist

from fsdp_trainer.config import Config
from fsdp_trainer.data.loader import evaluation_windows
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.run import Run
from fsdp_trainer.signals import StopRequest
from fsdp_trainer.step import eval_step


def evaluate(run: Run, rows: Rows, *, stop: StopRequest | None = None) -> float | None:
    """Return the mean loss over all supervised tokens of `rows`, the same for every world size and micro-batch.

    None when a signal arrived meanwhile. Weights are resharded afterwards.
    """
    config, runtime = run.config, run.runtime
    windows = evaluation_windows(
        rows,
        micro_batch_size=config.batch.micro_batch_size,
        rank=runtime.rank,
        world_size=runtime.world_size,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
    )
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    tokens = 0
    run.model.eval()
    try:
        with closing(windows):
            for window in windows:
                if stop is not None and stop.agreed():
                    return None
                for micro_batch in window.micro_batches:
                    total += eval_step(run, micro_batch)
                tokens += window.supervised_tokens
    finally:
        run.model.train()
        run.sharding.reshard_all()
    dist.all_reduce(total)
    return total.item() / tokens


def evaluation_is_due(config: Config, step: int, total_steps: int) -> bool:
    """Return whether the settings ask for an evaluation after this step."""
    every = config.eval.every_steps
    return (every is not None and step % every == 0) or (config.eval.at_end and step == total_steps)
