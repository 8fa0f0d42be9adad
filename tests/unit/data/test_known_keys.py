"""Every key of a record, a message and a part of one is read, refused or named; none is dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.data.formats import Chat, Plain
from fsdp_trainer.data.known_keys import MARKS, SHAPES, decides_targets
from fsdp_trainer.data.sources import BadRecord, Example, read_examples
from fsdp_trainer.errors import DataError
from tests.unit.data.files import write_parquet


def read(path: Path, **settings: Any) -> tuple[list[Example], list[BadRecord]]:
    records = list(read_examples([path], **settings))
    return [r for r in records if isinstance(r, Example)], [r for r in records if isinstance(r, BadRecord)]


def one(path: Path, **settings: Any) -> Example:
    (example,), bad = read(path, **settings)
    assert not bad
    return example


def turns(example: Example) -> list[tuple[str, str]]:
    assert isinstance(example.content, Chat)
    return [(message["role"], message["content"]) for message in example.content.messages]


# Marks of what is no target

NO = [{name: name == "masked"} for name in MARKS if name != "weight"]
NO += [{name: 0} for name in MARKS if "0 or 1" in MARKS[name][1]] + [{"loss_scale": 0.0}, {"weight": 0.0}]
YES = [{name: name != "masked"} for name in MARKS] + [
    {"loss": 1},
    {"loss_scale": 1.0},
    {"loss": None},
]
OTHER = [{"loss": 0.5}, {"loss_scale": 2}, {"loss": "false"}, {"train": 0}, {"training": "no"}, {"masked": 1}]
OTHER += [{"loss": [0, 1]}, {"loss_mask": {}}, {"loss": True, "train": False}, {"masked": True, "weight": 1}]


@pytest.mark.parametrize("shape", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize("mark", NO, ids=str)
def test_an_answer_marked_in_any_known_spelling_is_no_target(prepared, shown, jsonl, mark: dict, shape: str) -> None:
    role, text = ("from", "value") if shape == "conversations" else ("role", "content")
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{role: who, text: what} | (mark if what == "b" else {}) for who, what in said]
    (text,) = shown(prepared(jsonl({shape: messages}))[0])
    assert [part[:1] for part in text.split("⟦")[1:]] == ["d"]
    assert "assistant\nb<|im_end|>" in text


@pytest.mark.parametrize("mark", NO, ids=str)
def test_a_part_marked_in_any_known_spelling_is_no_target(prepared, shown, jsonl, mark: dict) -> None:
    parts = [{"type": "text", "text": "no: "} | mark, {"type": "text", "text": "yes"}]
    messages = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    (text,) = shown(prepared(jsonl({"messages": messages}))[0])
    assert text.endswith("assistant\nno: ⟦yes<|im_end|>⟧\n")
    messages[1]["content"] = [*parts[::-1], {"type": "text", "text": "!"}]
    (text,) = shown(prepared(jsonl({"messages": messages}, name="between.jsonl"))[0])
    assert text.endswith("assistant\n⟦yes⟧no: ⟦!<|im_end|>⟧\n")


@pytest.mark.parametrize("mark", YES, ids=str)
def test_what_is_marked_as_a_target_is_one(prepared, shown, jsonl, mark: dict) -> None:
    parts = [{"type": "text", "text": "b"} | mark]
    for answer in ({"content": "b"} | mark, {"content": parts}):
        record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]}
        assert shown(prepared(jsonl(record))[0])[0].endswith("⟦b<|im_end|>⟧\n")


@pytest.mark.parametrize("mark", OTHER, ids=str)
@pytest.mark.parametrize("in_part", [False, True])
def test_another_value_of_a_mark_is_refused_by_line_and_key(jsonl, mark: dict, in_part: bool) -> None:
    content: Any = [{"type": "text", "text": "b"} | mark] if in_part else "b"
    answer = {"role": "assistant", "content": content} | ({} if in_part else mark)
    _, (bad,) = read(jsonl({"messages": [{"role": "user", "content": "a"}, answer]}))
    assert any(f".{key}" in bad.what for key in mark)
    assert "messages[1]" in bad.what
    assert bad.where.endswith(":1")


@pytest.mark.parametrize("mark", [{"loss": True}, {"training": True}, {"loss_mask": 1}, {"masked": False}])
def test_a_mark_that_asks_to_train_on_a_question_is_refused(jsonl, mark: dict) -> None:
    for content in ({"content": "a"} | mark, {"content": [{"type": "text", "text": "a"} | mark]}):
        _, (bad,) = read(jsonl({"messages": [{"role": "user", **content}, {"role": "assistant", "content": "b"}]}))
        assert "only answers are targets" in bad.what


@pytest.mark.parametrize("name", ["train_detail", "training_detail"])
def test_stretches_of_an_answer_as_axolotl_counts_them(prepared, shown, jsonl, name: str) -> None:
    """Places of characters, the last included; what no stretch names is no target."""

    def record(*stretches: tuple[int, int, bool]) -> dict:
        detail = [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in stretches]
        return {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "one two three", name: detail}]
        }

    for number, (stretches, marked) in enumerate(
        [
            ([(0, 2, True), (3, 7, False), (8, 12, True)], "⟦one⟧ two ⟦three<|im_end|>⟧"),
            ([(4, 6, True)], "one ⟦two⟧ three⟦<|im_end|>⟧"),
            ([(0, 13, True)], "⟦one two three<|im_end|>⟧"),
        ]
    ):
        (text,) = shown(prepared(jsonl(record(*stretches), name=f"{number}.jsonl"))[0])
        assert text.endswith(f"assistant\n{marked}\n")
    for stretches in ([(0, 20, True)], [(4, 2, True)], [(0, 5, True), (3, 7, False)], [(-1, 2, True)]):
        _, (bad,) = read(jsonl(record(*stretches)))
        assert f"conversations[1].{name}" in bad.what


def test_marks_of_parts_hold_with_last_assistant_and_contradict_all(prepared, shown, jsonl) -> None:
    parts = [{"type": "text", "text": "no "}, {"type": "text", "text": "yes"}]
    parts[0]["train"] = False  # type: ignore[assignment]
    file = jsonl({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]})
    assert shown(prepared(file, train_on="last_assistant")[0])[0].endswith("no ⟦yes<|im_end|>⟧\n")
    with pytest.raises(DataError, match=r"records\.jsonl:1: .*data.train_on: assistant"):
        prepared(file, train_on="all")


def test_a_template_that_writes_whole_messages_writes_no_marks(prepared, shown, jsonl) -> None:
    from tests.unit.data.toy_tokenizer import build_tokenizer

    whole = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>{% endfor %}"
    parts = [{"type": "text", "text": "b", "loss": False}, {"type": "text", "text": "c"}]
    for answer in ({"content": "b", "train": False}, {"content": parts}):
        messages = [CHAT[0], {"role": "assistant", **answer}, *CHAT]
        tokenizer = build_tokenizer(template=whole)
        (text,) = shown(prepared(jsonl({"messages": messages}), tokenizer=tokenizer)[0], tokenizer=tokenizer)
        assert "train" not in text


def test_parts_cannot_be_marked_where_the_template_rewrites_the_answer(prepared, jsonl) -> None:
    from tests.unit.data.toy_tokenizer import CHATML, build_tokenizer

    parts = [{"type": "text", "text": "No ", "loss": False}, {"type": "text", "text": "yes"}]
    file = jsonl({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]})
    rewriting = build_tokenizer(template=CHATML.replace("m['content']", "m['content'] | upper"))
    with pytest.raises(DataError, match=r"records\.jsonl:1: .*messages\[1\]"):
        prepared(file, tokenizer=rewriting)


# Keys that nobody knows

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
QA = [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    "key", ["mask", "no_loss", "is_target", "label", "supervise", "ignore", "lossy", "weights", "contents", "tools"]
)
@pytest.mark.parametrize("at", ["message", "part"])
def test_an_unknown_key_of_a_message_or_a_part_is_refused_by_name(jsonl, key: str, at: str) -> None:
    part = {"type": "text", "text": "b"}
    answer = {"role": "assistant", "content": "b", key: 0} if at == "message" else None
    answer = answer or {"role": "assistant", "content": [part | {key: 0}]}
    _, (bad,) = read(jsonl({"messages": [CHAT[0], answer]}))
    assert f"the key {key!r} (0)" in bad.what
    assert "messages[1]" in bad.what
    example = one(jsonl({"messages": [CHAT[0], CHAT[1] | {key: None}]}))  # a table has every key in every row
    assert turns(example) == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize("key", ["loss_mask", "weight"])
def test_a_call_that_is_marked_is_refused(jsonl, key: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, key: 0}
    _, (bad,) = read(jsonl({"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}))
    assert f"tool_calls[0] has the key {key!r}" in bad.what


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "from": "gpt", "content": "a"}, "role and messages[0].from differ"),
        ({"role": "user", "content": "a", "value": "b"}, "content and messages[0].value differ"),
        ({"role": "user", "content": "a", "images": ["x.png"]}, "'images'"),
        ({"role": "assistant", "content": None, "refusal": "I will not"}, "'refusal'"),
        ({"role": "assistant", "content": "a", "reasoning": "x", "thinking": "y"}, "differ"),
    ],
)
def test_a_message_that_says_two_things_or_what_is_not_read_is_refused(jsonl, message: dict, says: str) -> None:
    _, (bad,) = read(jsonl({"messages": [message, CHAT[1]]}))
    assert says in bad.what


@pytest.mark.parametrize(
    ("name", "decides"),
    [
        *((name, True) for name in ("loss_mask", "isTrainable", "sample_weight", "labels", "lossmask", "kto_tag")),
        *((name, False) for name in ("constraints", "glossary", "used_in_training", "category")),
    ],
)
def test_a_column_that_sounds_as_if_it_decided_is_refused_and_another_is_named(
    prepared, jsonl, tmp_path: Path, name: str, decides: bool
) -> None:
    assert decides_targets(name) == decides
    record = {"messages": CHAT, "source": "s", name: 0}
    write_parquet([record], tmp_path / "a.parquet")
    for path in (jsonl(record), tmp_path / "a.parquet"):
        if decides:
            with pytest.raises(DataError, match=rf"1: the column '{name}' \(0\)"):
                prepared(path)
        else:
            _, report = prepared(path)
            assert report.unread == tuple(sorted([name, "source"]))
            assert any("not read" in line and name in line for line in report.format_facts())


# What a record says beside its turns

CONTEXTS = [
    {"system": "s"},
    {"system_prompt": "s"},
    {"tools": [{"name": "f"}]},
    {"functions": '[{"name": "f"}]'},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"history": [["a", "b"]]},
    {"input": "i"},
    {"documents": ["d"]},
    {"images": ["x.png"]},
]
TURNS: dict[str, dict] = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "question": {"question": "a", "answer": "b"},
    "pair of messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "pair": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
}


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: next(iter(context)))
@pytest.mark.parametrize("shape", TURNS)
@pytest.mark.parametrize("renamed", [False, True])
def test_no_context_is_dropped_in_any_format(jsonl, shape: str, context: dict, renamed: bool) -> None:
    """Rendered, or refused by the column's name; also where data.columns renamed it."""
    ((name, value),) = context.items()
    columns = {name: "theirs"} if renamed and name in ("system", "tools", "history", "input") else {}
    record = TURNS[shape] | {columns.get(name, name): value}
    good, bad = read(jsonl(record), columns=columns)
    plain = one(jsonl(TURNS[shape], name="plain.jsonl"))
    if bad:
        assert repr(name) in bad[0].what
    else:
        assert good[0].content != plain.content
    assert bool(bad) == (
        shape in ("text", "pair")
        or name in ("history", "documents", "images")
        or (name == "input" and shape[0] in "msp")
    )


