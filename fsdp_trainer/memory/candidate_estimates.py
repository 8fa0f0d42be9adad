"""The closed form of very many combinations: what each takes and how long, no more of it worked out than is asked for.

A time or a peak costs about a millisecond and there are thousands: memory grows with the micro-batch, so a few peaks a
combination tell which micro-batches may fit, and only those are timed. No torch.
"""

import bisect
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.memory.candidates import combination, enumerate_candidates, with_settings
from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_step import estimate_peaks, state_bytes
from fsdp_trainer.memory.estimate_time import estimate_step_time
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.host import host_memory
from fsdp_trainer.memory.plan import GIB, QUALITIES, quality_of
from fsdp_trainer.memory.quick import estimate_parts, step_settings

# benchmarks/PLANNER.md: the full simulation of a published row with chunked loss and every setting stated was at most
# 1.7 % below what was reserved. Rows that miss by more are explained there or lack settings.
SAFETY_SHARE = 0.02
# benchmarks/PLANNER.md: the closed form was up to 5.6 % below the full simulation's allocated memory and never more
# than 1 % above it; with expandable segments the smallest capacity is within 1 % of what is allocated.
CLOSED_FORM_SHARE, CLOSED_FORM_EXCESS = 0.07, 0.03
# What a machine without a desktop needs for itself: an assumption.
HOST_SYSTEM_BYTES = 2 * GIB
# What offloading must gain in predicted time to be taken: less is within the error of the prediction
# (benchmarks/SPEED.md), and it asks more of the host.
OFFLOAD_MUST_GAIN = 0.03
_RANK = {quality: place for place, quality in enumerate(QUALITIES)}


@dataclass(frozen=True)
class Limits:
    """What a plan may use, in bytes: of a GPU, and of a machine's RAM (None: not said); a GPU's bytes in words."""

    device: int
    host: int | None
    device_words: str = "GPU memory"

    @classmethod
    def of(cls, hardware: Hardware, host_bytes: int | None) -> "Limits":
        """Take the margins off what is there; ranks on CPU have the machine's RAM alone."""
        device = hardware.usable_bytes - hardware.outside_bytes
        if hardware.is_cpu:
            machine = device * hardware.gpus_per_node
            host_bytes = machine if host_bytes is None else min(host_bytes, machine)
        host = None if host_bytes is None else host_bytes - HOST_SYSTEM_BYTES  # below 0: that much is lacking too
        words = "RAM for each rank" if hardware.is_cpu else "GPU memory"
        return cls(int(device * (1 - SAFETY_SHARE)), host, words)

    def lacking(self, device: float, host: float) -> tuple[str, ...]:
        """Say what is missing for so many bytes."""
        found = [(device - self.device, f"of {self.device_words}")]
        if self.host is not None:
            found.append((host - self.host, "of host RAM"))
        return tuple(f"{_amount(size)} {what}" for size, what in found if size > 0)


