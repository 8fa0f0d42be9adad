"""Writes docs/configuration.md from the settings' own JSON Schema, so that the page cannot say something else.

Run `python docs/make_configuration.py` after a change to a setting; a test compares the page with what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# The settings file

Written by `docs/make_configuration.py` from the settings themselves: change the description there, not here.

A run is described by one YAML file. Every setting has a default, so a file holds only what differs. On the command line
a setting is `--section.key=value`, which goes before the file. Unknown keys are refused with the nearest known name,
and so is a setting that could have no effect beside the others. "Comes later" marks what is in the contract and refused
until it works. Numbers follow YAML 1.2: `1e-5` is a number. `fsdp-trainer schema` prints the JSON Schema, which editors
can check a file with.

The number of processes is not in it: `fsdp-trainer train --processes N` or an Accelerate profile says it, and gradient
accumulation follows as `batch.global_batch_size / (batch.micro_batch_size x processes)`, which must be whole.
"""


def format_page(schema: dict[str, Any]) -> str:
    """Formats the whole page from the JSON Schema of Config."""
    sections, top = [], []
    for name, field in schema["properties"].items():
        if "$ref" in field:
            section = schema["$defs"][field["$ref"].rsplit("/", 1)[-1]]
            sections.append(f"## {name}\n\n{section['description']}\n\n{_format_table(section['properties'])}")
        else:
            top.append((name, field))
    return "\n".join([INTRODUCTION, *sections, f"## Outside any section\n\n{_format_table(dict(top))}"])


def _format_table(properties: dict[str, Any]) -> str:
    rows = ["| setting | default | takes | what it does |", "|---|---|---|---|"]
    for name, field in properties.items():
        default = json.dumps(field["default"])
        cells = [f"`{name}`", f"`{default}`", _format_kind(field), field["description"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _format_kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return ", or ".join(_format_kind(option) for option in field["anyOf"])
    if "$ref" in field:
        return "mapping"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "value"))
    if kind == "array" and "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} numbers"
    if kind == "array":
        return f"list of ({_format_kind(field['items'])})"
    words = {"string": "text", "integer": "whole number", "object": "mapping", "boolean": "`true`, `false`"}
    signs = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    limits = [f"{sign} {field[key]}" for key, sign in signs if key in field]
    return " ".join([words.get(kind, kind), *limits])


def main() -> None:
    """Writes the page beside this script."""
    PAGE.write_text(format_page(Config.model_json_schema()), encoding="utf-8")


if __name__ == "__main__":
    main()