def test_empty_context_says_nothing(jsonl) -> None:
    for shape, record in TURNS.items():
        empty = {"system": "", "tools": [], "history": [], "input": " ", "chat_template_kwargs": {}, "images": None}
        assert one(jsonl(record | empty)).content == one(jsonl(record)).content, shape


def test_a_refused_system_text_names_the_renaming_that_renders_it(jsonl) -> None:
    record = {"prompt": "a", "completion": "b", "system": "s"}
    _, (bad,) = read(jsonl(record))
    assert "data.columns: {instruction: prompt, output: completion}" in bad.what
    example = one(jsonl(record), columns={"instruction": "prompt", "output": "completion"})
    assert turns(example) == [("system", "s"), ("user", "a"), ("assistant", "b")]


def test_two_system_texts_that_differ_are_refused(jsonl) -> None:
    _, (bad,) = read(jsonl({"messages": CHAT, "system": "s", "system_prompt": "t"}))
    assert "'system' and 'system_prompt' differ" in bad.what


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "a", "output": ["b", "c"]},
        {"instruction": ["a", "b"], "output": "c"},
        {"question": "a", "answer": ["b", "c"]},
        {"prompt": "a", "completion": ["b", "c"]},
        {"prompt": "a", "completion": "b", "text": ["c"]},
        {"messages": [CHAT[0], {"role": "assistant", "content": ["b", "c"]}]},
        {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "b"}, "c"]}]},
        {"messages": CHAT, "system": ["s", "t"]},
    ],
    ids=str,
)
def test_a_list_where_one_text_is_meant_is_refused(jsonl, record: dict) -> None:
    good, bad = read(jsonl(record))
    assert not good
    assert len(bad) == 1


