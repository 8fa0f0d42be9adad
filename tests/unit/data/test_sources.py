"""Reading records: each handed file as its README says, and the ways a line can be broken."""

import json
import os
import socket
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from fsdp_trainer.config import COLUMNS, SourceConfig
from fsdp_trainer.data.formats import Chat, Plain
from fsdp_trainer.data.sources import (
    BadRecord,
    Example,
    _hub_files,
    read_examples,
    read_file,
    resolve_paths,
    resolve_sources,
)
from fsdp_trainer.errors import DataError
from tests import light_imports as light
from tests.unit.data.files import write_csv, write_parquet

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


def test_d11_known_role_names_are_mapped_and_an_unknown_one_refused_by_line():
    good, bad = handed("d11")
    assert line_numbers(good) == [1, 2, 3, 4]
    roles = [
        [message["role"] for message in chat.messages] for example in good if isinstance(chat := example.content, Chat)
    ]
    assert roles == [
        ["user", "assistant"],
        ["system", "user", "assistant"],
        ["assistant", "user", "assistant"],
        ["user", "assistant", "tool", "assistant"],
    ]
    assert contents(good[3].content) == ["x", '{"name": "f"}', "1", "done"]
    assert line_numbers(bad) == [5]
    assert bad[0].kind == "unknown role"
    assert "'chatbot'" in bad[0].what


def test_d12_three_rows_load_and_the_old_key_is_refused():
    good, bad = handed("d12")
    assert [contents(example.content) for example in good] == [
        ["Add\n\n1 and 2", "3"],
        ["Say hi", "hi"],
        ["No input key", "ok"],
    ]
    assert line_numbers(bad) == [4]
    assert bad[0].kind == "missing field"
    assert "'response'" in bad[0].what


def test_d12_the_old_key_loads_when_it_is_renamed(jsonl):
    good, bad = read(jsonl({"instruction": "a", "response": "b", "x": 1}), columns={"output": "response"})
    assert not bad
    assert contents(good[0].content) == ["a", "b"]


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
    assert "ready-made tokens" in bad[5].what  # an id beyond the table: test_masks checks the tokenizer's own


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ('{"text": "a", "text": "b"}', "repeated key", "'text'"),
        ('{"text": "half \\ud83d of it"}', "lone surrogate", "\\ud83d"),
        ("[1, 2]", "wrong type", "list"),
        ("7", "wrong type", "number"),
        ('{"text": ' + "[" * 100_000, "broken JSON", ""),
        ('\ufeff{"text": "a"}', "broken JSON", "byte order mark"),
        ('{"text": ' + "1" * 5000 + "}", "broken JSON", ""),
        ('{"text": null}', "missing field", "null"),
        ('{"text": ["part"]}', "wrong type", "must be a string"),
        ('{"text": "t", "tools": [{"name": "f"}]}', "not supported", "'tools'"),
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


def chat_of(jsonl, record: dict) -> Chat:
    (example,), bad = read(jsonl(record))
    assert not bad
    assert isinstance(example.content, Chat)
    return example.content


def test_content_parts_of_text_are_joined(jsonl):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    chat = chat_of(jsonl, {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]})
    assert contents(chat) == ["one two", ""]


