"""Where each value of a configuration was written: a flag, a line of the settings file, or nowhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode


@dataclass(frozen=True)
class Origins:
    """The settings file's name and text, and the flag that gave each dotted name.

    All are equal, since two configurations of the same values are, wherever those were written. Empty for a
    configuration made in Python, of which nothing is said.
    """

    file: str = field(default="", compare=False)
    text: str = field(default="", compare=False)
    flags: Mapping[str, str] = field(default_factory=dict, compare=False)

    def describe(self, names: Sequence[str]) -> str:
        """Say where the values of `names` stand: "from run.yaml, line 3"; "" where nothing is known of them."""
        if not names or not (self.file or self.flags):
            return ""
        lines = find_lines(self.text)
        # A section says nothing where its own settings are named too.
        names = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
        places = {name: self._place(name, lines) for name in names}
        if len(set(places.values())) == 1:
            return next(iter(places.values()))
        return "; ".join(f"{name} {place}" for name, place in places.items())

    def _place(self, name: str, lines: Mapping[str, int]) -> str:
        flags = {flag: None for key, flag in self.flags.items() if key == name or key.startswith(f"{name}.")}
        if flags:
            return f"from the flag{'s' * (len(flags) > 1)} {', '.join(flags)}"
        return f"from {self.file}, line {lines[name]}" if name in lines else "by default"


def find_lines(text: str) -> dict[str, int]:
    """Return the line of each key of a settings file by its dotted name; the text must be valid YAML."""
    return dict(_keys(YAML(typ="safe", pure=True).compose(text), "")) if text else {}


def _keys(node: Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _keys(value, f"{name}.")


def leaf_names(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted names that a value given for `name` sets: `optim` with `{lr: 1}` sets `optim.lr`."""
    if not isinstance(value, Mapping) or not value:
        yield name
        return
    for key, inner in value.items():
        yield from leaf_names(f"{name}.{key}", inner)
