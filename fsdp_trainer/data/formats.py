"""The shapes a record may have, recognised by their keys and checked field by field.

Every shape becomes one of two things: a chat (a list of messages) or plain text (a prompt and what follows it).
"""

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_trainer.config import COLUMNS

ROLES = ("system", "developer", "user", "assistant", "tool")
_SAME_ROLE = {"human": "user", "gpt": "assistant", "model": "assistant", "function_call": "assistant"}
_SAME_ROLE |= {"observation": "tool", "function": "tool", "ipython": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
# In the order they are tried: the published alpaca files also have a "text" column with the prompt inside it, which
# would be trained on if it were taken for plain text.
_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
FORMATS = tuple(_KEYS)
assert {key for keys in _KEYS.values() for key in keys} <= set(COLUMNS)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_READY_MADE = "ready-made tokens (key 'input_ids') are not read: give text, which the model's own tokenizer encodes"
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
    in an answer that the record marks as no target, and stands nowhere else.
    """

    messages: tuple[dict[str, Any], ...]
    first_target: int = 0
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Plain:
    """Text without a chat template: the completion is the target."""

    prompt: str
    completion: str


def recognise_format(record: dict[str, Any]) -> str:
    """Return the format a record's keys stand for; raise RecordError with the nearest known key when there is none."""
    if (name := _fitting_format(record)) is not None:
        return name
    if "input_ids" in record:
        raise RecordError("unknown format", _READY_MADE)
    for keys in (_KEYS["prompt_completion"], _KEYS["alpaca"]):
        if half := [key for key in keys if key in record]:
            other = next(key for key in keys if key not in record)
            raise RecordError(
                "missing field",
                f"{half[0]!r} without {other!r}; it has {sorted(record)}; data.columns: {{{other}: NAME}} renames what "
                "the file calls differently",
            )
    names = tuple(key for keys in _KEYS.values() for key in keys)
    near = [f"{key!r} for {match[0]!r}" for key in record if (match := difflib.get_close_matches(key, names, n=1))]
    hint = f"; did you write {near[0]}?" if near else ""
    raise RecordError(
        "unknown format",
        f"no format has the keys {sorted(record)}: {_describe_formats()}{hint}; data.columns renames what a file "
        "calls differently",
    )


def example_from_record(record: dict[str, Any], name: str) -> Chat | Plain:
    """Check a record against its file's format and return its content."""
    if missing := [key for key in _KEYS[name] if key not in record]:
        other = _fitting_format(record) or ("ready-made tokens" if "input_ids" in record else None)
        if other is not None:
            raise RecordError(
                "another format",
                f"this record is {other}, the file is {name} (by data.format, or else by its first good record); one "
                "file has one format",
            )
        raise RecordError("missing field", f"no {missing[0]!r}, which {name} needs; the record has {sorted(record)}")
    if name == "text":
        _refuse_tools(record)
        return Plain("", _string(record["text"], "text"))
    if name == "prompt_completion":
        return _pair(record)
    tools = _tools(record.get("tools"))
    if name == "alpaca":
        return Chat(_alpaca(record), tools=tools)
    key = _KEYS[name][0]
    messages = _messages(record[key], key)
    if record.get("system") and messages[0]["role"] == "system":
        if messages[0]["content"] != _string(record["system"], "system"):
            raise RecordError("not supported", f"'system' and {key}[0] are two system messages; leave out one of them")
    elif record.get("system"):
        messages = ({"role": "system", "content": _string(record["system"], "system")}, *messages)
    return Chat(messages, tools=tools)


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
        name = _function_name(tool)
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
        messages[-1] = last | {key: f"{last[key].rstrip()} {name}" for key in _REASONING_KEYS if key in last}
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


def _fitting_format(record: dict[str, Any]) -> str | None:
    return next((name for name, keys in _KEYS.items() if all(key in record for key in keys)), None)


def _describe_formats() -> str:
    return ", ".join(f"{name} ({' + '.join(keys)})" for name, keys in _KEYS.items())


def _pair(record: dict[str, Any]) -> Chat | Plain:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        after = _messages(completion, "completion")
        return Chat(before + after, first_target=len(before), tools=_tools(record.get("tools")))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise RecordError("wrong type", "prompt and completion must both be text or both be lists of messages")
    _refuse_tools(record)
    return Plain(_string(prompt, "prompt"), _string(completion, "completion"))


def _alpaca(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Instruction and input are one question: with a blank line between them, as in the published prompt."""
    if record.get("history"):
        raise RecordError("not supported", "'history' of an alpaca record is not read; use messages for several turns")
    asked = _string(record["instruction"], "instruction")
    if record.get("input") is not None and (given := _string(record["input"], "input")).strip():
        asked = f"{asked}\n\n{given}" if asked.strip() else given
    answer = {"role": "assistant", "content": "" if record["output"] is None else _content(record["output"], "output")}
    messages = [{"role": "user", "content": asked}, answer]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _string(record["system"], "system")})
    return tuple(messages)


def _messages(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a CSV file can hold no list in another way
        value = _parsed(value, key)
    if not isinstance(value, list):
        raise RecordError("wrong type", f"{key!r} must be a list of messages, not {_shown(value)}")
    if not value:
        raise RecordError("missing field", f"{key!r} is an empty list")
    return tuple(_message(message, f"{key}[{index}]") for index, message in enumerate(value))


def _message(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"{at} must be an object with role and content, not {_shown(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and isinstance(content, str) and isinstance(role, str) and role in ROLES:
        return {"role": role, "content": content}  # what most are; the rest below would return the same
    # A table has every column in every row: null there is what is left out elsewhere.
    value = {key: item for key, item in value.items() if item is not None}
    name = "from" if "role" not in value and "from" in value else "role"
    text = "value" if "content" not in value and "value" in value else "content"
    role = _role(value.get(name), at, key=name)
    message: dict[str, Any] = {"role": role, "content": ""}
    if str(value[name]).strip().lower() == "function_call":
        message |= _called(value.get(text), f"{at}.{text}")
    elif text in value or role != "assistant":  # no answer is an empty one, which is no target; not the text "None"
        message["content"] = _content(value.get(text), f"{at}.{text}")
    if value.get("function_call"):
        raise RecordError("not supported", f"{at} has 'function_call', the older form of 'tool_calls'; use that")
    if value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{at}.tool_calls")
    for key in _REASONING_KEYS:
        if value.get(key):
            # Templates differ in the name they read; the record's own name stays beside the usual one.
            message[key] = message["reasoning_content"] = _string(value[key], f"{at}.{key}")
    message |= {key: _string(value[key], f"{at}.{key}") for key in ("tool_call_id", "name") if key in value}
    return message if _is_trained(value, at, role=role) else message | {"train": False}


def _is_trained(value: dict[str, Any], at: str, *, role: str) -> bool:
    """Read the mark of one answer: `weight` 0 or 1, as OpenAI's fine-tuning files have it, or `train` true or false."""
    if role != "assistant":
        if value.get("train") is True:
            raise RecordError(
                "not supported",
                f"{at}.train is true for the role {role!r}; only answers are targets (or everything, by data.train_on)",
            )
        return True
    known = {"weight": (0, 1), "train": (False, True)}
    for key, allowed in known.items():
        if key in value and (value[key] not in allowed or (key == "train" and not isinstance(value[key], bool))):
            raise RecordError(
                "not supported",
                f"{at}.{key} is {_shown(value[key])}; an answer is a target (weight 1, train true) or is none (weight "
                "0, train false)",
            )
    marks = {bool(value[key]) for key in known if key in value}
    if len(marks) == 2:
        raise RecordError("not supported", f"{at}.weight and {at}.train contradict each other; leave out one of them")
    return marks != {False}


def _role(role: Any, at: str, *, key: str) -> str:
    if not isinstance(role, str):
        found = f"has no {key!r}" if role is None else f"has the role {_shown(role)}"
        raise RecordError("missing field" if role is None else "wrong type", f"{at} {found}")
    plain = role.strip().lower()  # Human, GPT and USER stand in published files
    known_role = _SAME_ROLE.get(plain, plain)
    if known_role not in ROLES:
        near = difflib.get_close_matches(plain, ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join((*ROLES, *_SAME_ROLE))
        raise RecordError("unknown role", f"{at} has the unknown role {role!r}; known: {known}{hint}")
    return known_role


def _content(value: Any, at: str) -> str:
    """Return text, or the text of content parts one after another, as templates write them."""
    if not isinstance(value, list):
        return _string(value, at)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise RecordError("not supported", f"{at}[{index}] is {_shown(part)}; only text is read")
        kind = part.get("type", "text" if "text" in part else "unknown")
        if kind not in _TEXT_PARTS:
            raise RecordError("not supported", f"{at}[{index}] is of type {kind!r}; only text is read")
        texts.append(_string(part.get("text"), f"{at}[{index}].text"))
    return "".join(texts)


def _called(value: Any, at: str) -> dict[str, Any]:
    """Read the turn of a sharegpt file that calls a function: a call in its usual form, else the text as it is."""
    text = _string(value, at)
    try:
        call = _parsed(text, at)
    except RecordError as error:
        if error.kind == "lone surrogate":
            raise
        return {"content": text}
    if isinstance(call, dict) and {"name", "arguments"} <= call.keys():
        return {"tool_calls": _tool_calls([call], at)}
    return {"content": text}


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    value = _parsed(value, at)
    if not isinstance(value, list):
        raise RecordError("wrong type", f"{at} must be a list of calls, not {_shown(value)}")
    calls = []
    for index, item in enumerate(value):
        call = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise RecordError("wrong type", f"{at}[{index}] must be an object with name and arguments")
        arguments = _parsed(call.get("arguments", {}), f"{at}[{index}].arguments")
        if not isinstance(arguments, dict):
            raise RecordError("wrong type", f"{at}[{index}].arguments must be an object, not {_shown(arguments)}")
        given = {"id": item["id"]} if item.get("id") is not None else {}
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}, **given})
    return calls


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    tools = (_parsed(value, "tools") if value else None) or []  # "null" is how a table of text writes none
    if not isinstance(tools, list):
        raise RecordError("wrong type", f"'tools' must be a list, not {_shown(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or not _function_name(tool):
            raise RecordError("wrong type", f"tools[{index}] must be an object that describes a function by its name")
    return tuple(tools)


def _function_name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _refuse_tools(record: dict[str, Any]) -> None:
    if record.get("tools"):
        raise RecordError("not supported", "'tools' beside plain text: only a chat template could write them")


def _parsed(value: Any, at: str) -> Any:
    """Return JSON that stands in a string (many files keep calls and tools so), anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise RecordError("lone surrogate", f"{at} holds {code}, half of a character pair") from None
    except (ValueError, RecursionError) as error:
        raise RecordError("broken JSON", f"{at} is text, but not the JSON it should be: {error}") from None
    return parsed


def _string(value: Any, at: str) -> str:
    if value is None:
        raise RecordError("missing field", f"{at} is null or missing")
    if not isinstance(value, str):
        raise RecordError("wrong type", f"{at} must be a string, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def canonical(content: Chat | Plain) -> bytes:
    """Return bytes that are equal for records of equal content, whatever file, spacing or key order they came in."""
    if isinstance(content, Plain):
        value: Sequence[Any] = ("plain", content.prompt, content.completion)
    else:
        value = ("chat", content.messages, content.first_target, content.tools)
    return _CANONICAL.encode(value).encode()
