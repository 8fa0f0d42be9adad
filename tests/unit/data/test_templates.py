"""Chat templates of the families people train, in their published forms: every token and its mask written down.

In the expected texts ⟦ ⟧ enclose the targets; each stretch between control tokens and brackets is tokenised alone.
"""

from __future__ import annotations

import re
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fsdp_trainer.data import chat
from fsdp_trainer.data.chat import PART_LOST, REWRITTEN, UNREAD_VARIABLE
from fsdp_trainer.data.encode import Encoded, build_encoder, encode_examples
from fsdp_trainer.data.formats import Chat, RecordError
from fsdp_trainer.data.sources import Example
from fsdp_trainer.errors import DataError
from fsdp_trainer.limited import find_excess, run_limited

TEMPLATES = Path(__file__).resolve().parents[2] / "chat_templates"
WORDS = [
    "added words and sentences that people write to a model, in lines\n\nof text. Hello there! What now? 2+2=4\n"
] * 3

# family: (control tokens, start token, end token, whether the tokenizer itself starts texts with the start token)
FAMILIES: dict[str, tuple[str, str | None, str, bool]] = {
    "chatml": ("<|im_start|> <|im_end|>", None, "<|im_end|>", False),
    "llama3": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
        True,
    ),
    "qwen2_5": ("<|im_start|> <|im_end|> <|endoftext|>", None, "<|im_end|>", False),
    "qwen3": ("<|im_start|> <|im_end|> <|endoftext|>", None, "<|im_end|>", False),
    "gemma": ("<bos> <eos> <start_of_turn> <end_of_turn>", "<bos>", "<eos>", True),
    "mistral": ("<s> </s> [INST] [/INST]", "<s>", "</s>", True),
    "phi3": ("<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>", None, "<|endoftext|>", False),
    "phi4": ("<|im_start|> <|im_sep|> <|im_end|> <|endoftext|>", None, "<|im_end|>", False),
    "deepseek_v3": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        True,
    ),
}
FAMILIES["deepseek_r1"] = FAMILIES["deepseek_v3"]
# What their generation_config.json names beside the tokenizer's end token.
GENERATION_STOPS = {"gemma": ["<end_of_turn>"], "phi3": ["<|end|>"]}
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but not special, as Qwen has them


@lru_cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tiny byte-level BPE with the pre-tokenizer of GPT-2 and the family's control tokens."""
    control, bos, eos, adds_bos = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet: Any = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    backend.train_from_iterator(WORDS, trainer)
    backend.add_special_tokens(control.split())
    backend.add_tokens([AddedToken(text, normalized=False) for text in TEXT_TOKENS])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        additional_special_tokens=[name for name in control.split() if name not in (bos, eos)],
    )
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def encode(
    family: str, *messages: dict[str, Any], tools: tuple = (), variables: dict[str, Any] | None = None, **settings: Any
) -> Encoded:
    tokenizer = family_tokenizer(family)
    stops = tokenizer.convert_tokens_to_ids(GENERATION_STOPS.get(family, []))
    encoder = build_encoder(
        tokenizer, chat_template=str(tokenizer.chat_template), seq_len=2000, stop_ids=stops, **settings
    )
    chat = Chat(messages, tools=tools, template_kwargs=variables or {})
    return encode_examples([Example(chat, where="here:1", digest=1)], encoder=encoder)


