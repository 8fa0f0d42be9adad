"""Fine-tune: prepare the data, build the run or bring it back, loop over optimizer steps, export.

The loop is where tensors are read on the host; what a step does is step.py's business alone.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from fsdp_trainer.agreement import is_main, run_on_all, run_on_main
from fsdp_trainer.checkpoint import build_save_group, load_checkpoint
from fsdp_trainer.checkpoint_folder import read_best
from fsdp_trainer.checkpoint_manifest import Progress
from fsdp_trainer.config import Config
from fsdp_trainer.data.loader import Window, steps_per_epoch
from fsdp_trainer.data.rows import Rows
from fsdp_trainer.errors import Interrupted, NonFiniteError, OutputError
from fsdp_trainer.evaluation import evaluate, evaluation_is_due
from fsdp_trainer.export import export_model
from fsdp_trainer.model_card import format_model_card
from fsdp_trainer.nonfinite import find_first_nonfinite
from fsdp_trainer.optim.schedule import scheduled_rate
from fsdp_trainer.out_of_memory import Last, out_of_memory_is_explained
from fsdp_trainer.profiling import StepProfiler
from fsdp_trainer.progress import log_line
from fsdp_trainer.rank_watch import RankWatch, watch_ranks
from fsdp_trainer.rehearsal import rehearse, rehearses
from fsdp_trainer.resume_rules import describe
from fsdp_trainer.run import Run, build_run, check_model, start_values
from fsdp_trainer.run_folder import again, append_metrics, has_evaluation, how_to_go_on, last_evaluation, write_status
from fsdp_trainer.runtime import Runtime, build_runtime
from fsdp_trainer.saving import Saver, saving_failed
from fsdp_trainer.signals import StopRequest, stop_on_signals
from fsdp_trainer.step import StepOutput, train_step
from fsdp_trainer.training_agreement import check_same_rows, check_same_settings
from fsdp_trainer.training_data import TrainingData, load_training_data, training_windows
from fsdp_trainer.training_folder import check_disk, hold_folder, open_folder
from fsdp_trainer.training_ledger import RunLedger
from fsdp_trainer.training_start import check_length, find_start, flatten, library_versions
from fsdp_trainer.units import format_bytes, format_number

_MARKS = ("traced", "profiled", "skipped")  # keys of rows in metrics.jsonl that are there only where they are true
MAX_SKIPPED_IN_A_ROW = 3
# The fp16 scaler starts at 2**16 and halves at each overflow: 16 in a row bring it to 1, where scaling ends.
MAX_OVERFLOWS_IN_A_ROW = 16


def finetune(config: Config, *, prediction: Mapping[str, Any] | None = None) -> Path:
    """Fine-tune as one of the ranks, or alone, and return the run folder; finetuning.py starts ranks.

    `prediction` is what a plan said of this run, to be kept in its folder. Raises FsdpTrainerError for what the user
    can mend; Interrupted after a signal, with a checkpoint saved.
    """
    with stop_on_signals() as stop:
        runtime = build_runtime(
            timeout_minutes=config.train.timeout_minutes,
            trackers=config.log.trackers,
            tracker_dir=Path(config.output_dir),
        )
        config.check_world(runtime.world_size)
        check_same_settings(config)
        timeout, output_dir = config.train.timeout_minutes, Path(config.output_dir)
        watching = watch_ranks(runtime, timeout_minutes=timeout, output_dir=output_dir)
        # Inside of the watch: what is known is written before the others hear that this rank has failed.
        explained = out_of_memory_is_explained(config, runtime, plan=prediction)
        with hold_folder(output_dir), watching as watch, explained as last:
            return _finetune(config, runtime, stop, watch, prediction, last)


@dataclass(frozen=True)
class _Session:
    """What the loop needs besides the run: data, where things are written, and who asked to stop."""

    data: TrainingData
    total_steps: int
    output_dir: Path
    stop: StopRequest
    saver: Saver
    watch: RankWatch | None
    ledger: RunLedger
    last: Last


def _finetune(
    config: Config,
    runtime: Runtime,
    stop: StopRequest,
    watch: RankWatch | None,
    prediction: Mapping[str, Any] | None,
    last: Last,
) -> Path:
    output_dir = Path(config.output_dir)
    # Before the data, which may take hours; and on one rank of a node first, since it may download.
    runtime.main_first("check the model", lambda: check_model(config, runtime))
    data = runtime.main_first(
        "prepare data",
        lambda: load_training_data(config, is_writer=runtime.local_rank == 0, show=runtime.is_main, check=stop.check),
    )
    stop.check_all()
    check_same_rows(data.digest)
    _log_data(data, config, runtime)
    total_steps = _total_steps(config, data.train)
    facts = describe(config.to_dict(), rows=data.digest, versions=library_versions(), code=data.code)
    resume_from = find_start(config, runtime, output_dir, facts=facts)
    ledger = RunLedger(runtime, output_dir=output_dir, plan=prediction)
    run = _build(config, runtime, stop, last, data=data, load=resume_from is None)
    save_group = build_save_group(timeout=timedelta(minutes=config.train.timeout_minutes))
    progress, best = Progress(), None
    if resume_from is not None:
        progress = load_checkpoint(
            resume_from,
            model=run.model,
            optimizer=run.optimizer,
            scaler=run.scaler,
            device=runtime.device,
            seed=config.train.seed,
            already_verified=True,
            log=log_line,
        )
        best = run_on_main(lambda: read_best(resume_from)) if config.checkpoint.keep_best else None
        log_line(f"resumed from {resume_from} at step {progress.step}", is_main=runtime.is_main)
    check_length(config, total_steps=total_steps, step=progress.step)
    check_disk(run, output_dir=output_dir, step=progress.step, total_steps=total_steps, process_group=save_group)
    opened = partial(open_folder, config, runtime, step=progress.step, total_steps=total_steps, prediction=prediction)
    run_on_main(opened)
    if config.log.trackers:
        run_on_all(partial(runtime.accelerator.init_trackers, "tracker", config=flatten(config.to_dict())))
    saver = Saver(
        run,
        facts=facts,
        process_group=save_group,
        output_dir=output_dir,
        saved_step=progress.step,
        last_step=total_steps,
        best=best,
    )
    session = _Session(data, total_steps, output_dir, stop, saver, watch, ledger, last)
    stop.check_all()
    if _evaluation_is_owed(config, session, progress.step):
        _evaluate(run, session, progress)
    progress = train_loop(run, session, progress)
    _finish(run, session, progress)
    return output_dir


def _build(config: Config, runtime: Runtime, stop: StopRequest, last: Last, *, data: TrainingData, load: bool) -> Run:
    """Build the run, and rehearse it before it has its values where the settings say so."""
    rehearsed = rehearses(config, runtime)
    run = last.run = build_run(config, runtime, load=load and not rehearsed)
    for fact in run.facts:
        log_line(fact, is_main=runtime.is_main)
    if rehearsed:
        rehearse(run, data, last)
        stop.check_all()
        start_values(run, load=load)
    return run


def train_loop(run: Run, session: _Session, progress: Progress) -> Progress:
    """Loop over the remaining optimizer steps; saves are agreed by all ranks, so all leave together."""
    config, runtime, data = run.config, run.runtime, session.data
    windows = training_windows(
        data,
        config,
        progress=progress,
        stop=session.total_steps,
        rank=runtime.rank,
        world_size=runtime.world_size,
    )
    profiler = StepProfiler(config.profile, runtime, output_dir=session.output_dir, step=progress.step)
    with closing(profiler), closing(windows):
        for window in windows:
            for note in window.notes:
                log_line(note, is_main=runtime.is_main)
            rate = scheduled_rate(
                progress.optimizer_steps,
                schedule=config.schedule,
                peak=config.optim.lr,
                total_steps=session.total_steps,
            )
            started = time.perf_counter()
            session.last.step, session.last.window = progress.step + 1, window
            is_last = progress.step + 1 == session.total_steps
            with (
                profiler.watch(progress.step + 1) as profiled,
                session.ledger.watch(run, window, is_last=is_last, profiled=profiled) as traced,
            ):
                loss, grad_norm, skipped = _read(
                    train_step(run, window, learning_rate=rate, optimizer_step=progress.optimizer_steps)
                )
                seconds = time.perf_counter() - started
            if skipped or loss != loss:
                _check_skip(run, progress, loss=loss, grad_norm=grad_norm, window=window)
            progress = _advance(progress, window, skipped=skipped)
            session.ledger.took(run, progress.step, seconds, traced=traced)
            if session.watch is not None:
                session.watch.step = progress.step
            if progress.step % config.log.every_steps == 0 or progress.step == session.total_steps or skipped:
                row = {
                    "step": progress.step,
                    "epoch": round(progress.step / data.steps_per_epoch, 6) if data.steps_per_epoch else window.epoch,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "lr": rate,
                    **_speed(window, seconds),
                    **session.ledger.measure(),
                    **_marks(run, traced, profiled, skipped),
                }
                _log_step(run, session, row, skipped=skipped)
            if session.stop.agreed():
                _stop(run, session, progress)
            if evaluation_is_due(config, progress.step, session.total_steps):
                _evaluate(run, session, progress)
            if not is_last:
                session.saver.poll()
                session.saver.save_if_due(progress)
    return progress


def _marks(run: Run, *are_so: bool) -> dict[str, Any]:
    marks: dict[str, Any] = {name: True for name, is_so in zip(_MARKS, are_so, strict=True) if is_so}
    return marks | ({"loss_scale": _scale_before(run.scaler)} if "skipped" in marks and run.scaler is not None else {})


def _speed(window: Window, seconds: float) -> dict[str, float | None]:
    return {
        "tokens": window.tokens,
        "supervised_tokens": window.supervised_tokens,
        "step_seconds": seconds,
        "tokens_per_second": window.tokens / seconds,
        "mfu": None,  # needs the peak of the device, which the hardware catalogue will know
    }


def _read(output: StepOutput) -> tuple[float, float, bool]:
    """Read a step's results in one transfer; this is where the host waits for the device."""
    scalars = torch.stack([output.loss, output.grad_norm.to(output.loss.device), output.skipped.to(output.loss.device)])
    loss, grad_norm, skipped = scalars.tolist()
    return loss, grad_norm, bool(skipped)


