"""What a run asks of its folder before it writes there: that nobody else does, and that there is room."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from fsdp_trainer.agreement import is_main, run_on_main
from fsdp_trainer.checkpoint import checkpoint_bytes, try_saving
from fsdp_trainer.checkpoint_folder import make_empty, published
from fsdp_trainer.config import Config
from fsdp_trainer.errors import CheckpointError, FailedSave, OutputError
from fsdp_trainer.export import MAX_FILE_BYTES, exported_bytes, try_writing
from fsdp_trainer.export_folder import unfinished
from fsdp_trainer.progress import log_line
from fsdp_trainer.run import Run
from fsdp_trainer.run_folder import (
    CHECKPOINTS,
    DEVICES,
    PREDICTION,
    trim_metrics,
    write_json,
    write_settings,
    write_status,
    writing,
)
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


def open_folder(
    config: Config, runtime: Runtime, *, step: int, total_steps: int, prediction: Mapping[str, Any] | None = None
) -> None:
    """Write the files that say what this run is, and drop metrics of steps after `step`. For rank 0 alone."""
    output_dir = Path(config.output_dir)
    write_settings(output_dir, config.to_yaml())
    write_json(output_dir, DEVICES, describe_devices(runtime))
    if prediction is not None:
        write_json(output_dir, PREDICTION, prediction)
    trim_metrics(output_dir, after_step=step)
    write_status(output_dir, state="running", exit_code=0, step=step, total_steps=total_steps)


def describe_devices(runtime: Runtime) -> dict[str, Any]:
    """Return what the run is on, so that a plan can tell whose measurements these are, and a report what made them."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))
    name, size = "CPU", None
    if runtime.device.type == "cuda":
        found = torch.cuda.get_device_properties(runtime.device)
        name, size = found.name, found.total_memory
    ranks = {"ranks": runtime.world_size, "ranks_per_node": per_node}
    return {"device": name, "memory_bytes": size, **ranks, "versions": library_versions()}


def check_disk(
    run: Run, *, output_dir: Path, step: int, total_steps: int, process_group: dist.ProcessGroup | None = None
) -> None:
    """Refuse a run that will not be able to write its checkpoints and export, on all ranks, before it takes a step.

    Room for them is taken and given back, which quotas and limits answer, and one small shard goes through the writers
    and readers. A new checkpoint is written whole before an old one goes, so there is one more than is kept at the
    worst moment. OutputError where there is no room, FailedSave where writing fails.
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
    if not config.checkpoint.enabled:
        to_come = 0
    elif config.checkpoint.keep_best:  # each evaluation can be a new best one, which is saved
        every = config.eval.every_steps or total_steps
        to_come += saves_to_come(step=step, total_steps=total_steps, every_steps=every, async_save=False)

    checkpoints = output_dir / CHECKPOINTS

    def check() -> None:
        present = len(published(output_dir))
        most = max(present, min(present + to_come, kept + 1))
        needed = (most - present) * one + export
        free = shutil.disk_usage(output_dir).free
        refused = ""
        if needed <= free:
            each = [one // run.runtime.world_size] * (run.runtime.world_size * (most - present))
            places = [(checkpoints / ".step-reserved.tmp", each), (unfinished(output_dir / "model"), _files(export))]
            refused = _reserve(places)
        if needed > free or refused:
            raise OutputError(
                "The disk has no room for what this run will write.",
                values=f"{output_dir}: {format_bytes(free)} free, {format_bytes(needed)} needed: "
                f"{format_number(most - present, 'more checkpoint')} of {format_bytes(one)} (checkpoint.keep_latest: "
                f"{config.checkpoint.keep_latest}, and one more while the next is written) and a model of "
                f"{format_bytes(export)}" + (f"; reserving it ended with: {refused}" if refused else ""),
                fix="make room, set output_dir on another disk, lower checkpoint.keep_latest, or set export.at_end: "
                "false and export later" + ("; a quota or `ulimit -f` may be the limit" if refused else ""),
            )

    with writing_before_a_step(output_dir):
        run_on_main(check)
        if to_come:
            try_saving(
                output_dir,
                model=run.model,
                optimizer=run.optimizer,
                scaler=run.scaler,
                device=run.runtime.device,
                process_group=process_group,
            )
        if export:
            try_writing(
                output_dir / "model",
                model=run.model,
                optimizer=run.optimizer,
                dtype=config.export.dtype,
                hf_config=run.hf_config,
                process_group=process_group,
            )


@contextmanager
def writing_before_a_step(output_dir: Path) -> Iterator[None]:
    """Let an error of the trial say that it was one, and that nothing is lost with it; leave nothing of it."""
    is_new = not (output_dir / CHECKPOINTS).exists()
    try:
        with writing(output_dir):
            yield
    except CheckpointError as error:
        raise FailedSave(
            "What this run will write cannot be written: a trial of it failed before the first step.",
            values=error.values,
            fix="make room or give write access in output_dir, or set another one; no step was taken",
        ) from error
    finally:
        if is_new and is_main():
            with suppress(OSError):
                (output_dir / CHECKPOINTS).rmdir()


def _files(size: int) -> list[int]:
    return [MAX_FILE_BYTES] * (size // MAX_FILE_BYTES) + [size % MAX_FILE_BYTES]


def _reserve(places: Sequence[tuple[Path, Sequence[int]]]) -> str:
    """Take files of these sizes in folders of these names and give them back; return what the system refused, or "".

    In files of the sizes that will be written: a limit may be one of files.
    """
    try:
        for folder, sizes in places:
            make_empty(folder)
            for number, size in enumerate(size for size in sizes if size):
                with (folder / str(number)).open("wb") as file:
                    if not _can_reserve(file.fileno()):
                        break
                    os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        return f"{error.strerror}"
    finally:
        for folder, _ in places:
            shutil.rmtree(folder, ignore_errors=True)
    return ""


def _can_reserve(descriptor: int) -> bool:
    # Where the file system cannot, as NFS before 4.2, the C library writes to every block: hours for a large model.
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        return False
    done = call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(1)) == 0
    return done or ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS)
