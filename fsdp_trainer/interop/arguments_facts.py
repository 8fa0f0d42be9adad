"""Transformers' defaults, and what the rules may look at of training arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# transformers/training_args.py (5.24)
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused",
    "seed": 42,
    "bf16": False,
    "fp16": False,
    "logging_steps": 500,
    "save_steps": 500,
}


@dataclass(frozen=True)
class ArgumentFacts:
    """What the rules may look at: the arguments given, the number of GPUs, and the warm-up (steps or share, origin)."""

    held: Mapping[str, Any]
    world_size: int | None
    warmup: tuple[Any, str]

    def value(self, name: str) -> Any:
        """Return an argument, or Transformers' default of it."""
        return self.held.get(name, DEFAULTS.get(name))

    @property
    def rows(self) -> int | None:
        """Rows of a step over all GPUs; None where their number is not known."""
        if self.world_size is None:
            return None
        return self.value("per_device_train_batch_size") * self.value("gradient_accumulation_steps") * self.world_size

    @property
    def is_fsdp(self) -> bool:
        """True where fsdp is asked for."""
        return bool(self.value("fsdp"))
