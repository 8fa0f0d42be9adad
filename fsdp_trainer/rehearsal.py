"""The worst a run will ask of memory, before its first step: out of memory then comes at once and not at step 300.

A run that is built without values takes steps over its longest rows, an evaluation, and the copies of a save and an
export; then all of it is dropped. The values come afterwards, so the run is the same to the last bit with and without.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from fsdp_trainer.checkpoint import training_tensors
from fsdp_trainer.checkpoint_copy import local_part, plan_copy
from fsdp_trainer.config import Config
from fsdp_trainer.data.loader import Window, window_of_rows
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.export import gather_as_exported
from fsdp_trainer.optim.masters import MASTER, send_masters, trained_weights
from fsdp_trainer.optim.sharded_adamw import flat
from fsdp_trainer.out_of_memory import Last
from fsdp_trainer.progress import log_line
from fsdp_trainer.run import Run
from fsdp_trainer.runtime import Runtime
from fsdp_trainer.saving import saves_in_background
from fsdp_trainer.step import eval_step, train_step
from fsdp_trainer.training_data import TrainingData
from fsdp_trainer.units import format_bytes, format_duration

# The first and the last are what memory sees; what is accumulated between them holds no more.
MOST_MICRO_BATCHES = 2


def rehearses(config: Config, runtime: Runtime) -> bool:
    """Return whether a run rehearses: as the settings say; `auto` where the memory is an accelerator's."""
    return runtime.device.type == "cuda" if config.rehearse == "auto" else config.rehearse


def rehearse(run: Run, data: TrainingData, last: Last) -> None:
    """Take the most memory that training will, in a run built with `load=False`; `last` hears of the rows it takes.

    Collective. Weights hold small random numbers afterwards, and everything else is as it was built: the caller fills
    the weights and seeds the random numbers. Raises what torch raises when memory runs out.
    """
    started, config, device = time.perf_counter(), run.config, run.runtime.device
    window = longest_window(data.train if data.stream is None else _full_rows(config, run.runtime), run, data)
    last.window = window
    with _unrecorded(run):
        _fill_with_anything(run)
        # The first makes the optimizer's state, which every forward and backward but the first has beside it.
        for step, taken in enumerate((replace(window, micro_batches=window.micro_batches[:1]), window)):
            train_step(run, taken, learning_rate=config.optim.lr, optimizer_step=step)
        parts = [f"steps over the longest rows ({window.tokens:,} tokens)"]
        if data.evaluation is not None:
            last.window = longest_window(data.evaluation, run, data)
            _evaluate(run, last.window)
            parts.append("an evaluation")
        if config.checkpoint.enabled:
            _copy_for_a_save(run)
            parts.append("a save")
        if config.export.at_end:
            _gather_for_an_export(run)
            parts.append("an export")
        peak = f": peak {format_bytes(torch.cuda.max_memory_allocated(device))}" if device.type == "cuda" else ""
        _drop(run)
    log_line(
        f"rehearsed {', '.join(parts)} in {format_duration(time.perf_counter() - started)}{peak}",
        is_main=run.runtime.is_main,
    )


@contextmanager
def _unrecorded(run: Run) -> Iterator[None]:
    """Keep the rehearsal out of what the run will say of its memory, and let an error say that it was one."""
    phases, device = run.runtime.phases, run.runtime.device
    if phases.ended is not None:
        phases.ended(phases.current)  # loading, until here
    phases.rehearsing, ended, phases.ended = True, phases.ended, None
    scaler = run.scaler.state_dict() if run.scaler is not None else None
    yield  # what fails in it leaves the phases where they are
    phases.rehearsing, phases.ended, phases.current = False, ended, "load"
    if run.scaler is not None and scaler is not None:
        run.scaler.load_state_dict(scaler)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # The blocks were cut for other sizes than those of the first step: it begins with none, as without a rehearsal.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@torch.no_grad()
def _fill_with_anything(run: Run) -> None:
    """Give the weights small random numbers: memory without values may hold NaN, and equal ones would fill one expert.

    The run draws none of its numbers from here: it is seeded after the rehearsal.
    """
    for weight in trained_weights(run.model, run.optimizer).values():
        local_part(weight).uniform_(-0.02, 0.02)
    send_masters(run.optimizer)


def longest_window(rows: Rows, run: Run, data: TrainingData) -> Window:
    """Return this rank's part of a window of the longest rows, of them those with the most targets."""
    config, world_size = run.config, run.runtime.world_size
    accumulation = min(config.check_world(world_size), MOST_MICRO_BATCHES)
    wanted = accumulation * config.batch.micro_batch_size * world_size
    order = np.lexsort((-rows.row_supervised(), -rows.row_tokens()))
    return window_of_rows(
        rows,
        np.sort(np.resize(order[:wanted], wanted)),  # fewer rows than that are taken again
        micro_batch_size=config.batch.micro_batch_size,
        rank=run.runtime.rank,
        world_size=world_size,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
        epoch=0,
    )


def _full_rows(config: Config, runtime: Runtime) -> Rows:
    """Make rows of seq_len tokens that are all targets: of a stream nobody knows the longest."""
    n_rows = config.batch.micro_batch_size * runtime.world_size
    length = config.data.seq_len
    supervised = np.ones(n_rows * length, dtype=bool)
    supervised[::length] = False
    starts = np.arange(n_rows + 1, dtype=np.int64)
    return Rows(np.zeros(n_rows * length, dtype=np.int32), supervised, starts * length, starts)


def _evaluate(run: Run, window: Window) -> None:
    run.model.eval()
    for micro_batch in window.micro_batches:
        eval_step(run, micro_batch)
    run.model.train()
    run.sharding.reshard_all()


def _copy_for_a_save(run: Run) -> None:
    """Copy the state to host memory as a save in the background does; one in the foreground copies nothing large."""
    checkpoint = run.config.checkpoint
    if not saves_in_background(every_steps=checkpoint.every_steps, async_save=checkpoint.async_save):
        return
    with run.runtime.phases.enter("save"):
        tensors = training_tensors(run.model, run.optimizer)
        copy = plan_copy(tensors, model=run.model, optimizer=run.optimizer, device=run.runtime.device)
        copy.make()
        copy.release()


def _gather_for_an_export(run: Run) -> None:
    """Gather and convert the largest of the files that the exported model will have."""
    with run.runtime.phases.enter("save"):
        gather_as_exported(
            run.model,
            run.optimizer,
            dtype=run.config.export.dtype,
            hf_config=run.hf_config,
            keep=run.runtime.is_main,
            largest=True,
        )


@torch.no_grad()
def _drop(run: Run) -> None:
    """Bring the optimizer back to where it was made: torch's without state, ours with averages of zero."""
    if run.config.steps_with_torch:
        run.optimizer.state.clear()
        return
    for state in run.optimizer.state.values():
        for name, value in state.items():
            if name != MASTER:
                flat(value).zero_()
