"""Reads settings from YAML and flags, and turns what is wrong with them into one message that lists all of it.

Knows nothing of single settings: names and types come from the pydantic models it is given.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from fsdp_trainer.config_origins import Origins, leaf_names
from fsdp_trainer.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]

# What other trainers call it. The names are too far from ours for a spelling match.
FOREIGN_NAMES = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "train_batch_size": "batch.global_batch_size",
    "batch_size": "batch.global_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size",
    "gradient_checkpointing": "activation_checkpointing.mode",
    "gradient_clipping": "optim.max_grad_norm",
    "lr_scheduler_type": "schedule.name",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "mixed_precision": "precision",
    "bf16": "precision",
    "fp16": "precision",
    "model_name_or_path": "model.path",
    "dataset": "data.train",
    "report_to": "log.trackers",
    "logging_steps": "log.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_latest",
    "eval_steps": "eval.every_steps",
    "resume_from_checkpoint": "checkpoint.resume",
    "attn_implementation": "model.attention",
    "fsdp": "sharding.zero_stage",
    "sharding_strategy": "sharding.zero_stage",
    "cpu_offload": "sharding.offload",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the settings; `paths` are the dotted names it depends on."""

    what: str
    found: str
    fix: str
    paths: tuple[str, ...] = ()


def raise_problems(problems: Sequence[Problem], *, source: str = "", origins: Origins | None = None) -> None:
    """Raise one ConfigError that lists every problem; nothing happens when there is none.

    `source` names where all of it was found; with `origins` each problem says where its own values were written.
    """
    where = f" ({source})" if source else ""
    found = [problem.found + _written(problem, origins) for problem in problems]
    if len(problems) == 1:
        raise ConfigError(problems[0].what, values=found[0] + where, fix=problems[0].fix)
    if problems:
        lines = [f"{len(problems)} settings are wrong{where}"]
        for number, problem in enumerate(problems, start=1):
            lines += [f"{number}. {problem.what}", f"     found: {found[number - 1]}", f"     to fix: {problem.fix}"]
        raise ConfigError("\n".join(lines))


def _written(problem: Problem, origins: Origins | None) -> str:
    place = origins.describe(problem.paths) if origins is not None else ""
    return f" ({place})" if place else ""


