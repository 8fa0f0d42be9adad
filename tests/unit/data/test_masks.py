"""What is supervised: every handed file and template as its README says, shown as text with ⟦targets⟧ marked."""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_trainer.errors import DataError
from tests.unit.data.toy_tokenizer import CHATML, build_tokenizer

MARKERS = "t02_chatml_with_generation_markers.jinja"
STRICT = "t05_strict_alternation_no_system.jinja"


def chat(*turns: str) -> dict:
    roles = ["user", "assistant"] * len(turns)
    return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}


def test_d10_every_assistant_turn_with_its_end_is_a_target(prepared, shown):
    rows, report = prepared("d10_multi_turn_chat")
    assert shown(rows) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n⟦see you<|im_end|>⟧\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb (two user turns)<|im_end|>\n"
        "<|im_start|>assistant\n⟦c<|im_end|>⟧\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nlate system<|im_end|>\n"
        "<|im_start|>assistant\n⟦c<|im_end|>⟧\n",
        "<|im_start|>user\nlast turn is user<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        "<|im_start|>user\ndangling<|im_end|>\n",
    ]
    assert not report.warnings


def test_last_assistant_only(prepared, shown):
    rows, _ = prepared("d10_multi_turn_chat", train_on="last_assistant")
    assert "⟦hello" not in shown(rows)[0]
    assert "⟦see you<|im_end|>⟧" in shown(rows)[0]
    assert "⟦yes<|im_end|>⟧" in shown(rows)[3]


NOT_TRAINED = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": False}]


def marked_chat(*marks: dict) -> dict:
    """Answers b0, b1, ... to questions a0, a1, ..., each with its mark."""
    pairs = [
        ({"role": "user", "content": f"a{number}"}, {"role": "assistant", "content": f"b{number}", **mark})
        for number, mark in enumerate(marks)
    ]
    return {"messages": [message for pair in pairs for message in pair]}


@pytest.mark.parametrize("template", [MARKERS, "t01_chatml_no_generation_markers.jinja"])
@pytest.mark.parametrize("mark", NOT_TRAINED)
def test_an_answer_marked_as_not_to_be_trained_is_context_alone(prepared, shown, jsonl, mark: dict, template: str):
    file = jsonl(marked_chat(mark, {"weight": 1, "train": True}, {}, mark))
    text = shown(prepared(file, chat_template=template)[0])[0]
    assert [part[:2] for part in text.split("⟦")[1:]] == ["b1", "b2"]
    assert "b0<|im_end|>" in text
    last = shown(prepared(file, chat_template=template, train_on="last_assistant")[0])[0]
    assert [part[:2] for part in last.split("⟦")[1:]] == ["b2"]
    assert text.replace("⟦", "").replace("⟧", "") == last.replace("⟦", "").replace("⟧", "")


def test_a_mark_holds_whatever_shape_the_record_has(prepared, shown, jsonl):
    turns = [("human", "a", {}), ("gpt", "b", {"weight": 0}), ("human", "c", {}), ("gpt", "d", {})]
    shaped = {"system": "s", "conversations": [{"from": role, "value": text} | mark for role, text, mark in turns]}
    pair = {"prompt": marked_chat({})["messages"], "completion": marked_chat({"train": False}, {})["messages"]}
    for record, targets in ((shaped, ["d"]), (pair, ["b1"])):
        text = shown(prepared(jsonl(record))[0])[0]
        assert [part.split("<|im_end|>")[0] for part in text.split("⟦")[1:]] == targets


def test_a_record_whose_answers_are_all_marked_is_dropped_and_counted(prepared, jsonl):
    _, report = prepared(jsonl(marked_chat({"weight": 0}), marked_chat({})))
    assert report.dropped == {"every answer marked as not to be trained on": 1}


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0.5}, {"weight": 2}, {"weight": "0"}, {"train": 0}, {"train": "false"}, {"weight": 1, "train": False}],
)
def test_another_mark_is_refused_by_line(prepared, jsonl, mark: dict):
    with pytest.raises(DataError, match=r"records.jsonl:2: messages\[1\]\.(weight|train)"):
        prepared(jsonl(marked_chat({}), marked_chat(mark)))


