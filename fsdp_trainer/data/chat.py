"""From a record's content to pieces of text, each a target or not, by way of the model's chat template.

Which part of the text is an assistant turn comes from the template's own generation markers, or else from rendering the
conversation up to each turn and checking that the text so far is a prefix of the whole.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_trainer.data.formats import Chat, RecordError, has_reasoning, mark_messages, mark_parts
from fsdp_trainer.data.tokens import ControlTokens, build_control_tokens, is_hiding, texts_in
from fsdp_trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _PROBE = "ASKED", "PROBE"
# One thread at a time: Transformers kept the marked spans on the compiled template, which threads share, before it put
# them into a context variable (5.24 has that). Nothing is lost: rendering is Python, which threads do not make faster.
# Whoever renders many holds it for all of them: threads that took turns would finish together, and the tokenizer would
# wait for all of them, then all of them for it.
RENDERING = threading.RLock()

# What is worth counting about records that are trained on; a report says what each means.
TYPED_CONTROL = "control tokens in messages"
END_INSIDE_ANSWER = "end of turn inside an answer"
REWRITTEN = "answers written differently once more follows"
HEADER_TRAINED = "answers trained on with their header"


class Piece(NamedTuple):
    """A stretch of a document's text; `supervised`: its tokens are targets."""

    text: str
    supervised: bool


class Dropped(Exception):
    """A record holds nothing to train on; it is left out and counted under `reason`, in a strict run too."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class ChatTemplate:
    """A template with what a probe conversation showed of it."""

    source: str
    variables: dict[str, Any]  # bos_token and the like, which templates write out
    turn_end: str | None  # text of the token that ends an assistant turn; None: no such token was found
    has_markers: bool  # generation markers that cover an answer with the end of its turn, and no question
    asks: bool  # it can write the header of the next answer; where it cannot, an answer's header is part of the answer
    control: ControlTokens
    sanitize: bool  # typed control tokens become plain text

    @property
    def writes_the_date(self) -> bool:
        """Tell whether the text depends on the day it is made."""
        return "strftime_now" in self.source


def read_chat_template(path: str | Path | None, *, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the text of a template file, or the tokenizer's own template; None when it has none."""
    if path is None:
        return _own_template(tokenizer)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "data.chat_template cannot be read", values=f"{path}: {error}", fix="give the path of a Jinja file in UTF-8"
        ) from error
    try:
        inside = json.loads(text)
    except ValueError:
        return text
    # chat_template.json and tokenizer_config.json, in which models publish it
    found = inside.get("chat_template") if isinstance(inside, dict) else None
    return found if isinstance(found, str) else text


def _own_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    found = tokenizer.chat_template
    if isinstance(found, dict) and "default" not in found:
        raise DataError(
            "the tokenizer has several chat templates and none of them is its default",
            values=f"{tokenizer.name_or_path}: {', '.join(map(str, found))}",
            fix="write the one you mean to a file and name that in data.chat_template",
        )
    return tokenizer.get_chat_template() if found else None


def build_chat_template(source: str, *, tokenizer: "PreTrainedTokenizerBase", sanitize: bool = True) -> ChatTemplate:
    """Compile a template and learn from a probe conversation how it ends an assistant turn."""
    control = build_control_tokens(tokenizer)
    variables = dict(tokenizer.special_tokens_map)
    bare = ChatTemplate(
        source, variables, turn_end=None, has_markers=False, asks=True, control=control, sanitize=sanitize
    )
    probe = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _PROBE})
    try:
        text, spans = _render(bare, probe, markers="endgeneration" in source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            "the chat template is not valid Jinja",
            values=f"line {error.lineno}: {error.message}",
            fix="repair it, or name another in data.chat_template",
        ) from error
    except RecordError:  # a template that wants another order; the records themselves will tell
        return bare
    if not any(word.lower() in text.lower() for word in (_QUESTION, _PROBE)):
        raise DataError(
            "the chat template writes nothing of a conversation",
            values=f"for a question and an answer it gives {text[:80]!r}",
            fix="give a file with the Jinja template itself in data.chat_template, not a JSON file that holds one",
        )
    end = control.pattern.search(text, text.rfind(_PROBE) + len(_PROBE)) if _PROBE in text else None
    turn_end = end.group() if end else None
    marked = [text[start:stop] for start, stop in spans]
    covered = bool(marked) and _PROBE in marked[-1] and (turn_end is None or turn_end in marked[-1])
    covered = covered and not any(_QUESTION in stretch for stretch in marked)
    return replace(bare, turn_end=turn_end, has_markers=covered, asks=_can_ask(bare, probe))


def _can_ask(template: ChatTemplate, probe: Sequence[dict[str, Any]]) -> bool:
    """Tell whether the header of an answer stands in what the model is asked with, whatever asks for it."""
    try:
        question, asked = (_render(template, probe[:1], ask=ask)[0] for ask in (False, True))
    except RecordError:  # a question alone is no conversation to it
        return True
    text = _render(template, probe)[0]
    header = text[len(question) : text.rfind(_PROBE)]
    return asked != question or not text.startswith(question) or not header.strip()


