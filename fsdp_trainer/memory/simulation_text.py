"""A simulation as lines for a terminal; no torch."""

from collections.abc import Mapping
from typing import Any

from fsdp_trainer.units import format_bytes


def format_simulation(result: Mapping[str, Any], *, gpus: str, on_cpu: bool = False) -> str:
    """Format what `simulate --json` gives: the verdict, the peak by category, and the phases."""
    verdict = "fits" if result["fits"] else "does not fit"
    needed, limit = _size(result["min_capacity_gib"]), _size(result["limit"])
    place = "of RAM for each process" if on_cpu else "for torch on each GPU"
    lines = [
        f"{gpus}: {verdict}: {needed} needed of {limit} {place}",
        f"allocated {_size(result['allocated_gib'])}, reserved {_size(result['reserved_gib'])}; host "
        f"{_size(result['host_gib'])} a rank",
        "at the peak:",
    ]
    shown = sorted(result["breakdown"].items(), key=lambda entry: -entry[1])
    least = 0.0005 * result["allocated_gib"]  # less is no part of a picture of it
    lines += [f"  {category.replace('_', ' '):24}{_size(size):>11}" for category, size in shown if size > least]
    lines.append("highest in each phase:")
    lines += [f"  {phase:24}{_size(size):>11}" for phase, size in result["phases"].items() if size is not None]
    lines += format_step_time(result)
    return "\n".join(lines)


def check_host(result: Mapping[str, Any], ram_bytes: int, *, ranks: int, on_cpu: bool) -> tuple[dict[str, Any], str]:
    """Compare what a machine's `ranks` hold of its RAM with what it has; return the result with that, and a line."""
    each = result["min_capacity_gib"] if on_cpu else result["host_gib"]
    needed = max(result["host_node_gib"].values()) if "host_node_gib" in result else each * ranks
    has = ram_bytes / 2**30
    verdict = "fits" if needed <= has else "does not fit"
    line = f"RAM of one machine: {verdict}: {_size(needed)} needed by its {ranks} ranks of {_size(has)}"
    fits = result["fits"] and needed <= has
    return {**result, "fits": fits, "host_needed_gib": needed, "host_ram_gib": has}, line


def _size(gib: float) -> str:
    return format_bytes(gib * 2**30)


def format_step_time(result: Mapping[str, Any]) -> list[str]:
    """Return a line about the predicted time of a step; none where no rate is known."""
    if result["step_seconds"] is None:
        return []
    return [
        f"a step: {result['step_seconds']:.2f} s predicted, {result['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, "
        f"limited by {result['step_time']['limited_by']}"
    ]
