"""What was predicted of the run that is about to start: by the plan that chose it, else by the closed form."""

from collections.abc import Mapping
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import CPU, card_name, parse_gpus
from fsdp_trainer.memory.ledger import GIB, STEP, Prediction
from fsdp_trainer.memory.quick import quick_timeline, simulate_quick


def find_predicted(plan: Mapping[str, Any] | None, config: Config, devices: Mapping[str, Any]) -> Prediction | None:
    """Return what `plan` (plan.json of this very configuration) says, else the closed form; None where neither knows.

    `devices` is what the run is on, as devices.json has it. A plan for other devices says nothing about these.
    """
    if plan is not None and (plan["hardware"]["name"] == CPU) == (devices["device"] == CPU):
        chosen = plan["candidates"][plan["chosen"]]
        return _prediction(chosen, simulated=chosen["source"] == "simulation")
    ranks, per_node = devices["ranks"], devices["ranks_per_node"]
    card = card_name(devices["device"], memory_bytes=devices["memory_bytes"])
    hardware = parse_gpus(f"{ranks // per_node}x{per_node}x{card}")
    steps = [alive for _, phase, alive in quick_timeline(config, hardware) if phase in STEP]
    fullest = max(steps, key=lambda alive: sum(alive.values()))
    return _prediction(simulate_quick(config, hardware), simulated=False, categories=fullest)


def _prediction(
    found: Mapping[str, Any], *, simulated: bool, categories: Mapping[str, float] | None = None
) -> Prediction:
    """Return a prediction; the kinds of memory (bytes in `categories`) are those at the peak of a step.

    A plan has those of the whole run's peak, which on CPU may lie in a save: then they are not known here.
    """
    phases = {phase: size for phase, size in found["phases"].items() if size is not None}
    if categories is not None:
        kinds = {name: size / GIB for name, size in categories.items()}
    else:
        in_a_step = max(phases, key=phases.__getitem__, default=None) in STEP
        kinds = dict(found["breakdown"]) if in_a_step else {}
    return Prediction(
        kind="simulation" if simulated else "closed form",
        allocated_gib=found["allocated_gib"],
        phases=phases,
        categories=kinds,
        host_gib=found["host_gib"],
    )
