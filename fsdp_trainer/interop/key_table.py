"""The tables of other tools' keys: what each takes, and its verdict where no rule has to look at other keys.

A table is a YAML file beside this module. An entry says what the value `takes` and one of: `not_needed` (always),
`only` (not needed where the value is one of these, otherwise `refused` or `differs`), or `rule` (a function decides).
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from fsdp_trainer.config_reading import format_value
from fsdp_trainer.interop.places import Document, Key
from fsdp_trainer.interop.verdicts import Kind, Verdict


@dataclass(frozen=True)
class Entry:
    """One key of a table."""

    takes: str
    name: str = ""  # dotted; the current one where the key has older names
    rule: str = ""
    not_needed: str = ""
    only: tuple[Any, ...] | None = None
    refused: str = ""
    differs: str = ""
    auto: str = ""  # where Transformers fills "auto" in from
    fills: Any = None  # what Accelerate fills in for "auto" where Transformers does not
    also: tuple[str, ...] = ()  # older names

    def allows(self, value: Any) -> bool:
        """Tell whether the value is one that asks for nothing."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.only or ())


@dataclass(frozen=True)
class Table:
    """All keys of a tool by dotted name, and the sections that are taken or refused as a whole."""

    entries: Mapping[str, Entry]
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def sections(self) -> set[str]:
        """Names of all sections."""
        return {name.rpartition(".")[0] for name in self.entries if "." in name} | set(self.whole)


@cache
def load_table(name: str) -> Table:
    """Read the table of this name; one that holds an entry of another form is an error of this program."""
    raw = YAML(typ="safe", pure=True).load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))
    whole = raw.pop("WHOLE_SECTIONS", {})
    section_values, old_sections = raw.pop("SECTION_VALUES", {}), raw.pop("OLD_SECTIONS", {})
    entries = dict(_entries(raw, "")) | dict(_entries(section_values, ""))
    for old, current in old_sections.items():
        inside = [entry for entry in entries.values() if entry.name.startswith(f"{current}.")]
        entries |= {f"{old}.{entry.name.removeprefix(f'{current}.')}": entry for entry in inside}
    for current, entry in list(entries.items()):
        section = current.rpartition(".")[0]
        entries |= {f"{section}.{old}".lstrip("."): entry for old in entry.also}
    return Table(entries, whole)


def _entries(raw: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Entry]]:
    for name, value in raw.items():
        if "takes" in value:
            shown: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
            entry = Entry(name=prefix + name, **shown)
            assert sum((bool(entry.rule), bool(entry.not_needed), entry.only is not None)) == 1, prefix + name
            yield prefix + name, entry
        else:
            yield from _entries(value, f"{prefix}{name}.")


# What a rule answers; `with_key` makes a verdict of it.
@dataclass(frozen=True)
class Outcome:
    """A verdict without its key."""

    kind: Kind
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    blocks: bool = False


def mapped(text: str = "", **settings: Any) -> Outcome:
    """The key becomes these settings (section__name) exactly."""
    return Outcome("mapped", text, _dotted(settings))


def differs(text: str, **settings: Any) -> Outcome:
    """The key becomes these settings, with the difference that `text` says."""
    return Outcome("mapped with a difference", text, _dotted(settings))


def not_needed(text: str) -> Outcome:
    """Nothing is set, because of what `text` says."""
    return Outcome("not needed", text)


def refused(text: str, **instead: Any) -> Outcome:
    """Nothing here does that; `instead` stands in for it where differences are allowed."""
    return Outcome("refused", text, _dotted(instead))


def blocked(text: str) -> Outcome:
    """The file must be corrected: nothing can stand in."""
    return Outcome("refused", text, blocks=True)


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("__", ".", 1): value for name, value in settings.items()}


# The value of an "auto" and its origin, or what has to be given for it.
AutoSource = Callable[[str], tuple[Any, str] | str]
Rules = Mapping[str, Callable[[Any, Any], Outcome]]


@dataclass(frozen=True)
class Value:
    """A value as the table takes it, with what was remarkable about it; or what is wrong with it."""

    key: Key
    entry: Entry | None
    value: Any = None
    note: str = ""
    verdict: Verdict | None = None  # decided already


def read_values(document: Document, table: Table, *, fill: AutoSource, tool: str) -> list[Value]:
    """Bring every value of a document into the form that its table says, in the document's order."""
    off = {section for section in table.whole if _is_off(document, section, table)}
    values: list[Value] = []
    first: dict[str, Value] = {}
    for key in document.keys:
        value = _read_value(_without_secret(key), table, fill, tool, off)
        if value.entry is not None:
            other = first.setdefault(value.entry.name, value)
            value = value if other is value else _said_twice(value, other)
        values.append(value)
    return values


