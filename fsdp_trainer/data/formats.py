"""What a record says: a chat (a list of messages) or plain text (a prompt and what follows it).

Marks put into a chat show later whether a template writes all of it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fsdp_trainer.data.known_keys import REASONING_KEYS

_CANONICAL = json.JSONEncoder(sort_keys=True, default=str)  # json.dumps would build one for every record
# C0 (but tab and newline), DEL, C1, and Unicode's controls of the writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return text with its control characters written out as escapes, so that data cannot steer a terminal."""
    return _CONTROLS.sub(lambda match: ascii(match.group())[1:-1], text)


class RecordError(Exception):
    """One record cannot be used; `kind` is what it is counted under when bad records are skipped."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind, self.what = kind, visible(what)
        super().__init__(self.what)


@dataclass(frozen=True)
class Chat:
    """A conversation; only assistant turns from message `first_target` on may be targets.

    A message has `role` and `content` (text, "" for none), and where the record has them `tool_calls` (each with its
    arguments as an object, as templates expect them), `reasoning_content`, `tool_call_id` and `name`. `train` is False
    in an answer that the record marks as no target, `untrained` holds the (start, end) characters of its content that
    are none; both stand nowhere else. `template_kwargs` are variables of the chat template beside the usual ones.
    """

    messages: tuple[dict[str, Any], ...]
    first_target: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plain:
    """Text without a chat template: the completion is the target."""

    prompt: str
    completion: str


def mark_parts(chat: Chat) -> tuple[Chat, dict[str, str]]:
    """Return the conversation with a mark in each tool, call and last reasoning, and what each mark stands for.

    A template that knows nothing of tools leaves them out silently, and the model would learn another task. Whether a
    tool's own name stands in the text shows nothing: people write such words ("weather"). The marks stand
    nowhere else.
    """
    parts: dict[str, str] = {}
    mark = partial(_mark, parts=parts)
    tools = []
    for tool in chat.tools:
        name = function_name(tool)
        marked = {"name": name + mark(f"the tool {name!r} of 'tools'")}
        tools.append(tool | ({"function": tool["function"] | marked} if "function" in tool else marked))
    messages = []
    for index, message in enumerate(chat.messages):
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            # In the arguments: a template may write a call's id, which holds the name, in place of the name (Kimi K2).
            name = mark(f"the tool call {function['name']!r} of messages[{index}]")
            calls.append(call | {"function": function | {"arguments": function["arguments"] | {name: name}}})
        messages.append(message | {"tool_calls": calls} if calls else message)
    # Of earlier turns many templates leave the reasoning out on purpose, as the model's own chats do.
    last = messages[-1]
    if has_reasoning(last):
        name = mark("the reasoning of the last answer")
        messages[-1] = last | {key: f"{last[key].rstrip()} {name}" for key in REASONING_KEYS if key in last}
    return replace(chat, messages=tuple(messages), tools=tuple(tools)), parts


def has_reasoning(message: dict[str, Any]) -> bool:
    """Tell whether a message is an answer with its reasoning."""
    return message["role"] == "assistant" and bool(message.get("reasoning_content", "").strip())


def mark_messages(chat: Chat) -> tuple[Chat, dict[str, str]]:
    """Return the conversation with a mark in all that others than the assistant say, and what each mark stands for."""
    parts: dict[str, str] = {}
    messages = []
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant" and message["content"].strip():
            name = _mark(f"messages[{index}], of the role {message['role']!r}", parts=parts)
            message = message | {"content": f"{message['content'].rstrip()} {name}"}
        messages.append(message)
    return replace(chat, messages=tuple(messages)), parts


def _mark(what: str, *, parts: dict[str, str]) -> str:
    name = f"fsdpTrainerPart{len(parts)}End"
    parts[name] = what
    return name


def function_name(tool: dict[str, Any]) -> str:
    """Return the name of a tool, "" where it has none."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def canonical(content: Chat | Plain) -> bytes:
    """Return bytes that are equal for records of equal content, whatever file, spacing or key order they came in."""
    if isinstance(content, Plain):
        value: Sequence[Any] = ("plain", content.prompt, content.completion)
    else:
        value = ("chat", content.messages, content.first_target, content.tools, content.template_kwargs)
    return _CANONICAL.encode(value).encode()
