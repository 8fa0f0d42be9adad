"""Train as a user would and hand back what the run measured of its memory, and what a simulation says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests import training_runs


def trained(settings: dict[str, Any], *, weights: bool = False) -> dict[str, Any]:
    """Run `finetune`; return this rank's own peaks of the traced step, and on rank 0 ledger, metrics and weights."""
    from fsdp_trainer import Config, finetune, training_ledger
    from fsdp_trainer.memory.ledger import FILE

    recordings: list[Any] = []
    watched = training_ledger.tracing

    def tracing(*args: Any) -> Any:
        import contextlib

        @contextlib.contextmanager
        def keeping() -> Any:
            with watched(*args) as trace:
                yield trace
            recordings.append(trace.ledgers()[0])

        return keeping()

    training_ledger.tracing = tracing  # type: ignore[assignment]
    try:
        finetune(Config.from_dict(settings))
    finally:
        training_ledger.tracing = watched
    folder = Path(settings["output_dir"])
    found: dict[str, Any] = {
        "phases": [recording.phases for recording in recordings],
        "breakdowns": [recording.breakdown() for recording in recordings],
    }
    if os.environ["RANK"] == "0":
        found["memory"] = (folder / FILE).read_text() if (folder / FILE).is_file() else None
        found["metrics"] = training_runs.read_metrics(folder)
        if weights:
            found["weights"] = training_runs.read_weights(folder / "model")
    return found


def trained_all(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train several runs one after another in one group of ranks; a run that fails gives its traceback."""
    from tests.live_phases import _caught

    return {name: _caught(trained, settings) for name, settings in cases.items()}


def simulated_all(cases: dict[str, dict[str, Any]], world: int) -> dict[str, Any]:
    """Return each phase's peak bytes and the kinds at the peak, of the rows that a plan assumes."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.memory.traced_run import trace_run

    found = {}
    for name, settings in cases.items():
        device = trace_run(Config.from_dict(settings), world_size=world, compute_capability=None).device
        steps = [moment for moment in device.timeline if moment[1] in ("forward", "backward", "clip", "step")]
        at = max(steps, key=lambda moment: sum(moment[2].values()))[0]
        found[name] = {"phases": device.phases, "breakdown": device.breakdown(at)}
    return found