def _amount(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.05 * GIB else f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Sketch:
    """A combination as far as ranking needs it. seconds: of a step, None where a rate is not known or it cannot fit.
    floor: bytes a GPU holds at least. may_fit: GPU memory may suffice. order: its place in the enumeration, where those
    that do less work come first."""

    config: Config
    settings: StepSettings
    quality: str
    seconds: float | None
    floor: float
    may_fit: bool
    order: int

    @property
    def rank(self) -> int:
        """The place of its quality, 0 the best."""
        return _RANK[self.quality]


@dataclass(frozen=True)
class Judged:
    """A sketch with its memory: bytes of a GPU, of a machine's RAM and of one process's. `config` may save without a
    copy in the background where the sketch's does not. fits: None where the closed form cannot say."""

    sketch: Sketch
    config: Config
    allocated: float
    host: float = 0.0
    host_rank: float = 0.0
    fits: bool | None = False


class ClosedForm:
    """Works out time and memory of combinations of one model on given GPUs, each once and only where it is needed."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        limits: Limits,
        *,
        fixed: Collection[str] = (),
        memory_factor: float = 1.0,
    ) -> None:
        self.shape, self.hardware, self.limits = shape, hardware, limits
        self.fixed, self.memory_factor = frozenset(fixed), memory_factor
        self.capability = None if hardware.is_cpu else hardware.capability
        self.host_factor = 1.0  # of a machine's RAM, simulated by closed form: set as simulations come in
        self._peaks: dict[StepSettings, dict[str, int]] = {}

    def sketch_all(self, config: Config) -> list[Sketch]:
        """Return every combination that `config` leaves, with the time of those whose memory may fit."""
        groups: dict[Any, list[tuple[int, Config, StepSettings]]] = {}
        for order, made in enumerate(enumerate_candidates(config, self.hardware, fixed=self.fixed)):
            settings = step_settings(made, self.shape, ranks=self.hardware.count, capability=self.capability)
            # With more rows it holds more; where there is one micro-batch, no gradients wait for others.
            group = combination(made), settings.micro_batches > 1
            groups.setdefault(group, []).append((order, made, settings))
        found = [sketch for group in groups.values() for sketch in self._sketch_group(group)]
        return sorted(found, key=lambda sketch: sketch.order)

    def _sketch_group(self, group: list[tuple[int, Config, StepSettings]]) -> Iterator[Sketch]:
        """Sketch the micro-batches of one combination, which come largest first."""
        floor = self._floor(group[0][2])
        smallest_first = [settings for _, _, settings in reversed(group)]
        fitting = 0
        if floor <= self._most:
            fitting = bisect.bisect_left(smallest_first, True, key=lambda s: self._allocated(s) > self._most)
        for place, (order, config, settings) in enumerate(group):
            may_fit = len(group) - place <= fitting
            time = estimate_step_time(self.shape, settings, self.hardware) if may_fit else None
            seconds = None if time is None else time.seconds
            yield Sketch(config, settings, quality_of(config), seconds, floor, may_fit, order)

    def _floor(self, settings: StepSettings) -> float:
        """Bytes that are there together whatever the micro-batch: at rest, with weights or with gradients."""
        parameters = count_parameters(self.shape)
        resident = 0.0 if settings.offload_params else 1.0 / settings.shards
        rest = resident * (settings.recipe.weights * parameters + state_bytes(self.shape, settings.recipe))
        whole = 0 if not settings.keeps_gathered or settings.is_alone else settings.compute_bytes * parameters
        gradients = 0 if settings.offload_optimizer else resident * settings.recipe.gradients * parameters
        return (rest + max(whole, gradients)) * self.memory_factor

    def _find_peaks(self, settings: StepSettings) -> dict[str, int]:
        # What the host alone holds changes nothing of a GPU's.
        key = replace(settings, stepped=None)
        if key not in self._peaks:
            self._peaks[key] = estimate_peaks(self.shape, settings)
        return self._peaks[key]

    def _allocated(self, settings: StepSettings) -> float:
        return max(self._find_peaks(settings).values()) * self.memory_factor

    def judge(self, sketch: Sketch) -> Judged:
        """Say whether a combination fits, and where that is not plain what it takes."""
        return self.measure(sketch) if sketch.may_fit else Judged(sketch, sketch.config, sketch.floor)

    def measure(self, sketch: Sketch) -> Judged:
        """Work out memory in any case."""
        peaks, allocated = self._find_peaks(sketch.settings), self._allocated(sketch.settings)
        config, host, host_rank = self._with_host(sketch, peaks)
        fits = None if allocated <= self._most else False
        if allocated * (1 + CLOSED_FORM_SHARE) <= self.limits.device:
            fits = True
        if self._exceeds_host(host):
            fits = False
        return Judged(sketch, config, allocated, host, host_rank, fits)

    @property
    def _most(self) -> float:
        """Allocated bytes from which on nothing fits, as much as the closed form may be too high."""
        return self.limits.device * (1 + CLOSED_FORM_EXCESS)

    def _with_host(self, sketch: Sketch, peaks: dict[str, int]) -> tuple[Config, float, float]:
        """Return the host's bytes; where they do not suffice, with saves that keep no copy in the background."""
        config = sketch.config
        host, host_rank = self._host(config, sketch.settings, peaks)
        free = config.checkpoint.async_save and "checkpoint.async_save" not in self.fixed
        if self._exceeds_host(host) and free:
            config = with_settings(config, {"checkpoint.async_save": False})
            host, host_rank = self._host(config, sketch.settings, peaks)
        return config, host, host_rank

    def _exceeds_host(self, host: float) -> bool:
        return self.limits.host is not None and host * self.host_factor > self.limits.host

    def _host(self, config: Config, settings: StepSettings, peaks: dict[str, int]) -> tuple[float, float]:
        parts = estimate_parts(config, self.hardware, self.shape, settings, peaks=peaks)
        node = host_memory(parts, processes=self.hardware.gpus_per_node, data_workers=config.data.workers)
        return node.peak, host_memory(parts).peak


def ranked_seconds(seconds: float, config: Config) -> float:
    """Return a step's time as ranking takes it: with what offloading must gain."""
    return seconds * (1 + OFFLOAD_MUST_GAIN) if config.sharding.offload != "none" else seconds


def by_preference(sketches: Iterable[Sketch], *, quality_first: bool) -> list[Sketch]:
    """Sort the best first, by predicted time; where no time is known, by the order of the enumeration."""

    def key(sketch: Sketch) -> tuple[float, float, int, int]:
        seconds = math.inf if sketch.seconds is None else ranked_seconds(sketch.seconds, sketch.config)
        return (sketch.rank if quality_first else 0, seconds, sketch.rank, sketch.order)

    return sorted(sketches, key=key)
