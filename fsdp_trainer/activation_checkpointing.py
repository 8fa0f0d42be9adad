"""Recompute decoder layers in the backward pass instead of keeping their activations.

Always non-reentrant, always with the RNG state preserved, and around whole decoder layers, before they are sharded.
"""

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint


def layers_to_checkpoint(n_layers: int, *, mode: str, every_n: int) -> list[int]:
    """Return the indices of the layers that `mode` recomputes: all, none, or every n-th from the first.

    Layers are chosen by index, never by a counter kept somewhere: a second model in one process starts fresh.
    """
    if mode == "none":
        return []
    step = every_n if mode == "every_n_layers" else 1
    return [index for index in range(n_layers) if index % step == 0]


def apply_activation_checkpointing(layers: Sequence[nn.Module], *, mode: str, every_n: int = 1) -> list[int]:
    """Make the chosen decoder layers keep only their inputs between forward and backward; return their indices.

    Saves the activations of each chosen layer but its input, costs one more forward of it. It changes the layer's
    `forward` on the instance, so module and parameter names stay canonical (a wrapper module would put
    `_checkpoint_wrapped_module` into them) and FSDP's hooks, added later on the module call, stay outside:
    FSDP(checkpoint(layer)), the order in which weights are gathered once for recomputation and backward. The RNG
    state is kept because with dropout a new mask in the recomputation gives wrong gradients.
    """
    chosen = layers_to_checkpoint(len(layers), mode=mode, every_n=every_n)
    for index in chosen:
        layer = layers[index]
        if isinstance(layer.forward, functools.partial):
            raise AssertionError(f"decoder layer {index} is checkpointed already")
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True)
    return chosen
