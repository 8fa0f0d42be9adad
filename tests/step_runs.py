"""Build a run and take single steps on the ranks of a test, with rows made by hand and gradients handed back whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.models import Document

if TYPE_CHECKING:
    import torch

    from fsdp_trainer.data.loader import Window
    from fsdp_trainer.run import Run

Row = Sequence[Document]


def build(run_settings: dict[str, Any]) -> Run:
    """Join the ranks and build the run that the settings describe."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime

    config = Config.from_dict(run_settings)
    runtime = build_runtime(timeout_minutes=1)
    config.check_world(runtime.world_size)
    return build_run(config, runtime)


def make_rows(rows: Sequence[Row]) -> Any:
    """Return prepared rows that hold the given documents."""
    import numpy as np

    from fsdp_trainer.data.rows import Rows

    documents = [document for row in rows for document in row]
    return Rows(
        tokens=np.array([token for document in documents for token in document.tokens], dtype=np.int32),
        supervised=np.array([flag for document in documents for flag in document.supervised], dtype=bool),
        document_starts=np.array([0, *itertools.accumulate(len(d.tokens) for d in documents)], dtype=np.int64),
        row_documents=np.array([0, *itertools.accumulate(len(row) for row in rows)], dtype=np.int64),
    )


def window_of(run: Run, rows: Sequence[Row], *, step: int = 0) -> Window:
    """Return this rank's part of optimizer step `step` over the given rows, unshuffled."""
    from fsdp_trainer.data.loader import build_window

    config = run.config
    return build_window(
        make_rows(rows),
        step=step,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        rank=run.runtime.rank,
        world_size=run.runtime.world_size,
        seed=0,
        shuffle=False,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that is sharded over the ranks; a collective."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()  # type: ignore[operator]


def parameters(run: Run) -> dict[str, torch.Tensor]:
    """Return every parameter whole, by name."""
    return {name: whole(parameter) for name, parameter in run.model.named_parameters()}


@contextmanager
def captured_gradients(run: Run) -> Iterator[dict[str, torch.Tensor]]:
    """Give a mapping that `train_step` fills with the gradients the optimizer takes, whole, after clipping."""
    gradients: dict[str, torch.Tensor] = {}

    def capture(*_: Any) -> None:
        for name, parameter in run.model.named_parameters():
            if run.host_gradients is not None and parameter in run.host_gradients:
                gradients[name] = _whole_from_host(run, parameter)
            elif parameter.grad is not None:
                gradients[name] = whole(parameter.grad)

    hook = run.optimizer.register_step_pre_hook(capture)
    try:
        yield gradients
    finally:
        hook.remove()


def _whole_from_host(run: Run, parameter: Any) -> torch.Tensor:
    """Return a gradient that is on the host, whole, as the optimizer takes it."""
    import torch
    from torch.distributed.tensor import DTensor

    assert run.host_gradients is not None
    local = (run.host_gradients[parameter] * run.host_gradients.factor).float()
    if not isinstance(parameter, DTensor):
        return local.view(parameter.shape)
    shape = parameter.to_local().shape
    layout = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    gradient = DTensor.from_local(local.view(shape), parameter.device_mesh, parameter.placements, **layout)
    assert isinstance(gradient, torch.Tensor)
    return whole(gradient)


def one_step(run_settings: dict[str, Any], rows: Sequence[Row], lr: float = 1e-3) -> dict[str, Any]:
    """Take one optimizer step over all rows; return loss, grad_norm, whole gradients, and weights before and after."""
    from fsdp_trainer.step import train_step

    run = build(run_settings)
    before = parameters(run)
    with captured_gradients(run) as gradients:
        output = train_step(run, window_of(run, rows), learning_rate=lr, optimizer_step=0)
    return {
        "loss": output.loss.item(),
        "loss_dtype": str(output.loss.dtype),
        "grad_norm": output.grad_norm.item(),
        "skipped": output.skipped.item(),
        "gradients": gradients,
        "before": before,
        "after": parameters(run),
    }
