"""A plan as a person reads it in a terminal or a file: the ranked table, the best one taken apart, what else there is.

Takes plain values, as `Plan.to_json` gives them and plan.json holds them, and the timeline of the chosen run. Every
line keeps to the width that is asked for, and needs neither colour nor a terminal.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_trainer.report.memory_picture import SCALE, STACK, Moment, find_peak, format_memory
from fsdp_trainer.units import format_bytes, format_count, format_duration, format_number

GIB = 2**30
WIDE = 120  # from here on a combination stands in one line; below it in two
# The three moments at which the peak of a run can lie, by the phase they are in.
MOMENTS = {"forward": "forward and loss", "backward": "backward", "step": "optimizer step"}
SETTINGS = ("stage", "precision", "optimizer", "recompute", "offload", "batch")
NUMBERS = ("alloc", "reserved", "least", "host", "tokens/s", "whole run", "limited by")
# One blank between columns and a line under the names.
RULED = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def format_plan(
    plan: Mapping[str, Any], timeline: Sequence[Moment] | None = None, *, width: int = 80, top: int = 10
) -> Text:
    """Return the whole answer in lines of at most `width`; `timeline` is the chosen run's, `top` the rows shown."""
    lines = [*_heading(plan, width=width), "", *_table(plan, width=width, top=top), ""]
    lines += [line for note in format_notes(plan, top=top) for line in _wrap(note, width)]
    text = Text("\n".join(lines))
    if timeline is not None and plan["chosen"] is not None:
        text.append("\n\n" + "\n".join(_ledger(plan, timeline, width=width)) + "\n\n")
        text.append_text(format_memory(timeline, width=width - SCALE, height=10))
    return text


def unit_of(plan: Mapping[str, Any]) -> tuple[str, float]:
    """Return the unit that memory of a GPU is shown in, and GiB in it: MiB for a model that is tiny."""
    most = max((found["allocated_gib"] for found in plan["candidates"]), default=1.0)
    return ("GiB", 1.0) if most >= 0.5 else ("MiB", 1024.0)


# Predictions are rounded to 0.0001 GiB, which are 0.1 MiB.
_DIGITS = {"GiB": 2, "MiB": 1}


def device_of(plan: Mapping[str, Any]) -> str:
    """Return what memory is counted on: a GPU, or one of the processes that share a CPU."""
    return "rank" if plan["hardware"]["name"] == "CPU" else "GPU"


# --- what was asked, and the table -----------------------------------------------------------------------------------


def _heading(plan: Mapping[str, Any], *, width: int) -> Iterator[str]:
    config = plan["candidates"][0]["config"] if plan["candidates"] else None
    known = plan["host_bytes"]
    host = "host RAM not said" if known is None else f"host RAM {known / GIB:.0f} GiB a machine"
    asked = f"{plan['hardware']['written']}, {host}"
    if config is not None:
        rows = format_number(config["batch"]["global_batch_size"], "row")
        asked = f"{config['model']['path']} on {asked}; {rows} of {config['data']['seq_len']:,} tokens a step"
    yield from _wrap(asked, width)
    # Model, data and paths are what the plan is for; these could have been searched.
    searched = ("precision", "sharding.", "activation_checkpointing.", "loss.", "optim.", "batch.micro")
    names = [name for name in plan["fixed"] if name.startswith(searched)]
    fixed = f"held fixed: {', '.join(names)}" if names else "nothing is held fixed"
    looked = f"{plan['considered']:,} combinations looked at in {format_duration(plan['seconds'])}"
    yield from _wrap(f"{looked}; {plan['prefer']} first; {fixed}", width)


