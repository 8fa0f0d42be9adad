"""Kill runs at random moments, resume them, and compare everything with the run that nothing happened to.

    python -m benchmarks.sweeps.kill [120] [--seed 0]

SIGKILL to one rank or to all, at the start, in steps, evaluations, saves, prunes and the export, and at times that no
name stands for. Compared are every tensor of the last checkpoint (weights, optimizer, random states), the exported
files, the rows of the metrics and which rows and tokens each rank fed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import fault_runs, models, training_runs
from tests.checkpoint_runs import differing
from tests.ranks import run_ranks

STEPS, SAVE_EVERY = 8, 2
# Functions as modules of the package see them, and how often each is called in a run (saves in the background: twice).
MOMENTS: dict[str, tuple[str | None, int]] = {
    "start": ("training.build_run", 1),
    "step": ("training.train_step", STEPS),
    "evaluation": ("training.evaluate", 3),
    "save": ("checkpoint.save_sharded", 4),
    "publish": ("checkpoint.publish", 4),
    "prune": ("checkpoint.prune", 4),
    "export": ("training.export_model", 1),
    "any time": (None, 0),
}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"precision": "fp32", "checkpoint": {"async_save": True}}),
    (2, {"precision": "bf16", "checkpoint": {"async_save": False}, "sharding": {"offload": "optimizer"}}),
    (1, {"precision": "bf16", "checkpoint": {"async_save": True}, "sharding": {"offload": "optimizer"}}),
    (1, {"precision": "fp32", "checkpoint": {"async_save": False}}),
)


@dataclass
class Outcome:
    """One kill: where, whether it came in time, steps that had to be done again, and what then differed."""

    moment: str
    world_size: int
    victims: tuple[int, ...]
    came_in_time: bool
    lost_steps: int
    differences: list[str]

    @property
    def is_good(self) -> bool:
        """Return whether the resumed run is the quiet one and no more than one interval was lost."""
        return not self.differences and self.lost_steps <= SAVE_EVERY


def tiny(model: str, folder: Path, name: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run of eight steps over 22 rows with dropout: an epoch ends inside it, and so does a window."""
    train, _ = models.make_records(22, seed=30)
    held_out, _ = models.make_records(5, seed=31)
    return training_runs.settings(
        model,
        models.write_jsonl(train, folder / "train.jsonl"),
        folder / name,
        data={"eval": models.write_jsonl(held_out, folder / "eval.jsonl"), "cache_dir": str(folder / "cache")},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        train={"max_steps": STEPS},
        eval={"every_steps": 3, "at_end": True},
        checkpoint={"every_steps": SAVE_EVERY, "keep_latest": 1, "resume": "auto", **sections["checkpoint"]},
        precision=sections["precision"],
        sharding=sections.get("sharding", {}),
    )


@dataclass
class Quiet:
    """A run that nothing happened to, and what it left."""

    settings: dict[str, Any]
    world_size: int
    seconds: float
    left: dict[str, Any]


def run_quiet(model: str, folder: Path, world_size: int, sections: dict[str, Any]) -> Quiet:
    """Run once without a fault."""
    settings = tiny(model, folder, f"quiet-{world_size}-{sections['precision']}", sections)
    started = time.monotonic()
    assert fault_runs.run(settings, world_size) == [0] * world_size
    return Quiet(settings, world_size, time.monotonic() - started, what_is_left(settings))


def what_is_left(settings: dict[str, Any]) -> dict[str, Any]:
    """Return digests of the last checkpoint and the model, the metrics and the status of a finished run."""
    folder = Path(settings["output_dir"])
    found: dict[str, Any] = dict(fault_runs.end_state(folder))
    found["status"] = str(fault_runs.read_status(folder))
    for number, row in enumerate(fault_runs.comparable_metrics(folder)):
        found[f"metrics row {number}"] = str(row)
    return found


def kill_once(quiet: Quiet, moment: str, chance: random.Random) -> Outcome:
    """Kill a run at the moment, resume it, and compare; a kill that comes after the end is drawn again, once."""
    folder = Path(quiet.settings["output_dir"]).with_name("struck")
    settings = {**quiet.settings, "output_dir": str(folder)}
    everyone = tuple(range(quiet.world_size))
    victims = chance.choice([everyone, *((rank,) for rank in everyone)])
    within, calls = MOMENTS[moment]
    came_in_time = False
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        call, share = chance.randint(1, max(1, calls)), chance.random()
        fault = fault_runs.Fault(
            signal.SIGKILL, victims, within, call=call, share=share, delay=share * quiet.seconds if not within else 0.0
        )
        came_in_time = fault_runs.run_killed(settings, quiet.world_size, fault)
        if came_in_time:
            break
    begun = [steps_begun(folder, rank) for rank in everyone]
    kept = fault_runs.checkpoints(folder)
    resumed_at = int(kept[-1].removeprefix("step-")) if kept else 0
    codes = fault_runs.run(settings, quiet.world_size)
    wrong = [] if codes == [0] * quiet.world_size else [f"exit codes {codes}"]
    wrong += differing(what_is_left(settings), quiet.left) if not wrong else []
    for rank in everyone:
        planned, seen = (fault_runs.read_seen(Path(s["output_dir"]), rank) for s in (quiet.settings, settings))
        if seen != planned[: begun[rank]] + planned[resumed_at:]:
            wrong.append(f"rows fed by rank {rank}")
    return Outcome(moment, quiet.world_size, victims, came_in_time, max(0, max(begun) - resumed_at), wrong)


def steps_begun(folder: Path, rank: int) -> int:
    return len(fault_runs.read_seen(folder, rank)) if (folder / f"seen-rank{rank}.jsonl").exists() else 0


def kill_often(folder: Path, *, times: int, seed: int) -> list[Outcome]:
    """Kill `times` runs, going round the moments and the cases."""
    chance, outcomes = random.Random(seed), []
    model = run_ranks(models.save_model, 1, "gpt2_dropout", str(folder / "model"))[0]
    cases = CASES if times >= len(MOMENTS) * len(CASES) else CASES[:2]
    quiet = [run_quiet(model, folder, world_size, sections) for world_size, sections in cases]
    for number in range(times):
        moment = list(MOMENTS)[number % len(MOMENTS)]
        outcome = kill_once(quiet[number // len(MOMENTS) % len(quiet)], moment, chance)
        outcomes.append(outcome)
        # One line each: a long count may be cut short.
        print(
            f"kill {number}, {moment}: {'killed' if outcome.came_in_time else 'too late'}, {outcome.lost_steps} steps "
            f"again, {'equal' if outcome.is_good else outcome}",
            flush=True,
        )
    return outcomes


def main() -> int:
    """Kill and compare; print a table; 1 when anything differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=int, nargs="?", default=120)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = kill_often(Path(folder), times=asked.times, seed=asked.seed)
    tried = Counter(outcome.moment for outcome in outcomes)
    in_time = Counter(outcome.moment for outcome in outcomes if outcome.came_in_time)
    equal = Counter(outcome.moment for outcome in outcomes if outcome.is_good)
    for moment in MOMENTS:
        print(
            f"{moment:12} {tried[moment]:4} tried {in_time[moment]:4} killed {equal[moment]:4} equal after the resume"
        )
    most = max(outcome.lost_steps for outcome in outcomes)
    print(f"{equal.total()} of {tried.total()} equal; most steps done again: {most}, one interval being {SAVE_EVERY}")
    return int(equal.total() < tried.total())


if __name__ == "__main__":
    raise SystemExit(main())
