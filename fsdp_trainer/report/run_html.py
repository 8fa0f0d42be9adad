"""A run, or several side by side, as one page that needs nothing else: report.html.

Made from what runs leave in their folders, whether they finished, failed or are still going; what is not there is left
out or said to be missing.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_trainer import __version__
from fsdp_trainer.progress import log_line
from fsdp_trainer.report.charts import css_colour, to_svg
from fsdp_trainer.report.ledger_html import DASH, format_difference, ledger_section
from fsdp_trainer.report.ledger_text import format_peak
from fsdp_trainer.report.out_of_memory_html import out_of_memory_section
from fsdp_trainer.report.page import format_page, render
from fsdp_trainer.report.run_charts import Chart, build_charts, styles_of
from fsdp_trainer.report.run_record import LEDGER, OUT_OF_MEMORY, RunRecord, read_runs
from fsdp_trainer.run_folder import METRICS, SETTINGS, STATUS, write_text_atomically, writing
from fsdp_trainer.units import format_bytes, format_count, format_duration, format_number

REPORT = "report.html"
# Settings that say where a run lies, not what it is: they differ between any two.
_OF_PLACE = ("output_dir",)


def write_run_report(folders: Sequence[str | Path], out: Path) -> Path:
    """Write the page of these run folders to `out` and return `out`.

    ConfigError for what is no run folder, OutputError where no file can be made.
    """
    text = format_run_html(folders)
    with writing(out):
        write_text_atomically(out, text)
    return out


def leave_report(folder: Path) -> None:
    """Write report.html of a run that has ended, and say so in a line. Never raises: a report decides nothing.

    A folder without settings is left alone: its run ended before it began.
    """
    if not (folder / SETTINGS).is_file():
        return
    try:
        log_line(f"report: {write_run_report([folder], folder / REPORT)}")
    except (Exception, KeyboardInterrupt) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        log_line(f"{REPORT} was not written ({why}); `fsdp-trainer report {folder}` makes it")


def is_stale(folder: Path) -> bool:
    """Return whether what a run left is newer than its report."""
    report = folder / REPORT
    written = report.stat().st_mtime_ns if report.is_file() else 0
    files = (folder / name for name in (STATUS, METRICS, LEDGER, OUT_OF_MEMORY))
    return any(file.stat().st_mtime_ns > written for file in files if file.is_file())


def format_run_html(folders: Sequence[str | Path]) -> str:
    """Return the page of one run folder, or of several with their curves over one another."""
    runs = read_runs(folders)
    charts = build_charts(runs)
    styles = styles_of(runs)
    title = _title(runs)
    shown = [chart for chart in charts if chart.name != "ledger"]
    ledgers = [chart for chart in charts if chart.name == "ledger"] if len(runs) > 1 else []
    part = render(
        "run.html.jinja",
        title=title,
        several=len(runs) > 1,
        runs=[_of_run(run, styles[run.name], with_chart=len(runs) == 1) for run in runs],
        table=[(name, [dict(run_facts(run)).get(name, (DASH, "")) for run in runs]) for name in _fact_names(runs)],
        progress=[_figure(chart) for chart in shown if not _is_of_memory(chart)],
        memory=[_figure(chart) for chart in (*ledgers, *(chart for chart in shown if _is_of_memory(chart)))],
        differing=differing_settings(runs) if len(runs) > 1 else [],
        version=__version__,
    )
    return format_page(title, part)


def _is_of_memory(chart: Chart) -> bool:
    return chart.name.startswith(("memory", "phases", "ledger"))


def _title(runs: Sequence[RunRecord]) -> str:
    models = sorted({_model(str(path)) for run in runs if (path := _setting(run, "model", "path"))})
    names = " and ".join(run.name for run in runs) if len(runs) < 3 else format_number(len(runs), "run")
    return f"{names}: {models[0]}" if len(models) == 1 else names


def _model(path: str) -> str:
    """A folder by its last name, a model of the hub by its whole one."""
    return Path(path).name if Path(path).is_absolute() else path


def _of_run(run: RunRecord, style: tuple[str, str], *, with_chart: bool) -> dict[str, Any]:
    return {
        "name": run.name,
        "colour": css_colour(style[0]),
        "facts": list(run_facts(run)),
        "trouble": run_trouble(run),
        "notes": run.notes,
        "ledger": ledger_section(run.ledger, with_chart=with_chart) if run.ledger else "",
        "out_of_memory": out_of_memory_section(run.out_of_memory) if run.out_of_memory else "",
        "plan": list(_predictions(run)),
        "planned_by": run.planned.get("source"),
        "environment": list(_environment(run)),
        "settings": run.settings_text,
    }


def _figure(chart: Chart) -> dict[str, Any]:
    return {
        "title": chart.title,
        "caption": chart.caption,
        "svg": to_svg(chart.figure, name=chart.name, label=f"{chart.title}. {chart.caption}".strip(". ")),
        "key": [(name, css_colour(colour)) for name, (colour, _) in chart.legend.items()] if _has_kinds(chart) else [],
    }


def _has_kinds(chart: Chart) -> bool:
    """True where colours are kinds; those of runs are named once, above all charts."""
    return chart.name.startswith(("memory_step", "phases", "ledger"))


# --- what a person asks first ----------------------------------------------------------------------------------------


def run_facts(run: RunRecord) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (value, what more there is to say)) of what is known."""
    status, rows = run.status, run.rows
    if status:
        code = status.get("exit_code")
        yield "state", (str(status.get("state")), f"exit code {code}" if code else "")
    total = status.get("total_steps") or _setting(run, "train", "max_steps")
    step = rows[-1]["step"] if rows else status.get("step")
    if isinstance(step, int):
        yield "steps", (f"{step:,}", f"of {total:,}" if isinstance(total, int) else "")
    loss = run.curve("loss").known
    if len(loss):
        last = loss[-10:] if len(loss) >= 20 else loss[-1:]
        more = f"mean of the last {len(last)}, " if len(last) > 1 else ""
        yield "loss", (f"{last.mean():.4f}", f"{more}first {loss[0]:.4f}")
    evaluation = run.curve("eval_loss")
    if len(evaluation.known):
        steps = evaluation.steps[~(evaluation.values != evaluation.values)]
        best = int(evaluation.known.argmin())
        yield (
            "evaluation",
            (f"{evaluation.known[-1]:.4f}", f"best {evaluation.known[best]:.4f} at step {steps[best]:,.0f}"),
        )
    speed = _usual(run, "tokens_per_second")
    if speed is not None:
        seconds = _usual(run, "step_seconds")
        yield "tokens/s", (f"{speed:,.0f}", "" if seconds is None else f"median, {format_duration(seconds)} a step")
    tokens, spent = run.curve("tokens").known, run.curve("step_seconds").known
    if len(tokens):
        what = "" if not len(spent) else f"in {format_duration(float(spent.sum()))}"
        yield "tokens", (format_count(float(tokens.sum())), what)
    mfu = _usual(run, "mfu")
    if mfu is not None:
        yield "MFU", (f"{100 * mfu:.1f} %", "median")
    if run.ledger:
        first, _, rest = format_peak(run.ledger).removeprefix("peak ").partition(" (")
        yield "peak memory", (first, rest.rstrip(")"))
    lost = len(rows) - len(loss)
    if lost:
        yield "not finite", (f"{lost:,}", "steps without a loss")


