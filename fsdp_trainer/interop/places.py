"""Reads JSON and YAML so that every key keeps its line and column, also one that is written twice.

JSON is read as people write it: comments and trailing commas are let through and reported.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fsdp_trainer.errors import ConfigError

_MAX_DEPTH = 50
# A profile has some hundred values; aliases that stand in one another can stand for billions.
_MAX_VALUES = 100_000
_DIGITS = frozenset("0123456789+-.eE")


@dataclass(frozen=True)
class Key:
    """One value of a file: its dotted name, what stands there, and where its key is written (from 1)."""

    name: str
    value: Any
    file: str
    line: int
    column: int
    repeats: bool = False  # an earlier key of the same section has this name

    @property
    def place(self) -> str:
        """The place as editors and terminals take it: file:line:column."""
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Document:
    """A file's values in their order, without the sections around them, and what was odd about its writing."""

    file: str
    keys: tuple[Key, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Node:
    value: Any  # a list of (name, node) for a section
    at: int


def read_text(path: str | Path, *, what: str) -> str:
    """Return the text of a UTF-8 file (a byte-order mark is dropped); ConfigError where there is none to read."""
    path = Path(path)
    try:
        if not path.is_file():
            wrong = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
            raise ConfigError(f"{what} {wrong}", values=str(path), fix="give the path of a file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        fix = "give a file that you may read"
        raise ConfigError(f"{what} cannot be read", values=f"{path}: {error.strerror}", fix=fix) from None
    except UnicodeDecodeError as error:
        found = f"{path}: byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError(f"{what} is not UTF-8 text", values=found, fix="save it as UTF-8") from None
    if not text.strip():
        raise ConfigError(f"{what} is empty", values=str(path), fix="give a file with settings in it")
    return text


def read_json(text: str, *, file: str, what: str) -> Document:
    """Read a JSON object; ConfigError with line and column where it is none."""
    reader = _JsonReader(text, file, what)
    root = reader.read()
    if not isinstance(root.value, list) or root.value[:1] == [None]:
        raise ConfigError(
            f"{what} is not one object", values=f"{file}: {text.strip()[:40]}", fix="write {...} around it"
        )
    keys = tuple(_flatten(root.value, "", file, text))
    return Document(file, _check_text(keys, what), tuple(reader.notes))


def _check_text(keys: tuple[Key, ...], what: str) -> tuple[Key, ...]:
    """Refuse halves of characters (surrogates), which no file can hold."""
    for key in keys:
        try:
            f"{key.name}{key.value}".encode()
        except UnicodeEncodeError:
            found = f"{key.place}: {f'{key.name}: {key.value}'!a}"
            raise ConfigError(f"{what} has half of a character", values=found, fix="correct that place") from None
    return keys


def _shown(name: str) -> str:
    """Return a name as one word of a report: dots that would look like sections and control characters are escaped."""
    plain = name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return plain.replace(".", "\\.")


def _flatten(entries: list[tuple[str, _Node]], prefix: str, file: str, text: str) -> Iterator[Key]:
    seen: set[str] = set()
    for name, node in entries:
        line = text.count("\n", 0, node.at) + 1
        column = node.at - text.rfind("\n", 0, node.at)
        dotted = prefix + _shown(name)
        is_section = isinstance(node.value, list) and node.value[:1] != [None]
        if is_section and node.value and name not in seen:
            yield from _flatten(node.value, f"{dotted}.", file, text)
        else:
            yield Key(dotted, _plain(node.value), file, line, column, repeats=name in seen)
        seen.add(name)


def _plain(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if value[:1] == [None]:
        return [_plain(node.value) for node in value[1:]]
    return {name: _plain(node.value) for name, node in value}


class _JsonReader:
    """A cursor over the text. Lists are marked by a leading None, to tell them from sections."""

    def __init__(self, text: str, file: str, what: str) -> None:
        self.text, self.file, self.what, self.at = text, file, what, 0
        self.notes: list[str] = []

    def read(self) -> _Node:
        root = self.value(0)
        self.space()
        if self.at < len(self.text):
            self.fail("something stands after the end")
        return root

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        raise ConfigError(
            f"{self.what} is not valid JSON",
            values=f"{reason} ({self.file}, {self.where(self.at if at is None else at)})",
            fix="correct that place",
        ) from None

    def where(self, at: int) -> str:
        return f"line {self.text.count(chr(10), 0, at) + 1}, column {at - self.text.rfind(chr(10), 0, at)}"

    def note(self, what: str, at: int) -> None:
        self.notes.append(f"{what} ({self.where(at)}), which JSON does not have: read past it")

    def space(self) -> None:
        """Go past white space and comments."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r\n":
                self.at += 1
            elif text.startswith(("//", "#"), self.at):
                self.note("a comment", self.at)
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith("/*", self.at):
                self.note("a comment", self.at)
                end = text.find("*/", self.at + 2)
                if end < 0:
                    self.fail("a comment is never closed")
                self.at = end + 2
            else:
                return

    def value(self, depth: int) -> _Node:
        self.space()
        start = self.at
        if depth > _MAX_DEPTH:
            self.fail(f"more than {_MAX_DEPTH} sections in one another")
        char = self.text[start : start + 1]
        if char == "{":
            return _Node(self.entries("}", depth), start)
        if char == "[":
            return _Node([None, *self.entries("]", depth)], start)
        if char == '"':
            return _Node(self.string(), start)
        return _Node(self.word(), start)

    def entries(self, closing: str, depth: int) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        comma = None
        while True:
            self.space()
            if self.text.startswith(closing, self.at):
                if comma is not None:
                    self.note("a comma before the end of a section or list", comma)
                self.at += 1
                return found
            if found and comma is None:
                self.fail(f"a comma or {closing} is missing" if self.at < len(self.text) else f"{closing} is missing")
            found.append(self.entry(depth) if closing == "}" else self.value(depth + 1))
            self.space()
            comma = self.at if self.text.startswith(",", self.at) else None
            self.at += comma is not None

    def entry(self, depth: int) -> tuple[str, _Node]:
        at = self.at
        if not self.text.startswith('"', at):
            self.fail("a name in double quotes is missing" if at < len(self.text) else "} is missing")
        name = self.string()
        self.space()
        if not self.text.startswith(":", self.at):
            self.fail("a colon is missing")
        self.at += 1
        return name, _Node(self.value(depth + 1).value, at)

    def string(self) -> str:
        start = self.at
        try:
            text, self.at = json.JSONDecoder().raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.fail(error.msg.lower(), start)
        return text

    def word(self) -> Any:
        start = self.at
        while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in _DIGITS):
            self.at += 1
        word = self.text[start : self.at]
        if word in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[word]
        try:
            number = (int if word.lstrip("-").isdigit() else float)(word)
        except ValueError:
            self.fail(f"{word[:40] or self.text[start : start + 1] or 'nothing'} is no value", start)
        if not set(word) <= _DIGITS or (isinstance(number, float) and not math.isfinite(number)):
            self.fail(f"{word} is no number that JSON has", start)
        return number


def read_yaml(text: str, *, file: str, what: str) -> Document:
    """Read a YAML mapping as PyYAML, and so Accelerate, reads it (YAML 1.1); ConfigError with the place of an error."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if _count_values(root, {}) > _MAX_VALUES:
            raise ConfigError(f"{what} has more than {_MAX_VALUES} values", values=file, fix="write out its aliases")
        loader = yaml.SafeLoader("")
        keys = tuple(_yaml_keys(root, "", file, loader)) if isinstance(root, yaml.MappingNode) else ()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = f"{file}: {' '.join(str(error).split())}"
        raise ConfigError(f"{what} is not valid YAML", values=found, fix="correct that place") from None
    if not isinstance(root, yaml.MappingNode):
        fix = "write one `name: value` a line"
        raise ConfigError(f"{what} is not a list of `name: value` lines", values=file, fix=fix)
    return Document(file, _check_text(keys, what))


def _count_values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Count the values below a node, those that aliases stand for each time; RecursionError for one inside itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


def _yaml_keys(node: yaml.MappingNode, prefix: str, file: str, loader: Any) -> Iterator[Key]:
    loader.flatten_mapping(node)  # `<<: *anchor`
    seen: set[str] = set()
    for key, value in node.value:
        name = _shown(str(loader.construct_object(key, deep=True)))
        if isinstance(value, yaml.MappingNode) and value.value and name not in seen:
            yield from _yaml_keys(value, f"{prefix}{name}.", file, loader)
        else:
            line, column = key.start_mark.line + 1, key.start_mark.column + 1
            found = loader.construct_object(value, deep=True)
            yield Key(prefix + name, found, file, line, column, repeats=name in seen)
        seen.add(name)
