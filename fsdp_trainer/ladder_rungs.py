"""The rungs of a ladder as data: which technique each adds, and the settings it is measured with.

The usual ones climb from nothing applied, one technique a rung, each on top of those before; one's own come from a
file, each over the settings of the run. All are checked before the first is measured.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_origins import leaf_names
from fsdp_trainer.config_reading import (
    dotted_names,
    find_unknown_keys,
    format_value,
    merge_settings,
    parse_yaml,
    raise_problems,
    read_settings_text,
)
from fsdp_trainer.errors import ConfigError

# The first step allocates and warms up, the second is traced: the others are timed.
LEAST_STEPS, STEPS = 3, 5

# What a rung may change; anything else would compare different work, or nothing that is measured.
CHANGEABLE = (
    *("sharding.", "activation_checkpointing.", "loss.", "compile.", "precision", "model.attention"),
    *("optim.name", "optim.state_dtype", "optim.implementation", "optim.offload_step", "batch.micro_batch_size"),
)


@dataclass(frozen=True)
class Rung:
    """One rung: `settings` are what it changes of those below (dotted names), `config` the whole of its run.

    `config` is None where the settings are refused or can have no effect; `refusal` says why.
    """

    place: int
    name: str
    what: str
    settings: Mapping[str, Any]
    config: Config | None
    refusal: str = ""

    @property
    def folder(self) -> str:
        """The name of its run folder inside the ladder's."""
        return f"{self.place:02d}-{_in_a_path(self.name)}"


def make_rungs(
    config: Config,
    *,
    processes: int,
    steps: int,
    out: Path,
    own: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Rung, ...]:
    """Return the rungs of `config` on so many processes, each of `steps` steps in a folder of its own below `out`.

    `own` replaces the usual rungs, as `read_rungs` gives them. Raises ConfigError for one that is wrong; a usual rung
    that the settings refuse is left out of those above it and says so.
    """
    if steps < LEAST_STEPS:
        raise ConfigError(
            "A rung has too few steps to be timed: the first warms up and the second is traced.",
            values=f"steps: {steps}",
            fix=f"give {LEAST_STEPS} or more",
        )
    base = merge_settings(config.to_dict(), measured_alone(steps=steps))
    rungs = _own(base, own, processes=processes) if own is not None else _usual(config, base, processes=processes)
    return tuple(_placed(rung, out) for rung in rungs)


def choose_rungs(rungs: Sequence[Rung], only: Sequence[str]) -> tuple[Rung, ...]:
    """Return the rungs of these names, as they are in the whole ladder; all where none is named."""
    names = [rung.name for rung in rungs]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"the rungs are {', '.join(names)}"
            raise ConfigError("There is no rung of this name.", values=name, fix=fix)
    return tuple(rung for rung in rungs if not only or rung.name in only)


def measured_alone(*, steps: int) -> dict[str, Any]:
    """Return what every rung sets beside its technique: a few steps from the start, and nothing written but numbers.

    The learning rate is constant, because a warm-up is longer than the few steps.
    """
    nothing = Config()
    return {
        "train": {"max_steps": steps},
        "schedule": nothing.schedule.model_dump(mode="json") | {"name": "constant", "warmup_ratio": 0.0},
        "data": {"eval": None},
        "eval": nothing.eval.model_dump(mode="json"),
        "checkpoint": nothing.checkpoint.model_dump(mode="json") | {"enabled": False, "resume": "never"},
        "export": {"at_end": False},
        "log": nothing.log.model_dump(mode="json") | {"samples": 0},
        "rehearse": False,
        "profile": nothing.profile.model_dump(mode="json"),
    }


# --- the usual rungs -------------------------------------------------------------------------------------------------

NOTHING_APPLIED: Mapping[str, Any] = {
    "sharding.zero_stage": 0,
    "sharding.replicate": 1,
    "sharding.reshard_after_forward": None,
    "sharding.offload": "none",
    "activation_checkpointing.mode": "none",
    "activation_checkpointing.every_n": 1,
    "activation_checkpointing.offload": False,
    "loss.kind": "plain",
    "loss.chunk_tokens": None,
    "optim.name": "adamw",
    "optim.state_dtype": "fp32",
    "optim.offload_step": "host",
}


def usual_techniques(config: Config) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    """Return (name, what it does, settings) of the usual rungs, in order; sizes that `config` names are kept."""
    chunk, step = config.loss.chunk_tokens, config.optim.offload_step
    eight_bit = {"optim.name": "adamw_8bit", "optim.implementation": "fused"}
    optimizer = {"sharding.offload": "optimizer", "optim.implementation": "fused", "optim.offload_step": step}
    return (
        ("baseline", "nothing applied", NOTHING_APPLIED),
        ("checkpointing", "activations computed again", {"activation_checkpointing.mode": "full"}),
        ("stage1", "optimizer state sharded", {"sharding.zero_stage": 1}),
        ("stage2", "gradients sharded too", {"sharding.zero_stage": 2}),
        ("stage3", "weights sharded too", {"sharding.zero_stage": 3}),
        ("chunked_loss", "logits a chunk at a time", {"loss.kind": "chunked", "loss.chunk_tokens": chunk}),
        ("8bit", "optimizer averages in 8 bits", eight_bit),
        ("optimizer_offload", "optimizer on the host", optimizer),
        (
            "parameter_offload",
            "weights on the host too",
            {"sharding.offload": "params", "optim.offload_step": "host"},
        ),
    )


