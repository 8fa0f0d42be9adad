"""The weights that are trained: a parameter itself, or its master where the device keeps a rounded copy of it."""

import torch
from torch import nn

from fsdp_trainer.model import named_weights
from fsdp_trainer.optim.sharded_adamw import flat

MASTER = "master"  # in the optimizer's state


def masters(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Return the master of each parameter that has one. A frozen one's is no state of the optimizer's."""
    trained = {parameter: state[MASTER] for parameter, state in optimizer.state.items() if MASTER in state}
    return trained | getattr(optimizer, "frozen_masters", {})


def trained_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what is loaded, saved and exported of a model, by its names in the model: a tied tensor once."""
    named = named_weights(model)
    kept = {} if optimizer is None else masters(optimizer)
    return {name: kept.get(tensor, tensor) for name, tensor in named.items()}


@torch.no_grad()
def send_masters(optimizer: torch.optim.Optimizer) -> None:
    """Give the device what was loaded into the masters, rounded to what it computes in."""
    for parameter, master in masters(optimizer).items():
        flat(parameter).copy_(flat(master))
