"""A simulation as lines for a terminal; no torch."""

from collections.abc import Mapping
from typing import Any


def format_simulation(result: Mapping[str, Any], *, gpus: str, on_cpu: bool = False) -> str:
    """Format what `simulate --json` gives: the verdict, the peak by category, and the phases."""
    verdict = "fits" if result["fits"] else "does not fit"
    needed, limit = result["min_capacity_gib"], result["limit"]
    place = "of RAM for each process" if on_cpu else "for torch on each GPU"
    lines = [
        f"{gpus}: {verdict}: {needed:.2f} GiB needed of {limit:.2f} GiB {place}",
        f"allocated {result['allocated_gib']:.2f} GiB, reserved {result['reserved_gib']:.2f} GiB; host "
        f"{result['host_gib']:.2f} GiB a rank",
        "at the peak:",
    ]
    shown = sorted(result["breakdown"].items(), key=lambda entry: -entry[1])
    lines += [f"  {category.replace('_', ' '):24}{size:8.2f} GiB" for category, size in shown if size >= 0.005]
    lines.append("highest in each phase:")
    lines += [f"  {phase:24}{size:8.2f} GiB" for phase, size in result["phases"].items() if size is not None]
    lines += format_step_time(result)
    return "\n".join(lines)


def format_step_time(result: Mapping[str, Any]) -> list[str]:
    """Return a line about the predicted time of a step; none where no rate is known."""
    if result["step_seconds"] is None:
        return []
    return [
        f"a step: {result['step_seconds']:.2f} s predicted, {result['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, "
        f"limited by {result['step_time']['limited_by']}"
    ]