def _advance(progress: Progress, window: Any, *, skipped: bool) -> Progress:
    return replace(
        progress,
        step=progress.step + 1,
        optimizer_steps=progress.optimizer_steps + (not skipped),
        skipped_steps=progress.skipped_steps + skipped,
        consecutive_skipped=progress.consecutive_skipped + 1 if skipped else 0,
        tokens_seen=progress.tokens_seen + window.tokens,
        supervised_tokens_seen=progress.supervised_tokens_seen + window.supervised_tokens,
        stream=window.resume_at,
    )


def _check_skip(run: Run, progress: Progress, *, loss: float, grad_norm: float, window: Window) -> None:
    """Decide about a step whose gradient was not finite; loss and norm are equal on all ranks, so is the decision.

    An fp16 overflow is no error: the scaler halves its scale and the next step fits. Everything else follows
    `train.on_nonfinite`.
    """
    in_a_row = progress.consecutive_skipped + 1
    overflow = run.scaler is not None and loss == loss and abs(loss) != float("inf")
    limit = MAX_OVERFLOWS_IN_A_ROW if overflow else MAX_SKIPPED_IN_A_ROW
    if overflow or run.config.train.on_nonfinite == "skip":
        if in_a_row <= limit:
            return
        reason, instead = f"{in_a_row} steps in a row were not finite.", " or lower optim.lr"
    else:
        reason, instead = "The gradient of a step is not finite.", ", lower optim.lr or set train.on_nonfinite: skip"
    values = f"step {progress.step + 1}: loss {loss}, gradient norm {grad_norm}, rows {list(window.row_indices)[:16]}"
    if run.scaler is not None:
        values += f", gradients scaled by {_scale_before(run.scaler):g}"
    with suppress(torch.OutOfMemoryError):  # a step that has fitted once
        values += f"; the first that is not finite is {found}" if (found := find_first_nonfinite(run, window)) else ""
    raise NonFiniteError(
        reason,
        values=values,
        fix=f"look at these rows{instead}; {how_to_go_on(Path(run.config.output_dir))}",
    )