# Records that fit two shapes, and values that are none


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"messages": CHAT, "text": "c"}, "data.format: messages, or data.format: text"),
        ({"messages": CHAT, "prompt": "c"}, "data.format: messages"),
        ({"messages": CHAT, "conversations": TURNS["sharegpt"]["conversations"]}, "data.format: sharegpt"),
        ({"messages": CHAT, "prompt": "c", "completion": "d"}, "data.format: prompt_completion"),
        ({"prompt": "a", "completion": "b", "text": "a b"}, "data.format: text"),
        ({"instruction": "a", "output": "b", "text": "c"}, "data.format: text"),
        ({"question": "a", "answer": "b", "response": "c"}, "data.columns: {instruction: question, output: answer}"),
        ({"instruction": "a", "output": "b", "response": "c"}, "data.columns: {instruction: instruction, output"),
    ],
)
def test_a_record_that_fits_two_shapes_is_refused_by_line(jsonl, record: dict, fix: str) -> None:
    _, (bad,) = read(jsonl(record))
    assert fix in bad.what
    assert bad.where.endswith(":1")


def test_every_record_is_asked_whether_it_fits_two_shapes(jsonl) -> None:
    good, bad = read(jsonl({"messages": CHAT}, {"messages": CHAT, "text": "c"}, {"messages": CHAT, "prompt": "c"}))
    assert len(good) == 1
    assert [record.kind for record in bad] == ["two formats"] * 2