def test_a_mark_that_asks_for_more_than_answers_or_for_less_than_all_is_refused(prepared, jsonl):
    asked = {"messages": [{"role": "user", "content": "a", "train": True}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match=r"records.jsonl:1: messages\[0\].train"):
        prepared(jsonl(asked))
    for others in ((), ({},)):
        with pytest.raises(DataError, match=r"records.jsonl:1: .*data.train_on: assistant"):
            prepared(jsonl(marked_chat({"weight": 0}, *others)), train_on="all")
    defaults = {"messages": [message | {"train": False} for message in asked["messages"][:1]] + asked["messages"][1:]}
    assert prepared(jsonl(defaults), train_on="all")[1].documents == 1  # a table has the mark in every message


def test_train_on_all_leaves_out_the_first_token_only(prepared):
    rows, _ = prepared("d10_multi_turn_chat", train_on="all")
    assert np.array_equal(np.flatnonzero(~rows.supervised), rows.document_starts[:-1])


def test_generation_markers_are_used_as_they_are(prepared, shown):
    rows, _ = prepared("d10_multi_turn_chat", chat_template=MARKERS)
    assert "⟦hello<|im_end|>\n⟧" in shown(rows)[0]
    last, _ = prepared("d10_multi_turn_chat", chat_template=MARKERS, train_on="last_assistant")
    assert shown(last)[0].count("⟦") == 1
    assert "⟦see you<|im_end|>\n⟧" in shown(last)[0]


def test_markers_without_the_end_of_turn_give_way_to_the_prefix(prepared, shown, jsonl):
    short = CHATML.replace(
        "m['content'] + '<|im_end|>\\n' }}", "'' }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    )
    short = short.replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\\n' }}")
    tokenizer = build_tokenizer(template=short)
    rows, report = prepared(jsonl(chat("q", "hello")), tokenizer=tokenizer)
    assert shown(rows, tokenizer=tokenizer)[0].endswith("⟦hello<|im_end|>⟧\n")
    assert not report.warnings


ONE_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GENERATION, END = "{% generation %}", "{% endgeneration %}"


@pytest.mark.parametrize(
    "template",
    [
        f"{GENERATION}{{% for m in messages %}}{ONE_TURN}{{% endfor %}}{END}",
        f"{{% for m in messages %}}{GENERATION}{ONE_TURN}{END}{{% endfor %}}",
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{GENERATION}{ONE_TURN}{END}{{% else %}}{ONE_TURN}"
        "{% endif %}{% endfor %}",
    ],
    ids=["all in one", "every turn", "the questions"],
)
@pytest.mark.parametrize("turns", [("hi there", "yo"), ("hi there", "yo", "and you", "fine")])
def test_markers_that_cover_a_question_give_way_to_the_prefix(prepared, shown, jsonl, template: str, turns: tuple):
    tokenizer = build_tokenizer(template=template + ASKS)
    text = shown(prepared(jsonl(chat(*turns)), tokenizer=tokenizer)[0], tokenizer=tokenizer)[0]
    assert [part.split("⟧")[0] for part in text.split("⟦")[1:]] == [f"{answer}<|im_end|>" for answer in turns[1::2]]


def test_markers_and_prefix_agree_but_for_the_newline_after_the_end(prepared):
    marked, _ = prepared("d10_multi_turn_chat", chat_template=MARKERS)
    plain, _ = prepared("d10_multi_turn_chat")
    assert np.array_equal(marked.tokens, plain.tokens)
    only_marked = marked.supervised & ~plain.supervised
    assert not (plain.supervised & ~marked.supervised).any()
    assert len(set(marked.tokens[only_marked].tolist())) == 1  # the newline


def test_t05_a_template_error_names_the_line(prepared, shown):
    with pytest.raises(DataError, match=r"d10_multi_turn_chat.jsonl:1: .*roles must alternate"):
        prepared("d10_multi_turn_chat", chat_template=STRICT)
    rows, report = prepared("d10_multi_turn_chat", chat_template=STRICT, on_bad_record="skip")
    assert report.skipped == {"template error": 3}
    assert [example.split(":")[1] for example in report.skipped_examples] == ["1", "2", "3"]
    assert "[assistant] yes<|im_end|>⟧" in shown(rows)[0]


@pytest.mark.parametrize("template", ["t04_emits_bos.jinja", "t01_chatml_no_generation_markers.jinja"])
def test_one_bos_whoever_writes_it(prepared, template: str):
    tokenizer = build_tokenizer(adds_bos=True)
    rows, _ = prepared("d10_multi_turn_chat", tokenizer=tokenizer, chat_template=template)
    starts = rows.document_starts[:-1]
    assert np.array_equal(np.flatnonzero(rows.tokens == tokenizer.bos_token_id), starts)
    assert not rows.supervised[starts].any()


def test_a_template_that_writes_bos_for_a_tokenizer_that_does_not(prepared, tokenizer):
    rows, _ = prepared("d10_multi_turn_chat", chat_template="t04_emits_bos.jinja")
    assert np.array_equal(np.flatnonzero(rows.tokens == tokenizer.bos_token_id), rows.document_starts[:-1])


@pytest.mark.parametrize("name", ["d10_multi_turn_chat", "d13_prompt_completion"])
def test_pad_equal_to_eos_does_not_hide_the_stop(prepared, tokenizer, name: str):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows, report = prepared(name)
    for start, stop in zip(rows.document_starts, rows.document_starts[1:], strict=False):
        targets = rows.tokens[start:stop][rows.supervised[start:stop]]
        assert targets[-1] == tokenizer.eos_token_id
    assert not [warning for warning in report.warnings if "stop" in warning]


def test_a_template_without_an_end_of_turn_is_warned_about(prepared, jsonl):
    tokenizer = build_tokenizer(template=CHATML.replace("<|im_end|>", ""))
    _, report = prepared(jsonl(chat("q", "hello")), tokenizer=tokenizer)
    assert len(report.warnings) == 1
    assert "learn to stop" in report.warnings[0]
    assert "<|im_end|>" in report.warnings[0]  # the eos token it looked for


def test_d02_empty_answers_are_dropped_and_never_the_word_none(prepared, shown):
    rows, report = prepared("d02_empty_assistant_turns")
    assert report.dropped == {"empty answer": 3}
    assert len(shown(rows)) == 1
    assert "⟦fine<|im_end|>⟧" in shown(rows)[0]


@pytest.mark.parametrize("template", [MARKERS, "t01_chatml_no_generation_markers.jinja"])
def test_an_empty_turn_among_others_is_no_target(prepared, shown, jsonl, template: str):
    rows, _ = prepared(jsonl(chat("q", " ", "again", "hello")), chat_template=template)
    assert shown(rows)[0].count("⟦") == 1
    assert "⟦hello" in shown(rows)[0]
    assert "None" not in shown(rows)[0]


def test_d07_strict_names_the_first_bad_row_and_skip_names_all(prepared, shown):
    with pytest.raises(DataError, match=r"d07_missing_fields.jsonl:1: no assistant message"):
        prepared("d07_missing_fields")
    rows, report = prepared("d07_missing_fields", on_bad_record="skip")
    assert report.records == 8
    assert sum(report.skipped.values()) == 6
    assert [line.split(":")[1] for line in report.skipped_examples] == ["1", "2", "3", "4", "5", "7"]
    assert "⟦starts with assistant<|im_end|>⟧" in shown(rows)[0]
    assert "⟦ok<|im_end|>⟧" in shown(rows)[1]


def test_the_assistant_may_speak_first_where_the_template_needs_a_message(prepared, shown, jsonl):
    system = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nhelp<|im_end|>\\n' }}{% endif %}"
    tokenizer = build_tokenizer(template=system + CHATML)
    rows, _ = prepared(jsonl({"messages": [{"role": "assistant", "content": "hi"}]}), tokenizer=tokenizer)
    text = "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>assistant\n⟦hi<|im_end|>⟧\n"
    assert shown(rows, tokenizer=tokenizer) == [text]


def test_d08_too_long_by_each_policy(prepared, shown):
    rows, report = prepared("d08_over_long", seq_len=64)
    assert report.dropped == {"nothing to train on after truncation": 1}
    assert (report.truncated, report.documents, report.longest_tokens) == (1, 2, 64)
    assert shown(rows)[1].endswith("⟦fits<|im_end|>⟧\n")
    _, report = prepared("d08_over_long", seq_len=64, on_too_long="drop")
    assert (report.dropped, report.documents) == ({"longer than seq_len": 2}, 1)
    with pytest.raises(DataError, match=r"d08_over_long.jsonl:1: .*longer than data.seq_len"):
        prepared("d08_over_long", seq_len=64, on_too_long="error")


def test_d22_rows_that_lose_all_labels_are_dropped_and_counted(prepared):
    rows, report = prepared("d22_one_rank_all_masked", seq_len=64)
    assert report.dropped == {"nothing to train on after truncation": 4}
    assert (rows.row_supervised() > 0).all()


def test_nothing_supervised_at_all_is_an_error(prepared):
    with pytest.raises(DataError, match="no record is left") as error:
        prepared("d08_over_long", seq_len=8)
    assert "3 records" in str(error.value)
    assert "after truncation" in str(error.value)


def test_d13_prompt_masked_completion_and_eos_supervised(prepared, shown):
    rows, report = prepared("d13_prompt_completion")
    assert shown(rows) == [
        "Q: 1+1=⟦ 2<|im_end|>⟧",
        "Q: no leading space⟦joined<|im_end|>⟧",
        "<|im_start|>user\nchat style prompt<|im_end|>\n<|im_start|>assistant\n⟦chat style completion<|im_end|>⟧\n",
        # without a start token nothing predicts the first token of a document
        shown(rows)[3],
    ]
    assert shown(rows)[3].replace("⟦", "").replace("⟧", "") == "empty prompt<|im_end|>"
    assert report.dropped == {"empty completion": 1}


@pytest.mark.parametrize("prompt", ["Q: no leading space", "Q: 1+1=", "word wo"])
@pytest.mark.parametrize("completion", ["joined", " 2", "rd word", "\n\n"])
def test_the_tokens_of_the_prompt_are_those_of_the_prompt_alone(prepared, tokenizer, jsonl, prompt, completion):
    rows, _ = prepared(jsonl({"prompt": prompt, "completion": completion + "."}))
    alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert rows.tokens[: len(alone)].tolist() == alone
    assert np.array_equal(np.flatnonzero(rows.supervised), np.arange(len(alone), len(rows.tokens)))
    assert tokenizer.decode(rows.tokens) == prompt + completion + ".<|im_end|>"


def test_the_toy_tokenizer_does_merge_across_that_border(tokenizer):
    """Otherwise the test above would show nothing."""
    apart = tokenizer(["word wo", "rd word"], add_special_tokens=False)["input_ids"]
    assert tokenizer("word word word", add_special_tokens=False)["input_ids"] != apart[0] + apart[1]


def test_an_answer_that_starts_with_newlines_keeps_the_header_the_model_will_see(prepared, shown, tokenizer, jsonl):
    header = tokenizer("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    rows, _ = prepared(jsonl(chat("q", "\n\nhello")))
    assert rows.tokens[: len(header)].tolist() == header
    assert shown(rows)[0].endswith("⟦\n\nhello<|im_end|>⟧\n")


def test_a_tokenizer_that_puts_a_space_before_every_text(prepared, jsonl):
    tokenizer = build_tokenizer(prefix_space=True, template=None)
    prompt, whole, completion = tokenizer(["hello%", "hello%zoo", "zoo"], add_special_tokens=False)["input_ids"]
    assert prompt + completion != whole  # tokenised apart, the completion would begin with a space nobody wrote
    rows, _ = prepared(jsonl({"prompt": "hello%", "completion": "zoo"}), tokenizer=tokenizer)
    assert rows.tokens.tolist() == [*whole, tokenizer.eos_token_id]
    assert int(np.flatnonzero(rows.supervised)[0]) == len(prompt)


def test_a_border_that_cannot_be_kept_is_refused(prepared, jsonl):
    tokenizer = build_tokenizer(prefix_space=True, template=None)
    with pytest.raises(DataError, match=r"records.jsonl:1: the tokenizer merges"):
        prepared(jsonl({"prompt": "word wo", "completion": "rd word"}), tokenizer=tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_way_out(prepared, shown, jsonl):
    rewriting = CHATML.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else 'earlier')")
    tokenizer = build_tokenizer(template=rewriting)
    path = jsonl(chat("q", "one", "r", "two"))
    with pytest.raises(DataError, match=r"records.jsonl:1: .*last_assistant or all"):
        prepared(path, tokenizer=tokenizer)
    rows, _ = prepared(path, tokenizer=tokenizer, train_on="all")
    assert "two<|im_end|>" in shown(rows, tokenizer=tokenizer)[0]


def test_text_is_supervised_but_for_its_first_token_and_ends_once(prepared, tokenizer, jsonl):
    rows, _ = prepared(jsonl({"text": "hello world"}, {"text": "ends itself<|im_end|>"}, {"text": "  "}))
    assert rows.n_rows == 2
    for index in range(2):
        start, stop = rows.documents_of(index)
        assert (rows.tokens[start:stop] == tokenizer.eos_token_id).sum() == 1
        assert rows.tokens[stop - 1] == tokenizer.eos_token_id
        assert rows.supervised[start:stop].tolist() == [False] + [True] * (stop - start - 1)


def test_ids_outside_the_embedding_table_name_table_and_record(prepared, tokenizer: PreTrainedTokenizerFast):
    highest = len(tokenizer)
    with pytest.raises(DataError, match="embedding table") as error:
        prepared("d10_multi_turn_chat", vocab_size=100)
    assert "table of 100 rows" in str(error.value)
    assert "d10_multi_turn_chat.jsonl:1" in str(error.value)
    prepared("d10_multi_turn_chat", vocab_size=highest)


def test_a_tokenizer_without_a_template_is_refused_for_chats_only(prepared, jsonl):
    tokenizer = build_tokenizer(template=None)
    with pytest.raises(DataError, match="no chat template"):
        prepared("d10_multi_turn_chat", tokenizer=tokenizer)
    prepared(jsonl({"text": "hello"}), tokenizer=tokenizer)


def test_a_broken_template_is_named(prepared):
    tokenizer = build_tokenizer(template="{% for m in messages %}{{ m")
    with pytest.raises(DataError, match="not valid Jinja"):
        prepared("d10_multi_turn_chat", tokenizer=tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        prepared("d10_multi_turn_chat", chat_template="missing.jinja")


BARE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TURNS = {"messages": [{"role": role, "content": role[:1]} for role in ("user", "assistant", "user", "assistant")]}


def test_a_header_that_the_model_is_never_asked_with_is_trained_on_and_warned_about(prepared, shown, jsonl):
    tokenizer = build_tokenizer(template=BARE)
    rows, report = prepared(jsonl(TURNS), tokenizer=tokenizer)
    assert shown(rows)[0].count("⟦<|im_start|>assistant\na<|im_end|>⟧") == 2
    assert any("with the header of each answer" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    "end", ["{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n"]
)
def test_a_header_that_is_always_asked_with_is_not(prepared, shown, jsonl, end: str):
    rows, report = prepared(jsonl(TURNS), tokenizer=build_tokenizer(template=BARE + end))
    assert shown(rows)[0].count("⟦") == 2
    assert "⟦<|im_start|>" not in shown(rows)[0]
    assert not any("header" in warning for warning in report.warnings)


def test_a_template_that_fails_in_its_arithmetic_names_the_line(prepared, jsonl):
    template = "{{ 1 / (messages[0].content | length - 1) }}" + BARE
    with pytest.raises(DataError, match=r"records\.jsonl:1: the chat template refuses this conversation: division"):
        prepared(jsonl(TURNS), tokenizer=build_tokenizer(template=template))


def test_a_tokenizer_with_several_templates_and_no_default_is_refused(prepared, jsonl):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(DataError, match="rag, tool_use"):
        prepared(jsonl(TURNS), tokenizer=tokenizer)
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML}
    assert prepared(jsonl(TURNS), tokenizer=tokenizer)[0].n_documents == 1


def test_a_template_file_may_start_with_a_byte_order_mark(prepared, shown, jsonl, tmp_path):
    (tmp_path / "bom.jinja").write_bytes(b"\xef\xbb\xbf" + CHATML.encode())
    rows, _ = prepared(jsonl(TURNS), chat_template=tmp_path / "bom.jinja")
    assert shown(rows)[0].startswith("<|im_start|>user")


def test_a_template_may_stand_in_the_json_that_models_publish_it_in(prepared, shown, jsonl, tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    rows, _ = prepared(jsonl(TURNS), chat_template=tmp_path / "chat_template.json")
    assert shown(rows) == shown(prepared(jsonl(TURNS))[0])


@pytest.mark.parametrize("text", [" ", "hello", '{"model_type": "llama"}'])
def test_a_template_that_writes_nothing_of_a_conversation_is_refused(prepared, jsonl, tmp_path, text: str):
    (tmp_path / "template").write_text(text)
    with pytest.raises(DataError, match="writes nothing of a conversation"):
        prepared(jsonl(TURNS), chat_template=tmp_path / "template")


def test_a_template_without_end_names_the_line(prepared, jsonl):
    template = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}" + BARE
    with pytest.raises(DataError, match=r"records\.jsonl:1: the chat template refuses this conversation: maximum"):
        prepared(jsonl(TURNS), tokenizer=build_tokenizer(template=template))


def test_text_that_the_tokenizer_cannot_encode_is_counted_and_named(prepared, jsonl, tmp_path):
    """Byte-level BPE without a token for every byte drops what it does not know, or writes its unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]

    def build(*, unknown: str | None, alphabet: list[str]) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE(unk_token=unknown))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
        backend.train_from_iterator(["hello user assistant\nq"], trainer)
        built = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", unk_token=unknown, additional_special_tokens=special[1:]
        )
        built.chat_template = CHATML
        return built

    path = jsonl(chat("q", "hello"), chat("q", "hello é 7"), chat("zq", "hello"), name="lost.jsonl")
    _, report = prepared(path, tokenizer=build(unknown=None, alphabet=[]))
    (warning,) = (warning for warning in report.warnings if "cannot encode" in warning)
    assert "2 records with text that the tokenizer cannot encode" in warning
    assert "lost.jsonl:2: '7', 'é'" in warning
    _, report = prepared(path, tokenizer=build(unknown="<unk>", alphabet=[]))
    assert any("2 records" in warning and "unknown token" in warning for warning in report.warnings)
    whole = build(unknown=None, alphabet=pre_tokenizers.ByteLevel.alphabet())
    assert not any("cannot encode" in warning for warning in prepared(path, tokenizer=whole)[1].warnings)


def test_the_tiny_model_encodes_every_byte_and_reads_only_line_feeds_as_line_ends(jsonl, tmp_path):
    from transformers import AutoTokenizer

    from examples.tiny_model import make_tiny_model

    text = "one\u2028two\u0085three"
    records = tmp_path / "lines.jsonl"
    records.write_text(json.dumps(chat("q", text), ensure_ascii=False) + "\n\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "model", records=records))
    for written in (text, "é 答 \U0001f600 7<>"):
        assert tokenizer.decode(tokenizer(written)["input_ids"]) == written
