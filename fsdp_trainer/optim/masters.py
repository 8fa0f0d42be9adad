"""The weights that are trained: a parameter itself, or its master where the device keeps a rounded copy of it."""

import torch
from torch import nn

from fsdp_trainer.model import named_weights
from fsdp_trainer.optim.sharded_adamw import flat

MASTER = "master"  # in the optimizer's state


def trained_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what is loaded, saved and exported of a model, by its names in the model: a tied tensor once."""
    named = named_weights(model)
    if optimizer is None:
        return named
    states = optimizer.state
    return {name: states[t].get(MASTER, t) if t in states else t for name, t in named.items()}


@torch.no_grad()
def send_masters(optimizer: torch.optim.Optimizer) -> None:
    """Give the device what was loaded into the masters, rounded to what it computes in."""
    for parameter, state in optimizer.state.items():
        if MASTER in state:
            flat(parameter).copy_(flat(state[MASTER]))
