"""The numbers of a run that is still going: metrics.jsonl read as it grows, and how long the rest will take.

A file of 100,000 rows is read once; after that only what is new.
"""

import bisect
import json
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.run_folder import METRICS

CURVES = ("loss", "grad_norm", "tokens_per_second", "step_seconds", "eval_loss")
RECENT = 20  # rows that say how fast it is now; a median of them passes over the step that waited for a save


@dataclass
class Curve:
    """One number of a run over its steps; what was null or not finite is left out."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self.values[-1] if self.values else None

    def recent(self) -> float | None:
        """Return the median of the last RECENT values."""
        return statistics.median(self.values[-RECENT:]) if self.values else None


class Metrics:
    """The rows of a run's metrics.jsonl as far as they were read; `read_new` reads on."""

    def __init__(self, folder: Path) -> None:
        self._path = Path(folder) / METRICS
        self._forget()

    def _forget(self) -> None:
        self.curves = {name: Curve() for name in CURVES}
        self.last: dict[str, Any] = {}  # the newest row of a step
        self.last_evaluation: dict[str, Any] = {}
        self._lines: list[int] = []  # a hash of each line
        self._inode, self._offset = -1, 0

    def read_new(self) -> list[dict[str, Any]]:
        """Read what has been written since the last call and return its rows, oldest first; a torn end waits.

        A run that is resumed rewrites the file without the rows it will make again: what stays is not new.
        """
        before: list[int] = []
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    before = self._lines
                    self._forget()
                    self._inode = found.st_ino
                file.seek(self._offset)
                text = file.read()
        except OSError:  # not there yet
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        rows = []
        for line in text.splitlines():
            self._lines.append(hash(line))
            row = _parse(line)
            if row is None:
                continue
            self._take(row)
            at = len(self._lines) - 1
            if before[at : at + 1] != self._lines[at:]:
                before = []  # from the first line that differs on, all are new
                rows.append(row)
        return rows

    def _take(self, row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            self.last_evaluation = row
        else:
            self.last = row
        for name, curve in self.curves.items():
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                curve.steps.append(row["step"])
                curve.values.append(float(value))

    @property
    def step(self) -> int | None:
        """The last logged step."""
        return self.last.get("step")

    @property
    def logged_seconds(self) -> float | None:
        """Seconds between two rows, evaluations and saves aside; None before there are two."""
        steps, seconds = self.curves["step_seconds"].steps, self.curves["step_seconds"].recent()
        return seconds * (steps[-1] - steps[-2]) if len(steps) > 1 and seconds is not None else None

    def seconds_left(
        self, *, total_steps: int | None, started: float | None, started_step: int, updated: float | None, now: float
    ) -> float | None:
        """Return how long the steps to come will take, from the median of the recent ones and the usual overhead.

        Overhead is what evaluations, saves and reading data have taken beside the steps since this start, shared out
        over its steps. None where the length of the run or the time of a step is not known.
        """
        step, seconds, curve = self.step, self.curves["step_seconds"].recent(), self.curves["step_seconds"]
        if step is None or seconds is None or total_steps is None:
            return None
        overhead, done = 0.0, step - started_step
        own = curve.values[bisect.bisect_right(curve.steps, started_step) :]
        if started is not None and updated is not None and done > 0 and own:
            # Of several steps one is logged, which stands for the others.
            overhead = max(0.0, (updated - started) / done - statistics.fmean(own))
        since = max(0.0, now - updated) if updated is not None else 0.0
        return max(0.0, (total_steps - step) * (seconds + overhead) - since)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # torn by a power cut
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_last_rows(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the newest row of a step and of an evaluation, without reading the rows before them; {} where none is."""
    try:
        text = (Path(folder) / METRICS).read_bytes()
    except OSError:
        return {}, {}
    text = text[: text.rfind(b"\n") + 1]
    return _last_row(text, b'"loss"'), _last_row(text, b'"eval_loss"')


def _last_row(text: bytes, key: bytes) -> dict[str, Any]:
    end = len(text)
    while (found := text.rfind(key, 0, end)) >= 0:
        start, stop = text.rfind(b"\n", 0, found) + 1, text.find(b"\n", found)
        if (row := _parse(text[start:stop])) is not None:
            return row
        end = start
    return {}