def expected_tokens(family: str, marked: str) -> tuple[list[int], list[bool]]:
    """Tokens and mask of a text with ⟦targets⟧, control tokens as themselves and each stretch between them alone."""
    tokenizer = family_tokenizer(family)
    names = sorted(map(re.escape, [*FAMILIES[family][0].split(), *TEXT_TOKENS]), key=len, reverse=True)
    ids: list[int] = []
    mask: list[bool] = []
    supervised = False
    for part in re.split(f"([⟦⟧]|{'|'.join(names)})", marked):
        if part in ("⟦", "⟧"):
            supervised = part == "⟦"
        elif part:
            found: Any = tokenizer(part, add_special_tokens=False)["input_ids"]
            ids += found
            mask += [supervised] * len(found)
    return ids, mask


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
TWO_TURNS = (user("Hello there!"), assistant("What now?"), user("2+2?"), assistant("4, I think\n\nand so on"))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "two"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
ANSWERED_CALL = (user("2+2?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "4"}, assistant("It is 4"))
LLAMA_START = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"

CASES: list[tuple[str, tuple[dict[str, Any], ...], str]] = [
    (
        "chatml",
        (SYSTEM, *TWO_TURNS),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello there!<|im_end|>\n"
        "<|im_start|>assistant\n⟦What now?<|im_end|>⟧\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n⟦4, I think\n\nand so on<|im_end|>⟧\n",
    ),
    (
        "llama3",
        (SYSTEM, *TWO_TURNS),
        LLAMA_START + "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello there!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦What now?<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦4, I think\n\nand so on<|eot_id|>⟧",
    ),
    (
        "llama3",
        ANSWERED_CALL,
        LLAMA_START + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "add", "parameters": {"a": 2, "b": "two"}}<|eot_id|>⟧'
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦It is 4<|eot_id|>⟧",
    ),
    (
        "qwen2_5",
        TWO_TURNS,
        QWEN + "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n⟦What now?<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4, I think\n\nand so on<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        (SYSTEM, user("2+2?"), assistant("It is 4.", reasoning_content="Add two\nand two.")),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nAdd two\nand two.\n</think>\n\nIt is 4.<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        (user("2+2?"), assistant("<think>\nAdd two.\n</think>\n\nIt is 4.")),
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\nAdd two.\n</think>\n\nIt is 4.<|im_end|>⟧\n",
    ),
    (
        # without thinking: an empty block in the last answer alone, as the template has it
        "qwen3",
        TWO_TURNS,
        "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n⟦What now?<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\n4, I think\n\nand so on<|im_end|>⟧\n",
    ),
    (
        # the call is not the last answer, so no block stands before it
        "qwen3",
        ANSWERED_CALL,
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "two"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nIt is 4<|im_end|>⟧\n",
    ),
    (
        "gemma",
        TWO_TURNS,
        "<bos><start_of_turn>user\nHello there!<end_of_turn>\n<start_of_turn>model\n⟦What now?<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4, I think\n\nand so on<end_of_turn>⟧\n",
    ),
    (
        "mistral",
        TWO_TURNS,
        "<s>[INST]Hello there![/INST]⟦What now?</s>⟧[INST]2+2?[/INST]⟦4, I think\n\nand so on</s>⟧",
    ),
    (
        "phi3",
        (SYSTEM, *TWO_TURNS),
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHello there!<|end|>\n<|assistant|>\n⟦What now?<|end|>⟧\n"
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n⟦4, I think\n\nand so on<|end|>⟧\n<|endoftext|>",
    ),
    (
        "phi4",
        (SYSTEM, *TWO_TURNS),
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello there!<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦What now?<|im_end|>⟧<|im_start|>user<|im_sep|>2+2?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦4, I think\n\nand so on<|im_end|>⟧",
    ),
    (
        "deepseek_v3",
        (SYSTEM, *TWO_TURNS),
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hello there!<｜Assistant｜>⟦What now?<｜end▁of▁sentence｜>⟧"
        "<｜User｜>2+2?<｜Assistant｜>⟦4, I think\n\nand so on<｜end▁of▁sentence｜>⟧",
    ),
]


@pytest.mark.parametrize(("family", "messages", "marked"), CASES, ids=[f"{c[0]}-{len(c[1])}" for c in CASES])
def test_every_token_and_its_mask(family: str, messages: tuple[dict[str, Any], ...], marked: str) -> None:
    encoded = encode(family, *messages)
    assert not encoded.bad
    ids, mask = expected_tokens(family, marked)
    assert encoded.tokens.tolist() == ids
    assert encoded.supervised.tolist() == mask
    assert encoded.endless == 0  # the model is told to stop, by a token that ends its generation
    if (bos := family_tokenizer(family).bos_token_id) is not None:
        assert encoded.tokens.tolist().count(bos) == 1


@pytest.mark.parametrize(("family", "messages", "marked"), CASES, ids=[f"{c[0]}-{len(c[1])}" for c in CASES])
def test_the_tokens_before_an_answer_are_those_the_model_is_asked_with(
    family: str, messages: tuple[dict[str, Any], ...], marked: str
) -> None:
    tokenizer = family_tokenizer(family)
    encoded = encode(family, *messages, train_on="last_assistant")
    asked: Any = tokenizer.apply_chat_template(
        list(messages[:-1]), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    first = encoded.supervised.tolist().index(True)
    assert encoded.tokens[:first].tolist() == asked


def test_tools_reach_the_template() -> None:
    encoded = encode("qwen2_5", *ANSWERED_CALL, tools=(TOOL,))
    text = family_tokenizer("qwen2_5").decode(encoded.tokens)
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
    targets = family_tokenizer("qwen2_5").decode(encoded.tokens[encoded.supervised])
    assert targets == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "two"}}\n</tool_call><|im_end|>It is 4<|im_end|>'
    )
    assert "Environment: ipython" not in family_tokenizer("llama3").decode(encode("llama3", *TWO_TURNS).tokens)


