"""The random states of a rank as tensors, so that a checkpoint keeps them without a pickle.

Torch (CPU and device), Python and NumPy; restored bit for bit, or derived anew where no saved state fits.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist


def rng_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Return this rank's random states as tensors (so without a pickle) named `rng.<rank>.<generator>`."""
    version, words, gauss = random.getstate()
    assert version == 3, "Python's random state has another form here"
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert algorithm == "MT19937"
    found = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float(gauss is not None), gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), int(position)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(has_gauss), float(cached)], dtype=torch.float64),
    }
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {f"rng.{_rank()}.{name}": tensor for name, tensor in found.items()}


def restore_rng(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put this rank's random states back, as `rng_tensors` gave them."""
    found = {name.removeprefix(f"rng.{_rank()}."): tensor for name, tensor in tensors.items()}
    torch.set_rng_state(found["cpu"])
    has_gauss, gauss = found["python_gauss"].tolist()
    random.setstate((3, tuple(found["python"].tolist()), gauss if has_gauss else None))
    *keys, position = found["numpy"].tolist()
    has_gauss, gauss = found["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(found[device.type], device)


def derive_rng(*, seed: int, step: int) -> None:
    """Seed this rank's generators from (seed, step, rank): the rule where no saved state fits this world size."""
    words = np.random.SeedSequence([seed, step, _rank()]).generate_state(3)
    torch.manual_seed(int(words[0]))  # every device's generator too
    random.seed(int(words[1]))
    np.random.seed(int(words[2]))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
