"""The measured memory of a run beside what was predicted of it: what memory.json holds. Plain numbers, without torch.

`build_ledger` puts together what the ranks measured; sizes are GiB (2**30 bytes), smallest and largest over the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fsdp_trainer.memory.recording import CATEGORIES, PHASES
from fsdp_trainer.run_folder import parse_json

FILE, VERSION = "memory.json", 1
GIB = 2**30
STEP = ("forward", "backward", "clip", "step")  # the phases of an optimizer step
Source = Literal["allocator", "trace"]
Moment = tuple[int, str, dict[str, int]]  # (event, phase, bytes by category)


@dataclass(frozen=True)
class Range:
    """The smallest and the largest value over the ranks."""

    min: float
    max: float


@dataclass(frozen=True)
class Peak:
    """The fullest rank's peak and the phase it is in; `difference` is predicted / measured - 1."""

    measured_gib: float | None
    predicted_gib: float | None
    difference: float | None
    phase: str | None


@dataclass(frozen=True)
class PhaseMemory:
    """The most that was held in one phase; None where it was not measured or is not predicted."""

    phase: str
    measured_gib: Range | None
    reserved_gib: Range | None
    predicted_gib: float | None


@dataclass(frozen=True)
class CategoryMemory:
    """What one kind of memory held at the peak of the traced step, and of the prediction."""

    category: str
    measured_gib: Range | None
    predicted_gib: float | None


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of a rank's process at its fullest."""

    measured: Range
    predicted: float | None


@dataclass(frozen=True)
class TracedStep:
    """Which step was traced, the seconds it took, and those of a usual one (None: there was no other yet)."""

    step: int
    seconds: float
    usual_seconds: float | None


