"""What a simulation says, and what it does not know; kept apart so that an answer from the cache needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.recording import PHASES, Recording
from fsdp_trainer.memory.timing import StepTime, time_json

GIB = 2**30
# Techniques whose memory the simulation is known to follow, each by a test. A new one is added with its test.
KNOWN: Mapping[str, frozenset[Any]] = {
    "optim.name": frozenset({"adamw", "adamw_8bit", "paged_adamw_8bit"}),
    "optim.implementation": frozenset({"fused", "foreach"}),
    "optim.state_dtype": frozenset({"fp32", "bf16"}),
    "sharding.offload": frozenset({"none", "params", "optimizer"}),
    "optim.offload_step": frozenset({"host", "device"}),
    "precision": frozenset({"fp32", "bf16", "fp16", "bf16_pure"}),
    "activation_checkpointing.mode": frozenset({"none", "full", "every_n_layers"}),
    "activation_checkpointing.offload": frozenset({False}),
    "loss.kind": frozenset({"chunked", "plain"}),
    "model.attention": frozenset({"auto", "sdpa", "eager"}),
    "compile.enabled": frozenset({False}),
}


@dataclass(frozen=True)
class Simulation:
    """The memory and the predicted time of one rank; bytes and seconds.

    allocated: peak of live tensors and kernel workspaces. reserved: what torch's allocator holds for that if it may
    keep all it wants. min_capacity: the least it gets through with, giving cached blocks back in need. host: memory of
    the rank's process. tokens_per_rank: of one optimizer step. limit: what is left for the allocator once context and
    NCCL have theirs. phases: peak allocated bytes in each. breakdown: bytes at the peak, by category. timeline: the
    ledger's outline, which the cache keeps.

    Ranks on CPU have one memory for tensors and processes, and no caching allocator: reserved is allocated, host holds
    the tensors too, min_capacity is the machine's fullest moment (all processes, data workers included) divided by the
    ranks, and limit the machine's RAM divided by them.
    """

    allocated: int
    reserved: int
    min_capacity: int
    host: int
    limit: int
    phases: Mapping[str, int]
    breakdown: Mapping[str, int]
    step_time: StepTime | None
    tokens_per_rank: int
    config: Mapping[str, Any]
    ledger: Recording | None = field(default=None, repr=False, compare=False)
    timeline: Sequence[tuple[int, str, Mapping[str, int]]] = field(default=(), repr=False, compare=False)

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of an optimizer step; None where a rate of these GPUs is not known."""
        return None if self.step_time is None else self.step_time.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Predicted tokens a second of each GPU."""
        return None if self.step_time is None else self.tokens_per_rank / self.step_time.seconds

    @property
    def fits(self) -> bool:
        """True where the run gets through on these GPUs."""
        return self.min_capacity <= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of `simulate --json`, memory in GiB (2**30 bytes)."""
        return {
            "allocated_gib": self.allocated / GIB,
            "reserved_gib": self.reserved / GIB,
            "min_capacity_gib": self.min_capacity / GIB,
            "host_gib": self.host / GIB,
            "phases": {phase: self.phases[phase] / GIB if phase in self.phases else None for phase in PHASES},
            "breakdown": {category: size / GIB for category, size in self.breakdown.items()},
            **time_json(self.step_time, tokens_a_rank=self.tokens_per_rank),
            "fits": self.fits,
            "limit": self.limit / GIB,
            "config": self.config,
        }


def check_known(config: Config) -> None:
    """Refuse a technique that no test has compared with a real run: a wrong plan would look like a right one."""
    settings = config.to_dict()
    for path, values in KNOWN.items():
        value: Any = settings
        for part in path.split("."):
            value = value[part]
        if value not in values:
            raise ConfigError(
                "The memory of this technique is not known to the simulation yet.",
                values=f"{path}: {value}",
                fix=f"simulate with one of {sorted(map(str, values))}",
            )


def check_precision(precision: str, hardware: Hardware) -> None:
    """Refuse bf16 where a run refuses it, on GPUs that only emulate it; CPUs are exempt."""
    if precision.startswith("bf16") and not hardware.bf16_flops and not hardware.is_cpu:
        raise ConfigError(
            "This GPU has no bf16 arithmetic; it would be emulated and slow.",
            values=f"precision: {precision} on {hardware.name}",
            fix="set `precision: fp16`",
        )


def capability_of(hardware: Hardware) -> float | None:
    """Return the CUDA compute capability, such as 9.0, or None for CPU ranks; ConfigError for a GPU that has none."""
    if hardware.is_cpu:
        return None
    try:
        return float(hardware.compute_capability)
    except ValueError as error:
        raise ConfigError(
            "Which attention kernels this GPU runs is not known.",
            values=f"{hardware.name}: compute_capability {hardware.compute_capability!r}",
            fix="name an NVIDIA GPU or CPU, or give compute_capability in the file that describes it",
        ) from error
