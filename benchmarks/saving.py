"""What checkpoints cost: how long training waits for one, and seconds, bytes and memory of save, load and export.

    python -m benchmarks.saving [--rounds 5]

SmolLM2-135M in bf16 with fp32 masters on two gloo ranks of one CPU. Saves in the foreground and in the background take
turns, so that both meet the same machine. "Blocked" is how long training is held up: by the call that begins the save,
and after each step by the question whether it is done. A step beside a save is slower, too: both want the same cores.
Seconds are medians over rounds of the slower rank; memory is the highest peak of resident bytes above those before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.loading import Peaks
from tests import training_runs
from tests.models import Document
from tests.ranks import run_ranks

RANKS, ROWS, ROW_TOKENS = 2, 8, 128
Figures = dict[str, list[float]]


def measure(run_settings: dict[str, Any], rounds: int) -> Figures:
    """Save, load and export on this rank and return what each took, one entry a round."""
    from tests.checkpoint_runs import build

    figures: Figures = defaultdict(list)
    run = build(run_settings)
    take_step = stepper(run)
    take_step()  # the first one makes the optimizer's state
    for _ in range(rounds):
        figures["step alone"].append(timed(take_step)[0])
    saved = save_often(run, rounds, take_step, figures)
    for _ in range(rounds):
        load(run, saved, figures)
        export(run, figures)
    return dict(figures)


def stepper(run: Any) -> Callable[[], None]:
    """Return what takes one optimizer step over full rows and waits for it."""
    from fsdp_trainer.step import train_step
    from tests.step_runs import window_of

    texts = [tuple(range(100 + 7 * row, 100 + 7 * row + ROW_TOKENS)) for row in range(ROWS)]
    window = window_of(run, [[Document(tokens=text, supervised=(True,) * ROW_TOKENS)] for text in texts])

    def take_step() -> None:
        train_step(run, window, learning_rate=1e-5, optimizer_step=0).loss.item()

    return take_step


def timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds `action` took, its peak of resident bytes above those before, and its result."""
    with Peaks() as peaks:
        started = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - started
    return seconds, peaks.peak[1] - peaks.base[1], result


def save_often(run: Any, rounds: int, take_step: Callable[[], None], figures: Figures) -> Path:
    """Save once more than `rounds` each way (the first background save makes its host memory, and stands alone)."""
    from fsdp_trainer.checkpoint import build_stager
    from tests.checkpoint_runs import save, save_group

    group, stager = save_group(), build_stager(run.runtime.device)
    pending: Any = None
    for number in range(rounds + 1):
        first = "first " if number == 0 else ""
        options: dict[str, Any] = {"process_group": group, "keep_latest": 1}
        seconds, peak, _ = timed(lambda: save(run, 2 * number + 1, **options).wait())  # noqa: B023  # called at once
        figures[first + "foreground save"].append(seconds)
        figures["foreground save, memory"].append(peak)
        with Peaks() as peaks:
            started = time.perf_counter()
            pending = save(run, 2 * number + 2, **options, asynchronous=True, stager=stager)
            blocked, done = time.perf_counter() - started, False
            while not done:
                figures["step beside a save"].append(timed(take_step)[0])
                seconds, _, done = timed(pending.poll)
                blocked += seconds
            figures["background save, until published"].append(time.perf_counter() - started)
        figures[first + "background save, blocked"].append(blocked)
        figures["background save and the steps beside it, memory"].append(peaks.peak[1] - peaks.base[1])
    stager.close()
    figures["checkpoint, bytes"].append(sum(file.stat().st_size for file in pending.path.iterdir()))
    return pending.path


def load(run: Any, saved: Path, figures: Figures) -> None:
    """Verify every byte of a checkpoint, then fill the run from it."""
    from fsdp_trainer.checkpoint_search import refuse_damage
    from tests import checkpoint_runs

    figures["load: every byte verified"].append(timed(lambda: refuse_damage(saved))[0])
    seconds, peak, _ = timed(lambda: checkpoint_runs.load(run, saved, already_verified=True))
    figures["load: tensors read"].append(seconds)
    figures["load, memory"].append(peak)


def export(run: Any, figures: Figures) -> None:
    """Write the model folder at the end of a run, each tensor read again and compared."""
    from fsdp_trainer.export import export_model

    folder = Path(run.config.output_dir) / "model"
    seconds, peak, exported = timed(lambda: export_model(folder, model=run.model, hf_config=run.hf_config))
    figures["export"].append(seconds)
    figures["export, memory"].append(peak)
    figures["export, bytes"].append(exported.total_bytes)


def format_figures(ranks: list[Figures]) -> list[str]:
    """Return the rows of a table: of each figure the median over rounds, of memory the maximum, of the worse rank."""
    lines = ["| what | figure | lowest and highest round |", "|---|---:|---|"]
    for name in ranks[0]:
        rounds = [max(of_rank) for of_rank in zip(*(figures[name] for figures in ranks), strict=True)]
        if name.endswith(("bytes", "memory")):
            lines.append(f"| {name} | {max(rounds) / 1e9:.2f} GB | |")
        else:
            lines.append(f"| {name} | {statistics.median(rounds):.2f} s | {min(rounds):.2f} to {max(rounds):.2f} s |")
    blocked, whole = (
        statistics.median(max(both) for both in zip(*(figures[name] for figures in ranks), strict=True))
        for name in ("background save, blocked", "foreground save")
    )
    lines.append(f"| **a step is blocked for** | **{blocked / whole:.1%}** of a foreground save | |")
    return lines


def main() -> None:
    """Measure and print a table, with the load of the machine before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    from fsdp_trainer.demo import smollm2_folder

    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = training_runs.settings(
            str(smollm2_folder()),
            "unused.jsonl",
            folder,
            precision="bf16",
            data={"seq_len": ROW_TOKENS},
            batch={"global_batch_size": ROWS, "micro_batch_size": 2},
        )
        ranks = run_ranks(measure, RANKS, settings, asked.rounds, timeout=3600.0)
    print("\n".join(format_figures(ranks)))
    print(f"\n{os.cpu_count()} cores, load before {before:.1f}, after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
