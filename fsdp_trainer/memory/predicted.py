"""What was predicted of the run that is about to start: by the plan that chose it, else by the closed form."""

from collections.abc import Mapping
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import CPU, card_name, parse_gpus
from fsdp_trainer.memory.ledger import Prediction
from fsdp_trainer.memory.quick import simulate_quick


def find_predicted(plan: Mapping[str, Any] | None, config: Config, devices: Mapping[str, Any]) -> Prediction | None:
    """Return what `plan` (plan.json of this very configuration) says, else the closed form; None where neither knows.

    `devices` is what the run is on, as devices.json has it. A plan for other devices says nothing about these.
    """
    if plan is not None and (plan["hardware"]["name"] == CPU) == (devices["device"] == CPU):
        chosen = plan["candidates"][plan["chosen"]]
        return _prediction(chosen, simulated=chosen["source"] == "simulation")
    ranks, per_node = devices["ranks"], devices["ranks_per_node"]
    card = card_name(devices["device"], memory_bytes=devices["memory_bytes"])
    found = simulate_quick(config, parse_gpus(f"{ranks // per_node}x{per_node}x{card}"))
    return _prediction(found, simulated=False)


def _prediction(found: Mapping[str, Any], *, simulated: bool) -> Prediction:
    return Prediction(
        kind="simulation" if simulated else "closed form",
        allocated_gib=found["allocated_gib"],
        phases={phase: size for phase, size in found["phases"].items() if size is not None},
        categories=dict(found["breakdown"]),
        host_gib=found["host_gib"],
    )
