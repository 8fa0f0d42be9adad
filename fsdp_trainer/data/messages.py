"""The messages of a record: every key of each checked, and what it says brought into the one form of formats.Chat."""

import difflib
import json
from collections.abc import Collection
from typing import Any, NoReturn

from fsdp_trainer.data.formats import RecordError, function_name
from fsdp_trainer.data.known_keys import (
    CALL_ROLES,
    DETAIL_KEYS,
    DETAILS,
    INVERTED_MARKS,
    MARKS,
    MESSAGE_KEYS,
    PAIR_KEYS,
    PAIRS,
    PART_KEYS,
    PART_TEXT_KEYS,
    PLAIN_KEYS,
    REASONING_KEYS,
    REFUSED_KEYS,
    ROLE_KEYS,
    ROLES,
    SAME_ROLE,
    TEXT_KEYS,
    TEXT_PARTS,
    TEXT_TURNS,
    decides_targets,
)
from fsdp_trainer.data.strict_json import parsed

Spans = tuple[tuple[int, int], ...]  # (start, end) characters of a text


def read_messages(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of a column, as formats.Chat has them; RecordError names the message and its key.

    `key` is the column's name. Besides objects with role and content these may be pairs {input, output} and, in some
    columns, texts of which the first is a question.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):  # a CSV file can hold no list in another way
        value = parsed(value, key)
    if not isinstance(value, list):
        raise RecordError("wrong type", f"{key!r} must be a list of messages, not {shown(value)}")
    if not value:
        raise RecordError("missing field", f"{key!r} is an empty list")
    if key in TEXT_TURNS and all(isinstance(text, str) for text in value):
        return tuple({"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(value))
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        at = f"{key}[{index}]"
        if isinstance(message, dict) and (pair := _pair_in(message)) is not None:
            messages += _pair(message, at, *pair)
        else:
            messages.append(_message(message, at))
    return tuple(messages)


def _pair_in(message: dict[str, Any]) -> tuple[str, str] | None:
    if "role" in message or "from" in message:
        return None
    return next((pair for pair in PAIRS if message.keys() >= {*pair}), None)


def _pair(value: dict[str, Any], at: str, asked: str, answered: str) -> list[dict[str, Any]]:
    """Read a question with its answer; the mark is the answer's, the system text comes before both."""
    value = _known(value, at, PAIR_KEYS - {name for pair in PAIRS for name in pair} | {asked, answered})
    marks = {key: value[key] for key in MARKS if key in value}
    messages = [_message({"role": "system", "content": value["system"]}, f"{at}.system")] if value.get("system") else []
    if value.get(asked):  # XTuner leaves it empty where there is only text to go on
        messages.append(_message({"role": "user", "content": value[asked]}, f"{at}.{asked}"))
    return [*messages, _message({"role": "assistant", "content": value.get(answered), **marks}, f"{at}.{answered}")]


def _message(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"{at} must be an object with role and content, not {shown(value)}")
    role, content = value.get("role"), value.get("content")
    if len(value) == 2 and isinstance(content, str) and isinstance(role, str) and role in ROLES:
        return {"role": role, "content": content}  # what most are; the rest below would return the same
    value = _known(value, at, MESSAGE_KEYS)
    name, text = _one_of(value, ROLE_KEYS, at), _one_of(value, TEXT_KEYS, at)
    role = _role(value.get(name), at, key=name)
    message: dict[str, Any] = {"role": role, "content": ""}
    untrained: Spans = ()
    if str(value[name]).strip().lower() in CALL_ROLES:
        message |= _called(value.get(text), f"{at}.{text}")
    elif text in value or role != "assistant":  # no answer is an empty one, which is no target; not the text "None"
        message["content"], untrained = _content(value.get(text), f"{at}.{text}", role=role)
    if value.get("tool_calls"):
        message["tool_calls"] = read_calls(value["tool_calls"], f"{at}.tool_calls")
    thought = _one_of({key: value[key] for key in REASONING_KEYS if value.get(key)}, REASONING_KEYS, at)
    if value.get(thought):
        # Templates differ in the name they read; the record's own name stays beside the usual one.
        message[thought] = message["reasoning_content"] = string(value[thought], f"{at}.{thought}")
    message |= {key: string(value[key], f"{at}.{key}") for key in PLAIN_KEYS if key in value}
    for key in (key for key in DETAILS if key in value):
        if untrained:
            raise RecordError("not supported", f"{at}.{key} beside marks of the content's parts; leave out one of them")
        untrained = _untrained_by_detail(value[key], message["content"], f"{at}.{key}", role=role)
    is_target = _is_target(value, at, role=role)
    if role != "assistant" or (is_target and not untrained):
        return message
    spoken = [index for index, character in enumerate(message["content"]) if not character.isspace()]
    if not is_target or (spoken and all(any(start <= at < end for start, end in untrained) for at in spoken)):
        return message | {"train": False}
    return message | {"untrained": untrained}


def _known(value: dict[str, Any], at: str, known: Collection[str]) -> dict[str, Any]:
    """Return an object without its nulls, as a table has every key in every row; refuse keys that nobody knows."""
    value = {key: item for key, item in value.items() if item is not None}
    for key in value:
        if key not in known:
            _refuse_unknown(key, value[key], at, known)
        if key in REFUSED_KEYS and value[key]:
            _refuse_unread(key, value[key], at)
    return value


def _refuse_unknown(key: str, value: Any, at: str, known: Collection[str]) -> NoReturn:
    what = f"{at} has the key {key!r} ({shown(value)}), which is not known"
    if decides_targets(key):
        raise RecordError("unknown key", f"{what}; what is no target is marked by train: false (as is weight: 0)")
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else "; take it out, or move it beside the list of messages"
    raise RecordError("unknown key", what + hint)


def _refuse_unread(key: str, value: Any, at: str) -> NoReturn:
    if key == "function_call":
        raise RecordError("not supported", f"{at} has 'function_call', the older form of 'tool_calls'; use that")
    what = "put what the model answers into 'content'" if key == "refusal" else "only text is read"
    raise RecordError("not supported", f"{at} has {key!r} ({shown(value)}); {what}")


def _one_of(value: dict[str, Any], names: tuple[str, ...], at: str) -> str:
    """Return which of several names for one thing a message uses; the first where it uses none."""
    present = [name for name in names if name in value]
    if len(present) > 1 and any(value[name] != value[present[0]] for name in present):
        raise RecordError("not supported", f"{at}.{present[0]} and {at}.{present[1]} differ; leave out one of them")
    return present[0] if present else names[0]


def _is_target(value: dict[str, Any], at: str, *, role: str) -> bool:
    """Read the marks of an answer or of one of its parts, in every known spelling; True where there is none."""
    said: dict[str, bool] = {}
    for key in (key for key in MARKS if key in value):
        mark, takes = value[key], MARKS[key][1]
        is_switch, is_number = isinstance(mark, bool), not isinstance(mark, str) and mark in (0, 1)
        if not (is_number if key == "weight" else is_switch or (is_number and "0 or 1" in takes)):
            raise RecordError(
                "not supported",
                f"{at}.{key} is {shown(mark)} and takes {takes}: an answer is a target (train: true) or is none "
                "(train: false)",
            )
        said[key] = bool(mark) != (key in INVERTED_MARKS)
        if said[key] and role != "assistant" and key != "weight":  # OpenAI's weight is of answers alone
            raise RecordError(
                "not supported",
                f"{at}.{key} is {shown(mark)} for the role {role!r}; only answers are targets (or everything, by "
                "data.train_on)",
            )
    if len(set(said.values())) == 2:
        names = " and ".join(f"{at}.{key}" for key in said)
        raise RecordError("not supported", f"{names} contradict each other; leave out one of them")
    return False not in said.values()


def _untrained_by_detail(value: Any, content: str, at: str, *, role: str) -> Spans:
    """Return what of a text `train_detail` leaves out: all that no stretch with train: true names, ends included."""
    stretches: list[tuple[int, int, bool]] = []
    for index, one in enumerate(parsed(value, at) or []):
        if not isinstance(one, dict) or set(one) != set(DETAIL_KEYS) or not isinstance(one["train"], bool):
            raise RecordError("wrong type", f"{at}[{index}] must be an object of {', '.join(DETAIL_KEYS)}")
        begin, end = one["begin_offset"], one["end_offset"]
        # Axolotl counts to the last character itself; files that count one more at the end of a text mean all of it.
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(content):
            raise RecordError(
                "wrong type", f"{at}[{index}] is {shown(one)}, for a text with characters 0 to {len(content) - 1}"
            )
        if one["train"] and role != "assistant":
            raise RecordError("not supported", f"{at}[{index}].train is true for the role {role!r}; only answers are")
        stretches.append((begin, min(end + 1, len(content)), one["train"]))
    stretches.sort()
    untrained, done = [], 0
    for begin, end, train in [*stretches, (len(content), len(content), True)]:
        if begin < done:
            raise RecordError("not supported", f"{at} has stretches that overlap at character {begin}")
        if begin > done:
            untrained.append((done, begin))
        if not train:
            untrained.append((begin, end))
        done = end
    return tuple(untrained)


def _role(role: Any, at: str, *, key: str) -> str:
    if not isinstance(role, str):
        found = f"has no {key!r}" if role is None else f"has the role {shown(role)}"
        raise RecordError("missing field" if role is None else "wrong type", f"{at} {found}")
    plain = role.strip().lower()  # Human, GPT and USER stand in published files
    known_role = SAME_ROLE.get(plain, plain)
    if known_role not in ROLES:
        near = difflib.get_close_matches(plain, ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join((*ROLES, *SAME_ROLE))
        raise RecordError("unknown role", f"{at} has the unknown role {role!r}; known: {known}{hint}")
    return known_role


def _content(value: Any, at: str, *, role: str) -> tuple[str, Spans]:
    """Return text, or the text of content parts one after another, with the stretches that a part marks as no target.

    What a tool gives back may be a number or an object: it is written as JSON.
    """
    is_parts = isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value)
    if role == "tool" and value is not None and not isinstance(value, str) and not is_parts:
        return json.dumps(value, ensure_ascii=False), ()
    if not isinstance(value, list):
        return string(value, at), ()
    text, untrained = "", []
    for index, part in enumerate(value):
        here = f"{at}[{index}]"
        if not isinstance(part, dict):
            raise RecordError(
                "not supported",
                f"{here} is {shown(part)}; content is one text, or a list of parts such as "
                '{"type": "text", "text": ...}',
            )
        kind = part.get("type") or ("text" if any(name in part for name in PART_TEXT_KEYS) else "unknown")
        if kind not in TEXT_PARTS:
            raise RecordError("not supported", f"{here} is of type {kind!r}; only text is read")
        part = _known(part, here, PART_KEYS)
        name = _one_of(part, PART_TEXT_KEYS, here)
        start, text = len(text), text + string(part.get(name), f"{here}.{name}")
        if not _is_target(part, here, role=role):
            untrained.append((start, len(text)))
    return text, tuple(untrained)


def _called(value: Any, at: str) -> dict[str, Any]:
    """Read the turn of a sharegpt file that calls a function: a call in its usual form, else the text as it is."""
    if isinstance(value, dict):
        return {"tool_calls": read_calls([value], at)}
    text = string(value, at)
    try:
        call = parsed(text, at)
    except RecordError as error:
        if error.kind == "lone surrogate":
            raise
        return {"content": text}
    calls = call if isinstance(call, list) else [call]
    if calls and all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in calls):
        return {"tool_calls": read_calls(calls, at)}
    return {"content": text}


def read_calls(value: Any, at: str) -> list[dict[str, Any]]:
    """Return tool calls in their usual form, from a list or its JSON; arguments become an object."""
    value = parsed(value, at)
    if not isinstance(value, list):
        raise RecordError("wrong type", f"{at} must be a list of calls, not {shown(value)}")
    calls = []
    for index, item in enumerate(value):
        call = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise RecordError("wrong type", f"{at}[{index}] must be an object with name and arguments")
        for key in (key for key in (*item, *call) if decides_targets(key)):
            raise RecordError("unknown key", f"{at}[{index}] has the key {key!r}; mark the message that calls instead")
        arguments = parsed(call.get("arguments") or {}, f"{at}[{index}].arguments")
        if not isinstance(arguments, dict):
            raise RecordError("wrong type", f"{at}[{index}].arguments must be an object, not {shown(arguments)}")
        given = {"id": item["id"]} if item.get("id") is not None else {}
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}, **given})
    return calls


def read_tools(value: Any, at: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record, from a list or its JSON, or a list of the JSON of each."""
    tools = (parsed(value, at) if value else None) or []  # "null" is how a table of text writes none
    if not isinstance(tools, list):
        raise RecordError("wrong type", f"{at!r} must be a list, not {shown(tools)}")
    tools = [parsed(tool, f"{at}[{index}]") for index, tool in enumerate(tools)]
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or not function_name(tool):
            raise RecordError("wrong type", f"{at}[{index}] must be an object that describes a function by its name")
    return tuple(tools)


def string(value: Any, at: str) -> str:
    """Return a text that must be one."""
    if value is None:
        raise RecordError("missing field", f"{at} is null or missing")
    if not isinstance(value, str):
        raise RecordError("wrong type", f"{at} must be a string, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value as a message shows it: JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
