"""A plan as a notebook shows it: one piece of HTML that needs nothing from elsewhere, on a phone as on a desktop.

It takes the page's own text colour and background, so that light and dark are the notebook's; every value is escaped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_trainer.report.charts import colour_of, css_colour
from fsdp_trainer.report.memory_picture import STACK
from fsdp_trainer.report.page import render
from fsdp_trainer.report.plan_text import (
    NUMBERS,
    SETTINGS,
    device_of,
    format_notes,
    format_numbers,
    format_settings,
    unit_of,
)

SHOWN = 10


def format_plan_html(plan: Mapping[str, Any], *, top: int = SHOWN) -> str:
    """Return the ranked table, what it means, and the chosen combination's peak by kind; `plan` as `Plan.to_json`."""
    shown = plan["candidates"][:top]
    first = shown[0]["config"] if shown else None
    chosen = plan["candidates"][plan["chosen"]] if plan["chosen"] is not None else None
    unit, times = unit_of(plan)
    units = {"alloc": unit, "reserved": unit, "least": unit, "host": "GiB"}
    return str(
        render(
            "plan.html.jinja",
            hardware=plan["hardware"]["written"],
            model=first["model"]["path"] if first else "",
            rows=first["batch"]["global_batch_size"] if first else 0,
            seq_len=first["data"]["seq_len"] if first else 0,
            considered=plan["considered"],
            seconds=plan["seconds"],
            names=(*SETTINGS, *(f"{name}, {units[name]}" if name in units else name for name in NUMBERS)),
            first_number=len(SETTINGS),
            device=device_of(plan),
            unit=unit,
            times=times,
            candidates=[
                {
                    "place": place + 1,
                    "chosen": place == plan["chosen"],
                    "fits": found["fits"],
                    "cells": [*format_settings(plan, found), *format_numbers(plan, found)],
                    "lacks": found["lacks"],
                }
                for place, found in enumerate(shown)
            ],
            more=len(plan["candidates"]) - len(shown),
            notes=list(format_notes(plan, top=top)),
            chosen=chosen,
            bars=_bars(chosen, times) if chosen is not None else (),
        )
    )


def _bars(chosen: Mapping[str, Any], times: float) -> Sequence[dict[str, Any]]:
    """The kinds at the peak with their share of what torch can have of a GPU."""
    found = chosen["breakdown"]
    whole = max(chosen["limit"], chosen["allocated_gib"])
    return [
        {
            "name": name.replace("_", " "),
            "size": found[name] * times,
            "percent": 100 * found[name] / whole,
            "colour": css_colour(colour_of(name)),
        }
        for name in STACK
        if found.get(name, 0.0) >= 0.0005 * chosen["allocated_gib"]
    ]