def chat_pieces(chat: Chat, *, template: ChatTemplate, train_on: str) -> tuple[list[Piece], list[str]]:
    """Render a conversation and cut it into pieces; return them and what is worth counting about the record.

    Raises RecordError or Dropped where it cannot be trained on.
    """
    answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    targets = [index for index in answers if index >= chat.first_target]
    trained = [index for index in targets if chat.messages[index].get("train", True)]
    filled = [index for index in trained if _is_filled(chat.messages[index])]
    if train_on == "all" and len(trained) < len(targets):
        raise RecordError(
            "not supported",
            "an answer is marked as not to be trained on (weight 0 or train false), and data.train_on: all trains on "
            "every token; set data.train_on: assistant, or leave out the mark",
        )
    if targets and not filled:
        raise Dropped("empty answer" if trained else "every answer marked as not to be trained on")
    chat, notes = _without_control_tokens(chat, template=template)
    _check_parts(chat, template=template)
    if train_on == "all":
        text = _render_chat(template, chat)[0]
        _check_messages(text, chat, template=template)
        return [Piece(text, True)], notes
    if not targets:
        raise RecordError("no answer", "no assistant message to train on")
    if train_on == "last_assistant":
        filled = filled[-1:]
    spans: list[tuple[int, int]] = []
    if template.has_markers:
        text, marked = _render_chat(template, chat, markers=True)
        if len(marked) == len(answers):
            spans = [marked[answers.index(index)] for index in filled]
    if not spans:
        text, _ = _render_chat(template, chat)
        spans = [_turn_span(text, chat, index, template=template, notes=notes) for index in filled]
        notes += [] if template.asks else [HEADER_TRAINED]
    _check_messages(text, chat, template=template)
    for index, (start, end) in zip(filled, spans, strict=True):
        _check_whole_answer(text[start:end], chat.messages[index], index=index, asked=train_on)
    return _cut(text, spans), notes