# Its name and arguments stand in the question and in another answer as well: that they are in the text shows nothing.
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"c": "Bern"}}}
ASKED_WEATHER = (
    user("weather in Bern? c"),
    assistant("", tool_calls=[WEATHER]),
    {"role": "tool", "content": "weather c Bern"},
    assistant("weather c Bern"),
)
ROUND_CALL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize("content", ["", "I look at the weather in Bern, c"])
def test_a_call_that_the_template_leaves_out_is_refused_whatever_else_the_text_says(
    train_on: str, content: str
) -> None:
    messages = (ASKED_WEATHER[0], assistant(content, tool_calls=[WEATHER]), *ASKED_WEATHER[2:])
    (bad,) = encode("chatml", *messages, train_on=train_on).bad
    assert "the tool call 'weather' of messages[1]" in bad.what
    assert not encode("qwen2_5", *messages, train_on=train_on).bad


def test_a_call_without_its_arguments_or_outside_its_answer_is_refused() -> None:
    def bad_of(template: str) -> str:
        encoder = build_encoder(family_tokenizer("chatml"), chat_template=template + ASKS, seq_len=2000)
        encoded = encode_examples([Example(Chat(ASKED_WEATHER), where="here:1", digest=1)], encoder=encoder)
        return " ".join(bad.what for bad in encoded.bad)

    assert not bad_of(ROUND_CALL.replace("CALLS", "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"))
    assert "'weather'" in bad_of(
        ROUND_CALL.replace("CALLS", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}")
    )
    elsewhere = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    assert "leaves out" in bad_of(elsewhere + MARKED)


def test_a_tool_that_the_template_leaves_out_is_refused_though_its_name_is_written() -> None:
    (bad,) = encode("chatml", user("add 2"), assistant("add"), tools=(TOOL,), train_on="all").bad
    assert "the tool 'add' of 'tools'" in bad.what
    flat = {"name": "add", "parameters": {}}
    assert not encode("qwen2_5", user("add 2"), assistant("add"), tools=(TOOL, flat)).bad


def test_reasoning_that_also_stands_in_the_answer_is_not_taken_for_written() -> None:
    for train_on in ("assistant", "last_assistant", "all"):
        (bad,) = encode("chatml", user("a?"), assistant("sum: 4", reasoning_content="sum"), train_on=train_on).bad
        assert "reasoning" in bad.what and "or or " not in bad.what
        assert not encode("qwen3", user("a?"), assistant("sum: 4", reasoning_content="sum"), train_on=train_on).bad
    earlier = (user("a?"), assistant("sum: 4", reasoning_content="sum"), user("c?"), assistant("d"))
    (bad,) = encode("qwen3", *earlier).bad
    assert "leaves out" in bad.what


def test_answers_written_otherwise_when_more_follows_are_counted() -> None:
    assert encode("qwen3", *TWO_TURNS).notes == {REWRITTEN: 1}
    assert not encode("qwen3", *TWO_TURNS, train_on="last_assistant").notes
    assert not encode("phi3", *TWO_TURNS).notes  # an end of text after the conversation changes no answer