@dataclass(frozen=True)
class Ledger:
    """The memory of one run.

    source: where the peak was measured. "allocator": the whole run, by torch's CUDA allocator. "trace": the live
    tensor bytes of the traced step, on CPU, which has no allocator to ask. prediction: "simulation" where plan.json is
    of this very run, else the "closed form" at its start. fragmentation: the share of reserved memory that holds no
    tensor, in the fullest phase. timeline: about 200 moments of rank 0's traced step.
    """

    device: str
    ranks: int
    usable_gib: float | None
    source: Source | None
    peak: Peak
    prediction: Literal["simulation", "closed form"] | None
    phases: tuple[PhaseMemory, ...]
    categories: tuple[CategoryMemory, ...]
    allocated_gib: Range | None
    reserved_gib: Range | None
    fragmentation: Range | None
    allocator_retries: Range | None
    host_gib: HostMemory
    traced_step: TracedStep | None
    timeline: tuple[Moment, ...]

    @classmethod
    def read(cls, folder: str | Path) -> "Ledger | None":
        """Return the ledger of a run folder; None where there is none, or one of another version."""
        try:
            found = parse_json((Path(folder) / FILE).read_text(encoding="utf-8"))
            return cls.from_json(found)
        except (OSError, ValueError):
            return None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Ledger":
        """Return the ledger that memory.json holds; ValueError for anything else."""
        if not isinstance(found, Mapping) or found.get("version") != VERSION:
            raise ValueError(f"{FILE} is not of version {VERSION}")
        try:
            return _LEDGER.validate_python({name: value for name, value in found.items() if name != "version"})
        except ValidationError as error:
            raise ValueError(f"{FILE}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values as memory.json holds them."""
        return {"version": VERSION, **_LEDGER.dump_python(self, mode="json")}

    def __str__(self) -> str:
        """Return the table as it is shown at the end of a run."""
        from fsdp_trainer.report.ledger_text import format_ledger_text

        return format_ledger_text(self.to_json())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same lines in IPython, and in a notebook that cannot show HTML."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the ledger in a notebook: the bars, and the table of phases and kinds."""
        from fsdp_trainer.report.ledger_html import format_ledger_html

        return format_ledger_html(self.to_json())


_LEDGER = TypeAdapter(Ledger)


# --- made from what the ranks measured -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """What one rank measured, in bytes.

    phases, reserved_phases: the most in each phase, tensors and what the allocator held for them. categories: at the
    peak of the traced step. retries: how often the allocator had to give memory back before it could go on. host: the
    most that was resident.
    """

    phases: Mapping[str, int]
    reserved_phases: Mapping[str, int]
    categories: Mapping[str, int] | None
    retries: int | None
    host: int

    @property
    def peak(self) -> tuple[int, str | None]:
        """The most bytes of tensors that were measured, and the phase they were in."""
        return max(
            ((size, phase) for phase, size in self.phases.items()), default=(0, None), key=lambda found: found[0]
        )

    @property
    def fragmentation(self) -> float | None:
        """The share of reserved memory without tensors in the fullest phase."""
        allocated, phase = self.peak
        reserved = self.reserved_phases.get(phase or "", 0)
        return 1 - allocated / reserved if reserved else None


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a run, in GiB; phases and categories that are not known are left out."""

    kind: Literal["simulation", "closed form"]
    allocated_gib: float
    phases: Mapping[str, float]
    categories: Mapping[str, float]
    host_gib: float | None


def build_ledger(
    ranks: Sequence[RankMemory],
    *,
    device: str,
    usable_bytes: int | None,
    source: Source | None,
    prediction: Prediction | None,
    traced_step: TracedStep | None,
    timeline: Sequence[tuple[int, str, Mapping[str, int]]],
) -> Ledger:
    """Put what all ranks measured beside what was predicted."""
    peak, phase = max((rank.peak for rank in ranks), key=lambda found: found[0])
    measured = peak / GIB if phase is not None else None
    predicted = _predicted_peak(prediction, [phase for rank in ranks for phase in rank.phases], source=source)
    phases, kinds = (prediction.phases, prediction.categories) if prediction is not None else ({}, {})
    allocated = _range([rank.peak[0] / GIB for rank in ranks]) if source == "allocator" else None
    traced = [rank.categories for rank in ranks]
    return Ledger(
        device=device,
        ranks=len(ranks),
        usable_gib=None if usable_bytes is None else usable_bytes / GIB,
        source=source,
        peak=Peak(
            measured_gib=measured,
            predicted_gib=predicted,
            difference=predicted / measured - 1 if measured and predicted is not None else None,
            phase=phase,
        ),
        prediction=prediction.kind if prediction is not None else None,
        phases=tuple(
            PhaseMemory(
                phase=name,
                measured_gib=_range([_gib(rank.phases.get(name)) for rank in ranks]),
                reserved_gib=_range([_gib(rank.reserved_phases.get(name)) for rank in ranks]),
                predicted_gib=phases.get(name),
            )
            for name in PHASES
        ),
        categories=tuple(
            CategoryMemory(
                category=name,
                measured_gib=_range([_gib(found.get(name, 0)) if found is not None else None for found in traced]),
                predicted_gib=kinds.get(name),
            )
            for name in CATEGORIES
        ),
        allocated_gib=allocated,
        reserved_gib=_range([_gib(max(rank.reserved_phases.values(), default=None)) for rank in ranks]),
        fragmentation=_range([rank.fragmentation for rank in ranks]),
        allocator_retries=_range([rank.retries for rank in ranks]),
        host_gib=HostMemory(
            measured=Range(min(rank.host for rank in ranks) / GIB, max(rank.host for rank in ranks) / GIB),
            predicted=prediction.host_gib if prediction is not None else None,
        ),
        traced_step=traced_step,
        timeline=tuple((event, name, dict(held)) for event, name, held in timeline),
    )


def _predicted_peak(prediction: Prediction | None, measured: Sequence[str], *, source: Source | None) -> float | None:
    """Return what is to be compared with the measured peak: a trace has seen one step, and no save."""
    if prediction is None or source != "trace":
        return prediction.allocated_gib if prediction is not None else None
    return max((prediction.phases[phase] for phase in measured if phase in prediction.phases), default=None)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _range(values: Sequence[float | None]) -> Range | None:
    """Return the smallest and the largest; None unless every rank has measured."""
    known = [value for value in values if value is not None]
    return Range(min(known), max(known)) if known and len(known) == len(values) else None