def _said_twice(value: Value, other: Value) -> Value:
    """Decide on a key of which another name is given as well."""
    if value.value == other.value:
        return _decided(value.key, "not needed", f"another name of {other.key.name}, which says the same")
    text = f"another name of {other.key.name}, which is given too and says otherwise: keep one"
    return _decided(value.key, "refused", text, blocks=True)


def _without_secret(key: Key) -> Key:
    """Hide a value that must not get into a report."""
    is_secret = key.name.endswith(("_token", "api_key")) and isinstance(key.value, str)
    return replace(key, value="(not shown)") if is_secret else key


def held_values(values: Sequence[Value]) -> dict[str, Any]:
    """Return the readable values by the current name of their keys."""
    return {value.entry.name: value.value for value in values if value.entry is not None}


def _is_off(document: Document, section: str, table: Table) -> bool:
    """Tell whether a section that is taken as a whole does nothing: it is not enabled, or none of its parts is."""
    inside = [key for key in document.keys if key.name.startswith(f"{section}.")]
    if f"{section}.enabled" in table.entries:
        return all(key.value in (False, None, "false") for key in inside if key.name == f"{section}.enabled")
    switches = [key.value for key in inside if key.name.endswith("enabled")]
    return bool(switches) and not any(switches)


def judge(values: Sequence[Value], rules: Rules, facts: Any) -> list[Verdict]:
    """Return one verdict for each value; `facts` is what the rules may look at."""
    return [value.verdict or _judge(value, rules, facts) for value in values]


def _judge(value: Value, rules: Rules, facts: Any) -> Verdict:
    entry = value.entry
    assert entry is not None
    if entry.rule:
        outcome = rules[entry.rule](value.value, facts)
    elif entry.not_needed or entry.allows(value.value):
        outcome = not_needed(entry.not_needed or "off, or what happens here anyway")
    elif entry.refused:
        outcome = refused(entry.refused)
    else:
        outcome = differs(entry.differs)
    verdict = Verdict(value.key, outcome.kind, outcome.text, outcome.settings, outcome.blocks)
    renamed = f"another name of {entry.name}" if value.key.name != entry.name else ""
    return verdict.with_note(value.note).with_note(renamed)


def _read_value(key: Key, table: Table, fill: AutoSource, tool: str, off: set[str]) -> Value:
    entry = table.entries.get(key.name)
    if key.repeats:
        return _decided(key, "refused", "this name is written twice in its section: keep one", blocks=True)
    if key.value in ({}, None) and key.name in table.sections:
        return _decided(key, "not needed", "an empty section")
    if entry is None:
        return _unlisted(key, table, tool, off)
    if key.value is None:
        return _decided(key, "not needed", "null is the same as leaving it out")
    if key.value == "auto" and not entry.allows("auto"):
        return _filled(key, entry, fill)
    try:
        value, note = convert(key.value, entry.takes)
    except ValueError as error:
        # A list is a search space of DeepSpeed's autotuner, or a slip: either way the value is not known.
        return _decided(key, "refused", f"takes {_TAKES[entry.takes]}: {error}", blocks=not entry.not_needed)
    if "is cut to" in note and not entry.not_needed:  # the size of a bucket may be; rows, steps or a stage may not
        return _decided(key, "refused", f"takes {_TAKES[entry.takes]}: {format_value(key.value)} is none", blocks=True)
    return Value(key, entry, value, note)


def _decided(key: Key, kind: Kind, text: str, *, blocks: bool = False) -> Value:
    return Value(key, None, verdict=Verdict(key, kind, text, blocks=blocks))


def _filled(key: Key, entry: Entry, fill: AutoSource) -> Value:
    if entry.not_needed:
        return _decided(key, "not needed", entry.not_needed)
    found = fill(entry.auto) if entry.auto else "nobody fills in auto here: write the value"
    if isinstance(found, str) and entry.fills is not None:
        found = entry.fills, "as Accelerate fills it in"
    if isinstance(found, str):
        return _decided(key, "refused", found, blocks=True)
    value, source = found
    note = f"auto is {format_value(value)}, {source}"
    return _decided(key, "not needed", note) if value is False else Value(key, entry, value, note)


def _unlisted(key: Key, table: Table, tool: str, off: set[str]) -> Value:
    section, _, leaf = key.name.rpartition(".")
    if key.name in table.sections and key.name not in table.whole:
        return _decided(key, "refused", "this is a section: write {...} with its keys", blocks=True)
    top = key.name.split(".")[0]
    if top in table.whole:
        if leaf != "enabled" and difflib.get_close_matches(leaf, ["enabled"], cutoff=0.8):
            return _decided(key, "refused", f"{tool} has no such key; did you mean {section}.enabled?")
        if top in off:
            return _decided(key, "not needed", f"{top} is not enabled")
        return _decided(key, "refused", table.whole[top] or table.entries[f"{top}.enabled"].refused)
    above = next((name for name in _parents(key.name) if name in table.entries and name not in table.sections), None)
    if above is not None:
        return _inside_value(key, above, table.entries[above])
    if key.value is None:
        return _decided(key, "not needed", f"{tool} has no such key, and null asks for nothing")
    if leaf.lower().startswith(_REMARKS):
        return _decided(key, "not needed", "a remark, which nothing reads")
    near = find_near(key.name, table)
    wrong = "such key" if near or top in table.sections or not section else f"section {top}"
    return _decided(key, "refused", f"{tool} has no {wrong}" + (f"; did you mean {near}?" if near else ""))


