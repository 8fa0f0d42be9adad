"""The time of an optimizer step: what its parts take at rates that are reached, and what runs beside what.

Operations give seconds (`rates.py`), FSDP2's streams give the order; both the traced run and the closed form hand their
parts to `time_step`. A prediction for comparing plans, not a measurement. No torch here.

[Note: streams] FSDP2 (torch 2.11 to 2.15, _fsdp_param_group.py, _fsdp_collectives.py) lets a gather of the forward
begin once the unit before the last one was copied out, one of the backward once the last one was; a reduction begins
where its unit's backward ends, and that of the unit after it waits for it. Gathers and reductions of one process
group go over one communicator, one after the other. A backward ends when its last reduction has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Lane = Literal["links", "network", "to device", "to host", "host"]
Kind = Literal["matrices", "memory", "gather", "arrive", "reduce", "sum", "to device", "to host", "host"]


class Event(NamedTuple):
    """One part of a step as its stream takes it: `seconds` alone on its lane.

    matrices, memory: compute. gather: begins once all but `ahead - 1` of the gathers before it were copied out. arrive:
    the oldest gather that has not is waited for. reduce, sum: begin when what was computed so far is done (sum: and the
    reduction before it). to host: after the reduction before it. host: after what last went to the host.
    """

    kind: Kind
    seconds: float
    lane: Lane = "links"
    ahead: int = 1


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step on one GPU, by what they go to; what is hidden counts nothing.

    compute: matrix products and memory-bound operations, recomputation included. exposed_communication: gathers and
    reductions that FSDP2's prefetch cannot hide. exposed_transfer: PCIe of an offload that nothing hides. optimizer:
    the update, on the GPU or the host. exposed_data: the loader, where it is slower than the step.
    """

    compute: float
    exposed_communication: float
    exposed_transfer: float
    optimizer: float
    exposed_data: float
    limited_by: str

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed_communication + self.exposed_transfer + self.optimizer + self.exposed_data


def time_json(time: StepTime | None, *, tokens_a_rank: int) -> dict[str, Any]:
    """Return the keys of `simulate --json` that are about time; null where it is not known."""
    if time is None:
        return {"step_time": None, "step_seconds": None, "tokens_per_second_per_gpu": None}
    rate = tokens_a_rank / time.seconds
    return {"step_time": asdict(time), "step_seconds": time.seconds, "tokens_per_second_per_gpu": rate}


class Part(NamedTuple):
    """A stretch of a step that ends with everything done: the events of one micro-batch, and how often it comes."""

    events: Sequence[Event]
    times: int = 1


def time_step(micro_batches: Iterable[Part], update: Sequence[Event], *, data_seconds: float) -> StepTime:
    """Return the time of a step from the events of its micro-batches and of its update, and of loading its rows."""
    totals = dict.fromkeys(("matrices", "memory", "links", "network", "transfer"), 0.0)
    for events, times in micro_batches:
        alone = _alone(events)
        computed = alone["matrices"] + alone["memory"]
        with_messages = run_streams(events, transfers=False)
        exposed = max(0.0, with_messages - computed)
        totals["matrices"] += times * alone["matrices"]
        totals["memory"] += times * alone["memory"]
        totals["network" if alone["network"] > alone["links"] else "links"] += times * exposed
        if alone["to device"] or alone["to host"] or alone["host"]:
            totals["transfer"] += times * max(0.0, run_streams(events) - with_messages)
    last = _alone(update)
    on_host = last["host"] > last["matrices"] + last["memory"]
    optimizer = max(last["host"], last["matrices"] + last["memory"])
    # Both directions and the update itself run beside each other, in pieces.
    totals["transfer"] += max(0.0, max(last["to device"], last["to host"]) - optimizer)
    totals["links"] += last["links"] + last["network"]
    exposed_data = max(0.0, data_seconds - sum(totals.values()) - optimizer)
    causes = {
        "compute": totals["matrices"],
        "GPU memory bandwidth": totals["memory"] + (0.0 if on_host else optimizer),
        "links": totals["links"],
        "network": totals["network"],
        "PCIe": totals["transfer"],
        "host optimizer": optimizer if on_host else 0.0,
        "data loader": exposed_data,
    }
    return StepTime(
        compute=totals["matrices"] + totals["memory"],
        exposed_communication=totals["links"] + totals["network"],
        exposed_transfer=totals["transfer"],
        optimizer=optimizer,
        exposed_data=exposed_data,
        limited_by=max(causes, key=lambda cause: causes[cause]),
    )


_LANES = ("matrices", "memory", "links", "network", "to device", "to host", "host")


def _alone(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of each lane as if nothing waited."""
    found: dict[str, float] = dict.fromkeys(_LANES, 0.0)
    for event in events:
        found[event.kind if event.kind in ("matrices", "memory") else event.lane] += event.seconds
    return found


def run_streams(events: Sequence[Event], *, transfers: bool = True) -> float:
    """Return when everything is done; see [Note: streams]. `transfers` False: PCIe and host take no time."""
    now = reduced = scattered = moved = 0.0
    free: dict[str, float] = {}
    arrivals: list[float] = []
    copied_out = [0.0, 0.0]
    for kind, seconds, lane, ahead in events:
        if kind in ("matrices", "memory"):
            now += seconds
            continue
        if kind == "arrive":
            now = max(now, arrivals.pop(0))
            copied_out = [copied_out[1], now]
            continue
        if not transfers and kind in ("to device", "to host", "host"):
            continue
        if kind == "reduce":
            now = max(now, scattered)
        if kind == "gather":
            start = max(copied_out[-ahead], moved)
        elif kind == "to device":
            start = copied_out[-ahead]
        elif kind == "reduce":
            start = now
        else:  # sum and to host go after the reduction, host after what has moved
            start = moved if kind == "host" else max(now, reduced)
        end = free[lane] = max(start, free.get(lane, 0.0)) + seconds
        if kind == "gather":
            arrivals.append(end)
        elif kind in ("to device", "to host"):
            moved = end
        elif kind in ("reduce", "sum"):
            reduced = end
            scattered = end if kind == "reduce" else scattered
    return max([now, *free.values()])
