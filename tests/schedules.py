"""DeepSpeed's schedules: ones of every kind, and its formulas for their rates."""

from __future__ import annotations

import math
from typing import Any

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": 5e-5, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 0}),
    ("WarmupLR", {}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_max_lr": 3e-5, "warmup_num_steps": 8}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_min_lr": 1e-6, "warmup_max_lr": 3e-5, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 100, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 12}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 6}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 30, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_ratio": 0.2},
    ),
    ("WarmupCosineLR", {"total_num_steps": 60, "warmup_num_steps": 10, "cos_min_ratio": 0.1}),
]


def deepspeed_rates(kind: str, steps: int, *, lr: float, params: dict[str, Any]) -> list[float]:
    """The rates of optimizer steps 0 to steps - 1 as DeepSpeed 0.19 sets them, written from its documentation's words.

    A scheduler object counts last_batch_iteration from -1, sets the optimizer's rate when it is made, and moves after
    each step of the optimizer.
    """
    warmup = max(2, params.get("warmup_num_steps", 1000))
    total = params.get("total_num_steps", 0)
    low = params.get("warmup_min_lr", 0.0)
    high = params.get("warmup_max_lr", lr if kind == "WarmupLR" else 1e-3)

    def gamma(last: int) -> float:
        if params.get("warmup_type", "log") == "log":
            return math.log(last + 1) / math.log(warmup)
        return last / warmup

    def rate(last: int) -> float:
        if kind == "WarmupCosineLR":
            start, floor = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 0.0001)
            if last < 0:
                return 0.0
            if last < warmup:
                return lr * (start + (1.0 - start) * gamma(last))
            done = min(1.0, (last - warmup + 1) / max(1, total - warmup))
            return lr * max(0.0, floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0)
        if last < 0:
            return low
        if last < warmup:
            return low + (high - low) * gamma(last)
        if kind == "WarmupLR":
            return high
        return low + (high - low) * max(0.0, (total - last) / max(1.0, total - warmup))

    return [rate(step - 1) for step in range(steps)]
