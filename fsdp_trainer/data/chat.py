"""From a record's content to pieces of text, each a target or not, by way of the model's chat template.

Which part of the text is an assistant turn comes from the template's own generation markers, or else from rendering the
conversation up to each turn and checking that the text so far is a prefix of the whole.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_trainer.data.formats import Chat, RecordError, has_reasoning, mark_messages, mark_parts
from fsdp_trainer.data.tokens import ControlTokens, build_control_tokens, is_hiding, texts_in
from fsdp_trainer.errors import DataError
from fsdp_trainer.limited import LimitReached, find_excess, run_limited

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
PART_LOST = "answers of which the template leaves a part out"
UNREAD_VARIABLE = "chat_template_kwargs that the template does not read"


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
    ends: frozenset[str]  # text of the tokens at which generation stops
    has_markers: bool  # generation markers that cover an answer with the end of its turn, and no question
    asks: bool  # it can write the header of the next answer; where it cannot, an answer's header is part of the answer
    control: ControlTokens
    sanitize: bool  # typed control tokens become plain text

    @property
    def writes_the_date(self) -> bool:
        """Tell whether the text depends on the day it is made."""
        return "strftime_now" in self.source


def build_chat_template(
    source: str, *, tokenizer: "PreTrainedTokenizerBase", ends: Collection[str] = (), sanitize: bool = True
) -> ChatTemplate:
    """Compile a template and learn from a probe conversation how it ends an assistant turn.

    `ends`: the text of the tokens at which generation stops.
    """
    bare = ChatTemplate(
        source,
        variables=dict(tokenizer.special_tokens_map),
        turn_end=None,
        ends=frozenset(ends),
        has_markers=False,
        asks=True,
        control=(control := build_control_tokens(tokenizer)),
        sanitize=sanitize,
    )
    probe = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _PROBE})
    with RENDERING:  # which no other thread may hold while this process is forked
        excess = find_excess(lambda: _render(bare, probe))
    if excess is not None:
        raise DataError(
            "the chat template does not come to an end",
            values=f"for a question and an answer it took {excess}",
            fix="repair it, or name another in data.chat_template",
        )
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
    marked = len(trained) < len(targets) or any("untrained" in chat.messages[index] for index in trained)
    if train_on == "all" and marked:
        raise RecordError(
            "not supported",
            "an answer or a part of one is marked as not to be trained on (weight 0, train false or the like), and "
            "data.train_on: all trains on every token; set data.train_on: assistant, or leave out the mark",
        )
    if targets and not filled:
        raise Dropped("empty answer" if trained else "every answer marked as not to be trained on")
    chat, notes = _without_control_tokens(chat, template=template)
    notes += _unread_variables(chat, template=template)
    _check_parts(chat, template=template)
    if train_on == "all":
        text = _render_chat(template, chat)[0]
        _check_messages(text, chat, template=template)
        lost = any(_lost_part(text, chat.messages[index]) for index in answers)
        return [Piece(text, True)], notes + [PART_LOST] * lost
    if not targets:
        raise RecordError("no answer", "no assistant message to train on")
    if train_on == "last_assistant":
        filled = filled[-1:]
    spans: list[tuple[int, int]] = []
    if template.has_markers:
        text, marked = _render_chat(template, chat, markers=True)
        if len(marked) == len(answers):
            spans = [marked[answers.index(index)] for index in filled]
            spans = [(start, _reach_end(text, end, template=template)) for start, end in spans]
    if not spans:
        text, _ = _render_chat(template, chat)
        spans = [_turn_span(text, chat, index, template=template, notes=notes) for index in filled]
        notes += [] if template.asks else [HEADER_TRAINED]
    _check_messages(text, chat, template=template)
    for index, (start, end) in zip(filled, spans, strict=True):
        _check_whole_answer(text[start:end], chat.messages[index], index=index, asked=train_on)
    stretches = [
        stretch
        for index, span in zip(filled, spans, strict=True)
        for stretch in _trained_stretches(text, span, chat.messages[index], index=index)
    ]
    return _cut(text, stretches), notes


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
        fields = {key: value for key, value in message.items() if key not in ("role", "untrained")}
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
        return start, _reach_end(text, end, template=template)
    # Written in another way where it is the last: with thinking (Qwen 3), or with an end of text after it (Phi). The
    # answer may still stand right where the model is asked for it, closed by its end of turn.
    end = _answer_end(text, start, chat, index, template=template)
    if end is None:
        raise _no_mask(
            f"the template writes messages[{index}] differently when more follows, so this answer cannot be told from "
            "the rest",
            fix="or data.train_on: last_assistant or all",
        )
    if not upto.startswith(text[:end]) and REWRITTEN not in notes:
        notes.append(REWRITTEN)
    return start, _reach_end(text, end, template=template)


def _reach_end(text: str, end: int, *, template: ChatTemplate) -> int:
    """Return where an answer ends that goes on, behind its end of turn, to a token at which generation stops.

    Cohere's templates close an answer with two control tokens, of which the model has to write both.
    """
    before = [match.group() for match in template.control.pattern.finditer(text, max(0, end - 64), end)]
    if before and before[-1] in template.ends:
        return end
    at = end
    while match := template.control.pattern.match(text, at):
        at = match.end()
        if match.group() in template.ends:
            return at
    return end


def _trained_stretches(
    text: str, span: tuple[int, int], message: dict[str, Any], *, index: int
) -> Iterator[tuple[int, int]]:
    """Yield an answer's span without the stretches of its content that the record marks as no target."""
    start, end = span
    content: str = message["content"]
    if untrained := message.get("untrained"):
        said = content.strip()
        found = text.find(said, start, end)
        if found < 0 or text.find(said, found + 1, end) >= 0:
            raise _no_mask(
                f"parts of messages[{index}] are marked as no targets, and the template does not write its content "
                "word for word, so they cannot be told from the rest",
                fix="or leave out the marks",
            )
        first = found - (len(content) - len(content.lstrip()))  # where the content would start with its blanks
        for left, right in untrained:
            left, right = max(first + left, found), min(first + right, found + len(said))
            if start < left < right:
                yield start, left
            start = max(start, right)
    if start < end:
        yield start, end