def test_a_column_that_only_repeats_is_no_second_shape(jsonl) -> None:
    """UltraChat 200k has its first question in "prompt" as well, alpaca the whole prompt in "text"."""
    assert one(jsonl({"messages": CHAT, "prompt": "a", "prompt_id": "7"})).unread == ("prompt", "prompt_id")
    written = "Below is an instruction.\n### Instruction: a\n### Response: b"
    assert turns(one(jsonl({"instruction": "a", "output": "b", "text": written}))) == [
        ("user", "a"),
        ("assistant", "b"),
    ]
    assert one(jsonl({"messages": CHAT, "text": None, "prompt": ""})).content == Chat(tuple(CHAT))


def test_a_named_format_or_renamed_columns_decide_between_two_shapes(jsonl) -> None:
    path = jsonl({"messages": CHAT, "text": "c", "question": "d", "reply": "e"})
    assert one(path, record_format="text").content == Plain("", "c")
    assert one(path, record_format="messages").content == Chat(tuple(CHAT))
    assert turns(one(path, columns={"instruction": "question", "output": "reply"}))[0] == ("user", "d")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_none_is_refused_by_line(jsonl, number: str) -> None:
    lines = [
        json.dumps({"text": "a"}),
        f'{{"text": "b", "score": {number}}}',
        f'{{"text": "c", "x": [{{"y": {number}}}]}}',
    ]
    good, bad = read(jsonl(*lines))
    assert [record.where.rsplit(":", 1)[1] for record in bad] == ["2", "3"]
    assert all(number in record.what for record in bad)
    assert len(good) == 1
    call = {"name": "f", "arguments": f'{{"x": {number}}}'}
    assert read(jsonl({"messages": [CHAT[0], {"role": "assistant", "tool_calls": [call]}]}))[1]
    assert one(jsonl('{"text": "a", "score": 1.5e300}'))


