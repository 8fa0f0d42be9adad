"""The time of a traced step: the operations of each micro-batch at the rates of given GPUs, in FSDP2's order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.rates import Rates, Stretch, read_rates
from fsdp_trainer.memory.timing import Event, Part, StepTime, time_step
from fsdp_trainer.memory.work import Message, Work


@dataclass(frozen=True)
class StepWork:
    """The work of one optimizer step of a rank: of each micro-batch (forward, backward, how often), and of its update.

    shards: how many ranks one copy of the weights is spread over; sums between copies go over ranks so far apart.
    """

    micro_batches: Sequence[tuple[Work, Work, int]]
    update: Work
    shards: int
    tokens: int


def time_traced(work: StepWork, hardware: Hardware) -> StepTime | None:
    """Return the time of a traced step; None where a rate of these GPUs is not known."""
    rates = read_rates(hardware)
    if rates is None:
        return None
    parts = []
    for forward, backward, times in work.micro_batches:
        events = [*_events(forward, rates, work.shards, ahead=2), *_events(backward, rates, work.shards, ahead=1)]
        parts.append(Part(events, times))
    update = list(_events(work.update, rates, work.shards, ahead=1))
    return time_step(parts, update, data_seconds=rates.data_seconds(work.tokens))


def _events(work: Work, rates: Rates, shards: int, *, ahead: int) -> Iterator[Event]:
    for part in work:
        if isinstance(part, Stretch):
            yield from rates.compute_events(part)
        else:
            yield _message(part, rates, shards, ahead=ahead)


def _message(message: Message, rates: Rates, shards: int, *, ahead: int) -> Event:
    kind, size, ranks = message
    if kind == "arrive":
        return Event("arrive", 0.0)
    if kind == "to host":
        return Event("to host", rates.pcie_seconds(size), "to host")
    if kind == "to device":
        return Event("to device", rates.pcie_seconds(size), "to device", ahead)
    # A sum over fewer ranks than there are is one between copies, whose ranks are `shards` apart.
    stride = shards if kind == "sum" and ranks < rates.hardware.count else 1
    return Event(kind, rates.message_seconds(size, ranks, stride=stride), rates.lane(ranks, stride=stride), ahead)
