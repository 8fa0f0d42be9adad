"""The time of an optimizer step in closed form: units, stages and transfers as estimate_step.py has them for memory.

See [Note: streams] in timing.py for the order and rates.csv for the rates. No torch here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_step import state_bytes
from fsdp_trainer.memory.estimate_work import (
    count_units,
    embedding_backward,
    embedding_forward,
    gather_copies,
    layer_backward,
    layer_forward,
    layer_recomputed,
    loss_backward,
    loss_forward,
    reduce_copies,
    update_stretch,
)
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.rates import Rates, Stretch, read_rates
from fsdp_trainer.memory.timing import Event, Part, StepTime, time_step

TENSORS = 8  # of a layer, about; of those that leave one by one


def estimate_step_time(shape: ModelShape, settings: StepSettings, hardware: Hardware) -> StepTime | None:
    """Return the time of one optimizer step; None where a rate of these GPUs is not known."""
    rates = read_rates(hardware)
    if rates is None:
        return None
    step = _Step(shape, settings, rates)
    count = settings.micro_batches
    parts = [Part(step.micro_batch(first=True, last=count == 1))]
    if count > 2:
        parts.append(Part(step.micro_batch(first=False, last=False), times=count - 2))
    if count > 1:
        parts.append(Part(step.micro_batch(first=False, last=True)))
    data = rates.data_seconds(settings.tokens * count)
    return time_step(parts, step.update(), data_seconds=data)


@dataclass(frozen=True)
class _Unit:
    """An FSDP unit's parameters, and the events of its own compute."""

    parameters: int
    forward: list[Event]
    backward: list[Event]


