"""The planner: of all combinations that the settings leave, the one to take on given GPUs, and what it rests on.

The closed form ranks all by time and prunes what cannot fit; simulations decide from the best on; the one chosen has
been simulated in full. Quality comes first unless speed is asked for. No torch is imported here: simulations run in
processes of their own, and what the user's cache has needs none.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config, ModelConfig
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.hub import refuse_unreachable
from fsdp_trainer.memory.candidate_estimates import (
    CLOSED_FORM_SHARE,
    HOST_SYSTEM_BYTES,
    SAFETY_SHARE,
    ClosedForm,
    Judged,
    Limits,
    Sketch,
    by_preference,
    ranked_seconds,
)
from fsdp_trainer.memory.candidates import combination, refuse_unsearchable
from fsdp_trainer.memory.estimate_model import ModelShape, read_model_shape
from fsdp_trainer.memory.hardware import Hardware, read_overheads
from fsdp_trainer.memory.plan import GIB, QUALITIES, Candidate, Plan, Prefer
from fsdp_trainer.memory.quick import simulate_quick
from fsdp_trainer.memory.remedies import find_remedies
from fsdp_trainer.memory.simulation import Simulation, capability_of, check_precision
from fsdp_trainer.memory.simulation_workers import WORKERS, Ask, simulation_workers

# Times closer than this are the same: of those the plan takes the best quality, then the least memory.
SAME_TIME = 0.01
# A plan is found when no other combination can be faster by more than this.
BEATEN_BY = 0.03
# By how much more the closed form's time may be too long for one kind of offload than for another: 14 % were seen.
TIME_SPREAD = 0.15
# Simulations: after so many the best that fits is taken; where none fits, so many more of what surely does.
SIMULATIONS, MORE_SIMULATIONS = 8, 8
# What the table shows of each quality, the fastest micro-batch of each combination; and nearest misses.
SHOWN, SHOWN_TOO_LARGE = 6, 4


def plan(
    config: Config,
    hardware: Hardware,
    *,
    fixed: Collection[str] = (),
    host_bytes: int | None = None,
    prefer: Prefer = "quality",
    quick: bool = False,
    calibration: Mapping[str, float] | None = None,
) -> Plan:
    """Choose stage, precision, optimizer, offload, checkpointing and micro-batch for `config` on `hardware`.

    `fixed` names settings (`sharding.zero_stage`) that stay as `config` has them. `host_bytes` is the RAM of one
    machine; None does not limit it. `quick` goes by the closed form alone. `calibration` has factors by which a
    finished run's `memory` and `seconds` were above what was predicted. A combination that runs out of host RAM is
    tried with `checkpoint.async_save: false`, unless that is fixed. Raises ConfigError for a model the closed form does
    not know, and for fixed settings that contradict each other or the GPUs.
    """
    began = time.monotonic()
    question = _Question(config, hardware, frozenset(fixed), host_bytes, prefer, dict(calibration or {}))
    question.check(quick=quick)
    closed = question.closed_form()
    sketches = by_preference(closed.sketch_all(config), quality_first=prefer == "quality")
    chosen: Candidate | None = None
    simulated: dict[int, Candidate] = {}
    if not quick:
        with simulation_workers() as ask:
            simulated = _simulate_best(sketches, closed, question, ask)
        chosen = _best(simulated, question)
    listed = _list(sketches, closed, question, simulated)
    if quick:
        chosen = _choose_quickly(sketches, closed, question, listed)
    nearest, remedies = None, ()
    if chosen is None:
        nearest = _nearest(listed, closed)
        remedies = find_remedies(config, closed, host_bytes=host_bytes)
    return Plan(
        hardware=hardware,
        host_bytes=host_bytes,
        fixed=tuple(sorted(fixed)),
        prefer=prefer,
        candidates=_rank(listed, chosen, question),
        chosen=chosen,
        nearest=nearest,
        remedies=remedies,
        margins=_margins(hardware, chosen),
        considered=len(sketches),
        seconds=time.monotonic() - began,
        calibration=question.calibration,
    )


@dataclass(frozen=True)
class _Question:
    """What was asked."""

    config: Config
    hardware: Hardware
    fixed: frozenset[str]
    host_bytes: int | None
    prefer: Prefer
    calibration: Mapping[str, float] = field(default_factory=dict)

    def check(self, *, quick: bool) -> None:
        """Refuse at once what no plan can be made for."""
        refuse_unsearchable(self.config)
        if "precision" in self.fixed:
            check_precision(self.config.precision, self.hardware)
        if not quick:
            capability_of(self.hardware)

    def closed_form(self) -> ClosedForm:
        return ClosedForm(
            find_shape(self.config.model),
            self.hardware,
            Limits.of(self.hardware, self.host_bytes),
            fixed=self.fixed,
            memory_factor=self.calibration.get("memory", 1.0),
        )

    def key(self, candidate: Candidate, order: int = 0) -> tuple[float, float, float, float]:
        """The order of combinations that fit, the best first; without times, that of the enumeration."""
        place, seconds = list(QUALITIES).index(candidate.quality), candidate.step_seconds
        slot = math.inf if seconds is None else _slot(ranked_seconds(seconds, candidate.config))
        least = candidate.prediction["allocated_gib"] if seconds is not None else order
        return (place if self.prefer == "quality" else 0, slot, place, least)


def find_shape(model: ModelConfig) -> ModelShape:
    """Return what the closed form needs of a model; ConfigError for one that it does not know."""
    return read_model_shape(_find_config(model))


def _find_config(model: ModelConfig) -> str:
    """Return where the model's config.json is: from a hub id it is fetched once, a few kB."""
    if Path(model.path).exists() or model.path.count("/") > 1:
        return model.path
    refuse_unreachable(model.path, revision=model.revision)
    from huggingface_hub import hf_hub_download  # here: only for a hub id
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return hf_hub_download(model.path, "config.json", revision=model.revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return model.path  # reading it says in words what is wrong


def _slot(seconds: float) -> int:
    """Times in one slot count as the same."""
    return math.floor(math.log(seconds) / math.log1p(SAME_TIME))


# --- simulation ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """What the simulations so far have shown, by a sketch's order, and how far the closed form was off."""

    found: dict[int, Candidate] = field(default_factory=dict)
    refused: dict[int, FsdpTrainerError] = field(default_factory=dict)
    # The least of simulated over closed form, of time by where the optimizer is; others are taken to be as lucky.
    time_ratios: dict[Any, float] = field(default_factory=dict)
    memory_ratio: float = math.inf

    def knows(self, judged: Judged) -> bool:
        """Whether it was simulated as it would be now: how checkpoints are saved may have changed since."""
        known = self.found.get(judged.sketch.order)
        return known is not None and known.config.checkpoint == judged.config.checkpoint

    def learn(self, judged: Judged, candidate: Candidate, closed: ClosedForm) -> None:
        self.found[judged.sketch.order] = candidate
        if candidate.step_seconds and judged.sketch.seconds:
            kind, ratio = _offload(judged.sketch), candidate.step_seconds / judged.sketch.seconds
            self.time_ratios[kind] = min(ratio, self.time_ratios.get(kind, math.inf))
        self.memory_ratio = min(self.memory_ratio, candidate.prediction["min_capacity_gib"] * GIB / judged.allocated)
        closed.host_factor = max(closed.host_factor, candidate.host_node_gib * GIB / judged.host)


def _simulate_best(
    sketches: Sequence[Sketch], closed: ClosedForm, question: _Question, ask: Ask
) -> dict[int, Candidate]:
    """Simulate from the best on, until one fits that no other can beat; return what was simulated."""
    search = _Search()
    while True:
        best = _best(search.found, question)
        done = len(search.found)
        if done >= (SIMULATIONS if best is not None else SIMULATIONS + MORE_SIMULATIONS):
            break
        wanted = _next(sketches, closed, question, search, best)
        if not wanted:
            break
        for judged, answer in zip(wanted, ask([judged.config for judged in wanted], question.hardware), strict=True):
            if isinstance(answer, FsdpTrainerError):
                search.refused[judged.sketch.order] = answer
            else:
                search.learn(judged, _from_simulation(judged, answer, closed, question), closed)
    if search.refused and not search.found:
        raise next(iter(search.refused.values()))
    return search.found


def _best(found: Mapping[int, Candidate], question: _Question) -> Candidate | None:
    fitting = [(question.key(candidate, order), order) for order, candidate in found.items() if candidate.fits]
    return found[min(fitting)[1]] if fitting else None


def _next(
    sketches: Sequence[Sketch], closed: ClosedForm, question: _Question, search: _Search, best: Candidate | None
) -> list[Judged]:
    """Return the next combinations to simulate, one for each process: the best that could still be chosen."""
    wanted: list[Judged] = []
    for sketch in sketches:
        if sketch.order in search.refused or (best is not None and not _may_beat(sketch, best, question, search)):
            continue
        judged = closed.judge(sketch)
        if search.knows(judged) or (len(search.found) >= SIMULATIONS and not judged.fits):
            continue
        # The closed form counts no process among a GPU's bytes; on CPU they are one memory.
        likely = judged.allocated * min(1.0, search.memory_ratio) if not question.hardware.is_cpu else 0.0
        if judged.fits is not False and likely <= closed.limits.device:
            wanted.append(judged)
        if len(wanted) == WORKERS:
            break
    return wanted


def _may_beat(sketch: Sketch, best: Candidate, question: _Question, search: _Search) -> bool:
    place = list(QUALITIES).index(best.quality)
    if question.prefer == "quality" and sketch.rank != place:
        return sketch.rank < place
    if sketch.seconds is None or best.step_seconds is None:
        return False
    ratio = search.time_ratios.get(_offload(sketch), min(search.time_ratios.values()) * (1 - TIME_SPREAD))
    return sketch.seconds * ratio < best.step_seconds * (1 - BEATEN_BY)


def _offload(sketch: Sketch) -> tuple[str, str]:
    return sketch.config.sharding.offload, sketch.config.optim.offload_step


# --- candidates ------------------------------------------------------------------------------------------------------


def _from_simulation(judged: Judged, simulation: Simulation, closed: ClosedForm, question: _Question) -> Candidate:
    hardware = question.hardware
    ranks = hardware.gpus_per_node
    # The closed form knows a machine's processes together; each is off by as much as the simulated one.
    host = judged.host + ranks * (simulation.host - judged.host_rank)
    if hardware.is_cpu:
        host = simulation.min_capacity * ranks
    needed = simulation.min_capacity * closed.memory_factor
    return _candidate(judged, simulation.to_json(), question, closed, needed=needed, host=host, fits=None)


def _from_closed_form(judged: Judged, closed: ClosedForm, question: _Question) -> Candidate:
    prediction = simulate_quick(judged.config, question.hardware, shape=closed.shape)
    needed = judged.allocated if judged.fits is not True else 0.0
    host = judged.host * closed.host_factor
    return _candidate(judged, prediction, question, closed, needed=needed, host=host, fits=judged.fits)


def _candidate(
    judged: Judged,
    prediction: dict[str, Any],
    question: _Question,
    closed: ClosedForm,
    *,
    needed: float,
    host: float,
    fits: bool | None,
) -> Candidate:
    """`needed` bytes of a GPU and `host` of a machine decide, or `fits` says what the closed form knows."""
    simulated = prediction["min_capacity_gib"] is not None
    lacks = closed.limits.lacking(needed, host)
    if not simulated and fits is None:
        lacks = ()
    steps = question.config.train.max_steps
    prediction = _calibrate(prediction, question.calibration)
    seconds = prediction["step_seconds"]
    return Candidate(
        config=Config.from_dict(judged.config.to_dict()),  # with every check once more
        quality=judged.sketch.quality,
        prediction=prediction,
        source="simulation" if simulated else "closed form",
        host_node_gib=host / GIB,
        run_seconds=steps * seconds if steps is not None and seconds is not None else None,
        fits=not lacks if simulated else fits,
        lacks=lacks,
    )


_MEMORY, _BY_NAME = ("allocated_gib", "reserved_gib", "min_capacity_gib"), ("phases", "breakdown")


def _calibrate(prediction: Mapping[str, Any], calibration: Mapping[str, float]) -> dict[str, Any]:
    """Multiply a prediction by what a finished run measured of what was predicted for it."""
    memory, seconds = calibration.get("memory", 1.0), calibration.get("seconds", 1.0)

    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    found = dict(prediction)
    found |= {name: times(prediction[name], memory) for name in _MEMORY}
    found |= {name: {key: times(value, memory) for key, value in prediction[name].items()} for name in _BY_NAME}
    found["step_seconds"] = times(prediction["step_seconds"], seconds)
    found["tokens_per_second_per_gpu"] = times(prediction["tokens_per_second_per_gpu"], 1 / seconds)
    if step_time := prediction.get("step_time"):
        found["step_time"] = {
            key: value * seconds if isinstance(value, float) else value for key, value in step_time.items()
        }
    return found


# --- the table -------------------------------------------------------------------------------------------------------


def _list(
    sketches: Sequence[Sketch], closed: ClosedForm, question: _Question, simulated: Mapping[int, Candidate]
) -> dict[int, Candidate]:
    """Return what the table shows, by order: all that was simulated; of each quality the fastest that fit, or else the
    nearest miss; and of the best quality that fits, the nearest misses of other places for weights and optimizer."""
    listed = dict(simulated)
    has_fitting = False
    for quality in QUALITIES:
        own = by_preference((sketch for sketch in sketches if sketch.quality == quality), quality_first=True)
        shown = _fastest(own, closed, simulated)
        if shown and not has_fitting:
            placed = {_placement(judged.config) for judged in shown}
            shown += _nearest_misses([sketch for sketch in own if _placement(sketch.config) not in placed], closed)
            has_fitting = True
        elif not shown:
            shown = _nearest_misses(own, closed)[:1]
        for judged in shown:
            if judged.sketch.order not in listed:
                listed[judged.sketch.order] = _from_closed_form(judged, closed, question)
    return listed


def _fastest(own: Sequence[Sketch], closed: ClosedForm, simulated: Mapping[int, Candidate]) -> list[Judged]:
    """Walk one quality from the fastest on: the first micro-batch that fits of each combination, no two alike."""
    fitting: dict[Any, Judged] = {}
    for sketch in own:
        if len(fitting) == SHOWN:
            break
        group = combination(sketch.config)
        known = simulated.get(sketch.order)
        if group in fitting or (known is not None and not known.fits):
            continue
        judged = closed.judge(sketch)
        alike = any(
            (other.sketch.seconds, other.allocated) == (sketch.seconds, judged.allocated) for other in fitting.values()
        )
        if known is not None or (judged.fits is not False and not alike):
            fitting[group] = judged
    return list(fitting.values())


def _placement(config: Config) -> tuple[Any, ...]:
    sharding = config.sharding
    return sharding.offload, sharding.zero_stage, sharding.replicate, sharding.reshard_after_forward


def _nearest_misses(own: Sequence[Sketch], closed: ClosedForm) -> list[Judged]:
    """Return for each placement, all of which do not fit, what misses least: the nearest first."""
    if not own:
        return []
    smallest = min(sketch.settings.micro_batch_size for sketch in own)
    lean = [sketch for sketch in own if sketch.settings.micro_batch_size == smallest]
    if full := [sketch for sketch in lean if sketch.settings.checkpointing == "full"]:
        lean = full
    nearest: dict[tuple[Any, ...], Judged] = {}
    for judged in sorted((closed.measure(sketch) for sketch in lean), key=lambda judged: _excess(judged, closed)):
        if judged.fits is False:
            nearest.setdefault(_placement(judged.config), judged)
    return list(nearest.values())[:SHOWN_TOO_LARGE]


def _excess(judged: Judged, closed: ClosedForm) -> tuple[float, float]:
    """By what factor each of the two memories is too small, the shorter first."""
    host = judged.host / max(1, closed.limits.host) if closed.limits.host is not None else 0.0
    device = judged.allocated / max(1, closed.limits.device)
    return max(host, device), min(host, device)


def _choose_quickly(
    sketches: Sequence[Sketch], closed: ClosedForm, question: _Question, listed: dict[int, Candidate]
) -> Candidate | None:
    """Return the best of which the closed form is sure, and list it."""
    same: list[Judged] = []
    for sketch in sketches:
        if same and not _is_same(sketch, same[0].sketch, question):
            break
        judged = closed.judge(sketch)
        if judged.fits:
            same.append(judged)
            if sketch.seconds is None:
                break
    if not same:
        return None
    found = min(same, key=lambda judged: (judged.sketch.rank, judged.allocated))
    order = found.sketch.order
    listed[order] = listed.get(order) or _from_closed_form(found, closed, question)
    return listed[order]


def _is_same(sketch: Sketch, other: Sketch, question: _Question) -> bool:
    if question.prefer == "quality" and sketch.rank != other.rank:
        return False
    if sketch.seconds is None or other.seconds is None:
        return False
    own, best = (ranked_seconds(s.seconds, s.config) for s in (sketch, other) if s.seconds is not None)
    return _slot(own) == _slot(best)


def _rank(listed: Mapping[int, Candidate], chosen: Candidate | None, question: _Question) -> tuple[Candidate, ...]:
    """Sort what is listed: the chosen one, what fits, what the closed form cannot decide, what does not fit."""
    places = {True: 1, None: 2, False: 3}

    def key(entry: tuple[int, Candidate]) -> tuple[float, ...]:
        order, candidate = entry
        return (0 if candidate is chosen else places[candidate.fits], *question.key(candidate, order), order)

    return tuple(candidate for _, candidate in sorted(listed.items(), key=key))


def _nearest(listed: Mapping[int, Candidate], closed: ClosedForm) -> Candidate | None:
    """Return the listed candidate that misses by the smallest factor."""
    if not listed:
        return None

    def excess(candidate: Candidate) -> float:
        needed = candidate.prediction["min_capacity_gib"] or candidate.prediction["allocated_gib"]
        host = candidate.host_node_gib * GIB / max(1, closed.limits.host) if closed.limits.host is not None else 0.0
        return max(needed * GIB / max(1, closed.limits.device), host)

    return min(listed.values(), key=excess)


def _margins(hardware: Hardware, chosen: Candidate | None) -> dict[str, float]:
    """Return what is held back, in GiB of a GPU or a machine, or as a share."""
    found = {"safety_share": SAFETY_SHARE, "host_system_gib": HOST_SYSTEM_BYTES / GIB}
    if not hardware.is_cpu:
        overheads = read_overheads(hardware.capability)
        found["driver_gib"] = (hardware.memory_bytes - hardware.usable_bytes) / GIB
        found["context_gib"] = overheads["context"] / GIB
        found["nccl_gib"] = overheads["distributed"] / GIB if hardware.count > 1 else 0.0
    if chosen is not None and chosen.source == "simulation":
        if hardware.is_cpu:  # no allocator: what it gets through with is the processes' memory
            return found
        found["fragmentation_gib"] = chosen.prediction["min_capacity_gib"] - chosen.prediction["allocated_gib"]
    elif chosen is not None:
        found["closed_form_share"] = CLOSED_FORM_SHARE
    return found