@pytest.mark.parametrize(
    ("result", "text"),
    [(0.42, "0.42"), (7, "7"), (True, "true"), ({"a": "é"}, '{"a": "é"}'), ([1, 2], "[1, 2]"), ([], "[]")],
)
def test_what_a_tool_gives_back_is_written_as_text(jsonl, result: Any, text: str) -> None:
    calls = [{"name": "f", "arguments": {}}]
    messages = [CHAT[0], {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": result}, CHAT[1]]
    assert turns(one(jsonl({"messages": messages})))[2] == ("tool", text)
    _, bad = read(jsonl({"messages": [CHAT[0] | {"content": result}, CHAT[1]]}))
    assert ["messages[0].content" in record.what for record in bad] == [True] * (result != [])


# Shapes of open data sets, with their own columns

CALLS = '[{"name": "f", "arguments": {"x": 1}}]'
XLAM_TOOLS = '[{"name": "f", "description": "d", "parameters": {"x": {"type": "int", "description": "x"}}}]'
WILDCHAT = {"country": "X", "hashed_ip": "h", "header": {"accept-language": "en"}, "language": "English"}
WILDCHAT |= {"redacted": False, "state": "Y", "timestamp": None, "toxic": False, "turn_identifier": 1}
SETS: dict[str, tuple[dict, list[tuple[str, str]]]] = {
    "LIMA": ({"conversations": ["a", "b"], "source": "stackexchange"}, QA),
    "UltraChat": ({"id": "0", "data": ["a", "b", "c", "d"]}, [*QA, ("user", "c"), ("assistant", "d")]),
    "UltraChat 200k": ({"prompt": "a", "prompt_id": "x", "messages": CHAT}, QA),
    "Dolly": ({"instruction": "a", "context": "c", "response": "b", "category": "qa"}, [("user", "a\n\nc"), QA[1]]),
    "OpenOrca": ({"id": "1", "system_prompt": "s", "question": "a", "response": "b"}, [("system", "s"), *QA]),
    "MetaMathQA": ({"type": "GSM_Rephrased", "query": "a", "original_question": "o", "response": "b"}, QA),
    "GSM8K": ({"question": "a", "answer": "b"}, QA),
    "WildChat": (
        {
            "conversation_hash": "h",
            "model": "m",
            "conversation": [message | WILDCHAT for message in CHAT],
            "turn": 1,
            "openai_moderation": [{"categories": {}}],
            "detoxify_moderation": [],
        },
        QA,
    ),
    "Capybara": (
        {"source": "s", "conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]},
        [*QA, ("user", "c"), ("assistant", "d")],
    ),
    "Llama-Nemotron": (
        {
            "input": [CHAT[0]],
            "output": "b",
            "category": "math",
            "license": "cc",
            "reasoning": "on",
            "generator": "g",
            "used_in_training": "x",
            "version": "v1",
            "system_prompt": "detailed thinking on",
        },
        [("system", "detailed thinking on"), *QA],
    ),
    "Nemotron v1": (
        {"uuid": "u", "license": "l", "version": "v", "reasoning": "on", "metadata": "{}"}
        | {"messages": [message | {"tool_calls": []} for message in CHAT]},
        QA,
    ),
    "xLAM": ({"id": 0, "query": "a", "answers": CALLS, "tools": XLAM_TOOLS}, [("user", "a"), ("assistant", "")]),
    "SmolTalk2": ({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": True}, "source": "s"}, QA),
    "OpenHermes": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]}
        | {"system_prompt": "s", "source": "x", "skip_prompt_formatting": False, "custom_instruction": None},
        [("system", "s"), *QA],
    ),
    "ms-swift": ({"system": "s", "query": "a", "response": "b", "history": []}, [("system", "s"), *QA]),
    "ms-swift pairs": ({"system": "s", "conversation": [{"human": "a", "assistant": "b"}]}, [("system", "s"), *QA]),
    "XTuner": (
        {"conversation": [{"system": "s", "input": "a", "output": "b", "output_with_loss": True}]},
        [("system", "s"), *QA],
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_the_shapes_of_open_data_sets_are_recognised(jsonl, tmp_path: Path, name: str) -> None:
    record, expected = SETS[name]
    example = one(jsonl(record))
    assert turns(example) == expected
    if name != "WildChat":  # pyarrow cannot write an object without fields
        write_parquet([record], tmp_path / "a.parquet")
        assert turns(one(tmp_path / "a.parquet")) == expected
    if name == "xLAM":
        assert isinstance(example.content, Chat)
        assert example.content.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
        assert example.content.tools[0]["name"] == "f"


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"problem": "a", "solution": "b", "source": "s"}, "data.columns: {instruction: problem, output: solution}"),
        ({"id": 1, "turns": CHAT}, "data.columns: {messages: turns}"),
        ({"conversation_hash": "h", "chat": json.dumps(CHAT)}, "data.columns: {messages: chat}"),
        ({"prompt": "a", "response": "b"}, "data.columns: {completion: response}"),
        ({"inputs": "a", "targets": "b"}, "data.columns: {instruction: inputs, output: targets}"),
        ({"content": "a", "path": "b"}, "data.columns: {text: content}"),
        ({"user_question": "a", "best_answer": "b"}, "data.columns: {instruction: user_question, output: best_answer}"),
        ({"system_prompt": "s", "task": "a", "reply": "b"}, "data.columns: {instruction: task, output: reply}"),
    ],
)
def test_a_refusal_gives_the_line_that_reads_the_file_and_names_its_columns(
    jsonl, tmp_path: Path, record: dict, fix: str
) -> None:
    write_parquet([record], tmp_path / "a.parquet")
    for path in (jsonl(record), tmp_path / "a.parquet"):
        _, (bad,) = read(path)
        assert fix in bad.what
        assert all(name in bad.what for name in record)
    line = bad.what.split("data.columns: {")[1].split("}")[0]
    columns = dict(pair.split(": ") for pair in line.split(", "))
    assert one(tmp_path / "a.parquet", columns=columns)


