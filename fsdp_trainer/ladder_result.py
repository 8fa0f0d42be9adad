"""What a ladder measured, as plain numbers: one row a rung, kept in ladder.json and shown from there."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fsdp_trainer.run_folder import parse_json

Outcome = Literal["finished", "out of memory", "failed", "not run"]
LADDER, PAGE = "ladder.json", "ladder.html"
VERSION = 1


@dataclass(frozen=True)
class RungResult:
    """One rung: memory in GiB (2**30 bytes) of the fullest rank, the speed of all ranks together.

    `source` says where the measured peak is from: the CUDA allocator over the whole run, or the traced step's live
    bytes. Speed leaves out the first step and the traced one.
    """

    name: str
    what: str
    settings: Mapping[str, Any]
    folder: str
    outcome: Outcome = "not run"
    message: str | None = None
    predicted_gib: float | None = None
    measured_gib: float | None = None
    source: str | None = None
    usable_gib: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None


@dataclass(frozen=True)
class LadderResult:
    """All rungs of a ladder in order; `folder` is where their run folders, ladder.json and ladder.html lie."""

    folder: Path
    model: str
    hardware: str
    global_batch_size: int
    seq_len: int
    steps: int
    rungs: tuple[RungResult, ...]

    @property
    def fits(self) -> str | None:
        """The name of the first rung that got through; None where none did."""
        return next((rung.name for rung in self.rungs if rung.outcome == "finished"), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as ladder.json holds them."""
        found: dict[str, Any] = {"version": VERSION} | asdict(self)
        del found["folder"]
        return found | {"rungs": list(found["rungs"]), "fits": self.fits}

    def __str__(self) -> str:
        from fsdp_trainer.report.ladder_text import format_ladder

        return format_ladder(self.to_json())

    def _repr_html_(self) -> str:
        from fsdp_trainer.report.ladder_html import format_ladder_html

        return format_ladder_html(self.to_json(), page=False)

    @classmethod
    def read(cls, folder: Path) -> "LadderResult | None":
        """Read ladder.json of a folder; None where there is none that can be read."""
        try:
            found = parse_json((folder / LADDER).read_text(encoding="utf-8"))
            known = {field.name for field in fields(RungResult)}
            rungs = tuple(RungResult(**{k: v for k, v in rung.items() if k in known}) for rung in found["rungs"])
            if found["version"] != VERSION:
                return None
            return cls(
                folder=folder,
                model=found["model"],
                hardware=found["hardware"],
                global_batch_size=found["global_batch_size"],
                seq_len=found["seq_len"],
                steps=found["steps"],
                rungs=rungs,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