def _fact_names(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name, _ in run_facts(run)))


def _usual(run: RunRecord, key: str) -> float | None:
    """The median over logged steps but the first, which warms up."""
    known = run.curve(key).known
    return statistics.median((known[1:] if len(known) > 1 else known).tolist()) if len(known) else None


def run_trouble(run: RunRecord) -> str:
    """What the run said at its end, unless it finished."""
    state = run.status.get("state")
    if state == "running":
        return "The run was going on when this was written, or has ended without a word."
    return "" if state in (None, "finished") else str(run.status.get("message") or f"The run {state}.")


# --- predictions, environment, settings ------------------------------------------------------------------------------


def _predictions(run: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """(quantity with its unit, predicted, measured, difference), what the plan says beside what the run did."""
    found = run.planned
    peak = (run.ledger.get("peak") or {}).get("measured_gib")
    ranks = run.devices.get("ranks")
    speed = found.get("tokens_per_second_per_gpu")
    speed = speed * ranks if speed is not None and isinstance(ranks, int) else None
    rows = [
        ("allocated of a rank, GiB", found.get("allocated_gib"), peak, ".2f"),
        ("reserved of a rank, GiB", found.get("reserved_gib"), None, ".2f"),
        ("a step, s", found.get("step_seconds"), _usual(run, "step_seconds"), ".2f"),
        ("tokens/s of all ranks", speed, _usual(run, "tokens_per_second"), ",.0f"),
        ("the whole run, s", found.get("run_seconds"), None, ",.0f"),
    ]
    for part, seconds in (found.get("step_time") or {}).items():
        if isinstance(seconds, float | int) and seconds > 0:
            rows.append((f"of a step: {part.replace('_', ' ')}, s", seconds, None, ".2f"))
    for name, predicted, measured, digits in rows:
        if predicted is not None:
            shown = DASH if measured is None else format(measured, digits)
            yield name, format(predicted, digits), shown, format_difference(measured, predicted)


def _environment(run: RunRecord) -> Iterator[tuple[str, str]]:
    devices = run.devices
    if devices.get("device"):
        size = devices.get("memory_bytes")
        yield "device", str(devices["device"]) + (f", {format_bytes(size)}" if isinstance(size, int) else "")
    if devices.get("ranks"):
        yield "ranks", f"{devices['ranks']}, {devices.get('ranks_per_node')} on each machine"
    for name, version in (devices.get("versions") or {}).items():
        yield str(name), str(version)
    yield "folder", str(run.folder)


def differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return (name, value in each run) of the settings that are not equal in all; where a run lies does not count."""
    flat = [dict(_flatten(run.settings)) for run in runs]
    known = [settings for settings in flat if settings]  # what cannot be read does not differ
    names = [name for name in dict.fromkeys(name for settings in flat for name in settings) if name not in _OF_PLACE]
    differing = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    return [(name, [settings.get(name, DASH) for settings in flat]) for name in differing]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _setting(run: RunRecord, section: str, name: str) -> Any:
    found = run.settings.get(section)
    return found.get(name) if isinstance(found, Mapping) else None