@pytest.mark.parametrize(
    "names", [("conversation_hash",), ("system_prompt",), ("text_id", "outputs_dir"), ("context",)]
)
def test_a_hint_does_not_lead_astray(jsonl, names: tuple[str, ...]) -> None:
    _, (bad,) = read(jsonl(dict.fromkeys(names, "x")))
    assert "did you write" not in bad.what
    assert all(name in bad.what for name in names)


@pytest.mark.parametrize("record", [{"conversation": "USER: a", "score": 1}, {"data": "a", "kind": "b"}])
def test_a_refused_table_names_all_its_columns(tmp_path: Path, record: dict) -> None:
    write_parquet([record], tmp_path / "a.parquet")
    for columns in ({}, {"prompt": "missing"}):
        _, (bad,) = read(tmp_path / "a.parquet", columns=columns)
        assert all(repr(name) in bad.what for name in record)


def test_no_line_is_given_where_it_would_leave_half_of_the_record_out(jsonl) -> None:
    for record in ({"chosen": CHAT, "rejected": CHAT}, {"question": "a", "answers": {"text": ["b"]}}):
        _, (bad,) = read(jsonl(record))
        assert "set data.columns" not in bad.what
        assert "did you write" not in bad.what


def test_each_shape_is_the_only_one_of_its_columns() -> None:
    assert len({shape.columns for shape in SHAPES}) == len(SHAPES)
