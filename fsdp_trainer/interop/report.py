"""What an import found, as lines for the terminal, as a page, and as JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import format_value
from fsdp_trainer.interop.verdicts import KINDS, Import, Verdict


def format_report(imported: Import) -> str:
    """Return the report as lines: what needs attention first, every key once, with its place."""
    lines = [f"{imported.source} ({imported.tool}): {format_counts(imported)}"]
    for kind in KINDS:
        if found := imported.of_kind(kind):
            lines += ["", f"{kind}:"]
            lines += [f"  {_place(v, imported)}  {v.key.name}: {format_value(v.key.value)}{_becomes(v)}" for v in found]
    if imported.added:
        lines += ["", "not in the file:"]
        lines += [f"  {added.name}: {format_value(added.value)}  ({added.why})" for added in imported.added]
    if imported.remarks:
        lines += ["", "about the file:", *(f"  {note}" for note in imported.remarks)]
    return "\n".join(lines)


def format_counts(imported: Import) -> str:
    """Return how many keys have which verdict."""
    counts = [(len(imported.of_kind(kind)), kind) for kind in reversed(KINDS)]
    return ", ".join(f"{count} {kind}" for count, kind in counts if count) or "no keys"


def _place(verdict: Verdict, imported: Import) -> str:
    key = verdict.key
    file = "" if key.file == imported.source else f"{Path(key.file).name}:"
    return f"{file}{key.line}:{key.column}"


def _becomes(verdict: Verdict) -> str:
    settings = ", ".join(f"{name}: {format_value(value)}" for name, value in verdict.settings.items())
    if verdict.kind == "refused":
        instead = f"with --allow-differences {settings}" if settings else ""
        if not (verdict.blocks or settings):
            instead = "with --allow-differences it is left out"
        return f"\n      {'; '.join(part for part in (verdict.text, instead) if part)}"
    arrow = f" -> {settings}" if settings else ""
    return f"{arrow}  ({verdict.text})" if verdict.text else arrow


def format_json(imported: Import) -> dict[str, Any]:
    """Return the report as plain values: one object a key, in the order of the file."""
    return {
        "source": imported.source,
        "tool": imported.tool,
        "processes": imported.processes,
        "counts": {kind: len(imported.of_kind(kind)) for kind in KINDS},
        "keys": [
            {
                "key": verdict.key.name,
                "value": verdict.key.value,
                "file": verdict.key.file,
                "line": verdict.key.line,
                "column": verdict.key.column,
                "verdict": verdict.kind,
                "settings": dict(verdict.settings),
                "text": verdict.text,
            }
            for verdict in imported.verdicts
        ],
        "added": [{"setting": a.name, "value": a.value, "why": a.why} for a in imported.added],
        "notes": list(imported.remarks),
    }


def format_markdown(imported: Import, config: Config, *, memory: Sequence[str] = ()) -> str:
    """Return the report as a page: counts, one table a verdict, what was added, the arithmetic of a step, memory."""
    lines = [f"# What became of {imported.source}", "", f"Read as {imported.tool}: {format_counts(imported)}.", ""]
    for kind in KINDS:
        if found := imported.of_kind(kind):
            lines += [f"## {kind.capitalize()}", "", *_rows(found, imported), ""]
    if imported.added:
        lines += ["## Not in the file", "", "| setting | value | why |", "|---|---|---|"]
        lines += [f"| `{a.name}` | `{_cell(format_value(a.value))}` | {_cell(a.why)} |" for a in imported.added]
        lines.append("")
    if imported.remarks:
        lines += ["## About the file", "", *(f"- {note}" for note in imported.remarks), ""]
    lines += ["## A step", "", _format_step(imported, config), ""]
    if memory:
        lines += ["## Memory", "", *memory, ""]
    return "\n".join(lines)


def _rows(verdicts: list[Verdict], imported: Import) -> Iterator[str]:
    yield "| line | key | value | becomes | |"
    yield "|---|---|---|---|---|"
    for verdict in verdicts:
        settings = ", ".join(f"`{name}: {format_value(value)}`" for name, value in verdict.settings.items())
        cells = [
            _place(verdict, imported),
            f"`{verdict.key.name}`",
            f"`{format_value(verdict.key.value)}`",
            settings,
            verdict.text,
        ]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _format_step(imported: Import, config: Config) -> str:
    size, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    if imported.processes is None:
        return f"{size} rows; the number of processes was not known, so no Accelerate profile was written."
    accumulation = config.check_world(imported.processes)
    return (
        f"{size} rows = {micro} a micro-batch x {accumulation} accumulated x {imported.processes} processes, "
        f"stage {config.sharding.zero_stage}, offload {config.sharding.offload}, {config.precision}."
    )