def _usual(config: Config, base: Mapping[str, Any], *, processes: int) -> list[Rung]:
    found: list[Rung] = []
    applied: dict[str, Any] = {}
    for place, (name, what, changes) in enumerate(usual_techniques(config), start=1):
        below = merge_settings(_copy(base), applied)
        shown = {leaf: value for leaf, value in changes.items() if value != _at(below, leaf)}
        tried = {**applied, **changes}
        made: Config | None = None
        refusal = ""
        try:
            made = _checked(base, tried, processes=processes)
        except ConfigError as error:
            refusal = f"{error}\n  left out of the rungs above"
        else:
            applied = tried  # on one rank too: offloading parameters needs a stage
            if processes == 1 and "sharding.zero_stage" in changes and changes["sharding.zero_stage"]:
                made, refusal = None, "one rank has nothing to shard with"
        found.append(Rung(place, name, what, shown, made, refusal))
    return found


def _checked(base: Mapping[str, Any], changes: Mapping[str, Any], *, processes: int) -> Config:
    config = Config.from_dict(merge_settings(_copy(base), changes))
    config.check_world(processes)
    return config


def _copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy section by section, as far as `merge_settings` changes anything in place."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


def _placed(rung: Rung, out: Path) -> Rung:
    if rung.config is None:
        return rung
    settings = rung.config.to_dict() | {"output_dir": str(out / rung.folder)}
    return Rung(rung.place, rung.name, rung.what, rung.settings, Config.from_dict(settings), rung.refusal)


def _in_a_path(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "rung"


# --- one's own -------------------------------------------------------------------------------------------------------


def read_rungs(path: str | Path) -> list[Mapping[str, Any]]:
    """Read a list of {name, settings, what} from a YAML file; `check_own` says what is wrong with one."""
    text = read_settings_text(path)
    found = parse_yaml(text, source=str(path), what="the rungs are", fix=_SHAPE)
    if not isinstance(found, list) or not found:
        kind = "nothing" if not found else "no list"
        raise ConfigError("The file holds no list of rungs.", values=f"{path} holds {kind}", fix=_SHAPE)
    return found


_SHAPE = "write a list such as `- {name: bf16 sums, settings: {sharding.reduce_dtype: bf16}}`"


def _own(base: Mapping[str, Any], own: Sequence[Mapping[str, Any]], *, processes: int) -> list[Rung]:
    """Each of one's own rungs over the settings of the run; what is refused of one is refused before any is run."""
    found: list[Rung] = []
    for place, entry in enumerate(own, start=1):
        name = _name_of(entry, place=place, taken=[rung.name for rung in found])
        settings = merge_settings({}, entry.get("settings") or {})
        try:
            raise_problems(find_unknown_keys(settings, root=Config))
            changes = {leaf: _at(settings, leaf) for key in settings for leaf in leaf_names(key, settings[key])}
            _refuse_other_work(changes)
            config = _checked(base, changes, processes=processes)
        except ConfigError as error:
            raise ConfigError(f"rung {name}: {error.what}", values=error.values, fix=error.fix) from None
        what = str(entry.get("what") or ", ".join(f"{leaf}: {format_value(v)}" for leaf, v in changes.items()))
        found.append(Rung(place, name, what or "as the settings are", changes, config))
    return found


def _name_of(entry: Any, *, place: int, taken: Sequence[str]) -> str:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("settings") or {}, Mapping):
        raise ConfigError("A rung is a name with settings.", values=f"rung {place}: {format_value(entry)}", fix=_SHAPE)
    keys = ("name", "settings", "what")
    for key in entry:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            fix = f"did you mean {near[0]}?" if near else f"a rung has {', '.join(keys)}"
            raise ConfigError("A rung has no such key.", values=f"rung {place}: {key}", fix=fix)
    name = entry.get("name")
    if not isinstance(name, str | int) or not str(name).strip() or "," in str(name):
        values = f"rung {place}: name: {format_value(name)}"
        raise ConfigError("A rung needs a name, without a comma.", values=values, fix=_SHAPE)
    if str(name) in taken:
        raise ConfigError(
            "Two rungs have one name.",
            values=f"rungs {taken.index(str(name)) + 1} and {place}: {name}",
            fix="rename one",
        )
    return str(name)


def _refuse_other_work(changes: Mapping[str, Any]) -> None:
    wrong = [name for name in changes if not name.startswith(CHANGEABLE)]
    if wrong:
        allowed = [name for name in dotted_names(Config) if name.startswith(CHANGEABLE)]
        raise ConfigError(
            "A ladder compares techniques on the same work, so this is the same on every rung.",
            values=", ".join(f"{name}: {format_value(changes[name])}" for name in wrong),
            fix=f"set it in the settings file; a rung may change {', '.join(allowed)}",
        )


def _at(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value[part]
    return value