def _table(plan: Mapping[str, Any], *, width: int, top: int) -> list[str]:
    """The ranked combinations; GPU memory in GiB a GPU, host in GiB a machine, tokens/s of all GPUs together."""
    table = Table(box=RULED, pad_edge=False, padding=0, show_edge=False)
    shown = list(enumerate(plan["candidates"]))[:top]
    table.add_column("#", justify="right")
    rows = [(_mark(plan, place), format_settings(plan, found), format_numbers(plan, found)) for place, found in shown]
    if width >= WIDE:
        for name in SETTINGS:
            table.add_column(name)
        for name in NUMBERS:
            table.add_column(name, justify="left" if name == "limited by" else "right")
        for mark, settings, numbers in rows:
            table.add_row(mark, *settings, *numbers)
    else:
        for upper, lower in zip((*SETTINGS, ""), NUMBERS, strict=True):
            table.add_column(f"{upper}\n{lower}")
        for mark, settings, numbers in rows:
            table.add_row(mark, *(f"{u}\n{n}" for u, n in zip((*settings, ""), numbers, strict=True)))
    lines = _draw(table, width)
    more = len(plan["candidates"]) - len(shown)
    return [*lines, *([f"and {more} more: --top {len(plan['candidates'])}, or --json"] if more else [])]


def _draw(table: Table, width: int) -> list[str]:
    drawn = io.StringIO()
    Console(width=width, file=drawn, color_system=None, legacy_windows=False).print(table)
    return [line.rstrip() for line in drawn.getvalue().splitlines()]


def _mark(plan: Mapping[str, Any], place: int) -> str:
    return f">{place + 1}" if place == plan["chosen"] else str(place + 1)


