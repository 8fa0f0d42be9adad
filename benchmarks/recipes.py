"""What each way to save memory costs in what is learned, in bytes and in time, on a real model and real text.

    .venv/bin/python -m benchmarks.recipes [--steps 40] [--recipe bf16 --recipe bf16_pure] [--write]

SmolLM2-135M on two gloo ranks, the same 8 rows of 256 tokens in each step, from Python's own standard library; every
tenth of its modules is held out. One recipe after the other, so step times are only good on a machine with nothing
else to do. Bytes a parameter are all live tensors of both ranks between backward and step, measured, wherever they are;
a recipe that the settings refuse is listed with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

RESULTS = Path(__file__).with_name("RESULTS.md")
RANKS, ROWS, SEQ_LEN = 2, 8, 256
LAST = 10  # steps whose mean is the final loss: one step's rows are as hard as they are

_8BIT = {"optim": {"name": "adamw_8bit"}}
_HOST = {"sharding": {"offload": "optimizer"}}
_DEVICE = {"optim": {"offload_step": "device"}, **_HOST}
_NARROW = {"sharding": {"reduce_dtype": "bf16"}, "optim": {"state_dtype": "bf16"}}
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, averages bf16": {"precision": "bf16", "optim": {"state_dtype": "bf16"}},
    "bf16_pure": {"precision": "bf16_pure"},
    "bf16_pure, gradients and averages bf16": {"precision": "bf16_pure", **_NARROW},
    "bf16, adamw_8bit": {"precision": "bf16", **_8BIT},
    "bf16_pure, adamw_8bit": {"precision": "bf16_pure", **_8BIT},
    "bf16, optimizer offload, step on host": {"precision": "bf16", **_HOST},
    "bf16, optimizer offload, step on device": {"precision": "bf16", **_DEVICE},
    "bf16_pure, adamw_8bit, optimizer offload": {"precision": "bf16_pure", **_8BIT, **_HOST},
    "bf16, params offload": {"precision": "bf16", "sharding": {"offload": "params"}},
}


def write_text(folder: Path) -> tuple[str, str]:
    """Write the beginnings of the standard library's modules as records; return the files to train on and held out."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, chosen, length in (
        (files[0], [m for i, m in enumerate(modules) if i % 10], 6000),
        (files[1], modules[::10], 3000),
    ):
        texts = [module.read_text(encoding="utf-8", errors="replace")[:length] for module in chosen]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()), encoding="utf-8")
    return str(files[0]), str(files[1])


def settings(model: str, folder: Path, recipe: str, *, steps: int) -> dict[str, Any]:
    """Return the settings of a run by one recipe."""
    train, held_out = write_text(folder)
    return {
        "model": {"path": model},
        "data": {"train": train, "eval": held_out, "format": "text", "seq_len": SEQ_LEN, "on_too_long": "split"},
        "activation_checkpointing": {"mode": "none"},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 2},
        "schedule": {"warmup_ratio": 0.1},
        "train": {"max_steps": steps},
        "output_dir": str(folder / "run"),
        **RECIPES[recipe],
        "optim": {"lr": 5e-5, **RECIPES[recipe].get("optim", {})},
    }