def test_tool_calls_and_tools_keep_their_meaning(jsonl):
    """Arguments as text (OpenAI), as an object, and flat; tools as a list or as text, as many files have them."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"name": "f", "arguments": {"x": 2}},
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "a", "tool_calls": None},
    ]
    chat = chat_of(jsonl, {"messages": messages, "tools": json.dumps([tool])})
    assert chat.tools == (tool,)
    assert chat.messages[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"type": "function", "function": {"name": "f", "arguments": {"x": 2}}},
    ]
    assert chat.messages[2] == messages[2]
    assert "tool_calls" not in chat.messages[3]
    assert chat_of(jsonl, {"messages": messages, "tools": [tool]}) == chat


def test_a_function_call_of_sharegpt_is_a_tool_call(jsonl):
    turns = [
        ("human", "q"),
        ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
        ("observation", "1"),
        ("gpt", "a"),
    ]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns], "system": "s", "tools": "[]"}
    chat = chat_of(jsonl, record)
    assert contents(chat) == ["s", "q", "", "1", "a"]
    assert chat.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_beside_its_own(jsonl, key: str):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: "because"}]
    answer = chat_of(jsonl, {"messages": messages}).messages[1]
    assert answer[key] == answer["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "not supported"),
        ({"role": "user", "content": [7]}, "not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing field"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "not supported"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "wrong type"),
        ({"role": "assistant", "content": "", "tool_calls": {"name": "f"}}, "wrong type"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{cut"}]}, "broken JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "wrong type"),
        ({"role": "assistant", "content": "x", "reasoning": 7}, "wrong type"),
    ],
)
def test_what_cannot_be_read_in_a_message_is_refused(jsonl, message: dict, kind: str):
    _, bad = read(jsonl({"messages": [message]}))
    assert [record.kind for record in bad] == [kind]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "wrong type"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "{cut"}, "broken JSON"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, "not supported"),
        ({"instruction": "x", "output": 7}, "wrong type"),
    ],
)
def test_what_cannot_be_read_in_a_record_is_refused(jsonl, record: dict, kind: str):
    _, bad = read(jsonl(record))
    assert [bad_record.kind for bad_record in bad] == [kind]


def test_alpaca_files_have_a_text_column_that_is_not_trained_on(jsonl):
    chat = chat_of(jsonl, {"instruction": "i", "input": None, "output": "o", "text": "i o", "system": "s"})
    assert contents(chat) == ["s", "i", "o"]


def test_the_columns_that_can_be_renamed_are_those_that_are_read():
    assert len(COLUMNS) == len(set(COLUMNS))
    assert {"messages", "conversations", "prompt", "completion", "instruction", "output", "text", "tools"} <= set(
        COLUMNS
    )


def test_a_column_that_is_not_there_is_named(jsonl):
    good, bad = read(jsonl({"q": "a", "a": "b"}, {"q": "a"}), columns={"prompt": "q", "completion": "a"})
    assert good[0].content == Plain("a", "b")
    assert line_numbers(bad) == [2]
    assert "'a', which data.columns names" in bad[0].what


def test_equal_content_has_one_digest_whatever_it_came_in(jsonl, tmp_path: Path):
    record = {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a"}]}
    spaced = json.dumps({"id": 7} | record, indent=None, separators=(" ,  ", ":"), ensure_ascii=False)
    write_parquet([record], tmp_path / "a.parquet")
    digests = [example.digest for path in (jsonl(record, spaced), tmp_path / "a.parquet") for example in read(path)[0]]
    assert len(digests) == 3
    assert len(set(digests)) == 1


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
    ("name", "says"),
    [
        ("missing.jsonl", "does not exist"),
        ("a.zip", ".zip files are not read"),
        ("a.jsonl.xz", ".xz files"),
        ("a.tar.gz", ".tar files"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, says: str):
    if name != "missing.jsonl":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=says):
        resolve_paths(str(tmp_path / name))


def test_a_folder_gives_its_data_files_by_name(tmp_path: Path):
    names = ["b.jsonl", "a.csv", "sub/c.parquet", "d.json.gz", "README.md", ".hidden.jsonl", "_temporary/e.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [str(path.relative_to(tmp_path)) for path in resolve_paths(str(tmp_path))]
    assert found == ["a.csv", "b.jsonl", "d.json.gz", "sub/c.parquet"]


def test_a_folder_without_data_is_refused(tmp_path: Path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(DataError, match=r"README\.md"):
        resolve_paths(str(tmp_path))


def test_a_folder_that_datasets_saved(tmp_path: Path):
    import datasets

    saved = datasets.Dataset.from_list([{"prompt": f"p{i}", "completion": "c"} for i in range(20)])
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    good, bad = read(tmp_path / "one")
    assert [example.content for example in good] == [Plain(f"p{i}", "c") for i in range(20)]
    assert not bad
    saved.select([5, 3]).save_to_disk(tmp_path / "some")
    assert [example.content for example in read(tmp_path / "some")[0]] == [Plain("p5", "c"), Plain("p3", "c")]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="train, test"):
        resolve_paths(str(tmp_path / "both"))
    assert len(read(tmp_path / "both" / "test")[0]) == 20
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match="data-00001"):
        resolve_paths(str(tmp_path / "one"))


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"no-such-organisation/none .*, split validation"):
        resolve_paths(SourceConfig(path="no-such-organisation/none", split="validation"))
    with pytest.raises(DataError, match="whole split"):
        resolve_paths(SourceConfig(path="no-such-organisation/none", split="train[:10%]"))


def test_a_hub_id_gives_the_files_that_datasets_makes_of_it(tmp_path: Path, monkeypatch):
    """`datasets` takes a folder beside where it takes an id, and treats it in the same way from there on."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, count in (("train", 5), ("validation", 2)):
        (tmp_path / "hub").mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": f"{name} {index}", "completion": "c", "n": index}) for index in range(count)]
        (tmp_path / "hub" / f"{name}.jsonl").write_text("\n".join(lines))
    for source, name, count in (({}, "train", 5), ({"split": "validation"}, "validation", 2)):
        paths = _hub_files(SourceConfig(path=str(tmp_path / "hub"), **source))
        contents = [example.content for example in read_examples(paths) if isinstance(example, Example)]
        assert contents == [Plain(f"{name} {index}", "c") for index in range(count)]