_REMARKS = ("_", "//", "#", "comment", "description")  # how people write into JSON what it has no place for


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _inside_value(key: Key, above: str, entry: Entry) -> Value:
    """Judge a key below one that is no section in the table: where that takes anything, what it says holds for all."""
    if entry.takes != "any" or entry.rule:
        return _decided(key, "refused", f"{above} takes {_TAKES[entry.takes]}, no section", blocks=True)
    if entry.not_needed:
        return _decided(key, "not needed", entry.not_needed)
    return _decided(key, "refused" if entry.refused else "mapped with a difference", entry.refused or entry.differs)


def find_near(name: str, table: Table) -> str:
    """Return the key that was most likely meant: in the same section, elsewhere by this name, or a close one."""
    section, _, leaf = name.rpartition(".")
    names = [*table.entries, *table.whole]
    top, _, rest = name.partition(".")
    if section and top not in table.sections:
        return _near_section(top, rest, names, table)
    here = [other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == section]
    tops = sorted({other.split(".")[0] for other in names}) if not section else []
    close = difflib.get_close_matches(leaf, [*here, *tops], n=1, cutoff=0.75)
    close = close or [one for one in here if one.endswith(f"_{leaf}")]
    elsewhere = [other for other in names if other.rpartition(".")[2] == leaf]
    if close or not elsewhere:
        close = close or difflib.get_close_matches(leaf, [*here, *tops], n=1, cutoff=0.6)
        if close:
            return f"{section}.{close[0]}".lstrip(".")
    if elsewhere:
        return elsewhere[0]
    leaves = [other.rpartition(".")[2] for other in names]
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)
    return names[leaves.index(close[0])] if close else ""


def _near_section(top: str, rest: str, names: Sequence[str], table: Table) -> str:
    """Return what was meant by a key of an unknown section: a section spelt like it, or the one key of this name."""
    if inside := [other for other in names if other.endswith(f".{top}.{rest}")]:
        return inside[0]
    sections = [other for other in table.sections if "." not in other]
    close = difflib.get_close_matches(top, sections, n=1, cutoff=0.6)
    if close:
        return f"{close[0]}.{rest}"
    elsewhere = {table.entries[other].name for other in names if other in table.entries and other.endswith(f".{rest}")}
    return elsewhere.pop() if len(elsewhere) == 1 else ""


_TAKES = {
    "flag": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "numbers": "a list of numbers",
    "text": "text",
    "list": "a list",
    "any": "a value",
    "stage": "a stage, 0 to 3",
}
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def convert(value: Any, takes: str) -> tuple[Any, str]:
    """Return a value in the form a key takes, and a remark where it was written in another.

    Raises ValueError where it cannot be read so.
    """
    if takes == "any" or (takes == "list" and isinstance(value, list)):
        return value, ""
    if takes == "numbers" and isinstance(value, list):
        return [_number(item)[0] for item in value], ""
    if isinstance(value, list | dict):
        raise ValueError(f"{format_value(value)} is {'a list' if isinstance(value, list) else 'a section'}")
    if takes == "flag":
        return _flag(value)
    if takes in ("whole", "stage"):
        return _whole(value)
    if takes == "number":
        return _number(value)
    if takes == "text":
        if isinstance(value, bool | int | float):
            raise ValueError(f"{format_value(value)} is no text")
        return str(value), ""
    if takes == "list" and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()], "text, taken apart at commas"
    raise ValueError(f"{format_value(value)} is no list")


def _flag(value: Any) -> tuple[bool, str]:
    if isinstance(value, bool):
        return value, ""
    word = str(value).strip().lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE, f"written as {format_value(value)}"
    raise ValueError(f"{format_value(value)} is neither")


def _number(value: Any) -> tuple[float, str]:
    note = ""
    if isinstance(value, str):
        note = "a number written as text"
        if not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", value):
            raise ValueError(f"{format_value(value)} is no number")
        value = float(value) if re.search(r"[.eE]", value) or len(value) > 300 else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{format_value(value)} is no number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    if abs(value) > 1e300:
        raise ValueError("it is larger than any such number")
    return value, note


def _whole(value: Any) -> tuple[int, str]:
    number, note = _number(value)
    if abs(number) > 2**63:
        raise ValueError("it is larger than any such number")
    if int(number) != number:
        remark = f"{number} is cut to {int(number)}"
        note = f"{note}, {remark}" if note else remark
    return int(number), note