def format_value(value: Any) -> str:
    """Show a value the way it would be written in the file, cut to a readable length."""
    value = _plain(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _plain(value: Any) -> Any:
    """Return models and tuples as the mappings and lists of a settings file, without what was not written."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def parse_yaml(text: str, *, source: str, what: str = "the settings are", fix: str | None = None) -> Any:
    """Parse YAML 1.2, where `1e-5` is a number, `off` is text, and a key may stand once only."""
    found = ""
    try:
        value = YAML(typ="safe", pure=True).load(text)
        if not (found := describe_excess(value)):
            return value
        found += f" ({source})"
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = str(error.problem or error).split("\n")[0].removeprefix("found ")
        found = f"{reason} ({source}{place})"
        if "cannot start any token" in reason and "\\t" in reason:
            found = f"a tab where only spaces may stand ({source}{place})"
    except (YAMLError, ValueError) as error:
        found = f"{error} ({source})"
    except RecursionError:
        found = f"lists or mappings within one another, too many to be read ({source})"
    raise ConfigError(f"{what} not valid YAML", values=found, fix=fix or _YAML_FIX)


MAX_YAML_BYTES, MAX_YAML_VALUES = 2**20, 100_000  # of files written by hand; a page of text has 3,000 bytes


def describe_excess(value: Any) -> str:
    """Say what is wrong with a parsed file whose anchors hold themselves or stand for too much, "" for any other.

    A few lines of anchors of anchors are shared while they are parsed, and gigabytes once they are written out.
    """
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, dict | list | tuple | set):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = MAX_YAML_VALUES  # what it holds of itself
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(map(size, inner))
        return sizes[id(value)]

    try:
        total = size(value)
    except RecursionError:
        return "lists or mappings within one another, too many to be read"
    return (
        f"with its anchors written out it has more than {MAX_YAML_VALUES:,} values" if total > MAX_YAML_VALUES else ""
    )


_YAML_FIX = "correct that place; keys are `name: value`, indented with spaces, each written once"
_FLAG_FIX = "put the whole word in quotes for the shell, as in '--data.train=[a.jsonl, b.jsonl]'"


def read_settings_text(path: str | Path) -> str:
    """Return the text of a settings file; ConfigError where there is none to read."""
    path = Path(path)
    if path.is_dir():
        files = _settings_files(path)
        fix = f"give a file in it, such as {files[0]}" if files else "give the path of a file"
        raise ConfigError("the settings file is a folder", values=str(path), fix=fix)
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in _settings_files(path.parent)], n=1)
        hint = f"; there is {path.parent / near[0]}" if near else ""
        found = f"{path} (looked in {Path.cwd()})" if not path.is_absolute() else str(path)
        raise ConfigError("the settings file does not exist", values=found, fix=f"give the path of a file{hint}")
    try:
        if (size := path.stat().st_size) > MAX_YAML_BYTES:
            found = f"{path}: {size:,} bytes, at most {MAX_YAML_BYTES:,} are read"
            raise ConfigError("the settings file is too large", values=found, fix="give the settings file of a run")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "give a file that you may read"
        raise ConfigError("the settings file cannot be read", values=f"{path}: {reason}", fix=fix) from None


def parse_settings(text: str, *, source: str) -> dict[str, Any]:
    """Turn the text of a settings file into nested dictionaries; an empty file is an empty dictionary."""
    settings = parse_yaml(text, source=source)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(
            "the settings file is not a list of `name: value` lines",
            values=f"{source} holds {_YAML_KINDS.get(type(settings), 'a single value')}",
            fix="start from `optim: {lr: 1e-5}`",
        )
    if "distributed_type" in settings:
        raise ConfigError("this is an Accelerate profile, no settings file", values=source, fix="give it as --profile")
    return settings


_YAML_KINDS = {list: "a list", str: "only text"}


def _settings_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.y*ml")) if folder.is_dir() else []


def apply_overrides(settings: dict[str, Any], overrides: Overrides, *, root: type[BaseModel]) -> dict[str, str]:
    """Put `--section.key=value` words, or a nested or dotted mapping, over settings in place. The last one wins.

    Returns what gave each dotted name, for the error messages.
    """
    flags: dict[str, str] = {}
    for path, value in _override_pairs(overrides, root=root):
        merge_settings(settings, {path: value})
        flags |= dict.fromkeys(leaf_names(str(path), value), f"--{path}")
    return flags


def _override_pairs(overrides: Overrides, *, root: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    if isinstance(overrides, str):
        overrides = [overrides]
    words = iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals and not word.startswith("--"):
            raise _stray_word(word)
        if not equals:  # `--optim.lr 1e-5`, as many other tools take it
            text = next(words, "--")
            equals = "" if text.startswith("--") else "="
        if not equals or not name:
            raise ConfigError(
                "a setting has no value", values=word, fix="write --section.key=value, as in --optim.lr=1e-5"
            )
        yield name.strip(), _override_value(name.strip(), text, root=root)


def _stray_word(word: str) -> ConfigError:
    fix = "write --section.key=value, as in --optim.lr=1e-5, and --config RUN.YAML for a settings file"
    if Path(word).suffix in (".yaml", ".yml"):
        fix = f"write --config {word}"
    return ConfigError("this word is neither a flag nor a setting", values=word, fix=fix)


def check_command_flags(words: Sequence[str], *, root: type[BaseModel], flags: Sequence[str]) -> None:
    """Refuse a flag of no section that looks like one of the command's own, naming that one."""
    for word in words:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
        if "." not in name and near and name.removeprefix("--") not in root.model_fields:
            raise ConfigError(f"there is no flag {name}", values=word, fix=f"did you mean {near[0]}?")


def _override_value(name: str, text: str, *, root: type[BaseModel]) -> Any:
    value = parse_yaml(text, source=f"--{name}={text}", what="the value of a flag is", fix=_FLAG_FIX)
    # A commit such as 1234567 or 1e10 is a number to YAML; where only text can be meant, it stays text.
    if not isinstance(value, str | list | dict | None) and _takes_only_text(field_annotation(name, root=root)):
        return text
    return value


def _takes_only_text(annotation: Any) -> bool:
    kinds = set(get_args(annotation)) or {annotation}
    return str in kinds and kinds <= {str, type(None)}


def field_annotation(name: str, *, root: type[BaseModel]) -> Any:
    """Return the type of the field with this dotted name, or None when there is no such field."""
    model: Any = root
    for part in name.split("."):
        if not _is_section(model) or part not in model.model_fields:
            return None
        model = model.model_fields[part].annotation
    return model


def merge_settings(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put `changes` over `base` in place, section by section, and return it. Dotted keys are taken apart."""
    for key, value in changes.items():
        if isinstance(key, str) and "." in key:
            _put_at(base, key.split("."), value)
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping | None) and key != "columns":
            base[key] = merge_settings(dict(base.get(key) or {}), value)
        else:
            base[key] = value
    return base


def _put_at(base: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Put a value at a dotted name, beside what else stands there: two flags may each rename one column."""
    for part in parts[:-1]:
        inner = base.get(part)
        base[part] = dict(inner) if isinstance(inner, Mapping) else {}
        base = base[part]
    merge_settings(base, {parts[-1]: value})


def dotted_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """List every setting of a model by its dotted name."""
    names = []
    for key, field in model.model_fields.items():
        annotation = field.annotation
        if _is_section(annotation) and annotation is not None:
            names += dotted_names(annotation, f"{prefix}{key}.")
        else:
            names.append(prefix + key)
    return names


def find_unknown_keys(settings: Mapping[Any, Any], *, root: type[BaseModel]) -> list[Problem]:
    """Report each key that no section has, with the nearest name that exists."""
    problems = []
    for key, value in settings.items():
        field = root.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            problems.append(_unknown(str(key), value, section="", siblings=list(root.model_fields), root=root))
        elif _is_section(field.annotation) and isinstance(value, Mapping):
            siblings = list(field.annotation.model_fields)
            problems += [
                _unknown(str(inner), inner_value, section=str(key), siblings=siblings, root=root)
                for inner, inner_value in value.items()
                if inner not in siblings
            ]
    return problems


def _unknown(key: str, value: Any, *, section: str, siblings: list[str], root: type[BaseModel]) -> Problem:
    path = f"{section}.{key}" if section else key
    place = f"section {section}" if section else "the top level"
    near = nearest_setting(key, section=section, siblings=siblings, root=root)
    fix = f"did you mean {near}?" if near else f"{place} has: {', '.join(siblings)}"
    shown = format_value(dict(value) if isinstance(value, Mapping) else value)
    if not section and key in dotted_names(root):
        name, leaf = key.split(".")
        fix = f"write it in its section: `{name}: {{{leaf}: {shown}}}`"
        return Problem(f"{key} is written with a dot, which only flags are", f"{path}: {shown}", fix, (path,))
    return Problem(f"{path} is not a setting: {place} has no {key}", f"{path}: {shown}", fix, (path,))


def nearest_setting(key: str, *, section: str, siblings: list[str], root: type[BaseModel]) -> str | None:
    """Find what was most likely meant: in this section, elsewhere by the same name, or by another tool's name."""
    names = dotted_names(root)
    leaf = key.rsplit(".", 1)[-1].lower().replace("-", "_")
    exact = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    close_here = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.75)
    if close_here:
        return f"{section}.{close_here[0]}" if section else close_here[0]
    if exact:
        return " or ".join(exact[:3])
    if leaf in FOREIGN_NAMES:
        return FOREIGN_NAMES[leaf]
    close = difflib.get_close_matches(leaf, [name.rsplit(".", 1)[-1] for name in names], n=1, cutoff=0.7)
    if close:
        return next(name for name in names if name.rsplit(".", 1)[-1] == close[0])
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.5)
    return (f"{section}.{close[0]}" if section else close[0]) if close else None


