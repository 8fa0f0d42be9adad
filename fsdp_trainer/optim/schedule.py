"""The learning rate as a pure function of the optimizer step: nothing to save, nothing that runs world_size times."""

import math

from fsdp_trainer.config import ScheduleConfig


def warmup_length(total_steps: int, *, warmup_ratio: float, warmup_steps: int | None) -> int:
    """Return the warm-up in optimizer steps: `warmup_steps` where set, else the ratio of all steps, rounded up."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil(round(total_steps * warmup_ratio, 6))  # 100 * 0.07 is 7.000000000000001, which is 7 steps


def scheduled_rate(step: int, *, schedule: ScheduleConfig, peak: float, total_steps: int) -> float:
    """Return the rate used by optimizer step `step` (from 0) of a run of `total_steps`."""
    length = schedule.total_steps or total_steps
    return learning_rate(
        step,
        name=schedule.name,
        peak=peak,
        total_steps=length,
        warmup=warmup_length(length, warmup_ratio=schedule.warmup_ratio, warmup_steps=schedule.warmup_steps),
        min_lr_ratio=schedule.min_lr_ratio,
        warmup_min_ratio=schedule.warmup_min_ratio,
        warmup_shape=schedule.warmup_shape,
        convention=schedule.convention,
    )


def learning_rate(
    step: int,
    *,
    name: str,
    peak: float,
    total_steps: int,
    warmup: int,
    min_lr_ratio: float,
    warmup_min_ratio: float = 0.0,
    warmup_shape: str = "linear",
    convention: str = "native",
) -> float:
    """Return the rate used by optimizer step `step` (from 0).

    native: warm-up is (step + 1) / warmup of the way from peak * warmup_min_ratio to `peak`, so step 0 moves the
    weights and step warmup - 1 has the full rate. After it the rate falls from `peak` (first step after warm-up) to
    peak * min_lr_ratio (last step), linearly or as a cosine. `convention` counts the steps as Transformers or DeepSpeed
    do, for a run that goes on as it was there; only DeepSpeed's has `warmup_shape` log.
    """
    if convention == "deepspeed":
        if step == 0 and name == "cosine":
            return 0.0  # whatever the rise starts from
        rising, share = _deepspeed_position(step, name, total_steps, max(2, warmup), warmup_shape)
    elif convention == "transformers":
        rising, share = _transformers_position(step, total_steps, warmup)
    else:
        rising, share = _native_position(step, total_steps, warmup)
    if rising:
        return peak * (warmup_min_ratio + (1.0 - warmup_min_ratio) * share)
    if name == "constant":
        return peak
    fall = share if name == "linear" else 0.5 * (1.0 - math.cos(math.pi * share))
    return peak * (1.0 - (1.0 - min_lr_ratio) * fall)


def _native_position(step: int, total: int, warmup: int) -> tuple[bool, float]:
    """Return whether the rate rises at `step`, and how far the rise or the fall is done."""
    if step < warmup:
        return True, (step + 1) / warmup
    # The last step sits at progress 1; with a single step after warm-up there is nothing to fall through.
    return False, min(1.0, (step - warmup) / max(1, total - 1 - warmup))


def _transformers_position(step: int, total: int, warmup: int) -> tuple[bool, float]:
    """As transformers/optimization.py (5.24): step 0 of a warm-up stands still, and the floor lies after the end."""
    if step < warmup:
        return True, step / warmup
    return False, min(1.0, (step - warmup) / max(1, total - warmup))


def _deepspeed_position(step: int, name: str, total: int, warmup: int, shape: str) -> tuple[bool, float]:
    """As deepspeed/runtime/lr_schedules.py (0.19.8), which moves after each step: step n has the rate of its n - 1."""
    last = step - 1  # its last_batch_iteration; below 0 it is where the rise starts
    if last < warmup:
        return True, math.log(max(1, step)) / math.log(warmup) if shape == "log" else max(0, last) / warmup
    span = max(1, total - warmup)  # where the warm-up is longer than the schedule, it ends at the floor at once
    if name == "cosine":
        return False, min(1.0, (last - warmup + 1) / span)
    return False, 1.0 - max(0.0, (total - last) / span)