def test_reasoning_that_the_template_leaves_out_is_refused_with_a_way_out() -> None:
    thinking = (user("a?"), assistant("b", reasoning_content="because"), user("c?"), assistant("d"))
    (bad,) = encode("qwen3", *thinking).bad
    assert bad.kind == "no mask"
    assert "'because'" in bad.what
    assert "last_assistant" in bad.what
    assert not encode("qwen3", *thinking, train_on="last_assistant").bad
    for family in ("chatml", "deepseek_v3"):
        (bad,) = encode(family, *thinking[:2]).bad
        assert "does not write the reasoning of the last answer" in bad.what


def test_a_template_that_asks_otherwise_than_it_trains_is_refused() -> None:
    """DeepSeek R1 asks with an opened <think> and leaves the thinking out of the text it makes of a conversation."""
    for train_on in ("assistant", "last_assistant"):
        (bad,) = encode("deepseek_r1", user("a?"), assistant("<think>\nsum\n</think>\n\n4"), train_on=train_on).bad
        assert bad.kind == "no mask"
        assert "data.chat_template" in bad.what
        assert "data.train_on: all" in bad.what
        assert "last_assistant" not in bad.what


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
def test_a_system_message_that_is_lost_where_an_answer_follows_is_refused(train_on: str) -> None:
    """Mistral writes the system message before a question that comes last, so never in a whole conversation."""
    (bad,) = encode("mistral", SYSTEM, *TWO_TURNS, train_on=train_on).bad
    assert bad.kind == "no mask"
    assert "Be brief" not in family_tokenizer("mistral").decode(
        encode("mistral", SYSTEM, *TWO_TURNS, train_on="all").tokens
    )


SAID = {"system": "Be brief.", "developer": "Be kind.", "tool": "It is 4."}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", SAID)
@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_no_role_is_left_out_silently(family: str, role: str, train_on: str) -> None:
    """Most templates write a message only where they know its role, and its words would be missing from the context."""
    other = {"role": role, "content": SAID[role]}
    answered = (user("What?"), assistant("Yes."))
    messages = (*answered, other, assistant("No.")) if role == "tool" else (other, *answered)
    encoded = encode(family, *messages, train_on=train_on)
    if encoded.bad:
        (bad,) = encoded.bad
        assert re.search("does not write messages|refuses this conversation|in another way|differently", bad.what)
    else:
        assert SAID[role] in family_tokenizer(family).decode(encoded.tokens)


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}", True),
        # moved behind, and written as JSON: still there
        ("{% for m in messages | reverse %}<{{ m.role }}>{{ m.content | tojson }}<|im_end|>{% endfor %}", False),
    ],
)
def test_a_message_is_missed_by_a_mark_in_it_and_not_by_its_words(template: str, refused: bool) -> None:
    """The words of the developer also stand in the question."""
    turns = (("developer", 'say "what"'), ("user", 'I say "what"'), ("assistant", "a"))
    chat = Chat(tuple({"role": role, "content": text} for role, text in turns))
    encoder = build_encoder(family_tokenizer("chatml"), chat_template=template, seq_len=2000, train_on="all")
    bad = encode_examples([Example(chat, where="here:1", digest=1)], encoder=encoder).bad
    assert ["messages[0], of the role 'developer'" in one.what for one in bad] == [True] * refused


# Where an answer ends

TWO_ENDS = (  # as Command R7B and Command A close an answer: the model stops at the second
    "{% for m in messages %}<|START|><|{{ 'BOT' if m.role == 'assistant' else 'USER' }}|>"
    "{% if m.role == 'assistant' %}OPEN{{ m.content }}CLOSE{% else %}{{ m.content }}{% endif %}<|END|>{% endfor %}"
    "{% if add_generation_prompt %}<|START|><|BOT|>OPEN{% endif %}"
)
GENERATED = "{% generation %}{{ m.content }}CLOSE{% endgeneration %}"