class _Step:
    """The events of a step's parts; compute is timed once for layers that are alike."""

    def __init__(self, shape: ModelShape, settings: StepSettings, rates: Rates) -> None:
        self.shape, self.settings, self.rates = shape, settings, rates
        embedding, layers, head = count_units(shape)
        known: dict[tuple[bool, bool, bool], _Unit] = {}
        self.layers = [self._layer(index, size, known) for index, size in enumerate(layers)]
        forward, backward = loss_forward(shape, settings), loss_backward(shape, settings)
        table = rates.compute_events(embedding_forward(shape, settings))
        table_back = rates.compute_events(embedding_backward(shape, settings))
        self.head = _Unit(head, rates.compute_events(forward), rates.compute_events(backward))
        self.embedding = _Unit(embedding, table, table_back)
        self._made: dict[Any, list[Event]] = {}

    def _layer(self, index: int, parameters: int, known: dict[tuple[bool, bool, bool], _Unit]) -> _Unit:
        shape, settings = self.shape, self.settings
        recomputed = settings.is_checkpointed(index)
        key = index < shape.dense_layers, index < settings.masked_layers, recomputed
        if key not in known:
            forward = layer_forward(shape, settings, index=index)
            backward = layer_backward(shape, settings, index=index)
            if recomputed:
                backward.add(layer_recomputed(shape, settings, index=index))
            events = self.rates.compute_events(forward), self.rates.compute_events(backward)
            known[key] = _Unit(parameters, *events)
        return known[key]

    # Collectives, made once for units of one size

    def gather(self, unit: _Unit, *, backward: bool) -> list[Event]:
        """The gather of a unit's weights."""
        return self._once(("gather", unit.parameters, backward), lambda: self._gather(unit, backward=backward))

    def arrive(self, unit: _Unit) -> list[Event]:
        """The wait for a unit's weights."""
        return self._once(("arrive", unit.parameters), lambda: self._arrive(unit))

    def reduce(self, unit: _Unit, *, first: bool, last: bool) -> list[Event]:
        """What becomes of a unit's gradients after its backward."""
        key = ("reduce", unit.parameters, first, last)
        return self._once(key, lambda: self._reduce(unit, first=first, last=last))

    def _once(self, key: Any, make: Callable[[], Iterator[Event]]) -> list[Event]:
        if key not in self._made:
            self._made[key] = list(make())
        return self._made[key]

    def _gather(self, unit: _Unit, *, backward: bool) -> Iterator[Event]:
        """What is queued before a unit's weights arrive: from the host where they rest there, then from other ranks."""
        settings = self.settings
        if settings.is_alone or not unit.parameters:
            return
        ranks = settings.shards
        ahead = 1 if backward else 2
        if settings.offload_params:
            size = unit.parameters * settings.recipe.weights / ranks
            yield Event("to device", self.rates.pcie_seconds(size), "to device", ahead)
        if backward and settings.reshard_after_forward:
            ranks = settings.reshard_after_forward
        sent = unit.parameters * settings.compute_bytes * (ranks - 1) / ranks
        yield Event("gather", self.rates.message_seconds(sent, ranks), self.rates.lane(ranks), ahead)

    def _arrive(self, unit: _Unit) -> Iterator[Event]:
        """Wait for a unit's weights and copy them to where the model computes with them."""
        if not self.settings.is_alone and unit.parameters:
            yield Event("arrive", 0.0)
            copies = gather_copies(unit.parameters, self.settings, shards=self.settings.shards)
            yield from self.rates.compute_events(copies)

    def _reduce(self, unit: _Unit, *, first: bool, last: bool) -> Iterator[Event]:
        settings, rates = self.settings, self.rates
        if not unit.parameters:
            return
        local = unit.parameters / settings.shards
        if not settings.reduces_every_micro_batch and not last:
            moved = unit.parameters * (settings.compute_bytes + settings.reduce_bytes * (1 if first else 2))
            yield from rates.compute_events(Stretch(moved=moved, operations=4))
            return
        copies = reduce_copies(unit.parameters, settings, accumulates=not first)
        yield from rates.compute_events(copies)
        if settings.shards > 1:
            sent = (unit.parameters - local) * settings.reduce_bytes
            yield Event("reduce", rates.message_seconds(sent, settings.shards), rates.lane(settings.shards))
        replicas = settings.ranks // settings.shards
        # Replicas are summed once a window; with gradients on the host, every micro-batch.
        if replicas > 1 and (last or settings.offload_optimizer):
            sent = 2 * local * settings.reduce_bytes * (replicas - 1) / replicas
            lane = rates.lane(replicas, stride=settings.shards)
            yield Event("sum", rates.message_seconds(sent, replicas, stride=settings.shards), lane)
        if settings.offload_params or settings.offload_optimizer:
            yield from self._to_host(local * settings.recipe.gradients, first=first)

    def _to_host(self, size: float, *, first: bool) -> Iterator[Event]:
        yield Event("to host", self.rates.pcie_seconds(size), "to host")
        if not first:  # added to what is there: two sums read, one written
            yield Event("host", self.rates.host_seconds(3 * size), "host")

    def leave(self, unit: _Unit, *, first: bool) -> Iterator[Event]:
        """Run a unit's backward where gradients leave one by one: some of them beside the rest of it."""
        settings = self.settings
        size = unit.parameters * settings.compute_bytes / TENSORS
        sums = settings.reduce_bytes * (1 if first else 2) * unit.parameters / TENSORS + size
        lands_apart = not first or settings.reduce_bytes > settings.compute_bytes
        for _ in range(TENSORS):
            yield from (event._replace(seconds=event.seconds / TENSORS) for event in unit.backward)
            yield Event("to host", self.rates.pcie_seconds(size), "to host")
            if lands_apart:
                yield Event("host", self.rates.host_seconds(sums), "host")

    # Parts of a step

    def micro_batch(self, *, first: bool, last: bool) -> list[Event]:
        """Forward and backward of one micro-batch."""
        return [*self._forward(first=first), *self._backward(first=first, last=last)]

    def _outer(self) -> tuple[_Unit, _Unit]:
        """The unit that is gathered first and the head's; tied they are one, gathered at the beginning."""
        if self.shape.tied:
            return _Unit(self.head.parameters, self.embedding.forward, self.embedding.backward), self.head
        return self.embedding, self.head

    def _forward(self, *, first: bool) -> Iterator[Event]:
        gathers = not self.settings.keeps_gathered or first
        begin, head = self._outer()
        for unit in (begin, *self.layers):
            if gathers:
                yield from self.gather(unit, backward=False)
                yield from self.arrive(unit)
            yield from unit.forward
        if gathers and not self.shape.tied:
            yield from self.gather(head, backward=False)
            yield from self.arrive(head)
        yield from head.forward

    def _backward(self, *, first: bool, last: bool) -> Iterator[Event]:
        gathers = not self.settings.keeps_gathered
        begin, head = self._outer()
        waiting = [*reversed(self.layers), *([] if self.shape.tied else [begin])]
        if gathers:
            yield from self.gather(waiting[0], backward=True)
        if self.settings.is_alone:
            for unit in (head, *waiting):
                yield from self.leave(unit, first=first)
            return
        yield from head.backward
        if not self.shape.tied:
            yield from self.reduce(head, first=first, last=last)
        for number, unit in enumerate(waiting):
            if gathers:
                yield from self.arrive(unit)
                if number + 1 < len(waiting):
                    yield from self.gather(waiting[number + 1], backward=True)
            yield from unit.backward
            yield from self.reduce(unit, first=first, last=last)
        if self.shape.tied:
            yield from begin.backward
            yield from self.reduce(head, first=first, last=last)

    def update(self) -> list[Event]:
        """Clipping and the optimizer's step, on the GPU or on the host."""
        settings, rates, recipe = self.settings, self.rates, self.settings.whole_recipe
        parameters = count_parameters(self.shape) / settings.shards
        gradients = parameters * recipe.gradients
        stepped = update_stretch(self.shape, settings)
        if not settings.offload_optimizer:  # the norm reads them, the clipping reads and writes
            stepped.moved += 3 * gradients
            stepped.operations += 20
            if settings.offload_params:
                return [Event("host", rates.host_seconds(stepped.moved), "host")]
            return rates.compute_events(stepped)
        weights = parameters * settings.compute_bytes
        # Clipped one by one, and copied to the dtype that the device computes in.
        stepped.moved += 2 * gradients + parameters * recipe.weights + weights
        if not settings.steps_on_device:
            host = rates.host_seconds(gradients + stepped.moved)
            return [Event("host", host, "host"), Event("to device", rates.pcie_seconds(weights), "to device")]
        kept = parameters * recipe.weights + state_bytes(self.shape, recipe) / settings.shards
        return [
            Event("host", rates.host_seconds(gradients), "host"),
            *rates.compute_events(stepped),
            Event("to device", rates.pcie_seconds(kept + gradients), "to device"),
            Event("to host", rates.pcie_seconds(kept), "to host"),
        ]
