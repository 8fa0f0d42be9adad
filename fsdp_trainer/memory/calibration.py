"""What a finished run measured beside what is predicted of it, as factors for the plans of such GPUs.

Memory is moved only upwards: a run whose rows were shorter than the most they may be needs less than is predicted, and
the next one may not. Time is moved both ways, by the middle of the logged steps. Nothing is kept: who wants the factors
again names the run again, or has them in plan.json.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import Hardware, card_name, parse_gpus
from fsdp_trainer.memory.quick import simulate_quick
from fsdp_trainer.memory.simulation_cache import find_simulation
from fsdp_trainer.memory.simulation_process import simulate
from fsdp_trainer.run_folder import DEVICES, METRICS, SETTINGS, parse_json
from fsdp_trainer.units import format_number

# The first steps load kernels and fill caches.
WARM_UP_STEPS = 3
# With emptier rows than this a step does other work than the one that is predicted.
LEAST_FILLED = 0.8
# No run measures as much, in any unit; what is above (infinity) or no number (NaN) was never measured.
MOST = 1e15


def calibrate_from(run: Path, hardware: Hardware, *, quick: bool = False) -> dict[str, float]:
    """Return measured by predicted of a finished run: `memory` (at least 1) and `seconds`, each where it was measured.

    On CPU no memory is measured. Raises ConfigError for a folder that is no run, a run on other GPUs than `hardware`,
    and one too short or with too empty rows to say anything.
    """
    config, rows, devices = _read(run)
    ranks, per_node = devices["ranks"], devices["ranks_per_node"]
    card = card_name(devices["device"], memory_bytes=devices.get("memory_bytes"))
    if card != hardware.name:
        raise ConfigError(
            "The run was on other hardware than the plan is for.",
            values=f"{run}: {devices['device']}; the plan: {hardware}",
            fix="name a run on such GPUs, or leave out --calibrate",
        )
    ran_on = parse_gpus(f"{ranks // per_node}x{per_node}x{card}")
    predicted = _predict(config, ran_on, quick=quick)
    factors: dict[str, float] = {}
    if (memory := _memory_factor(rows, predicted)) is not None:
        factors["memory"] = memory
    if (time := _time_factor(rows, predicted, config, run=run)) is not None:
        factors["seconds"] = time
    if not factors:
        raise ConfigError(
            "The run measured nothing that is predicted of it.",
            values=f"{run}: on {ran_on}, memory is measured on GPUs only, and no time is predicted of these settings",
            fix="leave out --calibrate" + (", or --quick" if quick and not hardware.is_cpu else ""),
        )
    return factors


def describe_run(run: Path, *, model: str) -> str:
    """Return one line about the run that a plan for `model` was corrected by."""
    config, rows, devices = _read(run)
    other = "" if config.model.path == model else ", of other shapes than the model that is planned"
    steps = format_number(len(rows), "logged step")
    return f"calibrated by {run}: {config.model.path} on {devices['ranks']} x {devices['device']}, {steps}{other}"


def _read(run: Path) -> tuple[Config, list[Mapping[str, Any]], Mapping[str, Any]]:
    missing = [name for name in (SETTINGS, METRICS, DEVICES) if not (run / name).is_file()]
    if missing:
        raise ConfigError(
            "This is no run that can be compared with its prediction.",
            values=f"{run} has no {', '.join(missing)}",
            fix="name the output_dir of a run that has finished with this version",
        )
    try:
        devices = parse_json((run / DEVICES).read_text(encoding="utf-8"))
        rows = [parse_json(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
        devices = _check_devices(devices)
        # A traced step takes longer than the others, and comes early, or after a resume.
        steps = [_check_step(row) for row in rows if "step_seconds" in row]
        steps = [row for row in steps[WARM_UP_STEPS:] if not row.get("traced")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "What the run left cannot be read.", values=f"{run}: {error}", fix="name another run"
        ) from error
    if not steps:
        raise ConfigError(
            "The run is too short to calibrate by.",
            values=f"{run}: the first {WARM_UP_STEPS} logged steps do not count, and there are no more",
            fix=f"name a run of {WARM_UP_STEPS + 5} steps or more",
        )
    return Config.load(run / SETTINGS), steps, devices


def _check_devices(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what devices.json says, as numbers; ValueError for what no run writes."""
    ranks, per_node = int(found["ranks"]), int(found["ranks_per_node"])
    if ranks < 1 or per_node < 1 or ranks % per_node:
        raise ValueError(f"{DEVICES}: {ranks} ranks, {per_node} on each machine")
    memory = found.get("memory_bytes")
    numbers = {"ranks": ranks, "ranks_per_node": per_node, "memory_bytes": None if memory is None else int(memory)}
    return {**found, "device": str(found["device"]), **numbers}


_MEASURED = ("step_seconds", "tokens", "max_allocated_gib", "max_reserved_gib")


def _check_step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a logged step; ValueError where a number is none to divide by, such as NaN."""
    for name in _MEASURED:
        value = row.get(name)
        if value is None and name.startswith("max_"):  # CPU
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
            raise ValueError(f"{METRICS}: step {row.get('step')}: {name}: {value}")
    return row


def _predict(config: Config, hardware: Hardware, *, quick: bool) -> Mapping[str, Any]:
    """The run's own prediction, made as the plan's are."""
    if quick:
        return simulate_quick(config, hardware)
    found = find_simulation(config, hardware, expandable_segments=True)
    return (found or simulate(config, hardware, expandable_segments=True)).to_json()


def _memory_factor(rows: list[Mapping[str, Any]], predicted: Mapping[str, Any]) -> float | None:
    """The largest ratio of what the allocator said and what was predicted, of allocated or reserved memory."""
    found = []
    for measured, expected in (("max_allocated_gib", "allocated_gib"), ("max_reserved_gib", "reserved_gib")):
        most = max((row[measured] for row in rows if row.get(measured) is not None), default=None)
        if most is not None and predicted[expected]:
            found.append(most / predicted[expected])
    return max(1.0, *found) if found else None


def _time_factor(
    rows: list[Mapping[str, Any]], predicted: Mapping[str, Any], config: Config, *, run: Path
) -> float | None:
    if predicted["step_seconds"] is None:
        return None
    full = config.batch.global_batch_size * config.data.seq_len
    filled = statistics.median(row["tokens"] / full for row in rows)
    if filled < LEAST_FILLED:
        raise ConfigError(
            "The run's rows were too empty: a step took less than the one that is predicted.",
            values=f"{run}: {filled:.0%} of {config.data.seq_len:,} tokens a row in the middle",
            fix="name a run with data.packing: true, or with a data.seq_len that its records fill",
        )
    # A step of fewer tokens, as the last of an epoch, takes less.
    return statistics.median(row["step_seconds"] * full / row["tokens"] for row in rows) / predicted["step_seconds"]