def _no_mask(what: str, *, fix: str) -> RecordError:
    way_out = f"use a template with {{% generation %}} markers (data.chat_template: FILE), {fix}"
    if fix.endswith("all"):
        way_out += ", which trains on the text as it is written, without what the template leaves out"
    return RecordError("no mask", f"{what}; {way_out}")


def _turn_start(text: str, chat: Chat, index: int, *, template: ChatTemplate) -> int | None:
    if index > 0:
        # A variable such as Qwen 3's enable_thinking changes what an answer is asked with, and no earlier answer.
        for asking in (chat, replace(chat, template_kwargs={}))[: 1 + bool(chat.template_kwargs)]:
            before, _ = _render_chat(template, asking, stop=index, ask=True)
            if text.startswith(before):
                return len(before)
        return None
    # The assistant speaks first: many templates cannot render an empty conversation, so the header they would write
    # for the next turn is looked up in the text instead.
    asked, _ = _render_chat(template, chat, ask=True)
    header = asked[len(text) :] if asked.startswith(text) else ""
    found = text.find(header) if header else -1
    return found + len(header) if found >= 0 else None


def _answer_end(text: str, start: int, chat: Chat, index: int, *, template: ChatTemplate) -> int | None:
    """Return the end of an answer that stands at `start`, word for word and closed by the end of turn, else None."""
    answer = chat.messages[index]["content"].strip()
    if template.turn_end is None:
        return None
    if chat.messages[index].get("tool_calls"):
        return _calls_end(text, start, chat, index, template=template)
    if not answer:
        return None
    found = text.find(answer, start)
    end = text.find(template.turn_end, found + len(answer))
    if found < 0 or end < 0 or text[start:found].strip() or text[found + len(answer) : end].strip():
        return None
    return end + len(template.turn_end)


