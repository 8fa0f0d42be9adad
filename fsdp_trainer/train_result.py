"""What came of a run, read from its folder: `finetune` returns it, and a notebook shows it as HTML. No torch."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_trainer.report.notebook import execution_count
from fsdp_trainer.report.run_record import RunRecord, read_run
from fsdp_trainer.units import format_duration, format_number

if TYPE_CHECKING:
    from fsdp_trainer.memory.ledger import Ledger


@dataclass(frozen=True)
class TrainResult(os.PathLike[str]):
    """A run as its folder tells it; where a path is wanted it is that of the folder: `result / "model"`.

    state: running | finished | interrupted | failed, "" where the folder does not say. loss and eval_loss: of the last
    logged step and evaluation, nats a token. seconds: of all optimizer steps, by the mean of those that were logged.
    tokens_per_second: of all ranks, median. model: the exported folder, None where there is none. shown_in: the
    notebook's cell that has shown it already.
    """

    folder: Path
    state: str
    steps: int
    loss: float | None
    eval_loss: float | None
    seconds: float | None
    tokens_per_second: float | None
    model: Path | None
    shown_in: int | None = field(default=None, repr=False, compare=False)

    @classmethod
    def read(cls, folder: str | Path) -> "TrainResult":
        """Read a run folder, of a run that goes on as well; ConfigError where there is no run."""
        run = read_run(folder)
        times = run.curve("step_seconds").known.tolist()
        steps = run.rows[-1]["step"] if run.rows else 0
        model = run.folder / "model"
        return cls(
            folder=run.folder,
            state=str(run.status.get("state") or ""),
            steps=steps,
            loss=_last(run, "loss"),
            eval_loss=_last(run, "eval_loss"),
            seconds=steps * statistics.mean(times) if times else None,
            tokens_per_second=_usual(run.curve("tokens_per_second").known.tolist()),
            model=model if model.is_dir() else None,
        )

    @property
    def ledger(self) -> "Ledger | None":
        """What the run held of memory, predicted beside measured; None where nothing was measured."""
        from fsdp_trainer.memory.ledger import Ledger

        return Ledger.read(self.folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def __str__(self) -> str:
        """Return the folder and what came of the run, in one line."""
        parts = [self.state or "state unknown", format_number(self.steps, "step")]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"eval_loss {self.eval_loss:.4f}"] if self.eval_loss is not None else []
        parts += [format_duration(self.seconds)] if self.seconds is not None else []
        parts += [f"{self.tokens_per_second:,.0f} tokens/s"] if self.tokens_per_second is not None else []
        return f"{self.folder}: {', '.join(parts)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same lines in IPython, and in a notebook that cannot show HTML."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its numbers, curves and memory."""
        from fsdp_trainer.report.result_html import format_result_html, format_shown_above

        if self.shown_in is not None and self.shown_in == execution_count():
            return format_shown_above(self.folder)
        return format_result_html(self.folder)


def _last(run: RunRecord, key: str) -> float | None:
    known = run.curve(key).known
    return float(known[-1]) if len(known) else None


def _usual(values: Sequence[float]) -> float | None:
    """The median without the first, which warms up."""
    return statistics.median(values[1:] if len(values) > 1 else values) if values else None
