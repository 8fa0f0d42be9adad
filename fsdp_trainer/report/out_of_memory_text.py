"""Why a run ran out of memory and what would fit, as lines for a terminal; takes what out_of_memory.json holds."""

from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 12
_WIDEST = 44
MOST_ROWS = 8


def format_out_of_memory(found: Mapping[str, Any]) -> str:
    """Return where it was, what was asked and what was there, what held most, and which change frees how much."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    place = "host memory" if found["place"] == "host" else "device memory"
    yield f"Out of {place}" + (f" on rank {found['rank']}." if found["rank"] is not None else ".")
    yield _row("where", _where(found))
    if amounts := _amounts(found):
        yield _row("memory", amounts)
    if found["largest"]:
        yield _row("held most", ", ".join(f"{_words(row['category'])} {_size(row['gib'])}" for row in found["largest"]))
    if batch := found["batch"]:
        yield _row("batch", f"{batch['rows']} rows of {batch['longest']} tokens in a micro-batch")
    if (predicted := found["predicted_gib"]) is not None:
        yield _row("predicted", f"peak {_size(predicted)}{_distance(found)}")
    if found["snapshot"]:
        yield _row("snapshot", f"{found['snapshot']}, for pytorch.org/memory_viz")
    yield from _advice(found)


def _where(found: Mapping[str, Any]) -> str:
    if found["phase"] is None:  # a process that was killed has said nothing
        return f"after step {found['step']}; the kernel killed a process of the run"
    where = f"{found['phase']}, step {found['step']}" if found["step"] else found["phase"]
    if found.get("rehearsal"):
        where = f"{where} of the rehearsal, before the first step"
    if found["layer"] is not None:
        where += f", layer {found['layer']}"
    return f"{where} ({found['module']})" if found["module"] else where


def _amounts(found: Mapping[str, Any]) -> str:
    names = [("asked for", "requested"), ("free", "free"), ("in all", "total"), ("allocated", "allocated")]
    names.append(("reserved", "reserved"))
    sizes = [(words, found[f"{name}_gib"]) for words, name in names]
    return ", ".join(f"{words} {_size(size)}" for words, size in sizes if size is not None)


def _distance(found: Mapping[str, Any]) -> str:
    allocated, requested = found["allocated_gib"], found["requested_gib"]
    if allocated is None or not found["predicted_gib"]:
        return ""
    needed = allocated + (requested or 0)
    return f"; {_size(needed)} were needed here ({100 * (needed / found['predicted_gib'] - 1):+.1f} %)"


def _advice(found: Mapping[str, Any]) -> Iterator[str]:
    rows = found["advice"][:MOST_ROWS]
    if not rows:
        yield f"No change can be worked out: {found.get('no_advice') or 'none of those that are known frees anything'}."
        return
    width = max([len(row["change"]) for row in rows if len(row["change"]) <= _WIDEST], default=_WIDEST)
    yield ""
    yield f"{'one change alone':{width}}  {'frees':>10}  {'peak then':>10}  fits  slower"
    for row in rows:
        slower = "-" if row["slower_percent"] is None else f"{row['slower_percent']:.0f} %"
        fits = "yes" if row["fits"] else "no"
        sizes = f"{_size(row['frees_gib']):>10}  {_size(row['peak_gib']):>10}"
        change = row["change"]
        if len(change) > width:  # several together
            yield change
            change = "  together"
        line = f"{change:{width}}  {sizes}  {fits:4}  {slower:>6}"
        yield line + (f"  {row['gives_up']}" if row["gives_up"] else "")
    yield ""
    if found["command"]:
        yield "To go on:"
        yield f"  {found['command']}"
    elif any(row["fits"] for row in rows):
        yield "To go on, make the first change and start the same command again."
    if found.get("refused"):
        yield f"  ({', '.join(found['refused'])} cannot change in a run that has checkpoints: it begins anew elsewhere)"


def _row(name: str, text: str) -> str:
    return f"  {name:{_WIDTH}}{text}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"