def _scale_before(scaler: torch.amp.GradScaler) -> float:
    """Return what the gradients of a step that overflowed were scaled by: the scaler has backed off since."""
    return scaler.get_scale() / scaler.get_backoff_factor()


def _total_steps(config: Config, rows: Rows) -> int:
    if config.train.max_steps is not None:
        return config.train.max_steps
    return config.train.epochs * steps_per_epoch(rows.n_rows, global_batch_size=config.batch.global_batch_size)


def _stop(run: Run, session: _Session, progress: Progress) -> NoReturn:
    path = session.saver.save_now(progress)
    session.ledger.finish(run)
    if is_main():
        with suppress(OutputError):  # what counts is saved
            write_status(session.output_dir, state="interrupted", exit_code=Interrupted.exit_code, step=progress.step)
    raise Interrupted(
        f"Stopped on {session.stop.received} after step {progress.step}.",
        values=f"saved {path}" if path is not None else "nothing is saved (checkpoint.enabled: false)",
        fix=again(" to go on from there" if path is not None else ""),
    )


# Evaluation


def _evaluation_is_owed(config: Config, session: _Session, step: int) -> bool:
    """Return whether a signal came between the step of the checkpoint and its evaluation; rank 0 reads, all agree."""
    if step == 0 or not evaluation_is_due(config, step, session.total_steps):
        return False
    return run_on_main(lambda: not has_evaluation(session.output_dir, step=step))


