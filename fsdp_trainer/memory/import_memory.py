"""What an imported run takes, beside what DeepSpeed's own estimator says of it and the best plan on the same GPUs.

The run is simulated in a process of its own; the alternative is planned by the closed form, with the precision and the
optimizer held fixed. No torch is imported here.
"""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import check_model_path, setting
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.estimate import DeepSpeedEstimate, estimate_deepspeed
from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters, matrices
from fsdp_trainer.memory.hardware import GIB, Hardware, parse_gpus
from fsdp_trainer.memory.plan import Plan
from fsdp_trainer.memory.planner import find_shape, plan
from fsdp_trainer.memory.planning import read_ram
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_process import simulate

# What decides how a run learns: an alternative keeps it.
_KEPT = ("precision", "optim.name", "optim.state_dtype", "optim.implementation", "sharding.reduce_dtype", "loss.kind")
_SEARCHED = (
    *("sharding.zero_stage", "sharding.replicate", "sharding.reshard_after_forward", "sharding.offload"),
    *("optim.offload_step", "activation_checkpointing.mode", "activation_checkpointing.every_n"),
    *("batch.micro_batch_size", "checkpoint.async_save"),
)
_STAGES = {"none": "none", "optimizer": "optimizer", "params": "params+optimizer"}


@dataclass(frozen=True)
class ImportMemory:
    """The three answers: simulated here, DeepSpeed's formula (None below its stage 2), and the best plan."""

    config: Config
    hardware: Hardware
    simulation: Simulation
    deepspeed: DeepSpeedEstimate | None
    best: Plan

    def lines(self) -> tuple[str, ...]:
        """Return the lines that a report ends with."""
        found = self.simulation
        fits = "fits" if found.fits else "does not fit"
        peak, needs, limit = (_gib(size) for size in (found.allocated, found.min_capacity, found.limit))
        lines = [
            f"Predicted on {self.hardware}, rows of {self.config.data.seq_len} tokens:",
            "",
            f"- this run, simulated: {peak} at the peak of a GPU; it needs {needs}, torch can have {limit}: {fits}",
        ]
        if self.deepspeed is not None:
            lines.append(
                f"- DeepSpeed's own estimator for its stage, without activations: {_gib(self.deepspeed.gpu)} of a GPU, "
                f"{_gib(self.deepspeed.cpu)} of a machine's RAM"
            )
        return (*lines, self._best_line())

    def _best_line(self) -> str:
        if (chosen := self.best.chosen) is None:
            remedies = "; ".join(self.best.remedies) or "none was found"
            return f"- no other combination with this precision and optimizer fits; what would make it fit: {remedies}"
        changes = ", ".join(f"{name}: {setting(chosen.config, name)}" for name in self._changed(chosen.config))
        words = f"with {changes}" if changes else "these settings"
        speed = chosen.prediction["tokens_per_second_per_gpu"]
        return (
            f"- best combination by closed form, same precision and optimizer: {words}: "
            f"{chosen.prediction['allocated_gib']:.2f} GiB at the peak, "
            f"{chosen.host_node_gib:.0f} GiB of a machine's RAM"
            + (f", {speed * self.hardware.count:,.0f} tokens/s" if speed else "")
        )

    def _changed(self, other: Config) -> list[str]:
        return [name for name in _SEARCHED if setting(other, name) != setting(self.config, name)]

    def to_json(self) -> dict[str, Any]:
        """Return plain values: `imported` (simulate's keys), `deepspeed_gib`, `best` (a plan's candidate), or null."""
        other = self.deepspeed
        chosen = self.best.chosen
        changed = [] if chosen is None else self._changed(chosen.config)
        return {
            "gpus": str(self.hardware),
            "imported": self.simulation.to_json(),
            "deepspeed_gib": None if other is None else {"gpu": other.gpu / GIB, "machine": other.cpu / GIB},
            "best": None if chosen is None else chosen.to_json(),
            "best_changes": {name: setting(chosen.config, name) for name in changed} if chosen else {},
        }


def compare_memory(config: Config, gpus: str, *, host_ram: str | None = None) -> ImportMemory:
    """Simulate `config` on `gpus` (as `--gpus` takes them) and set it beside DeepSpeed's formula and the best plan.

    Raises ConfigError where no model is named, where the GPUs are not known or do not divide the batch, and for what
    the simulation or the planner does not know.
    """
    if "model.path" not in config.given:
        raise ConfigError(
            "Memory depends on the model, and nothing says which.",
            values=f"--gpus {gpus} without --model.path",
            fix="give --model.path as well: a hub id, or a folder with a config.json",
        )
    check_model_path(config.model.path)
    hardware = parse_gpus(gpus)
    config.check_world(hardware.count)
    return ImportMemory(
        config=config,
        hardware=hardware,
        simulation=simulate(config, hardware),
        deepspeed=_deepspeed(config, find_shape(config.model), hardware),
        best=plan(
            config,
            hardware,
            fixed=_KEPT,
            host_bytes=read_ram(host_ram) if host_ram is not None else None,
            quick=True,
        ),
    )


def _deepspeed(config: Config, shape: ModelShape, hardware: Hardware) -> DeepSpeedEstimate | None:
    """What its estimators print for the stage that `config` came from: they know stages 2 and 3, and AdamW in fp32."""
    sharding = config.sharding
    if sharding.zero_stage < 2 or (sharding.zero_stage == 2 and sharding.offload == "params"):
        return None
    return estimate_deepspeed(
        count_parameters(shape),
        # Its "layer" is the module that holds the most parameters of its own: a table, or one projection.
        largest_layer=max(rows * columns for rows, columns in matrices(shape)),
        gpus_per_node=hardware.gpus_per_node,
        nodes=hardware.nodes,
        zero_stage=sharding.zero_stage,
        offload=_STAGES[sharding.offload],
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
