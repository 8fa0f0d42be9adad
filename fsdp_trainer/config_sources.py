"""One source of data in the settings: what it may say, and what is wrong with one in its author's words."""

import difflib
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from fsdp_trainer.config_reading import WRONG_PART, Takes, format_value
from fsdp_trainer.config_types import Section, Text, tuple_from_list

# How a message says what data.train, data.columns and data.eval take.
SOURCES = Takes("a path, a mapping {path, weight, split, subset}, or a list of these")
RENAMED = Takes("a mapping of names, such as {prompt: question, completion: answer}")
HELD_OUT = Takes("a share above 0 and below 1, a path, a mapping {path, split, subset}, or a list of these")

# What data/known_keys.py calls the columns of a record.
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "output", "text")
COLUMNS += ("tools", "system", "input", "history", "chat_template_kwargs")


class SourceConfig(Section):
    """One source of data, where it takes more than a path to say."""

    path: Text = Field(description="A file, a folder or a hub id.")
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Its share of the rows of an epoch, relative to the other sources' weights."
    )
    split: Text | None = Field(default=None, description="Split of a hub data set; null takes train.")
    subset: Text | None = Field(default=None, description="Subset of a hub data set; null takes its default.")


def check_sources(value: Any) -> Any:
    """Name the source and the part of it that is wrong; pydantic would only say that no kind of source fits."""
    if isinstance(value, list | tuple) and not value:
        fix = "set {path} to a file, a folder or a hub id, or a list of these"
        raise _wrong_source("an empty list names no data", "[]", fix)
    for entry in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(entry, dict):
            continue
        known, shown = list(SourceConfig.model_fields), format_value(entry)
        if unknown := [str(key) for key in entry if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"a source has {', '.join(known)}"
            raise _wrong_source(f"a source has no setting {unknown[0]}", shown, fix)
        if not entry.get("path"):
            raise _wrong_source("a source names no path", shown, "give path: a file, a folder or a hub id")
        weight = entry.get("weight")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if weight is not None and not (is_number and 0 < weight < float("inf")):
            fix = "set a number above 0 without quotes, or leave the source out of the list"
            raise _wrong_source(f"{format_value(weight)} is no weight of a source", shown, fix)
    return value


def _wrong_source(what: str, found: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError(WRONG_PART, "{what}", {"what": what, "found": found, "fix": fix})


SomeSources = Annotated[tuple[Text | SourceConfig, ...], Field(min_length=1), BeforeValidator(tuple_from_list)]
