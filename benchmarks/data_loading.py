"""Does a step wait for its data? Steps that take their windows from the loader beside steps that have them ready.

    .venv/bin/python -m benchmarks.data_loading [--steps 12] [--write]

SmolLM2-135M in one process on CPU, packed rows of 512 tokens, the two kinds of step in turn on the same windows. The
time to build a window of 262,144 tokens, what 8 large GPUs take in a step, is measured alone.
"""

import argparse
import datetime
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data import write_conversations

SEQ_LEN = 512
ROWS_A_STEP = 2
LARGE_STEP_TOKENS = 262_144
RESULTS = Path(__file__).with_name("RESULTS.md")


def join_alone() -> None:
    """Set what a launcher exports for one CPU rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", CUDA_VISIBLE_DEVICES="")


def measure(folder: str, file: Path, scratch: str, *, steps: int) -> dict[str, float]:
    """Return median seconds of a step each way, the median wait for a window, and seconds to build a large one."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import build_window, iterate_windows
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.step import train_step
    from fsdp_trainer.training_data import load_training_data

    config = Config.from_dict(
        {
            "model": {"path": folder},
            "data": {"train": str(file), "seq_len": SEQ_LEN, "cache_dir": scratch},
            "activation_checkpointing": {"mode": "none"},
            "batch": {"global_batch_size": ROWS_A_STEP, "micro_batch_size": 1},
        }
    )
    rows = load_training_data(config, is_writer=True, show=False).train
    run = build_run(config, build_runtime())
    shared: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": 0, "shuffle": True, "seq_len": SEQ_LEN}
    shared |= {"packing": True, "pad_token_id": 0, "micro_batch_size": 1}
    ready = [build_window(rows, step=step, global_batch_size=ROWS_A_STEP, **shared) for step in range(steps)]
    loader = iterate_windows(rows, start=0, stop=steps, global_batch_size=ROWS_A_STEP, **shared)
    train_step(run, ready[0], learning_rate=0.0, optimizer_step=0)  # optimizer state is made in the first step
    found: dict[str, list[float]] = {"ready": [], "loaded": [], "wait": []}
    for step in range(steps):
        for kind in ("ready", "loaded") if step % 2 else ("loaded", "ready"):
            started = time.perf_counter()
            window = ready[step] if kind == "ready" else next(loader)
            waited = time.perf_counter() - started
            train_step(run, window, learning_rate=0.0, optimizer_step=1 + step).loss.item()
            found[kind].append(time.perf_counter() - started)
            if kind == "loaded":
                found["wait"].append(waited)
    large = []
    for step in range(5):
        started = time.perf_counter()
        build_window(rows, step=step, global_batch_size=LARGE_STEP_TOKENS // SEQ_LEN, **shared)
        large.append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in (found | {"large": large}).items()}


def main() -> None:
    """Measure, print, and on request append the figures to RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    join_alone()
    import torch

    from fsdp_trainer.demo import smollm2_folder

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "train.jsonl"
        write_conversations(file, count=4000)
        got = measure(str(smollm2_folder()), file, scratch, steps=words.steps)
    text = (
        f"\n## Waiting for data, {datetime.date.today()}\n\n`python -m benchmarks.data_loading`: torch "
        f"{torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; SmolLM2-135M, {words.steps} "
        f"steps each way in turn, medians. Windows from the loader: {got['loaded']:.3f} s a step; windows at hand: "
        f"{got['ready']:.3f} s ({got['loaded'] / got['ready'] - 1:+.1%}). Wait for a window: "
        f"{got['wait'] * 1e3:.2f} ms. Building a window of {LARGE_STEP_TOKENS:,} tokens: {got['large'] * 1e3:.0f} ms.\n"
    )
    print(text)
    if words.write:
        with RESULTS.open("a", encoding="utf-8") as results:
            results.write(text)


if __name__ == "__main__":
    main()
