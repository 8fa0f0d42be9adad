"""Reading records: each handed file as its README says, and the ways a line can be broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_trainer.data.formats import Chat, Plain
from fsdp_trainer.data.sources import BadRecord, Example, read_examples, resolve_paths
from fsdp_trainer.errors import DataError

DATA = Path(__file__).resolve().parents[2] / "inputs" / "data"


def read(path: Path, **settings) -> tuple[list[Example], list[BadRecord]]:
    records = list(read_examples(resolve_paths(str(path)), **settings))
    return [r for r in records if isinstance(r, Example)], [r for r in records if isinstance(r, BadRecord)]


def handed(name: str) -> tuple[list[Example], list[BadRecord]]:
    return read(next(DATA.glob(f"{name}_*.jsonl")))


def line_numbers(records) -> list[int]:
    return [int(record.where.rsplit(":", 1)[1]) for record in records]


def contents(messages: Chat | Plain) -> list[str]:
    assert isinstance(messages, Chat)
    return [message["content"] for message in messages.messages]


def test_d01_broken_lines_are_named_and_the_last_row_without_newline_is_kept():
    good, bad = handed("d01")
    assert line_numbers(good) == [1, 6]
    assert contents(good[-1].content) == ["4+4?", "8"]
    assert line_numbers(bad) == [2, 4, 5]
    assert {record.kind for record in bad} == {"broken JSON"}


def test_d04_no_bom_and_no_carriage_return_in_the_text():
    good, bad = handed("d04")
    assert not bad
    assert [contents(example.content) for example in good] == [["one", "1"], ["two", "2"]]


def test_d05_another_encoding_is_refused_with_byte_and_line():
    with pytest.raises(DataError, match=r"d05_not_utf8_latin1.jsonl:1, byte 46") as error:
        handed("d05")
    assert "0xe9" in str(error.value)


def test_encoding_offset_counts_the_lines_before(tmp_path: Path):
    path = tmp_path / "late.jsonl"
    first = b'{"text": "fine"}\r\n'
    path.write_bytes(first + b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=f":2, byte {len(first) + 13}"):
        read(path)


def test_d07_each_bad_row_is_named_and_the_good_ones_kept():
    good, bad = handed("d07")
    assert line_numbers(bad) == [2, 3, 4, 5, 7]  # line 1 has no answer: found when it is masked
    assert line_numbers(good) == [1, 6, 8]
    what = {int(record.where.rsplit(":", 1)[1]): record.what for record in bad}
    assert "empty list" in what[2]
    assert "no 'role'" in what[5]


@pytest.mark.parametrize(("name", "known_as"), [("d11", "sharegpt"), ("d12", "alpaca")])
def test_formats_that_come_later_are_refused_by_name(name: str, known_as: str):
    good, bad = handed(name)
    assert not good
    assert all(known_as in record.what for record in bad)


def test_d13_pairs_of_text_and_of_messages():
    good, _ = handed("d13")
    assert good[0].content == Plain("Q: 1+1=", " 2")
    chat = good[2].content
    assert isinstance(chat, Chat)
    assert chat.first_target == 1


def test_d15_a_second_schema_is_refused_with_its_line():
    good, bad = handed("d15")
    assert line_numbers(good) == [1]
    assert line_numbers(bad) == [2, 3, 4, 5]
    assert bad[0].kind == "another format"
    assert "sharegpt" in bad[0].what


def test_d16_empty_file_is_refused():
    with pytest.raises(DataError, match="no records"):
        handed("d16")


def test_d17_a_json_array_is_read():
    good, bad = handed("d17")
    assert not bad
    assert [contents(example.content) for example in good] == [["a", "b"], ["c", "d"]]
    assert "element 1" in good[1].where


def test_d19_wrong_types_are_refused_by_line():
    good, bad = handed("d19")
    assert not good
    assert line_numbers(bad) == [1, 2, 3, 4, 5, 6]
    assert "5" in bad[3].what


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ('{"text": "a", "text": "b"}', "repeated key", "'text'"),
        ('{"text": "half \\ud83d of it"}', "lone surrogate", "\\ud83d"),
        ("[1, 2]", "wrong type", "list"),
        ("7", "wrong type", "number"),
        ('{"text": ' + "[" * 100_000, "broken JSON", ""),
        ('{"text": ' + "1" * 5000 + "}", "broken JSON", ""),
        ('{"text": null}', "missing field", "null"),
        ('{"text": ["part"]}', "not supported yet", "content parts"),
    ],
)
def test_a_bad_line_after_a_good_one(jsonl, line: str, kind: str, says: str):
    good, bad = read(jsonl({"text": "good"}, line, {"text": "also good"}))
    assert line_numbers(good) == [1, 3]
    assert [record.kind for record in bad] == [kind]
    assert says in bad[0].what


def test_a_whole_pair_of_surrogates_is_a_character(jsonl):
    good, bad = read(jsonl('{"text": "\\ud83d\\ude00"}'))
    assert not bad
    assert good[0].content == Plain("", "\U0001f600")


def test_only_newline_ends_a_line(jsonl):
    text = "a\u2028b\u0085c\x0bd"
    good, _ = read(jsonl(json.dumps({"text": text}, ensure_ascii=False)))
    assert good[0].content == Plain("", text)


def test_unknown_role_names_the_nearest(jsonl):
    _, bad = read(jsonl({"messages": [{"role": "asistant", "content": "x"}]}))
    assert bad[0].kind == "unknown role"
    assert "'assistant'" in bad[0].what.split("did you mean")[1]


def test_unknown_keys_name_the_nearest(jsonl):
    _, bad = read(jsonl({"mesages": []}))
    assert "did you write 'mesages' for 'messages'" in bad[0].what


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]},
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
)
def test_what_would_be_lost_is_refused(jsonl, message: dict):
    _, bad = read(jsonl({"messages": [message]}))
    assert bad[0].kind == "not supported yet"


def test_null_user_content_is_bad_and_null_answer_is_empty(jsonl):
    good, bad = read(
        jsonl(
            {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]},
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
        )
    )
    assert line_numbers(bad) == [1]
    assert contents(good[0].content) == ["x", ""]


@pytest.mark.parametrize(
    ("name", "says"), [("missing.jsonl", "does not exist"), ("a.parquet", "Parquet"), ("a.jsonl.gz", "gzip")]
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, says: str):
    if name != "missing.jsonl":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=says):
        resolve_paths(str(tmp_path / name))


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="folders"):
        resolve_paths(str(tmp_path))


def test_a_named_format_is_kept_to(jsonl):
    path = jsonl({"prompt": "p", "completion": "c", "text": "t"})
    assert read(path)[0][0].content == Plain("p", "c")
    assert read(path, record_format="text")[0][0].content == Plain("", "t")
    with pytest.raises(DataError, match="alpaca"):
        read(path, record_format="alpaca")


def test_a_list_of_files_keeps_their_order_and_each_its_format(jsonl):
    paths = [
        str(jsonl({"text": "one"}, name="a.jsonl")),
        str(jsonl({"prompt": "p", "completion": "c"}, name="b.jsonl")),
    ]
    examples = list(read_examples(resolve_paths(paths)))
    assert [example.content for example in examples if isinstance(example, Example)] == [
        Plain("", "one"),
        Plain("p", "c"),
    ]


def test_reading_needs_no_torch():
    code = "import sys, fsdp_trainer.data.sources; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
