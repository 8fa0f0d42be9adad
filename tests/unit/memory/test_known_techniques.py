"""A technique that the simulation does not know is refused, and a setting that nobody has looked at is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from fsdp_trainer.config import Config, Section
from tests.ranks import run_ranks

# Settings with a fixed choice that change no tensor of a step: data, saving, logging and the like; and numbers of ranks
# and stages, which are simulated whatever they are. A new setting belongs here or into simulation.KNOWN, with a test.
NO_TECHNIQUE = {
    "model.init",
    "model.trust_remote_code",
    "data.format",
    "data.train_on",
    "data.packing",
    "data.sanitize_control_tokens",
    "data.streaming",
    "data.on_too_long",
    "data.on_bad_record",
    "data.shuffle",
    "sharding.reduce_dtype",
    "schedule.name",
    "schedule.warmup_shape",
    "schedule.convention",
    "train.on_nonfinite",
    "eval.at_end",
    "checkpoint.enabled",
    "checkpoint.keep_best",
    "checkpoint.async_save",
    "export.at_end",
    "export.dtype",
    "log.trace_step",
    "log.report",
    "rehearse",
}


def choices(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield every setting that has a fixed choice of values, with the values."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from choices(kind, f"{prefix}{name}.")
        elif values := list(_values(kind)):
            yield prefix + name, values


def _values(kind: Any) -> Iterator[Any]:
    if kind is bool:
        yield from (False, True)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind) if get_origin(kind) is not None and get_origin(kind) not in (tuple, dict) else ():
            yield from _values(part)


def known() -> dict[str, frozenset[Any]]:
    from fsdp_trainer.memory.simulation import KNOWN

    return dict(KNOWN)


def refuses(path: str, value: Any) -> bool:
    from fsdp_trainer.errors import ConfigError
    from fsdp_trainer.memory.simulation import check_known

    config: Any = Config()
    *sections, name = path.split(".")
    updates: Any = {name: value}
    if sections:  # past the validators: what comes later must be refused here as well
        updates = {sections[0]: getattr(config, sections[0]).model_copy(update=updates)}
    try:
        check_known(config.model_copy(update=updates))
    except ConfigError as error:
        return path in str(error)
    return False


def refused(cases: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [case for case in cases if refuses(*case)]


def test_every_setting_with_a_choice_was_looked_at() -> None:
    found = {path for path, _ in choices()}
    assert found - NO_TECHNIQUE == set(run_ranks(known, 1)[0])
    assert found >= NO_TECHNIQUE


def test_what_is_not_known_is_refused_by_name() -> None:
    table = run_ranks(known, 1)[0]
    wanted = [(path, value) for path, values in choices() if path in table for value in values]
    wanted += [("optim.name", "an_optimizer_of_tomorrow")]
    answers = run_ranks(refused, 1, wanted)[0]
    assert answers == [(path, value) for path, value in wanted if value not in table[path]]
    assert ("optim.name", "adamw_8bit") in answers or "adamw_8bit" in table["optim.name"]


@pytest.mark.parametrize("path", ["optim.name", "precision", "activation_checkpointing.mode"])
def test_choices_are_found(path: str) -> None:
    """The walk over the settings must not come back empty."""
    assert len(dict(choices())[path]) > 2
