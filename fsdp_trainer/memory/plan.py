"""What a plan says: the combinations that were looked at, ranked, the one to take, and what was held back.

Plain values, made by planner.py and shown by report/; no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import Hardware

GIB = 2**30
Prefer = Literal["quality", "speed"]

# What a parameter and its averages are kept in, best first, and what each gives up. A plan steps down this list only
# where nothing of a better one fits, unless speed is asked for.
QUALITIES: Mapping[str, str] = {
    "masters": "nothing: fp32 weights and averages",
    "masters, bf16 averages": "fp32 weights; AdamW's averages are rounded to bf16, stochastically, in every step",
    "pure": "no fp32 weights: updates are rounded to bf16 stochastically, right on average and noisier",
    "pure, bf16 averages": "as pure, and AdamW's averages and the sums of gradients are rounded to bf16 as well",
    "8-bit": "fp32 weights; AdamW's averages of matrices are kept in 8 bits, in blocks of 256",
    "pure, 8-bit": "no fp32 weights, gradients summed in bf16, and averages of matrices in 8 bits",
}


def quality_of(config: Config) -> str:
    """Return the key of QUALITIES that the settings belong to."""
    weights = "pure" if config.precision == "bf16_pure" else "masters"
    if "8bit" in config.optim.name:
        return "8-bit" if weights == "masters" else "pure, 8-bit"
    return f"{weights}, bf16 averages" if config.optim.state_dtype == "bf16" else weights


@dataclass(frozen=True)
class Candidate:
    """One combination. `config` is complete and checked: it is what would run.

    prediction: the keys of `simulate --json` (null where the closed form knows none) and `step_time`. host_node_gib:
    RAM of one machine, all its processes. run_seconds: the whole run, where the number of steps is known. fits: with
    the plan's margins; null where only a simulation can tell. lacks: what does not fit, with amounts.
    """

    config: Config
    quality: str
    prediction: Mapping[str, Any]
    source: Literal["closed form", "simulation"]
    host_node_gib: float
    run_seconds: float | None
    fits: bool | None
    lacks: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of an optimizer step; None where no rate is known."""
        return self.prediction["step_seconds"]

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the prediction's keys, with the fields beside them."""
        return {
            **self.prediction,
            "quality": self.quality,
            "gives_up": QUALITIES[self.quality],
            "source": self.source,
            "host_node_gib": self.host_node_gib,
            "run_seconds": self.run_seconds,
            "fits": self.fits,
            "lacks": list(self.lacks),
        }


@dataclass(frozen=True)
class Plan:
    """The answer of the planner.

    host_bytes: RAM of one machine, None where it was not said. fixed: dotted names the user gave. candidates: ranked,
    those that fit first. chosen: one of them, confirmed by a full simulation (with `quick`, by the closed form alone).
    nearest and remedies: where nothing fits, the nearest miss and what would make it fit, each computed. margins: what
    is held back, by name, in GiB (`_gib`) or as a share (`_share`). considered: combinations looked at, those that are
    not listed included. calibration: factors from a finished run.
    """

    hardware: Hardware
    host_bytes: int | None
    fixed: tuple[str, ...]
    prefer: Prefer
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    nearest: Candidate | None
    remedies: tuple[str, ...]
    margins: Mapping[str, float]
    considered: int
    seconds: float
    calibration: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `chosen` and `nearest` are places in `candidates`, or null."""
        return {
            "hardware": {**asdict(self.hardware), "written": str(self.hardware)},
            "host_bytes": self.host_bytes,
            "fixed": list(self.fixed),
            "prefer": self.prefer,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "chosen": self._place(self.chosen),
            "nearest": self._place(self.nearest),
            "remedies": list(self.remedies),
            "margins": dict(self.margins),
            "considered": self.considered,
            "seconds": self.seconds,
            "calibration": dict(self.calibration),
        }

    def __str__(self) -> str:
        """Return the table and what it means, in lines of 80 characters; the ledger comes with the command."""
        from fsdp_trainer.report.plan_text import format_plan

        return format_plan(self.to_json()).plain

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same lines in IPython, and in a notebook that cannot show HTML."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        from fsdp_trainer.report.plan_html import format_plan_html

        return format_plan_html(self.to_json())

    def _place(self, wanted: Candidate | None) -> int | None:
        return next((place for place, candidate in enumerate(self.candidates) if candidate is wanted), None)
