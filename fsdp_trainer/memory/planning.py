"""`fsdp_trainer.plan`: the question as a person puts it, turned into the planner's own terms.

GPUs by name or those of this machine, host RAM in words, and what was written in the settings held fixed. No torch is
imported here; finding this machine's GPUs may import it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.calibration import calibrate_from
from fsdp_trainer.memory.hardware import Hardware, detect, parse_gpus
from fsdp_trainer.memory.machine import machine_bytes
from fsdp_trainer.memory.plan import Plan, Prefer
from fsdp_trainer.memory.planner import plan as plan_on
from fsdp_trainer.memory.quick import quick_timeline
from fsdp_trainer.memory.simulation_cache import find_simulation
from fsdp_trainer.memory.simulation_process import simulate

Timeline = Sequence[tuple[int, str, Mapping[str, int]]]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def plan(
    config: Config,
    gpus: str | Path | Hardware | None = None,
    *,
    host_ram: str | int | None = None,
    prefer: Prefer = "quality",
    quick: bool = False,
    calibrate: str | Path | None = None,
) -> Plan:
    """Say which combinations of settings fit on `gpus` and which is fastest; what `config` names is held fixed.

    `gpus` is what `--gpus` takes, such as "2xRTX4090", default this machine's (CPU ranks where it has none). `host_ram`
    is the RAM of one machine, such as "128GiB" or bytes: default this machine's own, not checked for GPUs by name.
    `prefer` "speed" ranks by speed alone. `quick` answers by the closed form. `calibrate` is the folder of a finished
    run on such GPUs, by whose measurements the predictions are moved. Raises ConfigError for what cannot be planned.
    """
    if prefer not in ("quality", "speed"):
        raise ConfigError("This is nothing a plan can prefer.", values=f"prefer: {prefer}", fix="quality or speed")
    hardware = gpus if isinstance(gpus, Hardware) else detect() if gpus is None else parse_gpus(gpus)
    host_bytes = read_ram(host_ram) if host_ram is not None else None
    if host_bytes is None and (gpus is None or hardware.is_cpu):
        host_bytes = machine_bytes()
    return plan_on(
        config,
        hardware,
        fixed=config.given,
        host_bytes=host_bytes,
        prefer=prefer,
        quick=quick,
        calibration=calibrate_from(Path(calibrate), hardware, quick=quick) if calibrate is not None else None,
    )


def plan_for_ranks(config: Config, *, ranks: int, ranks_per_node: int, on_cpu: bool) -> Plan:
    """Plan for `ranks` processes on machines like this one, each with a GPU of its own or, `on_cpu`, a core."""
    hardware = hardware_here(ranks=ranks, ranks_per_node=ranks_per_node, on_cpu=on_cpu)
    return plan_on(config, hardware, fixed=config.given, host_bytes=machine_bytes())


def hardware_here(*, ranks: int, ranks_per_node: int, on_cpu: bool) -> Hardware:
    """Describe what `ranks` processes on machines like this one have, each a GPU of its own or, `on_cpu`, a core."""
    nodes = ranks // ranks_per_node
    if on_cpu:
        return parse_gpus(f"{nodes}x{ranks_per_node}xCPU")
    return replace(detect(), count=ranks, gpus_per_node=ranks_per_node, nodes=nodes)


def timeline_of(plan: Plan) -> Timeline:
    """Return (index, phase, bytes by category) over the chosen run, by what its prediction rests on."""
    chosen, factor = plan.chosen, plan.calibration.get("memory", 1.0)
    assert chosen is not None
    if chosen.source == "closed form":
        found: Timeline = quick_timeline(chosen.config, plan.hardware)
    else:
        made = find_simulation(chosen.config, plan.hardware, expandable_segments=True)
        if made is None:  # the user's cache cannot be written
            made = simulate(chosen.config, plan.hardware, expandable_segments=True)
        found = made.timeline
    return [(at, phase, {kind: round(size * factor) for kind, size in kinds.items()}) for at, phase, kinds in found]


def read_ram(text: str | int) -> int:
    """Read `128GiB`, `128 GB`, `0.5TiB`, or a number of bytes; a bare number below a million is refused as unclear."""
    words = str(text).strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", words)
    size = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if not 2**20 <= size < 2**60:
        raise ConfigError("This is no amount of host RAM.", values=f"host RAM: {text}", fix="such as 128GiB or 0.5TiB")
    return int(size)
