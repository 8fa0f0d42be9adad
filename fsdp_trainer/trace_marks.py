"""What the tensors of a run are: the kinds that a memory trace cannot tell from when they are made and freed.

`mark` is a trace's: called with tensors and a category of memory/recording.py.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from fsdp_trainer.data.loader import Window
from fsdp_trainer.optim.offloaded_adamw import OffloadedAdamW
from fsdp_trainer.run import Run

Mark = Callable[[Iterable[torch.Tensor], str], None]


def mark_run(run: Run, mark: Mark) -> None:
    """Mark what a run that is built holds: its parameters, wherever their masters are, and its buffers."""
    mark(run.model.parameters(), "parameters")
    mark(run.model.buffers(), "buffers")
    if isinstance(run.optimizer, OffloadedAdamW):
        mark(run.optimizer.frozen_masters.values(), "parameters")


def mark_window(window: Window, mark: Mark) -> None:
    """Mark what a step is fed."""
    mark(tensors_of(window), "buffers")


def mark_resting(run: Run, mark: Mark) -> None:
    """Mark what lives between two optimizer steps of a real run, from the weights to the last scalar."""
    mark_run(run, mark)
    mark_gradients(run, mark)
    mark_state(run, mark)
    # Freed now, and filled again in place: a trace must know them before.
    gathered = (found for group in run.sharding.groups() for p in group.fsdp_params for found in p.all_gather_outputs)
    mark(gathered, "unsharded_parameters")
    mark(filter(torch.is_tensor, vars(run.optimizer).values()), "temporaries")
    if isinstance(run.optimizer, OffloadedAdamW):
        mark(run.optimizer.rooms(), "temporaries")
    if run.scaler is not None:
        mark(filter(torch.is_tensor, vars(run.scaler).values()), "temporaries")


def mark_gradients(run: Run, mark: Mark) -> None:
    """Mark the gradients, on the device and on the host."""
    mark((p.grad for p in run.model.parameters() if p.grad is not None), "gradients")
    if run.host_gradients is not None:
        mark(run.host_gradients.tensors(), "gradients")


def mark_state(run: Run, mark: Mark) -> None:
    """Mark the optimizer's state, as far as it has been made."""
    for state in run.optimizer.state.values():
        mark((value for value in state.values() if isinstance(value, torch.Tensor)), "optimizer_state")
    if eight_bit := getattr(run.optimizer, "eight_bit", None):
        mark(vars(eight_bit.tables).values(), "optimizer_state")


@contextmanager
def marking(run: Run, mark: Mark) -> Iterator[None]:
    """Mark gradients when the optimizer takes them and its state when it has made it, while the context is open."""
    before = run.optimizer.register_step_pre_hook(lambda *_: mark_gradients(run, mark))
    after = run.optimizer.register_step_post_hook(lambda *_: mark_state(run, mark))
    try:
        yield
    finally:
        before.remove()
        after.remove()


def tensors_of(window: Window) -> list[torch.Tensor]:
    """Return the tensors of a window's micro-batches."""
    values = [value for micro_batch in window.micro_batches for value in vars(micro_batch).values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
