"""What a profile of a few steps says in numbers: compute, communication exposed and hidden, copies, and idle time.

Interval arithmetic on plain numbers, without torch: what counts as which is profiling.py's business.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_trainer.units import format_duration

Kind = Literal["compute", "communication", "copy"]
Interval = tuple[int, int]
SUMMARY, FOLDER = "summary.json", "profile"


@dataclass(frozen=True)
class Operation:
    """One operation on a device or thread, from `start` to `end` in nanoseconds of one clock."""

    kind: Kind
    start: int
    end: int


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals sorted and merged, so that none overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Return how much time is covered by intervals that may overlap."""
    return sum(end - start for start, end in union(intervals))


def divide_time(operations: Sequence[Operation], *, window: Interval, steps: int) -> dict[str, float]:
    """Divide the window's time, in seconds a step: what is computed, what communication and copies add to it, the rest.

    `*_hidden` runs beside compute (a copy also beside communication) and adds nothing; `*_exposed` is time in which
    nothing else is done. compute, both exposed and idle add up to the whole step.
    """
    begin, end = window
    inside: dict[str, list[Interval]] = {"compute": [], "communication": [], "copy": []}
    for found in operations:
        if (start := max(found.start, begin)) < (stop := min(found.end, end)):
            inside[found.kind].append((start, stop))
    compute, communication, copies = (length(inside[kind]) for kind in ("compute", "communication", "copy"))
    with_communication = length(inside["compute"] + inside["communication"])
    with_copies = length(inside["compute"] + inside["communication"] + inside["copy"])
    exposed = with_communication - compute
    result = {
        "compute": compute,
        "communication_exposed": exposed,
        "communication_hidden": communication - exposed,
        "copies_exposed": with_copies - with_communication,
        "copies_hidden": copies - (with_copies - with_communication),
        "idle": (end - begin) - with_copies,
        "step": end - begin,
    }
    return {name: nanoseconds / 1e9 / steps for name, nanoseconds in result.items()}


def format_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of the log: where the time of a step goes, the rank that waits most, the top operations."""
    ranks: Sequence[Mapping[str, Any]] = summary["ranks"]
    first = ranks[0]["seconds"]
    last = summary["first_step"] + summary["steps"] - 1
    parts = ", ".join(
        f"{label} {_format_time(first[name])} ({first[name] / first['step']:.0%})"
        for name, label in _LABELS.items()
        if first[name] > 0.0005 * first["step"] or name == "compute"
    )
    lines = [f"profile of steps {summary['first_step']} to {last}: a step of {_format_time(first['step'])}: {parts}"]
    if len(ranks) > 1:
        exposed = [rank["seconds"]["communication_exposed"] for rank in ranks]
        most = max(range(len(ranks)), key=exposed.__getitem__)
        lines.append(
            f"communication exposed: {_format_time(min(exposed))} to {_format_time(exposed[most])} a step, "
            f"most on rank {most}: the rank that waits least is the slowest"
        )
    lines.append("top operations a step: " + ", ".join(_format_operation(found) for found in ranks[0]["top"][:5]))
    return lines


def _format_time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)


def _format_operation(found: Mapping[str, Any]) -> str:
    return f"{found['name']} {_format_time(found['seconds'])} ({found['calls']:g} calls)"


_LABELS = {
    "compute": "compute",
    "communication_exposed": "communication exposed",
    "communication_hidden": "communication hidden",
    "copies_exposed": "copies exposed",
    "copies_hidden": "copies hidden",
    "idle": "idle",
}