def test_a_split_says_nothing_about_local_files(jsonl):
    with pytest.raises(DataError, match="split has no effect"):
        resolve_paths(SourceConfig(path=str(jsonl({"text": "a"})), split="test"))


def test_sources_are_kept_apart_only_where_they_are_mixed(tmp_path: Path, jsonl):
    one, two = str(jsonl({"text": "1"}, name="1.jsonl")), str(jsonl({"text": "2"}, name="2.jsonl"))
    (together,) = resolve_sources((one, SourceConfig(path=two)))
    assert [path.name for path in together.files] == ["1.jsonl", "2.jsonl"]
    mixed = resolve_sources((SourceConfig(path=two, weight=0.5), SourceConfig(path=one, weight=2.0)))
    assert [(source.files[0].name, source.weight) for source in mixed] == [("2.jsonl", 0.5), ("1.jsonl", 2.0)]


def test_a_named_format_is_kept_to(jsonl):
    path = jsonl({"prompt": "p", "completion": "c", "text": "t"})
    assert read(path, record_format="prompt_completion")[0][0].content == Plain("p", "c")
    assert read(path, record_format="text")[0][0].content == Plain("", "t")
    assert read(path, record_format="alpaca")[1][0].kind == "another format"


def test_reading_goes_on_in_the_format_of_the_whole_file(jsonl):
    path = jsonl("broken", {"text": "", "prompt": "p", "completion": "c"}, {"text": "b"})
    whole = list(read_file(path))
    rest = list(read_file(path, start=whole[1][1]))
    assert rest == whole[2:]
    assert isinstance(rest[0][0], BadRecord)
    assert list(read_file(path, start=whole[2][1])) == []


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
    assert light.python(code).returncode == 0


