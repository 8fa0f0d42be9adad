"""Stochastic rounding to bf16: a value goes up or down with the probability that makes its mean right.

Rounded to nearest, an update below half of bf16's grid (1/256 of a weight) is lost each time it comes; rounded so, it
arrives on average. Nothing of it is saved: the random numbers of a step follow from (seed, step, shard).
"""

import hashlib

import torch


def seeded_generator(device: torch.device, *, seed: int, step: int, shard: int) -> torch.Generator | None:
    """Return the generator of one optimizer step, the same in every rerun and on every replica of a shard.

    Replicas (stage 0, HYBRID) hold equal weights and must round them equally, so `shard` is no rank of the world. None
    on a pretended device, where nothing is drawn.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    # CPU generators look at 32 bits of a seed: a hash, so that neighbouring steps and shards share none of them.
    digest = hashlib.blake2b(f"{seed}/{step}/{shard}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def round_stochastically_(target: torch.Tensor, source: torch.Tensor, generator: torch.Generator | None) -> None:
    """Write `source` (fp32) to `target` (bf16, same shape), each value to one of its two neighbours; NaN stays NaN.

    bf16 is the upper half of fp32's bits: a uniform 16-bit number added to the lower half carries into the upper one
    with just the probability that the lower half stands for. What bf16 can hold is written as it is. Takes 10 bytes a
    value while it works, so hand it pieces.
    """
    noise = torch.empty(source.shape, dtype=torch.int32, device=source.device)
    noise.random_(0, 2**16, generator=generator)
    rounded = noise.add_(source.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)
    target.copy_(torch.where(torch.isfinite(source), rounded, source))
