"""DeepSpeed schedules of every kind, whose rates are compared with its formulas and with its own code."""

from __future__ import annotations

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
