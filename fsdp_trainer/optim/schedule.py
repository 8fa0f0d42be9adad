"""The learning rate as a pure function of the optimizer step: nothing to save, nothing that runs world_size times."""

import math


def warmup_length(total_steps: int, *, warmup_ratio: float, warmup_steps: int | None) -> int:
    """Return the warm-up in optimizer steps: `warmup_steps` where set, else the ratio of all steps, rounded up."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil(round(total_steps * warmup_ratio, 6))  # 100 * 0.07 is 7.000000000000001, which is 7 steps


def learning_rate(step: int, *, name: str, peak: float, total_steps: int, warmup: int, min_lr_ratio: float) -> float:
    """Return the rate used by optimizer step `step` (from 0).

    Warm-up is peak * (step + 1) / warmup, so step 0 moves the weights and step warmup - 1 has the full rate. After it
    the rate falls from `peak` (first step after warm-up) to peak * min_lr_ratio (last step), linearly or as a cosine.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if name == "constant":
        return peak
    # The last step sits at progress 1; with a single step after warm-up there is nothing to fall through.
    span = max(1, total_steps - 1 - warmup)
    progress = min(1.0, (step - warmup) / span)
    fall = progress if name == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return peak * (1.0 - (1.0 - min_lr_ratio) * fall)
