"""The shapes a record may have, recognised by their keys and checked field by field.

Every shape becomes one of two things: a chat (a list of messages) or plain text (a prompt and what follows it).
"""

import difflib
import json
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = {  # in the order they are tried
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
FORMATS = tuple(_KEYS)
_LATER_KEYS = {"conversations": "sharegpt", "instruction": "alpaca", "input_ids": "ready-made token"}
_LATER_MESSAGE_KEYS = ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_ALL_KEYS = tuple(key for keys in _KEYS.values() for key in keys)


class RecordError(Exception):
    """One record cannot be used; `kind` is what it is counted under when bad records are skipped."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind, self.what = kind, what
        super().__init__(what)


@dataclass(frozen=True)
class Chat:
    """A conversation; only assistant turns from message `first_target` on may be targets.

    A message has `role` and `content` (text, "" for none), and where the record has them `tool_calls` (each with its
    arguments as an object, as templates expect them), `reasoning_content`, `tool_call_id` and `name`.
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
    for name, keys in _KEYS.items():
        if all(key in record for key in keys):
            return name
    for key, name in _LATER_KEYS.items():
        if key in record:
            raise RecordError("unknown format", f"{name} records (key {key!r}) are not read yet; use messages")
    if half := [key for key in ("prompt", "completion") if key in record]:
        raise RecordError("missing field", f"{half[0]!r} without its other half; a pair has prompt and completion")
    near = [f"{key!r} for {match[0]!r}" for key in record if (match := difflib.get_close_matches(key, _ALL_KEYS, n=1))]
    hint = f"; did you write {near[0]}?" if near else ""
    raise RecordError("unknown format", f"no format has the keys {sorted(record)}: {_describe_formats()}{hint}")


def example_from_record(record: dict[str, Any], name: str) -> Chat | Plain:
    """Check a record against its file's format and return its content."""
    if missing := [key for key in _KEYS[name] if key not in record]:
        other = _other_format(record)
        if other is not None:
            raise RecordError("another format", f"this record is {other}, the file is {name}; one file has one format")
        raise RecordError("missing field", f"no {missing[0]!r} in a {name} record; it has {sorted(record)}")
    if "tools" in record:
        raise RecordError("not supported yet", "'tools' are not read yet; training without them would change the task")
    if name == "messages":
        return Chat(_messages(record["messages"], "messages"))
    if name == "text":
        return Plain("", _string(record["text"], "text"))
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt")
        return Chat(before + _messages(completion, "completion"), first_target=len(before))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise RecordError("wrong type", "prompt and completion must both be text or both be lists of messages")
    return Plain(_string(prompt, "prompt"), _string(completion, "completion"))


def _other_format(record: dict[str, Any]) -> str | None:
    for name, keys in _KEYS.items():
        if all(key in record for key in keys):
            return name
    return next((name for key, name in _LATER_KEYS.items() if key in record), None)


def _describe_formats() -> str:
    return ", ".join(f"{name} ({' + '.join(keys)})" for name, keys in _KEYS.items())


def _messages(value: Any, key: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise RecordError("wrong type", f"{key!r} must be a list of messages, not {_shown(value)}")
    if not value:
        raise RecordError("missing field", f"{key!r} is an empty list")
    return tuple(_message(message, f"{key}[{index}]") for index, message in enumerate(value))


def _message(value: Any, at: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"{at} must be an object with role and content, not {_shown(value)}")
    if later := [key for key in _LATER_MESSAGE_KEYS if value.get(key)]:
        raise RecordError("not supported yet", f"{at} has {later[0]!r}, which is not read yet")
    role = value.get("role")
    if not isinstance(role, str):
        found = "has no 'role'" if role is None else f"has the role {_shown(role)}"
        raise RecordError("missing field" if role is None else "wrong type", f"{at} {found}")
    if role not in ROLES:
        near = difflib.get_close_matches(role.lower(), ROLES, n=1) or {"human": ["user"], "gpt": ["assistant"]}.get(
            role
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RecordError("unknown role", f"{at} has the unknown role {role!r}; known: {', '.join(ROLES)}{hint}")
    content = value.get("content")
    if content is None and role == "assistant":
        return {"role": role, "content": ""}  # an empty answer, which is never a target; not the text "None"
    return {"role": role, "content": _string(content, f"{at}.content")}


def _string(value: Any, at: str) -> str:
    if value is None:
        raise RecordError("missing field", f"{at} is null or missing")
    if isinstance(value, list):
        raise RecordError("not supported yet", f"{at} is a list; content parts are not read yet, use one string")
    if not isinstance(value, str):
        raise RecordError("wrong type", f"{at} must be a string, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