def translate_errors(error: ValidationError, *, settings: Mapping[Any, Any], root: type[BaseModel]) -> list[Problem]:
    """Turn pydantic's list of errors into problems in the user's words, one per setting."""
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        path = _setting_path(item["loc"], root=root)
        if item["type"] == NEEDS_REPLICAS:
            shown = ", ".join(f"{path}.{key}: {format_value(value)}" for key, value in item["input"].items())
            depends = (path, f"{path}.zero_stage", f"{path}.replicate")
            problems.setdefault(path, Problem(item["msg"], shown, f"set {path}.replicate: 2 or more", depends))
        elif item["type"] == WRONG_PART:
            said, what = item.get("ctx", {}), f"{path} cannot be used: {item['msg']}"
            problems.setdefault(path, Problem(what, f"{path}: {said['found']}", said["fix"].format(path=path), (path,)))
        elif item["type"] != "extra_forbidden":  # find_unknown_keys says it with the nearest name
            problems.setdefault(path, _wrong_value(path, _find_value(path, settings, item["input"]), root=root))
    return list(problems.values())


NEEDS_REPLICAS = "needs_replicas"  # the one error of a whole section: a strategy name that needs a second setting
WRONG_PART = "wrong_part"  # of a setting that has parts; the error's context has `found` and `fix`


