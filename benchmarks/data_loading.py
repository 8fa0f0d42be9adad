"""Does a step wait for its data? Steps that take their windows from the loader beside steps that have them ready.

    .venv/bin/python -m benchmarks.data_loading [--seconds 180] [--write]

SmolLM2-135M in one process on CPU, packed rows of 256 tokens. Both kinds of step do the same window one after the
other, in turn the one and the other first, so each pair gives a difference that other load moves little; the answer is
the median of these differences with the interval it lies in at 95 %. Short steps make many pairs, and are the harder
test: a thread that builds windows takes the larger share of them. The time to build a window of 262,144 tokens, what 8
large GPUs take in a step, is measured alone.
"""

import argparse
import datetime
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.data import write_conversations

SEQ_LEN = 256
ROWS_A_STEP = 1
GOAL = 0.02
LARGE_STEP_TOKENS = 262_144
RESULTS = Path(__file__).with_name("RESULTS.md")


def join_alone() -> None:
    """Set what a launcher exports for one CPU rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", CUDA_VISIBLE_DEVICES="")


def measure(folder: str, file: Path, scratch: str, *, seconds: float) -> dict[str, list[float]]:
    """Return seconds of each step by kind, seconds waited for each window, and seconds to build a large one."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import build_window, iterate_windows
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.step import train_step
    from fsdp_trainer.training_data import load_training_data

    config = Config.from_dict(
        {
            "model": {"path": folder},
            "data": {"train": str(file), "seq_len": SEQ_LEN, "cache_dir": scratch, "on_too_long": "split"},
            "activation_checkpointing": {"mode": "none"},
            "batch": {"global_batch_size": ROWS_A_STEP, "micro_batch_size": 1},
        }
    )
    rows = load_training_data(config, is_writer=True, show=False).train
    run = build_run(config, build_runtime())
    shared: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": 0, "shuffle": True, "seq_len": SEQ_LEN}
    shared |= {"packing": True, "micro_batch_size": 1}
    loader = iterate_windows(rows, start=0, stop=rows.n_rows, global_batch_size=ROWS_A_STEP, **shared)
    found: dict[str, list[float]] = {"ready": [], "loaded": [], "wait": [], "large": []}
    until = math.inf
    for step in range(rows.n_rows):
        ready = build_window(rows, step=step, global_batch_size=ROWS_A_STEP, **shared)
        for kind in ("ready", "loaded") if step % 2 else ("loaded", "ready"):
            started = time.perf_counter()
            window = ready if kind == "ready" else next(loader)
            waited = time.perf_counter() - started
            train_step(run, window, learning_rate=0.0, optimizer_step=1 + step).loss.item()
            found[kind].append(time.perf_counter() - started)
            if kind == "loaded":
                found["wait"].append(waited)
        if step == 1:  # the optimizer's state is made in the first step, and the allocator settles in the second
            found = {name: [] for name in found}
            until = time.perf_counter() + seconds
        if time.perf_counter() > until:
            break
    loader.close()
    for step in range(5):
        started = time.perf_counter()
        build_window(rows, step=step, global_batch_size=LARGE_STEP_TOKENS // SEQ_LEN, **shared)
        found["large"].append(time.perf_counter() - started)
    return found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the median at 95 %, whatever the distribution: order statistics of the sample."""
    ordered, count = sorted(values), len(values)
    outside = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[outside], ordered[count - 1 - outside]


def format_figures(found: dict[str, list[float]]) -> str:
    """Return the medians, and whether steps with and without loading agree as the goal asks."""
    median = {name: statistics.median(values) for name, values in found.items()}
    differences = [one / other - 1 for one, other in zip(found["loaded"], found["ready"], strict=True)]
    low, high = median_interval(differences)
    inside = low > -GOAL and high < GOAL
    verdict = "yes" if inside else "no" if low > GOAL else "this run cannot tell"
    return (
        f"{len(differences)} pairs of steps on the same window. With windows from the loader {median['loaded']:.3f} s "
        f"a step, with windows at hand {median['ready']:.3f} s; median difference in a pair "
        f"{statistics.median(differences):+.2%} (95 %: {low:+.2%} to {high:+.2%}). Within {GOAL:.0%}: {verdict}. "
        f"Wait for a window: {median['wait'] * 1e3:.2f} ms. Building a window of {LARGE_STEP_TOKENS:,} tokens: "
        f"{median['large'] * 1e3:.0f} ms."
    )


def main() -> None:
    """Measure, print, and on request append the figures to RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    join_alone()
    import torch

    from fsdp_trainer.demo import smollm2_folder

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "train.jsonl"
        write_conversations(file, count=4000)
        found = measure(str(smollm2_folder()), file, scratch, seconds=words.seconds)
    text = (
        f"\n## Waiting for data, {datetime.date.today()}\n\n`python -m benchmarks.data_loading`: torch "
        f"{torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; SmolLM2-135M, rows of "
        f"{SEQ_LEN} tokens. {format_figures(found)}\n"
    )
    print(text)
    if words.write:
        with RESULTS.open("a", encoding="utf-8") as results:
            results.write(text)


if __name__ == "__main__":
    main()