def _evaluate(run: Run, session: _Session, progress: Progress) -> None:
    rows = session.data.evaluation
    if rows is None:
        return
    started = time.perf_counter()
    loss = evaluate(run, rows, stop=session.stop)
    if loss is None:
        _stop(run, session, progress)
    seconds = time.perf_counter() - started
    log_line(f"step {progress.step}: eval_loss {loss:.4f} ({seconds:.1f} s)", is_main=run.runtime.is_main)
    _write_metrics(run, session, {"step": progress.step, "eval_loss": loss})
    session.saver.evaluated(progress, loss)


# Seeing it


def _log_step(run: Run, session: _Session, row: Mapping[str, Any], *, skipped: bool) -> None:
    memory = row["max_allocated_gib"]
    log_line(
        f"step {row['step']}/{session.total_steps}  loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  "
        f"lr {row['lr']:.2e}  {row['step_seconds']:.2f} s  {row['tokens_per_second']:,.0f} tokens/s"
        + (f"  {format_bytes(memory * 2**30)}" if memory is not None else "")
        + ("  skipped: not finite" if skipped else ""),
        is_main=run.runtime.is_main,
    )
    _write_metrics(run, session, row)


def _write_metrics(run: Run, session: _Session, row: Mapping[str, Any]) -> None:
    """Write a row to metrics.jsonl and the trackers. Collective: a full disk ends the run on all ranks."""
    numbers = {key: value for key, value in row.items() if key not in ("step", *_MARKS) and value is not None}

    def write() -> None:
        append_metrics(session.output_dir, row)
        if run.config.log.trackers:
            run.runtime.accelerator.log(numbers, step=row["step"])

    run_on_main(write)


def _log_data(data: TrainingData, config: Config, runtime: Runtime) -> None:
    for line in data.describe(samples=config.log.samples, colour=sys.stdout.isatty()):
        log_line(line, is_main=runtime.is_main)


# Start and end


def _exports_all(config: Config) -> bool:
    """Return whether the exported weights are those that trained, to the last bit."""
    return config.export.dtype == "fp32" or (config.precision == "bf16_pure" and config.export.dtype == "bf16")


def _export(run: Run, session: _Session, progress: Progress, model: Path) -> None:
    config, runtime, data = run.config, run.runtime, session.data
    card = format_model_card(
        config,
        progress=progress,
        versions=library_versions(),
        dtype=config.export.dtype,
        evaluation=last_evaluation(session.output_dir, step=progress.step),
        chat=bool(data.tokenizer.chat_template),
    )
    with runtime.phases.enter("save"):
        exported = export_model(
            model,
            model=run.model,
            optimizer=run.optimizer,
            hf_config=run.hf_config,
            tokenizer=data.tokenizer,
            dtype=config.export.dtype,
            generation_config=data.generation_config,
            card=card,
        )
    log_line(
        f"model: {exported.folder} ({format_bytes(exported.total_bytes)}, {config.export.dtype}"
        + ("" if _exports_all(config) else ": updates smaller than its rounding are lost, fp32 keeps them")
        + ")",
        is_main=runtime.is_main,
    )


def _finish(run: Run, session: _Session, progress: Progress) -> None:
    """Save the last state, export the model, and leave the folder complete."""
    config, runtime = run.config, run.runtime
    model = session.output_dir / "model" if config.export.at_end else None
    with saving_failed(session.saver.save_end(progress), model):
        if model is not None:
            _export(run, session, progress, model)
    session.ledger.finish(run)
    # Not end_training, which destroys the process group as well. Only rank 0 has trackers.
    run_on_main(lambda: [tracker.finish() for tracker in runtime.accelerator.trackers])
    run_on_main(lambda: write_status(session.output_dir, state="finished", exit_code=0, step=progress.step))
    log_line(
        f"finished: {format_number(progress.step, 'step')}, {progress.tokens_seen:,} tokens"
        + (f", {format_number(progress.skipped_steps, 'step')} skipped" if progress.skipped_steps else ""),
        is_main=runtime.is_main,
    )
