"""What a run has left in its folder, as far as it can be read: a run that ended badly is shown as well as one that did.

Torn lines, missing files and values that are no numbers are noted, not raised; only a folder without a run is an error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.config_reading import parse_settings
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.ledger import FILE as LEDGER
from fsdp_trainer.memory.ledger import Ledger
from fsdp_trainer.run_folder import DEVICES, METRICS, PREDICTION, SETTINGS, STATUS, parse_json
from fsdp_trainer.units import format_number

OUT_OF_MEMORY = "out_of_memory.json"


@dataclass(frozen=True)
class Curve:
    """One number over steps: `steps` and `values` are float arrays of one length; a value that is none is NaN."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def known(self) -> np.ndarray:
        """The values that are numbers."""
        return self.values[~np.isnan(self.values)]


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it.

    rows: logged steps, evaluations: those that have an eval_loss, both by step. The JSON files by name, {} where there
    is none. notes: what could not be read.
    """

    folder: Path
    name: str
    rows: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    status: Mapping[str, Any]
    settings_text: str
    settings: Mapping[str, Any]
    devices: Mapping[str, Any]
    ledger: Mapping[str, Any]
    out_of_memory: Mapping[str, Any]
    plan: Mapping[str, Any]
    notes: Sequence[str]

    def curve(self, key: str) -> Curve:
        """Return a number of the logged steps, or with `eval_loss` of the evaluations."""
        rows = self.evaluations if key == "eval_loss" else self.rows
        steps = np.array([row["step"] for row in rows], dtype=float)
        return Curve(steps, np.array([_number(row.get(key)) for row in rows], dtype=float))

    @property
    def planned(self) -> Mapping[str, Any]:
        """What the plan says of the combination that it chose; {} where there is none."""
        chosen, candidates = self.plan.get("chosen"), self.plan.get("candidates")
        if isinstance(chosen, int) and isinstance(candidates, list) and 0 <= chosen < len(candidates):
            return candidates[chosen]
        return {}


def read_run(folder: str | Path, *, name: str | None = None) -> RunRecord:
    """Read a run folder; `name` is what it is called beside others. ConfigError where there is no run."""
    folder = Path(folder)
    if not any((folder / file).is_file() for file in (METRICS, STATUS, SETTINGS)):
        what = "This is no run folder." if folder.is_dir() else "There is no such run folder."
        fix = "give the output_dir of a run"
        raise ConfigError(what, values=f"{folder} has neither {METRICS} nor {STATUS} nor {SETTINGS}", fix=fix)
    notes: list[str] = []
    rows, evaluations = _read_metrics(folder / METRICS, notes)
    text = _read_text(folder / SETTINGS, notes)
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        rows=rows,
        evaluations=evaluations,
        status=_read_object(folder / STATUS, notes),
        settings_text=text,
        settings=_read_settings(text, notes),
        devices=_read_object(folder / DEVICES, notes),
        ledger=_read_ledger(folder, notes),
        out_of_memory=_read_object(folder / OUT_OF_MEMORY, notes, version=1),
        plan=_read_object(folder / PREDICTION, notes),
        notes=tuple(notes),
    )


def read_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """Read several run folders, each under the shortest end of its path that is no other's."""
    paths = [Path(folder).resolve() for folder in folders]
    twice = {path for path in paths if paths.count(path) > 1}
    if twice:
        values = ", ".join(sorted(map(str, twice)))
        raise ConfigError("A run cannot stand beside itself.", values=values, fix="give each run folder once")
    return [read_run(given, name=_short_name(path, paths)) for given, path in zip(folders, paths, strict=True)]


def _short_name(path: Path, paths: Sequence[Path]) -> str:
    for count in range(1, len(path.parts)):
        ends = [other.parts[-count:] for other in paths]
        if ends.count(path.parts[-count:]) == 1:
            return "/".join(path.parts[-count:])
    return str(path)


def _number(value: Any) -> float:
    """A number that can be drawn, else NaN: null stands for a value that was not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else math.nan


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Logged steps and evaluations, each by step. A step that stands twice counts as it was done last."""
    if not path.is_file():
        notes.append(f"There is no {METRICS}: no step was logged.")
        return [], []
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    unread = 0
    for row in _read_rows(path):
        if row is None:
            unread += 1
        elif "eval_loss" in row:
            evaluations[row["step"]] = row
        else:
            steps[row["step"]] = row
    if unread:
        notes.append(f"{METRICS}: {format_number(unread, 'line')} left out: torn, or no row of a run.")
    return [steps[step] for step in sorted(steps)], [evaluations[step] for step in sorted(evaluations)]


def _read_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's object; None for a line that is none, such as the last one of a run that was killed."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            has_step = isinstance(row, dict) and isinstance(row.get("step"), int)
            yield row if has_step else None


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}.")
        return ""


def _read_object(path: Path, notes: list[str], *, version: int | None = None) -> dict[str, Any]:
    """A JSON object; {} where there is none, with a note where there is something else."""
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        notes.append(f"{path.name} cannot be read.")
        return {}
    if not isinstance(found, dict) or (version is not None and found.get("version") != version):
        notes.append(f"{path.name} is not what this version of fsdp-trainer writes.")
        return {}
    return found


def _read_ledger(folder: Path, notes: list[str]) -> dict[str, Any]:
    found = Ledger.read(folder)
    if found is None and (folder / LEDGER).is_file():
        notes.append(f"{LEDGER} is not what this version of fsdp-trainer writes.")
    return {} if found is None else found.to_json()


def _read_settings(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        found = parse_settings(text, source=SETTINGS) if text else {}
    except ConfigError as error:
        notes.append(f"{SETTINGS} cannot be read: {error.what}")
        return {}
    return found if isinstance(found, dict) else {}