@pytest.mark.parametrize(
    ("written", "role"),
    [
        ("Human", "user"),
        ("GPT", "assistant"),
        (" USER ", "user"),
        ("model", "assistant"),
        ("function", "tool"),
        ("ipython", "tool"),
        ("Observation", "tool"),
        ("developer", "developer"),
    ],
)
@pytest.mark.parametrize(("name", "text"), [("from", "value"), ("role", "content"), ("role", "value")])
def test_roles_are_known_by_the_names_of_published_files(jsonl, written: str, role: str, name: str, text: str):
    chat = chat_of(jsonl, {"conversations": [{name: written, text: "x"}]})
    assert chat.messages == ({"role": role, "content": "x"},)


def test_content_parts_of_text_go_by_several_names(jsonl):
    parts = [{"type": "input_text", "text": "a"}, {"text": "b"}, {"type": "output_text", "text": "c"}]
    assert contents(chat_of(jsonl, {"messages": [{"role": "user", "content": parts}]})) == ["abc"]


def test_messages_may_stand_as_json_text(jsonl, tmp_path: Path):
    """As the only way in which a CSV file holds a conversation."""
    messages = [{"role": "user", "content": 'say "é", please'}, {"role": "assistant", "content": "é"}]
    assert chat_of(jsonl, {"messages": json.dumps(messages)}) == chat_of(jsonl, {"messages": messages})
    write_csv([{"messages": json.dumps(messages)}], tmp_path / "a.csv")
    assert contents(read(tmp_path / "a.csv")[0][0].content) == ['say "é", please', "é"]
    _, bad = read(jsonl({"messages": "[no messages"}, {"messages": "no messages"}))
    assert [record.kind for record in bad] == ["broken JSON", "wrong type"]
    assert "messages is text, but not the JSON" in bad[0].what


@pytest.mark.parametrize(
    "record",
    [
        {"messages": '[{"role": "user", "content": "\\ud800"}]'},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": "\\ud800"}'}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": '[{"name": "f", "description": "\\ud800"}]'},
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": "\\ud800"}}'}]},
    ],
    ids=["messages", "arguments", "tools", "function_call"],
)
def test_half_a_character_inside_json_text_is_found(jsonl, record: dict):
    """It is whole in the line, where the backslash is escaped: only the inner text holds it."""
    _, bad = read(jsonl(record))
    assert [record.kind for record in bad] == ["lone surrogate"]
    assert "\\ud800" in bad[0].what


def test_an_alpaca_record_without_instruction_asks_its_input(jsonl):
    chat = chat_of(jsonl, {"instruction": " ", "input": "what is asked", "output": "a"})
    assert contents(chat) == ["what is asked", "a"]
    _, bad = read(jsonl({"instruction": "i", "output": "o"}, {"instruction": "i", "output": 3}, {"instruction": "i"}))
    assert [record.what for record in bad] == [
        "output must be a string, not 3",
        "no 'output', which alpaca needs; the record has ['instruction']",
    ]


def test_half_a_pair_says_how_to_rename_the_other(jsonl):
    _, bad = read(jsonl({"prompt": "p", "response": "r"}))
    assert "data.columns: {completion: response}" in bad[0].what
    _, bad = read(jsonl({"prompt": "p", "x": "r"}))
    assert "data.columns: {completion: NAME}" in bad[0].what


@pytest.mark.parametrize(
    ("name", "says"),
    [("a.csv", "on the first line"), ("a.txt", "put the text in it"), ("a.jsonl", "one JSON object a line")],
)
def test_an_empty_file_says_what_to_write_in_one_of_its_kind(tmp_path: Path, name: str, says: str):
    (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=says):
        read(tmp_path / name)


def test_an_empty_table_says_what_to_write(tmp_path: Path):
    write_parquet([{"prompt": "a"}], tmp_path / "a.parquet")
    parquet.write_table(parquet.read_table(tmp_path / "a.parquet").slice(1), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="one record a row"):
        read(tmp_path / "a.parquet")


