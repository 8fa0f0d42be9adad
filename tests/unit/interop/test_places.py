"""Keys keep their place, whatever else is odd about a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.places import Document, read_json, read_text, read_yaml


def read(text: str) -> Document:
    return read_json(text, file="f.json", what="the file")


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return str(caught.value)


def test_every_key_has_its_place() -> None:
    document = read('{\n  "a": 1,\n\t"b": {"c": [1, {"d": 2}],\n   "e.f": null}, "g": {}\n}')
    places = {key.name: (key.line, key.column, key.value) for key in document.keys}
    assert places == {
        "a": (2, 3, 1),
        "b.c": (3, 8, [1, {"d": 2}]),
        "b.e\\.f": (4, 4, None),
        "g": (4, 18, {}),
    }
    assert document.keys[0].place == "f.json:2:3"


def test_a_name_that_stands_twice_is_marked() -> None:
    document = read('{"a": 1, "s": {"x": 1}, "a": 2, "s": {"x": 2}}')
    assert [(key.name, key.repeats) for key in document.keys] == [
        ("a", False),
        ("s.x", False),
        ("a", True),
        ("s", True),
    ]


def test_comments_and_trailing_commas_are_let_through_and_said() -> None:
    document = read('// one\n{"a": 1, /* two\n */ "b": "// none", # three\n "c": [1, 2,],}')
    assert [key.value for key in document.keys] == [1, "// none", [1, 2]]
    assert [note.split(" (")[0] for note in document.notes] == [
        *["a comment"] * 3,
        *["a comma before the end of a section or list"] * 2,
    ]
    assert "line 2, column 10" in document.notes[1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"a": 1 "b": 2}', ["a comma or } is missing", "line 1, column 9"]),
        ('{"a": }', ["line 1, column 7"]),
        ('{"a": NaN}', ["NaN", "line 1, column 7"]),
        ('{"a": Infinity}', ["Infinity"]),
        ('{"a": 1e999}', ["1e999"]),
        ('{"a": True}', ["True is no value"]),
        ('{"a": 1', ["} is missing"]),
        ('{"a": "x', ["unterminated string", "line 1, column 7"]),
        ("{'a': 1}", ["double quotes", "line 1, column 2"]),
        ('{"a": 1}}', ["something stands after the end", "line 1, column 9"]),
        ('{"a": /* 1}', ["never closed"]),
        ("[1, 2]", ["not one object"]),
        ("3", ["not one object"]),
        ('{"a": 1,, "b": 2}', ["line 1, column 9"]),
        ('{"a": ' + "[" * 100, ["in one another"]),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(text: str, parts: list[str]) -> None:
    message = error_of(text)
    for part in [*parts, "f.json", "to fix:"]:
        assert part in message


JSON_TEXT = st.text(alphabet='{}[]:,"\\/*#-+.eE0123456789 \n\ttruefalsn\u00e9', max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet=".a b", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(alphabet="abcdefg_", min_size=1), VALUES), st.sampled_from([None, 2]))
def test_values_are_those_of_json(values: dict[str, object], indent: int | None) -> None:
    found: dict[str, Any] = {}
    for key in read(json.dumps(values, indent=indent)).keys:
        *sections, leaf = key.name.replace("\\.", "\0").split(".")
        place = found
        for section in sections:
            place = place.setdefault(section.replace("\0", "."), {})
        place[leaf.replace("\0", ".")] = key.value
    assert found == values


@settings(max_examples=60, deadline=None)
@given(JSON_TEXT)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text)
    except ConfigError:
        return


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        ('{"a": "\u00e9"}'.encode("latin-1"), "not UTF-8 text"),
    ],
)
def test_files_without_text(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        read_text(path, what="the file")


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read(read_text(path, what="the file")).keys[0].column == 2


@pytest.mark.parametrize("wrong", ["", "missing.json"])
def test_no_file(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"is a folder|does not exist"):
        read_text(tmp_path / wrong, what="the file")


def test_yaml_keeps_places_and_marks_repeats() -> None:
    document = read_yaml("a: no\nb:\n  c: '1'\n  d: [1, 2]\nb:\n  c: 2\n", file="f.yaml", what="the file")
    assert [(k.name, k.value, k.line, k.column, k.repeats) for k in document.keys] == [
        ("a", False, 1, 1, False),
        ("b.c", "1", 3, 3, False),
        ("b.d", [1, 2], 4, 3, False),
        ("b", {"c": 2}, 5, 1, True),
    ]


@pytest.mark.parametrize(
    "text", ["- 1\n", "just text", "a: [1\n", "a: !!python/object:os.system 1", "a: &x [*x]\n? [1]\n: 2"]
)
def test_what_is_no_mapping_of_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match=r"YAML|name: value"):
        read_yaml(text, file="f.yaml", what="the file")
