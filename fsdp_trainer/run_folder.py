"""What a run leaves in `output_dir` beside checkpoints and model: settings, metrics and the state it ended in."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS, STATUS, SETTINGS = "metrics.jsonl", "status.json", "config.yaml"


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader sees the old or the new file whole, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


def write_status(output_dir: Path, *, state: str, exit_code: int, step: int, message: str = "") -> None:
    """Record how the run stands: running | finished | interrupted | failed, with the exit code it ends with.

    The elastic agent turns every worker's exit code into 1, so whoever started the run reads the code here.
    """
    status = {"state": state, "exit_code": exit_code, "step": step, "message": message}
    write_text_atomically(output_dir / STATUS, json.dumps(status) + "\n")


def append_metrics(output_dir: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object to metrics.jsonl; a number that is not finite becomes null, which JSON has."""
    row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    with (output_dir / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def has_evaluation(output_dir: Path, *, step: int) -> bool:
    """Return whether metrics.jsonl holds an evaluation after `step`; call `trim_metrics` first, for whole lines."""
    path = output_dir / METRICS
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
    return any(row["step"] == step and "eval_loss" in row for row in rows)


def trim_metrics(output_dir: Path, *, after_step: int) -> int:
    """Drop rows of steps that a resume will do again, and a torn last line; return how many rows went."""
    path = output_dir / METRICS
    if not path.is_file():
        return 0
    kept, dropped = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            keep = json.loads(line)["step"] <= after_step
        except (ValueError, KeyError):
            keep = False
        kept.append(line) if keep else None
        dropped += not keep
    if dropped:
        write_text_atomically(path, "".join(line + "\n" for line in kept))
    return dropped
