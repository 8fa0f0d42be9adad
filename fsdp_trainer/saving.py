"""Checkpoints of a running loop: at most one in flight, and the last one always waited for.

[Note: one interval] A kill costs at most `checkpoint.every_steps` optimizer steps: those begun since the newest
checkpoint that is published. One that is still written in the background does not count yet. So there one is begun
after every half of the interval, and training waits for it where the next is due: when a kill comes, the newest
published one is the last or the last but one, at most two halves back.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_trainer.agreement import run_on_main
from fsdp_trainer.checkpoint import PendingSave, save_checkpoint
from fsdp_trainer.checkpoint_copy import HostMemory
from fsdp_trainer.checkpoint_folder import checkpoint_path, record_best
from fsdp_trainer.checkpoint_manifest import Best, Progress
from fsdp_trainer.errors import CheckpointError, FailedSave
from fsdp_trainer.progress import log_line
from fsdp_trainer.run import Run
from fsdp_trainer.run_folder import write_status


def saves_in_background(*, every_steps: int, async_save: bool) -> bool:
    """Return whether saves run beside training; an interval of one step leaves no time for that."""
    return async_save and every_steps > 1


def is_save_due(step: int, *, every_steps: int, async_save: bool) -> bool:
    """Return whether a checkpoint is begun after `step`, see [Note: one interval]."""
    return step % every_steps in _steps_of_saves(every_steps=every_steps, async_save=async_save)


def saves_to_come(*, step: int, total_steps: int, every_steps: int, async_save: bool) -> int:
    """Return how many checkpoints a run at `step` will still write, that of its end included."""
    if step >= total_steps:
        return 0
    due = _steps_of_saves(every_steps=every_steps, async_save=async_save)
    between = sum((total_steps - after) // every_steps - (step - after) // every_steps for after in due)
    return between + (total_steps % every_steps not in due)


@contextmanager
def saving_failed(failed: CheckpointError | None, model: Path | None) -> Iterator[None]:
    """Let an export to `model` (None: there is none) go on after a last save that failed, and raise that afterwards."""
    try:
        yield
    except CheckpointError as error:
        if failed is None:
            raise
        values = f"{failed.values}; {error.values}"
        raise FailedSave(
            "Neither the last checkpoint nor the model could be written.", values=values, fix=failed.fix
        ) from error
    if failed is not None:
        there = f"; the trained model is there all the same: {model}" if model is not None else ""
        raise FailedSave(failed.what, values=failed.values + there, fix=failed.fix) from failed


def _steps_of_saves(*, every_steps: int, async_save: bool) -> set[int]:
    """Return after which steps of an interval one is begun, counted from its start."""
    half = (every_steps + 1) // 2
    return {0, half} if saves_in_background(every_steps=every_steps, async_save=async_save) else {0}


class Saver:
    """Saves one run. Every method is collective; failures are raised on all ranks."""

    def __init__(
        self,
        run: Run,
        *,
        facts: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        output_dir: Path,
        saved_step: int,
        last_step: int | None = None,
        best: Best | None = None,
    ) -> None:
        self._run, self._facts, self._group, self._output_dir = run, facts, process_group, output_dir
        self._pending: PendingSave | None = None
        checkpoint = run.config.checkpoint
        self._enabled = checkpoint.enabled
        self._in_background = checkpoint.enabled and saves_in_background(
            every_steps=checkpoint.every_steps, async_save=checkpoint.async_save
        )
        self._memory: HostMemory = {}
        if self._in_background:
            every, half = checkpoint.every_steps, (checkpoint.every_steps + 1) // 2
            often = "after each step" if half == 1 else f"every {half} steps"
            fact = f"checkpoints: one begun {often} in the background, so that a kill costs at most {every}"
            log_line(fact, is_main=run.runtime.is_main)
        self._saved_step, self._last_step, self._best = saved_step, last_step, best

    def save_if_due(self, progress: Progress) -> None:
        """Save after a step where one is due, see [Note: one interval]."""
        checkpoint = self._run.config.checkpoint
        if is_save_due(progress.step, every_steps=checkpoint.every_steps, async_save=checkpoint.async_save):
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Save after a step, once; in the background where the settings allow."""
        if self._enabled and progress.step not in (self._saved_step, self._last_step):  # `save_end` saves that
            self._save(progress, asynchronous=self._in_background)

    def save_now(self, progress: Progress) -> Path | None:
        """Make sure that this very state is on disk, and return its folder; None where nothing is to be saved."""
        if not self._enabled:
            return None
        if progress.step != self._saved_step:
            self._save(progress, asynchronous=False)
        self._finish()
        return checkpoint_path(self._output_dir, progress.step)

    def save_end(self, progress: Progress) -> CheckpointError | None:
        """Make sure that the end of the run is on disk; return what that failed at: the export is still to be tried."""
        try:
            self._finish()
        except CheckpointError as error:  # of an earlier step: what counts now is the last
            log_line(f"warning: {error}", is_main=self._run.runtime.is_main)
        try:
            self.save_now(progress)
        except CheckpointError as error:
            self._memory.clear()
            return error
        self.close()
        return None

    def evaluated(self, progress: Progress, loss: float) -> None:
        """Note an evaluation after a step; with `checkpoint.keep_best` the best so far is saved, and kept."""
        if not self._run.config.checkpoint.keep_best:
            return
        # Rank 0's word: the loss is the same everywhere, but a save that one rank alone begins would hang.
        if not run_on_main(lambda: loss < (self._best.eval_loss if self._best else math.inf)):
            return
        best = self._best = Best(progress.step, loss)
        if progress.step == self._saved_step:
            self._finish()
            run_on_main(lambda: record_best(checkpoint_path(self._output_dir, best.step), best))
        else:
            self.save(progress)
        log_line(f"best evaluation so far: {loss:.4f} at step {best.step}", is_main=self._run.runtime.is_main)

    def close(self) -> None:
        """Wait for the save in flight and give its host memory back."""
        self._finish()
        self._memory.clear()

    def poll(self) -> None:
        """Notice a background save that is done or has failed; called once a step."""
        if (pending := self._pending) is not None and pending.poll():
            self._pending = None
            self._say(pending)

    def _save(self, progress: Progress, *, asynchronous: bool) -> None:
        self._finish()
        run = self._run
        with run.runtime.phases.enter("save"):
            self._pending = save_checkpoint(
                self._output_dir,
                model=run.model,
                optimizer=run.optimizer,
                scaler=run.scaler,
                progress=progress,
                facts=self._facts,
                device=run.runtime.device,
                process_group=self._group,
                asynchronous=asynchronous,
                memory=self._memory,
                keep_latest=run.config.checkpoint.keep_latest,
                best=self._best,
            )
        self._saved_step = progress.step
        if not asynchronous:
            self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.wait()
            except BaseException:
                self._saved_step = -1
                raise
            self._say(pending)

    def _say(self, saved: PendingSave) -> None:
        step = self._saved_step
        run_on_main(lambda: write_status(self._output_dir, state="running", exit_code=0, step=step))
        log_line(f"checkpoint: {saved.path}", is_main=self._run.runtime.is_main)
