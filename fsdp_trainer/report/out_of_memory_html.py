"""Why a run ran out of memory and what would fit, as a part of a page; takes what out_of_memory.json holds."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fsdp_trainer.report.charts import colour_of, css_colour, name_of
from fsdp_trainer.report.ledger_html import DASH
from fsdp_trainer.report.page import render


def out_of_memory_section(found: Mapping[str, Any]) -> Markup:
    """Return where it was, what was asked and what was there, what held most, and which change frees how much."""
    if found["phase"] is None:  # a process that was killed has said nothing
        where = f"after step {found['step']}; the kernel killed a process of the run"
    else:
        where = f"rank {found['rank']}, {name_of(found['phase'])}, step {found['step']}"
    if found["layer"] is not None:
        where += f", layer {found['layer']}"
    if found["module"]:
        where += f" ({found['module']})"
    sizes = [
        *(("asked for", "requested_gib"), ("free", "free_gib"), ("in all", "total_gib")),
        *(("allocated", "allocated_gib"), ("reserved", "reserved_gib"), ("predicted peak", "predicted_gib")),
    ]
    batch = found["batch"] or {}
    return render(
        "out_of_memory.html.jinja",
        where=where,
        place="host RAM" if found["place"] == "host" else "device memory",
        facts=[(name, f"{found[key]:.2f} GiB") for name, key in sizes if found[key] is not None],
        batch=", ".join(f"{name_of(name)} {value:,}" for name, value in batch.items() if isinstance(value, int)),
        largest=[
            (name_of(row["category"]), css_colour(colour_of(row["category"])), f"{row['gib']:.2f}")
            for row in found["largest"] or ()
        ],
        advice=[
            {
                "change": row["change"],
                "frees": _size(row["frees_gib"]),
                "peak": _size(row["peak_gib"]),
                "fits": {True: "yes", False: "no", None: DASH}[row["fits"]],
                "slower": DASH if row["slower_percent"] is None else f"{row['slower_percent']:.0f} %",
            }
            for row in found["advice"] or ()
        ],
        command=found["command"] or "",
        snapshot=found["snapshot"] or "",
    )


def _size(gib: float | None) -> str:
    return DASH if gib is None else f"{gib:.2f}"
