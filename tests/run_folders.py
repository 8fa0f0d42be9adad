"""Run folders as runs leave them, made by hand for what shows them: no model, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The tags, texts and ids of a page; a tag that is not closed is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """What is read, with single blanks."""
        return " ".join(" ".join(self.texts).split())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What every file below a folder holds and when it was written, to compare before and after."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of metrics.jsonl, as a GPU's run writes it."""
    return {
        "step": step,
        "epoch": step / 100,
        "loss": 1 + 4 * math.exp(-step / 10),
        "grad_norm": 2.0 + step % 3,
        "lr": 1e-4 * min(step / 3, 1),
        "tokens": 480,
        "supervised_tokens": 120,
        "step_seconds": 0.8,
        "tokens_per_second": 600.0,
        "mfu": None,
        "max_allocated_gib": 17.5,
        "max_reserved_gib": 19.25,
        "num_alloc_retries": 0,
    } | changes


def memory(**changes: Any) -> dict[str, Any]:
    """What memory.json holds of a run on two cards."""

    def of(low: float, high: float | None = None) -> dict[str, float]:
        return {"min": low, "max": low if high is None else high}

    sizes = {
        "parameters": (6.0, 6.0),
        "optimizer_state": (5.0, 5.0),
        "activations": (6.5, 6.3),
        "buffers": (0.25, 0.25),
    }
    alive = [{"parameters": 6 * 2**30, "buffers": 2**28}, {"parameters": 6 * 2**30, "activations": 7 * 2**30}]
    return {
        "version": 1,
        "device": "NVIDIA GeForce RTX 4090",
        "ranks": 2,
        "usable_gib": 23.5,
        "source": "allocator",
        "peak": {"measured_gib": 17.9, "predicted_gib": 17.6, "difference": 17.6 / 17.9 - 1, "phase": "backward"},
        "prediction": "simulation",
        "phases": [
            {"phase": "load", "measured_gib": of(6.0), "reserved_gib": of(6.5), "predicted_gib": 6.0},
            {"phase": "backward", "measured_gib": of(17.8, 17.9), "reserved_gib": of(19.0), "predicted_gib": 17.6},
            {"phase": "evaluate", "measured_gib": None, "reserved_gib": None, "predicted_gib": None},
        ],
        "categories": [
            {"category": name, "measured_gib": of(measured, measured + 0.1), "predicted_gib": predicted}
            for name, (measured, predicted) in sizes.items()
        ],
        "allocated_gib": of(17.8, 17.9),
        "reserved_gib": of(19.0, 19.25),
        "fragmentation": of(0.05, 0.07),
        "allocator_retries": of(0, 2),
        "host_gib": {"measured": of(3.0, 3.1), "predicted": 2.9},
        "traced_step": {"step": 2, "seconds": 1.9, "usual_seconds": 0.8},
        "timeline": [[0, "forward", alive[0]], [7, "backward", alive[1]], [9, "step", alive[0]]],
    } | changes


def out_of_memory(**changes: Any) -> dict[str, Any]:
    """What out_of_memory.json holds."""
    return {
        "version": 1,
        "rank": 1,
        "place": "device",
        "phase": "backward",
        "step": 17,
        "layer": 12,
        "module": "model.layers.12.mlp",
        "requested_gib": 1.25,
        "free_gib": 0.5,
        "total_gib": 23.5,
        "allocated_gib": 21.0,
        "reserved_gib": 22.25,
        "largest": [{"category": "activations", "gib": 9.125}],
        "batch": {"rows": 1, "tokens": 4096, "longest": 4096},
        "predicted_gib": 17.6,
        "snapshot": "memory_snapshot_rank1.pickle",
        "advice": [
            {
                "change": "activation_checkpointing.mode: full",
                "settings": {"activation_checkpointing.mode": "full"},
                "frees_gib": 3.1,
                "peak_gib": 18.0,
                "fits": True,
                "slower_percent": 24,
            }
        ],
        "command": "fsdp-trainer train --config run.yaml --activation_checkpointing.mode=full",
    } | changes


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    status: Mapping[str, Any] | None = None,
    **files: Mapping[str, Any],
) -> Path:
    """Write a run folder: settings, status, metrics, devices, and each of `files` as NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"model": {"path": "org/model"}, "output_dir": str(folder), "train": {"max_steps": 20}}
    (folder / "config.yaml").write_text(Config.from_dict({**base, **(settings or {})}).to_yaml(), encoding="utf-8")
    if rows is None:
        rows = [*(row(step) for step in range(1, 21)), {"step": 10, "eval_loss": 2.5}, {"step": 20, "eval_loss": 2.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in rows), encoding="utf-8")
    ended = {"state": "finished", "exit_code": 0, "step": 20, "message": ""}
    device = {"device": "NVIDIA GeForce RTX 4090", "memory_bytes": 25 * 2**30, "ranks": 2, "ranks_per_node": 2}
    device |= {"versions": {"torch": "2.14.1"}}
    for name, content in {"status": ended if status is None else status, "devices": device, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