def _setting_path(location: Iterable[Any], *, root: type[BaseModel]) -> str:
    """Cut pydantic's location after the setting: list positions and names of union members are noise."""
    parts: list[str] = []
    for part in location:
        model = field_annotation(".".join(parts), root=root) if parts else root
        if not _is_section(model):
            break
        parts.append(str(part))
    return ".".join(parts)


def _find_value(path: str, settings: Any, default: Any) -> Any:
    """Return what the user wrote; pydantic reports the one element of a list that it stumbled over."""
    for part in path.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return default
        settings = settings[part]
    return settings


def _wrong_value(path: str, value: Any, *, root: type[BaseModel]) -> Problem:
    annotation = field_annotation(path, root=root)
    found = f"{path}: {format_value(value)}"
    if _is_section(annotation):
        fix = f"write it as a section, with: {', '.join(annotation.model_fields)}"
        return Problem(f"{path} is a section, not a single value", found, fix, (path,))
    if isinstance(value, str) and value.strip().lower() in {"yes", "no", "on", "off", "true", "false"}:
        found += " (text: in YAML 1.2 only true and false without quotes are booleans)"
    fix = f"set {path} to {describe_type(annotation, _metadata(path, root=root))}"
    return Problem(f"{path} cannot be {format_value(value)}", found, fix, (path,))


def _metadata(path: str, *, root: type[BaseModel]) -> tuple[Any, ...]:
    section, _, name = path.rpartition(".")
    model = field_annotation(section, root=root) if section else root
    return tuple(model.model_fields[name].metadata)


@dataclass(frozen=True)
class Takes:
    """Put into `Annotated`: says what a setting takes where its type does not."""

    text: str


_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
_BOUND_WORDS = {Gt: ("gt", "above"), Ge: ("ge", "of at least"), Lt: ("lt", "below"), Le: ("le", "of at most")}


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Say in words which values a type takes, with its bounds: "a whole number of at least 2, or null"."""
    metadata = list(metadata)
    for item in metadata:
        if isinstance(item, Takes):
            return item.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return _join([str(value) for value in arguments])
    if origin in (Union, UnionType):
        kinds = [describe_type(kind, metadata) for kind in arguments if kind is not type(None)]
        return _join(kinds) + (", or null" if type(None) in arguments else "")
    if origin is tuple:
        inner = describe_type(arguments[0])
        if arguments[-1] is Ellipsis:
            return f"a list of {inner}"
        return f"a list of {len(arguments)}, each {inner}"
    return " and ".join([_TYPE_WORDS.get(origin or annotation, str(annotation)), *_bounds(metadata)]).replace(
        " and ", " ", 1
    )


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        inner = getattr(item, "metadata", None)  # a pydantic FieldInfo inside Annotated keeps its bounds there
        if inner:
            yield from _bounds(inner)
        elif type(item) in _BOUND_WORDS:
            name, words = _BOUND_WORDS[type(item)]
            bound = getattr(item, name)
            yield f"{words} {bound if isinstance(bound, int) else format(bound, 'g')}"
        elif isinstance(item, MinLen):
            yield "that is not empty"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