@lru_cache
def two_ends_tokenizer(eos: str) -> PreTrainedTokenizerFast:
    tokenizer = family_tokenizer("chatml")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    names = ["<|START|>", "<|USER|>", "<|BOT|>", "<|ANSWER|>", "<|/ANSWER|>", "<|MORE|>", "<|END|>", "<|eos|>"]
    backend.add_special_tokens(names)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, additional_special_tokens=names)


@pytest.mark.parametrize("close", ["<|/ANSWER|>", "<|/ANSWER|><|MORE|>", "<|MORE|>"])
@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize(("eos", "stops"), [("<|END|>", []), ("<|eos|>", ["<|END|>"])])
def test_the_span_reaches_the_end_token_that_follows_directly(close: str, markers: bool, eos: str, stops: list) -> None:
    """By the tokenizer's end token, or by the generation config's."""
    tokenizer = two_ends_tokenizer(eos)
    template = TWO_ENDS.replace("{{ m.content }}CLOSE", GENERATED, 1) if markers else TWO_ENDS
    template = template.replace("CLOSE", close).replace("OPEN", "<|ANSWER|>")
    ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    encoder = build_encoder(tokenizer, chat_template=template, seq_len=2000, stop_ids=ids)
    encoded = encode_examples([Example(Chat(TWO_TURNS), where="here:1", digest=1)], encoder=encoder)
    targets = tokenizer.decode(encoded.tokens[encoded.supervised])
    assert targets == f"What now?{close}<|END|>4, I think\n\nand so on{close}<|END|>"
    assert encoded.endless == 0


def test_where_no_target_is_an_end_token_of_tokenizer_or_generation_config_it_is_counted() -> None:
    """The template's own end of turn does not stop a model whose configs do not name it."""
    tokenizer = two_ends_tokenizer("<|eos|>")
    template = TWO_ENDS.replace("CLOSE", "").replace("OPEN", "")
    for stops, endless in (([], 1), (["<|END|>"], 0)):
        ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
        encoder = build_encoder(tokenizer, chat_template=template, seq_len=2000, stop_ids=ids)
        encoded = encode_examples([Example(Chat(TWO_TURNS), where="here:1", digest=1)], encoder=encoder)
        assert encoded.endless == endless
        assert encoder.end_tokens() == ", ".join([*stops, "<|eos|>"])


# A template that writes the last answer in another way

