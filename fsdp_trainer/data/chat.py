"""From a record's content to pieces of text, each a target or not, by way of the model's chat template.

Which part of the text is an assistant turn comes from the template's own generation markers, or else from rendering the
conversation up to each turn and checking that the text so far is a prefix of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_trainer.data.formats import Chat, RecordError
from fsdp_trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "PROBE"
_WAY_OUT = (
    "use a template with {% generation %} markers (data.chat_template: FILE), or data.train_on: last_assistant or all"
)


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
    has_markers: bool  # generation markers that cover the end of the turn


def read_chat_template(path: str | Path | None, *, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the text of a template file, or the tokenizer's own template; None when it has none."""
    if path is None:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "data.chat_template cannot be read", values=f"{path}: {error}", fix="give the path of a Jinja file in UTF-8"
        ) from error


def build_chat_template(source: str, *, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Compile a template and learn from a probe conversation how it ends an assistant turn."""
    variables = dict(tokenizer.special_tokens_map)
    bare = ChatTemplate(source, variables, turn_end=None, has_markers=False)
    probe = ({"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE})
    try:
        text, spans = _render(bare, probe, markers="endgeneration" in source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            "the chat template is not valid Jinja", values=f"line {error.lineno}: {error.message}", fix="repair it"
        ) from error
    except RecordError:  # a template that wants another order; the records themselves will tell
        return bare
    turn_end = _first_special(text[text.rfind(_PROBE) + len(_PROBE) :], tokenizer=tokenizer)
    covered = bool(spans) and (turn_end is None or turn_end in text[spans[-1][0] : spans[-1][1]])
    return ChatTemplate(source, variables, turn_end=turn_end, has_markers=covered)


def _first_special(tail: str, *, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names.update(str(token) for token in tokenizer.all_special_tokens)
    found = [(tail.find(name), -len(name), name) for name in names if name in tail]
    return min(found)[2] if found else None


def chat_pieces(chat: Chat, *, template: ChatTemplate, train_on: str) -> list[Piece]:
    """Render a conversation and cut it into pieces; raise RecordError or Dropped when it cannot be trained on."""
    if chat.tools:
        template = replace(template, variables=template.variables | {"tools": list(chat.tools)})
    answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    targets = [index for index in answers if index >= chat.first_target]
    filled = [index for index in targets if _says_something(chat.messages[index])]
    if targets and not filled:
        raise Dropped("empty answer")
    if train_on == "all":
        return [Piece(_render(template, chat.messages)[0], True)]
    if not targets:
        raise RecordError("no answer", "no assistant message to train on")
    if train_on == "last_assistant":
        filled = filled[-1:]
    if template.has_markers:
        text, spans = _render(template, chat.messages, markers=True)
        if len(spans) == len(answers):
            return _cut(text, [spans[answers.index(index)] for index in filled])
    text, _ = _render(template, chat.messages)
    return _cut(text, [_turn_span(text, chat.messages, index, template=template) for index in filled])


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _turn_span(text: str, messages: Sequence[dict[str, Any]], index: int, *, template: ChatTemplate) -> tuple[int, int]:
    """Return where the answer `messages[index]` starts and ends in the text, its end-of-turn token included."""
    start = _turn_start(text, messages, index, template=template)
    upto = text if index == len(messages) - 1 else _render(template, messages[: index + 1])[0]
    if start is None or not text.startswith(upto) or len(upto) <= start:
        raise RecordError(
            "no mask",
            f"the template writes the conversation up to messages[{index}] differently when more follows, so its "
            f"answers cannot be told from the rest; {_WAY_OUT}",
        )
    end = len(upto)
    if template.turn_end is not None and (found := text.rfind(template.turn_end, start, end)) >= 0:
        end = found + len(template.turn_end)  # what follows the token (a newline in ChatML) is never generated
    return start, end


def _turn_start(text: str, messages: Sequence[dict[str, Any]], index: int, *, template: ChatTemplate) -> int | None:
    if index > 0:
        before, _ = _render(template, messages[:index], ask=True)
        return len(before) if text.startswith(before) else None
    # The assistant speaks first: many templates cannot render an empty conversation, so the header they would write
    # for the next turn is looked up in the text instead.
    asked, _ = _render(template, messages, ask=True)
    header = asked[len(text) :] if asked.startswith(text) else ""
    found = text.find(header) if header else -1
    return found + len(header) if found >= 0 else None


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Piece]:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [Piece(text[at:start], False), Piece(text[start:end], True)]
        at = end
    pieces.append(Piece(text[at:], False))
    return [piece for piece in pieces if piece.text]


def _render(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], *, ask: bool = False, markers: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages; `ask` adds the header of the next assistant turn, `markers` returns the generation spans."""
    try:
        # The function that apply_chat_template calls (transformers 5.17 to 5.24). Called directly because it gives the
        # spans in characters: one way of finding tokens then serves every format.
        texts, spans = render_jinja_template(
            [list(messages)],
            chat_template=template.source,
            add_generation_prompt=ask,
            return_assistant_tokens_mask=markers,
            **template.variables,
        )
    except jinja2.TemplateSyntaxError:
        raise
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RecordError("template error", f"the chat template refuses this conversation: {error}") from error
    return texts[0], [(int(start), int(end)) for start, end in spans[0]] if markers else []
