"""What a run asks of its folder before it writes there: that nobody else does, and that there is room."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fsdp_trainer.agreement import run_on_main
from fsdp_trainer.checkpoint import checkpoint_bytes
from fsdp_trainer.checkpoint_folder import published
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.export import exported_bytes
from fsdp_trainer.progress import log_line
from fsdp_trainer.run import Run
from fsdp_trainer.run_folder import DEVICES, PREDICTION, trim_metrics, write_json, write_settings, write_status, writing
from fsdp_trainer.runtime import Runtime
from fsdp_trainer.saving import saves_to_come
from fsdp_trainer.training_start import library_versions
from fsdp_trainer.units import format_bytes, format_number


@contextmanager
def hold_folder(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of `output_dir` while the context is open. Rank 0 holds the lock, all ranks hear the outcome.

    FolderInUse on every rank when another run is writing there, OutputError when nobody can.
    """
    from fsdp_trainer.run_lock import lock_folder, unlock_folder

    held: list[FileLock] = []

    def hold() -> None:
        with writing(output_dir):
            held.append(lock_folder(output_dir, log=log_line))

    run_on_main(hold)
    try:
        yield
    finally:
        for lock in held:
            unlock_folder(lock)


def open_folder(config: Config, runtime: Runtime, *, step: int, prediction: Mapping[str, Any] | None = None) -> None:
    """Write the files that say what this run is, and drop metrics of steps after `step`. For rank 0 alone."""
    output_dir = Path(config.output_dir)
    write_settings(output_dir, config.to_yaml())
    write_json(output_dir, DEVICES, describe_devices(runtime))
    if prediction is not None:
        write_json(output_dir, PREDICTION, prediction)
    trim_metrics(output_dir, after_step=step)
    write_status(output_dir, state="running", exit_code=0, step=step)


def describe_devices(runtime: Runtime) -> dict[str, Any]:
    """Return what the run is on, so that a plan can tell whose measurements these are, and a report what made them."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))
    name, size = "CPU", None
    if runtime.device.type == "cuda":
        found = torch.cuda.get_device_properties(runtime.device)
        name, size = found.name, found.total_memory
    ranks = {"ranks": runtime.world_size, "ranks_per_node": per_node}
    return {"device": name, "memory_bytes": size, **ranks, "versions": library_versions()}


def check_disk(run: Run, *, output_dir: Path, step: int, total_steps: int) -> None:
    """Refuse a run whose checkpoints and export will not fit on the disk, on all ranks, before it takes a step.

    A new checkpoint is written whole before an old one goes, so there is one more than is kept at the worst moment.
    """
    config = run.config
    one = checkpoint_bytes(run.model, run.optimizer)
    export = (
        exported_bytes(run.model, dtype=config.export.dtype, hf_config=run.hf_config) if config.export.at_end else 0
    )
    kept = config.checkpoint.keep_latest + config.checkpoint.keep_best
    to_come = saves_to_come(
        step=step,
        total_steps=total_steps,
        every_steps=config.checkpoint.every_steps,
        async_save=config.checkpoint.async_save,
    )
    if config.checkpoint.keep_best:  # each evaluation can be a new best one, which is saved
        every = config.eval.every_steps or total_steps
        to_come += saves_to_come(step=step, total_steps=total_steps, every_steps=every, async_save=False)

    def check() -> None:
        present = len(published(output_dir))
        most = max(present, min(present + to_come, kept + 1))
        needed = (most - present) * one + export
        free = shutil.disk_usage(output_dir).free
        if needed > free:
            raise ConfigError(
                "The disk has no room for what this run will write.",
                values=f"{output_dir}: {format_bytes(free)} free, {format_bytes(needed)} needed: "
                f"{format_number(most - present, 'more checkpoint')} of {format_bytes(one)} (checkpoint.keep_latest: "
                f"{config.checkpoint.keep_latest}, and one more while the next is written) and a model of "
                f"{format_bytes(export)}",
                fix="make room, set output_dir on another disk, lower checkpoint.keep_latest, or set export.at_end: "
                "false and export later",
            )

    run_on_main(check)