def test_linked_folders_are_searched_and_a_link_upwards_ends(tmp_path: Path, jsonl):
    """Path.rglob leaves linked folders out before Python 3.13: half the data would be missing silently."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text('{"text": "b"}')
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "data" / "dataset_infos.json").write_text("{}")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "sub" / "up").symlink_to(tmp_path / "data")
    found = [str(path.relative_to(tmp_path / "data")) for path in resolve_paths(str(tmp_path / "data"))]
    assert found == ["a.jsonl", "linked/b.jsonl"]


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in ("/dev/null", str(tmp_path / "pipe.jsonl")):
        with pytest.raises(DataError, match=f"a device, a pipe or a socket\n  found: {path}"):
            resolve_paths(path)
    with pytest.raises(DataError, match="patterns are not expanded"):
        resolve_paths(str(tmp_path / "*.jsonl"))


def test_the_hub_is_asked_once_for_a_data_set_that_is_not_here(tmp_path: Path, monkeypatch):
    """`datasets` itself waits 1, 2, 4, 8 and 8 seconds between its questions."""
    with socket.socket() as taken:  # a port that nothing listens on
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
        began = time.monotonic()
        with pytest.raises(
            DataError, match=r"no-such-organisation/none .*the hub cannot be reached .*in no cache here"
        ):
            resolve_paths("no-such-organisation/none")
    assert time.monotonic() - began < 10


def test_saved_data_sets_below_a_folder_and_empty_ones(tmp_path: Path):
    import datasets

    saved = datasets.Dataset.from_list([{"prompt": f"p{i}", "completion": "c"} for i in range(6)])
    saved.save_to_disk(tmp_path / "all" / "one", num_shards=2)
    # What `map` leaves in the folder of a loaded set is not of the set.
    datasets.load_from_disk(str(tmp_path / "all" / "one")).map(lambda record: {"completion": "other"})
    assert len(list((tmp_path / "all" / "one").glob("*.arrow"))) == 3
    good, bad = read(tmp_path / "all")
    assert not bad
    assert [example.content for example in good] == [Plain(f"p{i}", "c") for i in range(6)]
    datasets.Dataset.from_dict({"prompt": [], "completion": []}).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match="saved data set holds no records"):
        resolve_paths(str(tmp_path / "none"))
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "all" / "two")
    with pytest.raises(DataError, match="several splits"):
        resolve_paths(str(tmp_path / "all"))


def test_two_system_messages_are_refused_and_one_twice_is_one(jsonl):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert contents(chat_of(jsonl, {"system": "s", "messages": turns})) == ["s", "q"]
    _, bad = read(jsonl({"system": "other", "messages": turns}))
    assert "two system messages" in bad[0].what
    assert chat_of(jsonl, {"tools": "null", "messages": turns}).tools == ()


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("train.jsonl", "test.jsonl"), True),
        (("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"), True),
        (("train/a.jsonl", "dev/a.jsonl"), True),
        (("my_train.jsonl", "my_eval.jsonl.gz"), True),
        (("Training.csv", "Val.csv"), True),
        (("train-0.jsonl", "train-1.jsonl", "training.jsonl"), False),
        (("test.jsonl", "latest.jsonl"), False),  # what is named for testing alone is what is meant
        (("trainer.jsonl", "contest.jsonl", "devices.jsonl", "train.jsonl"), False),
    ],
    ids=str,
)
def test_a_folder_of_several_splits_is_refused(tmp_path: Path, names: tuple[str, ...], refused: bool):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}')
    if refused:
        with pytest.raises(DataError, match="several splits"):
            resolve_paths(str(tmp_path))
    assert len(resolve_paths([str(tmp_path / name) for name in names])) == len(names)
    if not refused:
        assert len(resolve_paths(str(tmp_path))) == len(names)


def test_tool_calls_may_stand_as_json_text(jsonl):
    calls = [{"name": "f", "arguments": {"x": 1}}]
    one, two = (
        chat_of(jsonl, {"messages": [{"role": "assistant", "tool_calls": written}]})
        for written in (calls, json.dumps(calls))
    )
    assert one == two