def refusal(run_settings: dict[str, Any]) -> str:
    """Return why the settings are refused, or nothing."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.errors import ConfigError

    try:
        Config.from_dict(run_settings).check_world(RANKS)
    except ConfigError as error:
        return error.what.splitlines()[-1].strip()
    return ""


def train(run_settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train on this rank; return losses, the held-out loss, seconds a step and this rank's live bytes."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.training import evaluate
    from fsdp_trainer.training_data import load_training_data

    config = Config.from_dict(run_settings)
    runtime = build_runtime(timeout_minutes=30)
    data = runtime.main_first("data", lambda: load_training_data(config, is_writer=runtime.is_main, show=False))
    live = measure_live_bytes(config, runtime, data)
    gc.collect()
    run = build_run(config, runtime)
    losses, seconds = [], []
    for loss, duration in take_steps(run, data, steps):
        losses.append(loss)
        seconds.append(duration)
    assert data.evaluation is not None
    return {
        "losses": losses,
        "held_out": evaluate(run, data.evaluation),
        "seconds": seconds,
        "live": live,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
    }


def take_steps(run: Any, data: Any, steps: int) -> Iterator[tuple[float, float]]:
    """Take optimizer steps on the schedule of the settings; yield (loss, seconds)."""
    from fsdp_trainer.checkpoint_manifest import Progress
    from fsdp_trainer.optim.schedule import learning_rate, warmup_length
    from fsdp_trainer.step import train_step
    from fsdp_trainer.training_data import training_windows

    config, schedule = run.config, run.config.schedule
    windows = training_windows(
        data, config, progress=Progress(), stop=steps, rank=run.runtime.rank, world_size=run.runtime.world_size
    )
    total = config.train.max_steps
    warmup = warmup_length(total, warmup_ratio=schedule.warmup_ratio, warmup_steps=schedule.warmup_steps)
    for step, window in enumerate(windows):
        rate = learning_rate(
            step,
            name=schedule.name,
            peak=config.optim.lr,
            total_steps=total,
            warmup=warmup,
            min_lr_ratio=schedule.min_lr_ratio,
        )
        started = time.perf_counter()
        loss = train_step(run, window, learning_rate=rate, optimizer_step=step).loss.item()
        yield loss, time.perf_counter() - started


def measure_live_bytes(config: Any, runtime: Any, data: Any) -> int:
    """Return the bytes of this rank's live tensors when the optimizer takes the second step's gradients."""
    from benchmarks.live_bytes import LiveBytes
    from fsdp_trainer.run import build_run

    found: list[int] = []
    live = LiveBytes()

    def note(*_: Any) -> None:
        gc.collect()
        found.append(live.current)

    with live:
        run = build_run(config, runtime)
        run.optimizer.register_step_pre_hook(note)
        for _ in take_steps(run, data, 2):
            pass
    return found[-1]


def summarize(recipe: str, model: str, steps: int) -> dict[str, Any]:
    """Run one recipe on all ranks; return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        run_settings = settings(model, Path(folder), recipe, steps=steps)
        if refused := refusal(run_settings):
            return {"refused": refused}
        ranks = run_ranks(train, RANKS, run_settings, steps, timeout=36_000)
    return {
        "final": statistics.mean(ranks[0]["losses"][-LAST:]),
        "held_out": ranks[0]["held_out"],
        "bytes": sum(rank["live"] for rank in ranks) / ranks[0]["parameters"],
        "seconds": statistics.median(ranks[0]["seconds"][1:]),
    }


def format_table(rows: dict[str, dict[str, Any]], *, steps: int) -> str:
    """Format the rows as a Markdown section; losses beside those of bf16 with masters, where that was run."""
    import torch

    base = rows.get("bf16", {})
    lines = [
        f"### Recipes, {datetime.date.today().isoformat()}, {steps} steps",
        "",
        f"torch {torch.__version__}, {os.cpu_count()} cores ({platform.machine()}), {RANKS} gloo ranks, SmolLM2-135M, "
        f"{ROWS} rows of {SEQ_LEN} tokens a step, text of Python {platform.python_version()}'s standard library, "
        f"lr 5e-5 at most. Final loss: mean of the last {LAST} steps. Beside bf16: of the two losses.",
        "",
        "| recipe | final loss | held-out loss | beside bf16 | bytes a parameter | step |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, row in rows.items():
        if "refused" in row:
            lines.append(f"| {recipe} | refused: {row['refused']} | | | | |")
            continue
        beside = (
            ", ".join(f"{row[key] / base[key] - 1:+.2%}" for key in ("final", "held_out")) if "final" in base else ""
        )
        lines.append(
            f"| {recipe} | {row['final']:.4f} | {row['held_out']:.4f} | {beside} | {row['bytes']:.2f} "
            f"| {row['seconds']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the recipes and print, or append to RESULTS.md, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", choices=list(RECIPES), action="append")
    parser.add_argument("--write", action="store_true", help="append the table to RESULTS.md")
    options = parser.parse_args()
    from fsdp_trainer.demo import smollm2_folder

    rows = {}
    for recipe in options.recipe or RECIPES:
        rows[recipe] = summarize(recipe, str(smollm2_folder()), options.steps)
        print(recipe, rows[recipe], flush=True)
    table = format_table(rows, steps=options.steps)
    print(table)
    if options.write:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write("\n" + table)


if __name__ == "__main__":
    main()