QWEN3_CALLS = (
    "{% for t in tools or [] %}<|im_start|>system\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_CALLS = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "three"}}}


@pytest.mark.parametrize("content", ["", "I add."])
@pytest.mark.parametrize("calls", [[CALL], [CALL, TWO_CALLS]], ids=["one", "two"])
def test_a_call_in_the_middle_trains_where_the_last_answer_alone_has_an_empty_think_block(
    content: str, calls: list
) -> None:
    messages = (
        user("2+2?"),
        assistant(content, tool_calls=calls),
        {"role": "tool", "content": "4"},
        assistant("It is 4"),
    )
    tokenizer = family_tokenizer("qwen3")
    encoder = build_encoder(tokenizer, chat_template=QWEN3_CALLS, seq_len=2000)
    encoded = encode_examples([Example(Chat(messages, tools=(TOOL,)), where="here:1", digest=1)], encoder=encoder)
    assert not encoded.bad
    written = "".join(
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": 2, "b": "{call["function"]["arguments"]["b"]}"}}}}\n'
        "</tool_call>"
        for call in calls
    )
    targets = tokenizer.decode(encoded.tokens[encoded.supervised])
    assert targets == f"{content}{written}<|im_end|><think>\n\n</think>\n\nIt is 4<|im_end|>"


def test_a_call_whose_end_cannot_be_told_is_still_refused() -> None:
    """The template counts the letters of all calls at its end, so a mark in one changes the text behind it."""
    counting = QWEN3_CALLS + "{{ messages | tojson | length }}"
    encoder = build_encoder(family_tokenizer("qwen3"), chat_template=counting, seq_len=2000)
    (bad,) = encode_examples([Example(Chat(ANSWERED_CALL), where="here:1", digest=1)], encoder=encoder).bad
    assert bad.kind == "no mask"


THOUGHT = (user("a?"), assistant("<think>\nbecause\n</think>\n\nb"), user("c?"), assistant("d"))


@pytest.mark.parametrize("earlier", [THOUGHT[1], assistant("b", reasoning_content="because")], ids=["text", "field"])
def test_train_on_all_counts_what_the_template_leaves_out(earlier: dict[str, Any]) -> None:
    messages = (THOUGHT[0], earlier, *THOUGHT[2:])
    encoded = encode("qwen3", *messages, train_on="all")
    assert not encoded.bad
    assert "because" not in family_tokenizer("qwen3").decode(encoded.tokens)
    assert encoded.notes == {PART_LOST: 1}
    assert not encode("qwen3", *messages[2:], train_on="all").notes
    (bad,) = encode("qwen3", *messages).bad
    assert "all, which trains on the text as it is written, without what the template leaves out" in bad.what


# Variables of the template that a record sets


def test_chat_template_kwargs_reach_the_template() -> None:
    says = "{% if mood is defined %}<|im_start|>system\n{{ mood }}<|im_end|>\n{% endif %}"
    template = says + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASKS
    encoder = build_encoder(family_tokenizer("chatml"), chat_template=template, seq_len=2000)

    def encoded(**variables: Any) -> Encoded:
        chat = Chat(TWO_TURNS, template_kwargs=variables)
        return encode_examples([Example(chat, where="here:1", digest=1)], encoder=encoder)

    assert "system\nkind<|im_end|>" in family_tokenizer("chatml").decode(encoded(mood="kind").tokens)
    (bad,) = encoded(xml_tools=["{}"]).bad
    assert "chat_template_kwargs.xml_tools" in bad.what
    assert encoded(enable_thinking=False).notes == {UNREAD_VARIABLE: 1}
    assert not encoded(python_tools=[], note="").bad


def test_an_answer_asked_for_without_thinking_has_its_empty_block_in_the_question() -> None:
    """Qwen 3 asks so with enable_thinking false; earlier answers have no block, whatever they were asked with."""
    encoded = encode("qwen3", *TWO_TURNS, variables={"enable_thinking": False})
    assert not encoded.bad
    marked = (
        "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n⟦What now?<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "⟦4, I think\n\nand so on<|im_end|>⟧\n"
    )
    ids, mask = expected_tokens("qwen3", marked)
    assert encoded.tokens.tolist() == ids
    assert encoded.supervised.tolist() == mask


# Seven templates of which none came to an end within 25 s and 2 GB.
ENDLESS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "text that doubles": "{% set t = namespace(x='xx') %}{% for a in range(99) %}{% set t.x = t.x ~ t.x %}{% endfor %}",
    "one product": "{{ 'x' * 9999999999 }}",
    "list that doubles": "{% set t = namespace(x=[1]) %}{% for a in range(99) %}{% set t.x = t.x + t.x %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "macro": "{% macro m(n) %}{% for a in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(99) }}",
    "padding": "{{ '%9999999999d' % 1 }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_refused_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "find_excess", partial(find_excess, seconds=1, memory_bytes=2**28))
    start = time.monotonic()
    with pytest.raises(DataError, match=r"does not come to an end[\s\S]*took more than (1 s|0.25 GiB)"):
        chat.build_chat_template(ENDLESS[name], tokenizer=family_tokenizer("chatml"))
    assert time.monotonic() - start < 15


def test_a_template_without_an_end_for_one_record_names_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "run_limited", partial(run_limited, seconds=0.3))
    source = "{% for m in messages %}{{ m.content }}{% if m.content == 'loop' %}" + ENDLESS["loops"]
    template = chat.build_chat_template(source + "{% endif %}{% endfor %}", tokenizer=family_tokenizer("chatml"))
    record = Chat(({"role": "user", "content": "loop"}, {"role": "assistant", "content": "a"}))
    with pytest.raises(RecordError, match=r"the chat template took more than 0\.3 s for this conversation"):
        chat.chat_pieces(record, template=template, train_on="all")
