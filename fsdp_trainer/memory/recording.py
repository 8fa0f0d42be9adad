"""What a traced run held at every moment, by phase and by kind; plain numbers, without torch.

The kinds are those of torch's MemTracker, with what FSDP gathers and sends apart.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

PHASES: tuple[str, ...] = ("load", "forward", "backward", "clip", "step", "evaluate", "save")
CATEGORIES: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "unsharded_parameters",
    "unsharded_gradients",
    "communication_buffers",
    "temporaries",
    "buffers",
)
Event = tuple[int, int, int]  # index of the allocation, bytes (negative: freed), index of the visit to a phase


@dataclass(slots=True)
class Allocation:
    """One stretch of memory, from its allocation to its release (positions in the list of events; None: never).

    `visit` and `died_visit` count the phases entered so far; `recomputed` tells that checkpointing was running a
    layer's forward again when it was made.
    """

    size: int
    stream: int
    born: int
    visit: int
    recomputed: bool
    category: str | None
    index: int = 0
    died: int | None = None
    died_visit: int | None = None
    died_recomputing: bool = False


@dataclass(frozen=True)
class Moment:
    """The bytes alive after one event, by category."""

    event: int
    phase: str
    bytes: dict[str, int]


@dataclass(frozen=True)
class Recording:
    """Everything that was allocated and freed, in order. `visits` names the phase of each visit."""

    allocations: tuple[Allocation, ...]
    events: tuple[Event, ...]
    visits: tuple[str, ...]

    def rounded(self, categories: Iterable[str], size_of: Callable[[int], int]) -> "Recording":
        """Return the ledger with `size_of` each allocation of these categories in place of its size."""
        found = tuple(
            replace(a, size=size_of(a.size)) if self.category(a) in categories else a for a in self.allocations
        )
        events = tuple((i, found[i].size if size > 0 else -found[i].size, visit) for i, size, visit in self.events)
        return Recording(found, events, self.visits)

    @cached_property
    def phases(self) -> dict[str, int]:
        """Peak bytes of each phase that was entered; what is alive when a phase begins counts in it."""
        peaks: dict[str, int] = dict.fromkeys(self.visits, 0)
        current = last = 0
        for _, delta, visit in self.events:
            for entered in range(last, visit + 1):  # phases without an event of their own hold what is there
                phase = self.visits[entered]
                peaks[phase] = max(peaks[phase], current)
            last = visit
            current += delta
            phase = self.visits[visit]
            peaks[phase] = max(peaks[phase], current)
        for entered in range(last + 1, len(self.visits)):
            peaks[self.visits[entered]] = max(peaks[self.visits[entered]], current)
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}

    def rises(self, phase: str) -> list[int]:
        """Return, for each visit to a phase, the most bytes that were alive in it above those when it began."""
        found = {visit: 0 for visit, name in enumerate(self.visits) if name == phase}
        current, began = 0, dict.fromkeys(found, 0)
        last = -1
        for _, delta, visit in self.events:
            if visit != last:
                began[visit], last = current, visit
            current += delta
            if visit in found:
                found[visit] = max(found[visit], current - began[visit])
        return list(found.values())

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes ever alive, and the event at which they were."""
        current = most = at = 0
        for index, (_, delta, _) in enumerate(self.events):
            current += delta
            if current > most:
                most, at = current, index
        return most, at

    def category(self, allocation: Allocation) -> str:
        """Return what an allocation is: as it was marked, or by when it was made and freed.

        What a forward makes and leaves behind is kept for the backward: activations; so is what a recomputed layer
        leaves. Everything else that nobody named is temporary.
        """
        if allocation.category is not None:
            return allocation.category
        if allocation.recomputed:
            kept = not (allocation.died_recomputing and allocation.died_visit == allocation.visit)
            return "activations" if kept else "temporaries"
        outlives = allocation.died_visit != allocation.visit
        return "activations" if outlives and self.visits[allocation.visit] == "forward" else "temporaries"

    def breakdown(self, event: int | None = None) -> dict[str, int]:
        """Return the bytes alive after an event (default: the peak) by category; every category is named."""
        event = self.peak[1] if event is None else event
        found = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.allocations:
            if allocation.born <= event and (allocation.died is None or allocation.died > event):
                found[self.category(allocation)] += allocation.size
        return found

    @cached_property
    def timeline(self) -> list[tuple[int, str, dict[str, int]]]:
        """(event, phase, bytes by category) over the whole run: about 1000 moments, each the peak of its stretch.

        No stretch is of two phases, so the peak of each phase is among them.
        """
        return [(moment.event, moment.phase, moment.bytes) for moment in self._moments(1000)]

    @cached_property
    def outline(self) -> list[tuple[int, str, dict[str, int]]]:
        """The timeline in about 200 moments, small enough to be kept; kinds that hold nothing are left out."""
        return [(m.event, m.phase, {kind: size for kind, size in m.bytes.items() if size}) for m in self._moments(200)]

    def _moments(self, count: int) -> Iterator[Moment]:
        stretch = max(1, -(-len(self.events) // count))
        current, best, best_total = dict.fromkeys(CATEGORIES, 0), None, -1
        total = 0
        kinds = [self.category(allocation) for allocation in self.allocations]
        for index, (allocation, delta, visit) in enumerate(self.events):
            phase = self.visits[visit]
            if index and phase != self.visits[self.events[index - 1][2]]:
                if best is not None:
                    yield best
                best, best_total = Moment(index, phase, dict(current)), total  # what is alive as it begins counts in it
            current[kinds[allocation]] += delta
            total += delta
            if total > best_total:
                best, best_total = Moment(index, phase, dict(current)), total
            if (index + 1) % stretch == 0 or index + 1 == len(self.events):
                yield best  # type: ignore[misc]  # every event sets it where it is None
                best, best_total = None, -1
