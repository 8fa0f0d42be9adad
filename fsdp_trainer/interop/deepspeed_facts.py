"""What the rules may look at of a DeepSpeed configuration: its values, and what several of them say together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.interop.deepspeed_batch import Batch

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
_DTYPES |= {"half": "fp16", "torch.float16": "fp16", "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32"}
_DTYPES |= {"float": "fp32"}


@dataclass(frozen=True)
class Facts:
    """What the rules may look at: every readable value by its name, the batch, and what else reads the file."""

    values: Mapping[str, Any]
    batch: Batch
    from_transformers: bool = False
    under_accelerate: bool = False  # the Trainer or a profile, which start DeepSpeed through Accelerate

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these values that is there."""
        return next((self.values[name] for name in names if name in self.values), default)

    @property
    def precision(self) -> str:
        """The precision that is switched on: bf16, fp16, fp32, or "both"."""
        on = [name for name in ("bf16", "fp16") if self.values.get(f"{name}.enabled")]
        if self.values.get("torch_autocast.enabled"):
            on.append(read_dtype(self.values.get("torch_autocast.dtype", "bf16")) or "bf16")
        found = set(on)
        return "both" if len(found) > 1 else found.pop() if found else "fp32"

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 where none is said."""
        return self.values.get("zero_optimization.stage", 1 if self.values.get("zero_optimization") else 0)

    def device(self, what: str) -> str:
        """Where the optimizer or the parameters are kept: none, cpu or nvme."""
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_params"}[what]
        found = self.values.get(f"zero_optimization.{what}.device")
        return str(found or ("cpu" if self.values.get(f"zero_optimization.{old}") else "none")).lower()

    @property
    def peak(self) -> float | None:
        """The highest learning rate, or None where the file does not say it."""
        schedule = self.values.get("scheduler.type")
        if schedule == "WarmupDecayLR":  # WarmupLR takes the optimizer's where it says nothing, this one does not
            return self.get("scheduler.params.warmup_max_lr", default=1e-3)
        over = ("scheduler.params.warmup_max_lr",) if schedule == "WarmupLR" else ()
        made = ("optimizer.params.lr",) if "optimizer.type" in self.values else ()
        found = self.get(*over, *made)
        return 1e-3 if found is None and "optimizer.type" in self.values else found


def read_dtype(word: Any) -> str | None:
    """Return bf16, fp16 or fp32 for any of the names these have, or None."""
    return _DTYPES.get(str(word).strip().lower())