def format_settings(plan: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """The cells of SETTINGS, short; the batch is micro-batch x accumulation."""
    config = candidate["config"]
    sharding, checkpointing, optim = config["sharding"], config["activation_checkpointing"], config["optim"]
    stage = str(sharding["zero_stage"])
    if sharding["replicate"] > 1:
        stage += f" x{sharding['replicate']}"
    elif sharding["reshard_after_forward"]:
        stage += f" r{sharding['reshard_after_forward']}"
    precision = config["precision"].replace("bf16_pure", "bf16 pure")
    optimizer = optim["name"].replace("adamw_8bit", "adamw 8-bit")
    if optim["state_dtype"] == "bf16":
        optimizer += " bf16"
    mode = checkpointing["mode"]
    mode = f"every {checkpointing['every_n']}" if mode == "every_n_layers" else mode
    offload = sharding["offload"]
    if offload == "optimizer" and optim["offload_step"] == "device":
        offload = "optimizer*"
    micro = config["batch"]["micro_batch_size"]
    batch = f"{micro} x {config['batch']['global_batch_size'] // (micro * plan['hardware']['count'])}"
    return [stage, precision, optimizer, mode, offload, batch]


def format_numbers(plan: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """The cells of NUMBERS; a dash where nothing is known."""
    memory = [candidate["allocated_gib"], candidate["reserved_gib"], candidate["min_capacity_gib"]]
    speed, run = tokens_per_second(plan, candidate), candidate["run_seconds"]
    host, (unit, times) = candidate["host_node_gib"], unit_of(plan)
    return [
        *(("-" if size is None else f"{size * times:.{_DIGITS[unit]}f}") for size in memory),
        f"{host:.0f}" if host >= 10 else f"{host:.1f}",
        "-" if speed is None else f"{speed:,.0f}",
        "-" if run is None else format_duration(run),
        _limit(candidate),
    ]


def tokens_per_second(plan: Mapping[str, Any], candidate: Mapping[str, Any]) -> float | None:
    """Return predicted tokens/s of all GPUs together; None where no rate is known."""
    each = candidate["tokens_per_second_per_gpu"]
    return None if each is None else each * plan["hardware"]["count"]


_SHORT = {"GPU memory bandwidth": "GPU memory", "host optimizer": "host step", "data loader": "data"}


def _limit(candidate: Mapping[str, Any]) -> str:
    if candidate["fits"] is False:
        return "no fit"
    limit = (candidate.get("step_time") or {}).get("limited_by") or "-"
    limit = _SHORT.get(limit, limit)
    return limit if candidate["fits"] else f"{limit} ?"


# --- what the numbers mean -------------------------------------------------------------------------------------------


def format_notes(plan: Mapping[str, Any], *, top: int) -> Iterator[str]:
    """Say what the numbers mean, what each quality gives up, what was chosen or is lacking, and what is held back."""
    shown, device = plan["candidates"][:top], device_of(plan)
    yield (
        f"alloc, reserved and the least a run gets through with: {unit_of(plan)[0]} on each {device}. host: GiB of a "
        f"machine. tokens/s: all {device}s. batch: micro-batch x accumulation. recompute: "
        "activation_checkpointing."
    )
    if any(format_settings(plan, found)[4].endswith("*") for found in shown):
        yield "optimizer*: kept on the host, stepped on the GPU in pieces (optim.offload_step: device)."
    for quality, places in _by_quality(shown).items():
        found = shown[places[0] - 1]
        yield f"gives up, {quality} ({_places(places)}): {found['gives_up']}."
    waiting = [n for n, found in enumerate(shown, start=1) if not found["config"]["checkpoint"]["async_save"]]
    if waiting and "checkpoint.async_save" not in plan["fixed"]:
        yield f"{_places(waiting)}: checkpoint.async_save: false, for the copy of a save has no room in host RAM."
    for place, found in enumerate(shown, start=1):
        if found["fits"] is None:
            yield f"#{place} ?: too close for the closed form; leave out --quick."
            break
    yield from _verdict(plan)
    if margins := list(_margins(plan["margins"])):
        yield f"held back: {', '.join(margins)}."
    yield from calibration_notes(plan["calibration"])
    if plan["host_bytes"] is None and plan["chosen"] is not None:
        needed = plan["candidates"][plan["chosen"]]["host_node_gib"]
        yield f"host RAM was not said: #{plan['chosen'] + 1} needs {needed:.1f} GiB a machine (--host-ram checks it)."


def _by_quality(candidates: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, candidate in enumerate(candidates, start=1):
        found.setdefault(candidate["quality"], []).append(place)
    return found


def _places(places: Sequence[int]) -> str:
    """Name places of the table, those that follow each other as a range: #1 to #4, #6."""
    starts = [place for place in places if place - 1 not in places]
    ends = [place for place in places if place + 1 not in places]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"#{first}" if first == last else f"#{first} to #{last}" for first, last in pairs)


def _verdict(plan: Mapping[str, Any]) -> Iterator[str]:
    chosen, candidates = plan["chosen"], plan["candidates"]
    if chosen is not None:
        down = next((place for place in range(chosen + 1, len(candidates)) if candidates[place]["fits"]), None)
        if down is not None:
            yield f"one step down, #{down + 1}: {compare(plan, candidates[chosen], candidates[down])}."
        return
    yield "NOTHING FITS."
    if plan["nearest"] is not None:
        near = candidates[plan["nearest"]]
        yield f"nearest, #{plan['nearest'] + 1}: lacks {' and '.join(near['lacks']) or 'little'}."
    for remedy in plan["remedies"]:
        yield f"would fit with: {remedy}."


def compare(plan: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in words what `other` changes of `one`, and what that costs or saves."""
    settings = zip(SETTINGS, format_settings(plan, one), format_settings(plan, other), strict=True)
    changed = [f"{name} {new} for {old}" for name, old, new in settings if old != new]
    effects = []
    before, after = tokens_per_second(plan, one), tokens_per_second(plan, other)
    if before and after:
        share = after / before - 1
        effects.append("as fast" if abs(share) < 0.005 else f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}")
    gpu = least_known(other) - least_known(one)
    device, (unit, times) = device_of(plan), unit_of(plan)
    changes = f"{abs(gpu) * times:.2f} {unit} {_more(gpu)} on each {device}"
    effects.append(changes if abs(gpu) * times >= 0.005 else f"the same memory on each {device}")
    host = other["host_node_gib"] - one["host_node_gib"]
    if abs(host) >= 0.5:
        effects.append(f"{abs(host):.0f} GiB {_more(host)} of host RAM")
    return f"{', '.join(changed) or 'the same settings'}: {', '.join(effects)}"


def least_known(candidate: Mapping[str, Any]) -> float:
    """Return the GiB a GPU must have for it: the smallest capacity that survives, else what is allocated."""
    least = candidate["min_capacity_gib"]
    return candidate["allocated_gib"] if least is None else least


def _more(amount: float) -> str:
    return "more" if amount > 0 else "less"


def _margins(margins: Mapping[str, float]) -> Iterator[str]:
    for name, value in margins.items():
        if not value:
            continue
        words = name.removesuffix("_gib").removesuffix("_share").replace("_", " ")
        yield f"{words} {value:.0%}" if name.endswith("_share") else f"{words} {value:.2f} GiB"


def calibration_notes(factors: Mapping[str, float]) -> Iterator[str]:
    """Say how far a finished run moved the predictions; nothing where none was used."""
    for name, factor in factors.items():
        change = "as predicted" if abs(factor - 1) < 0.0005 else f"{factor - 1:+.1%}"
        yield f"calibrated, {name.replace('_', ' ')}: {change} (x {factor:.3f})."


# --- the chosen one --------------------------------------------------------------------------------------------------


def _ledger(plan: Mapping[str, Any], timeline: Sequence[Moment], *, width: int) -> Iterator[str]:
    chosen = plan["candidates"][plan["chosen"]]
    made = "by the closed form" if chosen["source"] == "closed form" else "by a full simulation"
    unit, times = unit_of(plan)
    yield from _wrap(f"#{plan['chosen'] + 1} on one {device_of(plan)}, {made}, in {unit}:", width)
    moments = {phase: find_peak(found) for phase in MOMENTS if (found := [m for m in timeline if m[1] == phase])}
    table = Table(box=RULED, pad_edge=False, padding=0, show_edge=False)
    table.add_column("alive at the highest moment of")
    for phase in moments:
        table.add_column(MOMENTS[phase], justify="right")
    for category in reversed(STACK):
        sizes = [moment[2].get(category, 0) * times / GIB for moment in moments.values()]
        if max(sizes, default=0.0) >= 0.5 * 10 ** -_DIGITS[unit]:
            table.add_row(category.replace("_", " "), *(f"{size:.{_DIGITS[unit]}f}" for size in sizes))
    totals = [sum(moment[2].values()) * times / GIB for moment in moments.values()]
    table.add_row("allocated", *(f"{size:.{_DIGITS[unit]}f}" for size in totals))
    yield from _draw(table, width)
    others = [
        f"{phase} {size * times:.{_DIGITS[unit]}f}"
        for phase, size in chosen["phases"].items()
        if phase not in MOMENTS and size is not None
    ]
    if others:
        yield from _wrap(f"other phases: {', '.join(others)}.", width)
    of = "of the machine for" if device_of(plan) == "rank" else "of"
    yield from _wrap(f"torch can have {chosen['limit']:.2f} GiB {of} each {device_of(plan)}.", width)


def summarize(plan: Mapping[str, Any]) -> str:
    """Return the chosen combination and what is predicted of it in one line, for a log."""
    chosen = plan["candidates"][plan["chosen"]]
    stage, precision, optimizer, mode, offload, batch = format_settings(plan, chosen)
    speed = tokens_per_second(plan, chosen)
    memory, limit = (format_bytes(chosen[name] * GIB) for name in ("allocated_gib", "limit"))
    return (
        f"planned for {plan['hardware']['written']}: stage {stage}, {precision}, {optimizer}, checkpointing {mode}, "
        f"offload {offload}, micro-batch x accumulation {batch}; predicted {memory} allocated of "
        f"{limit} on each" + (f", {format_count(speed)} tokens/s" if speed else "")
    )


def _wrap(text: str, width: int) -> list[str]:
    return [line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width)]
