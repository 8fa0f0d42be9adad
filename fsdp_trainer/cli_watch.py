"""`fsdp-trainer watch` follows a run from another terminal, `fsdp-trainer runs` lists runs: both only read.

Nothing here imports torch, and nothing is sent to the run: it goes on whether or not it is looked at.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.progress import SafeConsole, log_error, log_line
from fsdp_trainer.run_metrics import Metrics, read_last_rows
from fsdp_trainer.run_record import (
    RunFacts,
    RunRecord,
    find_newest_checkpoint,
    find_runs,
    is_run,
    measure_disk,
    peak_gib,
    read_facts,
    read_record,
)

STOPPED_WATCHING = 130  # as a shell counts Ctrl-C: 0 would say that the run has finished
# A rank that was killed is missed by the others within seconds, and they say why the run ended.
LOST_SECONDS = 15.0


@dataclass(frozen=True)
class _Look:
    """What one look into the folder has found."""

    record: RunRecord
    facts: RunFacts
    new_rows: list[dict[str, Any]]


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder (output_dir).", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="Show how it stands now, and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, metavar="SECONDS")] = 1.0,
) -> None:
    """Follow a run from another terminal: progress, curves, memory, time left. It ends with the run's exit code."""
    _check_run(run, once=once)
    metrics = Metrics(run)
    if once:
        look = _look(run, metrics)
        console = _console()
        console.print(_picture(look, metrics, console, height=None))
        raise typer.Exit(look.record.command_code)
    try:
        with _ends_on_sigterm():
            record = _follow_live(run, metrics, every) if sys.stdout.isatty() else _follow_lines(run, metrics, every)
    except KeyboardInterrupt:
        log_error(f"stopped watching; {run} goes on as it was")
        raise typer.Exit(STOPPED_WATCHING) from None
    raise typer.Exit(record.command_code)


def _check_run(run: Path, *, once: bool) -> None:
    """Refuse what cannot become a run folder and, where nothing is waited for, a folder without a run."""
    if run.exists() and not run.is_dir():
        raise ConfigError("This is no run folder.", values=f"{run} is a file", fix="give the run's output_dir")
    if is_run(run):
        return
    inside = find_runs([run], depth=2)
    if inside:
        raise ConfigError(
            "This folder holds runs and is none itself.",
            values=f"{run} holds {_names(inside)}",
            fix="give one of them, or list them with `fsdp-trainer runs`",
        )
    if once:
        near = find_runs([run.parent], depth=1)
        such = f", such as {_names(near)}" if near else ""
        raise ConfigError(
            "There is no run here.",
            values=f"{run} has no status.json" if run.exists() else f"{run} does not exist",
            fix=f"give a run's output_dir{such}; without --once it is waited for",
        )


def _names(runs: list[Path], most: int = 4) -> str:
    return ", ".join(map(str, runs[:most])) + (f" and {len(runs) - most} more" if len(runs) > most else "")


def _look(run: Path, metrics: Metrics) -> _Look:
    # Rows first: a run that has ended writes none after its state.
    record = read_record(run, step_seconds=metrics.logged_seconds)
    new = metrics.read_new()
    return _Look(record, read_facts(record), new)


def _console() -> Console:
    return SafeConsole(highlight=False, markup=False, emoji=False)


def _picture(look: _Look, metrics: Metrics, console: Console, *, height: int | None) -> Any:
    from fsdp_trainer.report.watch_text import format_watch

    can_draw = console.encoding.startswith("utf")
    return format_watch(look.record, metrics, look.facts, width=console.width, height=height, curves=can_draw)


def _looks(run: Path, metrics: Metrics, every: float) -> Iterator[_Look]:
    """Look again and again until the run has ended; a lost one is given time to say why."""
    lost_since = None
    while True:
        look = _look(run, metrics)
        yield look
        lost = look.record.state == "lost"
        lost_since = (lost_since or time.monotonic()) if lost else None
        if look.record.ended and (not lost or time.monotonic() - (lost_since or 0.0) > LOST_SECONDS):
            return
        time.sleep(every)


def _follow_live(run: Path, metrics: Metrics, every: float) -> RunRecord:
    console, look = _console(), None
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for look in _looks(run, metrics, every):
            live.update(_picture(look, metrics, console, height=console.height), refresh=True)
    assert look is not None
    return look.record


def _follow_lines(run: Path, metrics: Metrics, every: float) -> RunRecord:
    """Say what is new, a line each: into a file or a pipe, where nothing can be drawn anew."""
    from fsdp_trainer.report.watch_text import format_end, format_row

    state, checkpoint, look = None, None, None
    for number, look in enumerate(_looks(run, metrics, every)):
        record = look.record
        if number == 0 and record.state is None:
            log_line(f"{run}: waiting for a run")
        if record.state not in (state, None) and not record.ended:
            log_line(f"{run}: {record.state}")
        state = record.state
        for row in look.new_rows if number else look.new_rows[-1:]:  # what came before the first look is history
            log_line(format_row(row, total_steps=record.total_steps))
        found = look.facts.checkpoint
        if found is not None and found != checkpoint:
            log_line(f"checkpoint: {found.path}")
            checkpoint = found
        sys.stdout.flush()
    assert look is not None
    log_line(f"{run}: {format_end(look.record)}")
    return look.record


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Leave through the context managers on SIGTERM as well: the cursor that a live picture hides comes back."""

    def leave(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# --- runs ------------------------------------------------------------------------------------------------------------


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Where to look, three levels deep; default runs/.", metavar="[FOLDER]..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """List runs, the newest first: how each stands, how far it came, what it holds and where it would go on."""
    places = folders or [Path("runs")]
    missing = [str(place) for place in places if not place.is_dir()]
    if missing and not folders:
        print("[]" if as_json else "no run yet: runs/ is not here; a run writes into its output_dir")
        return
    if missing:
        raise ConfigError(
            "There is no such folder.",
            values=", ".join(missing),
            fix="give the folders that hold runs, such as the parent of output_dir",
        )
    found = sorted((describe(run) for run in find_runs(places)), key=lambda run: -(run["written"] or 0.0))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        log_line(f"no runs in {', '.join(map(str, places))}")
        return
    from fsdp_trainer.report.runs_text import format_runs

    console = _console()
    table, notes = format_runs(found, width=console.width)
    console.print(table, *notes, sep="\n")


def describe(run: Path) -> dict[str, Any]:
    """Return what `runs --json` says of one run; null for what its folder does not tell."""
    last, evaluation = read_last_rows(run)
    record = read_record(run, step_seconds=last.get("step_seconds"))
    checkpoint = find_newest_checkpoint(run)
    peak, _ = peak_gib(read_facts(record), last)
    described = {
        "name": str(run),
        "state": record.state,
        "exit_code": record.exit_code if record.ended else None,
        "step": max(last.get("step", 0), record.step),
        "total_steps": record.total_steps,
        "loss": last.get("loss"),
        "eval_loss": evaluation.get("eval_loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "peak_gib": peak,
        "bytes_on_disk": measure_disk(run),
        "checkpoint": str(checkpoint.path) if checkpoint is not None else None,
        "checkpoint_step": checkpoint.step if checkpoint is not None else None,
        "started": record.started,
        "written": record.updated,
        "host": record.host,
        "pid": record.pid,
        "message": record.message,
    }
    return {key: None if isinstance(value, float) and value != value else value for key, value in described.items()}