def _is_filled(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or any(text.strip() for text in _answer_texts(message))


def _answer_texts(message: dict[str, Any]) -> list[str]:
    """What an answer says: its reasoning and its text."""
    return [text for text in (message.get("reasoning_content"), message["content"]) if text]


def _without_control_tokens(chat: Chat, *, template: ChatTemplate) -> tuple[Chat, list[str]]:
    """Hide what stands for a control token in the messages of all but the assistant, and count both.

    An answer is what the model writes, in tokens: there a control token may be meant. Anyone else only types text.
    """
    everything = "\0".join(texts_in((chat.messages, chat.tools)))
    if is_hiding(everything):
        raise RecordError("private character", "the text holds a character of Unicode's private plane 16")
    if not template.control.found_in(everything):
        return chat, []
    notes: list[str] = []
    messages = list(chat.messages)
    for index, message in enumerate(messages):
        fields = {key: value for key, value in message.items() if key != "role"}
        if not template.control.found_in(fields):
            continue
        if message["role"] != "assistant":
            notes.append(TYPED_CONTROL)
            if template.sanitize:
                messages[index] = {"role": message["role"], **template.control.hide(fields)}
        elif template.turn_end is not None and any(template.turn_end in text for text in texts_in(fields)):
            notes.append(END_INSIDE_ANSWER)
    if template.control.found_in(chat.tools):
        notes.append(TYPED_CONTROL)
        chat = replace(chat, tools=tuple(template.control.hide(chat.tools))) if template.sanitize else chat
    return replace(chat, messages=tuple(messages)), sorted(set(notes))


def _turn_span(text: str, chat: Chat, index: int, *, template: ChatTemplate, notes: list[str]) -> tuple[int, int]:
    """Return where the answer `messages[index]` starts and ends in the text, its end-of-turn token included."""
    start = _turn_start(text, chat, index, template=template)
    is_last = index == len(chat.messages) - 1
    if start is None:
        raise _no_mask(
            f"the template writes what leads to messages[{index}] in another way than where it asks for that answer, "
            "so what is trained would never be asked",
            fix="or data.train_on: all" if is_last else "or data.train_on: last_assistant or all",
        )
    upto = text if is_last else _render_chat(template, chat, stop=index + 1)[0]
    if text.startswith(upto) and len(upto) > start:
        end = len(upto)
        if template.turn_end is not None and (found := text.rfind(template.turn_end, start, end)) >= 0:
            end = found + len(template.turn_end)  # what follows the token (a newline in ChatML) is never generated
        return start, end
    # Written in another way where it is the last: with thinking (Qwen 3), or with an end of text after it (Phi). The
    # answer may still stand right where the model is asked for it, closed by its end of turn.
    end = _answer_end(text, start, chat.messages[index], template=template)
    if end is None:
        raise _no_mask(
            f"the template writes messages[{index}] differently when more follows, so this answer cannot be told from "
            "the rest",
            fix="or data.train_on: last_assistant or all",
        )
    if not upto.startswith(text[:end]) and REWRITTEN not in notes:
        notes.append(REWRITTEN)
    return start, end


def _no_mask(what: str, *, fix: str) -> RecordError:
    way_out = f"use a template with {{% generation %}} markers (data.chat_template: FILE), {fix}"
    return RecordError("no mask", f"{what}; {way_out}")


def _turn_start(text: str, chat: Chat, index: int, *, template: ChatTemplate) -> int | None:
    if index > 0:
        before, _ = _render_chat(template, chat, stop=index, ask=True)
        return len(before) if text.startswith(before) else None
    # The assistant speaks first: many templates cannot render an empty conversation, so the header they would write
    # for the next turn is looked up in the text instead.
    asked, _ = _render_chat(template, chat, ask=True)
    header = asked[len(text) :] if asked.startswith(text) else ""
    found = text.find(header) if header else -1
    return found + len(header) if found >= 0 else None


def _answer_end(text: str, start: int, message: dict[str, Any], *, template: ChatTemplate) -> int | None:
    """Return the end of an answer that stands at `start`, word for word and closed by the end of turn, else None."""
    answer = message["content"].strip()
    if not answer or template.turn_end is None or message.get("tool_calls"):
        return None
    found = text.find(answer, start)
    end = text.find(template.turn_end, found + len(answer))
    if found < 0 or end < 0 or text[start:found].strip() or text[found + len(answer) : end].strip():
        return None
    return end + len(template.turn_end)


def _check_parts(chat: Chat, *, template: ChatTemplate) -> None:
    """Refuse a template that leaves out a tool, a call or the last reasoning, anywhere in the conversation."""
    if chat.tools or any("tool_calls" in message for message in chat.messages) or has_reasoning(chat.messages[-1]):
        _refuse_lost(*mark_parts(chat), template=template)


def _check_messages(text: str, chat: Chat, *, template: ChatTemplate) -> None:
    """Refuse a template that leaves out what somebody else than the assistant says, as many do with unknown roles."""
    at = 0
    for message in chat.messages:
        if message["role"] != "assistant":
            said = message["content"].strip()
            if (found := text.find(said, at)) < 0:  # moved, written in another way, or left out: a mark in it tells
                _refuse_lost(*mark_messages(chat), template=template)
                return
            at = found + len(said)


def _refuse_lost(marked: Chat, parts: dict[str, str], *, template: ChatTemplate) -> None:
    text = _render_chat(template, marked)[0] if parts else ""
    if (lost := next((what for mark, what in parts.items() if mark not in text), None)) is not None:
        raise RecordError("template error", f"the chat template does not write {lost}; use one that does")


def _check_whole_answer(written: str, message: dict[str, Any], *, index: int, asked: str) -> None:
    """Refuse a template that leaves part of an answer out (DeepSeek R1: the reasoning); blanks may differ."""
    if not message.get("tool_calls") and "reasoning_content" not in message and message["content"] in written:
        return  # word for word, as nearly all are
    squeezed = "".join(written.split())
    at = 0
    for text in _answer_texts(message):  # one after the other: a short reasoning may stand in the answer's text as well
        wanted = "".join(text.split())
        at = squeezed.find(wanted, at) + len(wanted)
        if at < len(wanted):
            raise _left_out(repr(text.strip()[:40]), index=index, asked=asked)
    for call in message.get("tool_calls", ()):
        if "".join(call["function"]["name"].split()) not in squeezed:
            raise _left_out(f"the tool call {call['function']['name']!r}", index=index, asked=asked)


def _left_out(what: str, *, index: int, asked: str) -> RecordError:
    other = "" if asked == "last_assistant" else "data.train_on: last_assistant where it keeps the last, "
    return _no_mask(
        f"the template leaves out or rewrites part of messages[{index}] ({what})",
        fix=f"or {other}or data.train_on: all",
    )


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [Piece(text[at:start], False), Piece(text[start:end], True)]
        at = end
    pieces.append(Piece(text[at:], False))
    return [piece for piece in pieces if piece.text]


def _render_chat(
    template: ChatTemplate, chat: Chat, *, stop: int | None = None, ask: bool = False, markers: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation, or its messages before `stop`."""
    return _render(template, chat.messages[:stop], ask=ask, markers=markers, tools=chat.tools)


def _render(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    *,
    ask: bool = False,
    markers: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages; `ask` adds the header of the next assistant turn, `markers` returns the generation spans."""
    try:
        # The function that apply_chat_template calls (transformers 5.17 to 5.24). Called directly because it gives the
        # spans in characters: one way of finding tokens then serves every format.
        with RENDERING:
            texts, spans = render_jinja_template(
                [list(messages)],
                chat_template=template.source,
                add_generation_prompt=ask,
                return_assistant_tokens_mask=markers,
                tools=list(tools) or None,  # templates ask whether there are any with `is none`
                **template.variables,
            )
    except jinja2.TemplateSyntaxError:
        raise
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise RecordError("template error", f"the chat template refuses this conversation: {error}") from error
    return texts[0], [(int(start), int(end)) for start, end in spans[0]] if markers else []