def _calls_end(text: str, start: int, chat: Chat, index: int, *, template: ChatTemplate) -> int | None:
    """Return the end of an answer at `start` that calls tools: a mark in its last call tells where that is written.

    The text before the answer and after its end of turn must be the same with the mark as without.
    """
    marked, parts = mark_parts(replace(chat, tools=(), messages=chat.messages[index : index + 1]))
    messages = (*chat.messages[:index], *marked.messages, *chat.messages[index + 1 :])
    written, _ = _render_chat(template, replace(chat, messages=messages))
    last = written.rfind([mark for mark, what in parts.items() if "tool call" in what][-1])
    if last < 0 or not written.startswith(text[:start]) or (found := written.find(template.turn_end or "", last)) < 0:
        return None
    after = written[found + len(template.turn_end or "") :]
    return len(text) - len(after) if text.endswith(after) and len(text) - len(after) > start else None


def _unread_variables(chat: Chat, *, template: ChatTemplate) -> list[str]:
    """Refuse texts and lists for a template that does not read them; a switch is only counted."""
    unread = [name for name in chat.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template.source)]
    for name in unread:
        if (value := chat.template_kwargs[name]) and not isinstance(value, bool | int | float):
            raise RecordError(
                "not supported",
                f"chat_template_kwargs.{name} is {str(value)[:40]!r}, and the chat template does not read it; use one "
                "that does (data.chat_template), or take it out",
            )
    return [UNREAD_VARIABLE] if unread else []


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
    if (lost := _lost_part(written, message)) is not None:
        other = "" if asked == "last_assistant" else "or data.train_on: last_assistant where it keeps the last, "
        raise _no_mask(
            f"the template leaves out or rewrites part of messages[{index}] ({lost})",
            fix=f"{other}or data.train_on: all",
        )


def _lost_part(written: str, message: dict[str, Any]) -> str | None:
    """Return what a text leaves out of an answer, None where it has all of it."""
    if not message.get("tool_calls") and "reasoning_content" not in message and message["content"] in written:
        return None  # word for word, as nearly all are
    squeezed = "".join(written.split())
    at = 0
    for text in _answer_texts(message):  # one after the other: a short reasoning may stand in the answer's text as well
        wanted = "".join(text.split())
        at = squeezed.find(wanted, at) + len(wanted)
        if at < len(wanted):
            return repr(text.strip()[:40])
    for call in message.get("tool_calls", ()):
        if "".join(call["function"]["name"].split()) not in squeezed:
            return f"the tool call {call['function']['name']!r}"
    return None


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
    return _render(
        template, chat.messages[:stop], ask=ask, markers=markers, tools=chat.tools, variables=chat.template_kwargs
    )


def _as_written(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its marks, which a template that writes whole messages would write out."""
    if "train" in message or "untrained" in message:
        return {key: value for key, value in message.items() if key not in ("train", "untrained")}
    return message


def _render(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    *,
    ask: bool = False,
    markers: bool = False,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages; `ask` adds the header of the next assistant turn, `markers` returns the generation spans."""
    try:
        # The function that apply_chat_template calls (transformers 5.17 to 5.24). Called directly because it gives the
        # spans in characters: one way of finding tokens then serves every format.
        render = partial(
            render_jinja_template,
            [[_as_written(message) for message in messages]],
            chat_template=template.source,
            add_generation_prompt=ask,
            return_assistant_tokens_mask=markers,
            tools=list(tools) or None,  # templates ask whether there are any with `is none`
            **{**template.variables, **variables},
        )
        with RENDERING:
            texts, spans = run_limited(render)
    except LimitReached as error:
        raise RecordError("template error", f"the chat template took {error} for this conversation") from None
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
