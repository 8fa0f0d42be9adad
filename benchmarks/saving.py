"""What checkpoints cost: how long training waits for one, and seconds, bytes and memory of save, load and export.

    python -m benchmarks.saving [--rounds 5]

SmolLM2-135M in bf16 with fp32 masters on two gloo ranks of one CPU. Saves in the foreground and in the background take
turns, so that both meet the same machine; so do saves with and without a hash of what is written. "Blocked" is how long
training is held up: by the call that begins the save, by the next optimizer step where it waits for the copy, and after
each step by the question whether the save is done. A step beside a save is slower, too: both want the same cores.
Seconds are medians over rounds of the slower rank; memory is the highest peak of resident bytes above those before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
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
    compare_hashing(run, 4 * rounds, figures)  # they write over what was loaded
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
    from tests.checkpoint_runs import save, save_group

    group, memory = save_group(), {}
    pending: Any = None
    for number in range(rounds + 1):
        first = "first " if number == 0 else ""
        options: dict[str, Any] = {"process_group": group, "keep_latest": 1}
        seconds, peak, _ = timed(lambda: save(run, 2 * number + 1, **options).wait())  # noqa: B023  # called at once
        figures[first + "foreground save"].append(seconds)
        figures["foreground save, memory"].append(peak)
        with Peaks() as peaks, timed_waits(run.optimizer) as waits:
            started = time.perf_counter()
            pending = save(run, 2 * number + 2, **options, asynchronous=True, memory=memory)
            begun = time.perf_counter() - started
            after = run.optimizer.register_step_pre_hook(lambda *_: waits.append(time.perf_counter()))
            polled, done = 0.0, False
            while not done:
                figures["step beside a save"].append(timed(take_step)[0])
                seconds, _, done = timed(pending.poll)
                polled += seconds
            after.remove()
            figures["background save, until published"].append(time.perf_counter() - started)
        waited = sum(end - start for start, end in zip(waits[::2], waits[1::2], strict=True))
        for part, seconds in (("call", begun), ("next step", waited), ("polls", polled)):
            figures[f"{first}background save, blocked by the {part}"].append(seconds)
        figures[first + "background save, blocked"].append(begun + waited + polled)
        figures["background save and the steps beside it, memory"].append(peaks.peak[1] - peaks.base[1])
    figures["checkpoint, bytes"].append(sum(file.stat().st_size for file in pending.path.iterdir()))
    return pending.path


def compare_hashing(run: Any, rounds: int, figures: Figures) -> None:
    """Save with and without a hash in turn; the CPU seconds of the thread that writes do not depend on the disk."""
    from tests.checkpoint_runs import save, save_group

    group = save_group()
    for number in range(rounds):
        for way in ("hashed", "unhashed")[:: 1 if number % 2 else -1]:
            with nullcontext() if way == "hashed" else unhashed():
                worked = time.thread_time()
                seconds, _, _ = timed(lambda: save(run, 1, process_group=group).wait())
                figures[f"foreground save, {way}, CPU of the thread"].append(time.thread_time() - worked)
            figures[f"foreground save, {way}"].append(seconds)


@contextmanager
def timed_waits(optimizer: Any) -> Iterator[list[float]]:
    """Note when each step comes to the optimizer's hooks; whoever adds one behind them sees how long they took."""
    waits: list[float] = []
    hook = optimizer.register_step_pre_hook(lambda *_: waits.append(time.perf_counter()))
    try:
        yield waits
    finally:
        hook.remove()


class NoHash:
    """What is left of writing when nothing is hashed."""

    def update(self, content: Any) -> None:
        """Take the bytes and do nothing with them."""

    def hexdigest(self) -> str:
        """Return the digest of nothing."""
        return "0" * 32


@contextmanager
def unhashed() -> Iterator[None]:
    """Write checkpoints without hashing their bytes; the manifest is wrong then."""
    from fsdp_trainer import checkpoint_writer

    kept = checkpoint_writer.xxhash
    checkpoint_writer.xxhash = SimpleNamespace(xxh3_128=NoHash)  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoint_writer.xxhash = kept


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
            lines.append(f"| {name} | {statistics.median(rounds):.3f} s | {min(rounds):.3f} to {max(rounds):.3f} s |")
    medians = {
        name: statistics.median(max(both) for both in zip(*(figures[name] for figures in ranks), strict=True))
        for name in ranks[0]
    }
    whole = medians["foreground save"]
    lines.append(f"| **training is blocked for** | **{medians['background save, blocked'] / whole:.1%}** of a save | |")
    hashed, bare = (medians[f"foreground save, {way}, CPU of the thread"] for way in ("hashed", "unhashed"))
    lines.append(f"| **hashing adds, in CPU of the thread** | **{(hashed - bare) / whole:+.1%}** of a save | |")
    hashed, bare = (medians[f"foreground save, {way}"] for way in ("hashed", "unhashed"))
    lines.append(f"| hashing adds, in seconds of a save | {hashed / bare - 1:+.1%} | |")
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
