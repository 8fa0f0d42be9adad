"""A plan as a notebook shows it: one piece of HTML that needs nothing from elsewhere, on a phone as on a desktop.

It takes the page's own text colour and background, so that light and dark are the notebook's; every value is escaped.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_trainer.report.memory_picture import COLOURS, STACK
from fsdp_trainer.report.plan_text import NUMBERS, SETTINGS, format_notes, format_numbers, format_settings

SHOWN = 10


def format_plan_html(plan: Mapping[str, Any], *, top: int = SHOWN) -> str:
    """Return the ranked table, what it means, and the chosen combination's peak by kind; `plan` as `Plan.to_json`."""
    shown = plan["candidates"][:top]
    first = shown[0]["config"] if shown else None
    chosen = plan["candidates"][plan["chosen"]] if plan["chosen"] is not None else None
    return _template().render(
        hardware=plan["hardware"]["written"],
        model=first["model"]["path"] if first else "",
        rows=first["batch"]["global_batch_size"] if first else 0,
        seq_len=first["data"]["seq_len"] if first else 0,
        considered=plan["considered"],
        seconds=plan["seconds"],
        names=(*SETTINGS, *NUMBERS),
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
        bars=_bars(chosen) if chosen is not None else (),
    )


def _bars(chosen: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The kinds at the peak with their share of what torch can have of a GPU."""
    found = chosen["breakdown"]
    whole = max(chosen["limit"], chosen["allocated_gib"])
    return [
        {
            "name": name.replace("_", " "),
            "gib": found[name],
            "percent": 100 * found[name] / whole,
            "colour": COLOURS[name],
        }
        for name in STACK
        if found.get(name, 0.0) >= 0.0005 * whole
    ]


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    text = Path(__file__).with_name("plan.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)
