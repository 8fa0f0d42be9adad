"""Which shape a record has, and its content: recognised by its columns, and every column accounted for.

A column is read, refused, or named as not read: none is dropped without a word.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fsdp_trainer.data.formats import Chat, Plain, RecordError
from fsdp_trainer.data.known_keys import (
    ANSWERS,
    CONTEXT,
    DOCUMENTS,
    FORMATS,
    QUESTIONS,
    RENDERED,
    SHAPES,
    Shape,
    decides_targets,
    fitting_shapes,
)
from fsdp_trainer.data.messages import read_calls, read_messages, read_tools, shown, string
from fsdp_trainer.data.strict_json import parsed

_READY_MADE = "ready-made tokens (key 'input_ids') are not read: give text, which the model's own tokenizer encodes"
# Variables of a template that are not a record's to set.
_RESERVED = ("messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message")
_RESERVED += ("return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token", "unk_token")


def recognise_shape(record: dict[str, Any], *, record_format: str = "auto", renamed: Collection[str] = ()) -> Shape:
    """Return the shape a record's columns stand for; RecordError where they stand for none.

    `renamed`: the columns that data.columns named, which say what the file is meant as.
    """
    fitting = _fitting(record, record_format=record_format, renamed=renamed)
    if fitting:
        return fitting[0]
    if record_format != "auto":
        return next(shape for shape in SHAPES if shape.format == record_format)
    raise _no_format(record)


def refuse_second_shape(
    record: dict[str, Any], shape: Shape, *, record_format: str = "auto", renamed: Collection[str] = ()
) -> None:
    """Raise RecordError for a record that fits another shape too, and says something else there."""
    for other in _fitting(record, record_format=record_format, renamed=renamed):
        extra = [name for name in other.columns if name not in shape.columns]
        if other is not shape and not all(_says_the_same(record, name, shape) for name in extra):
            raise _two_formats(shape, other)
    if record_format == "auto" and "prompt" not in shape.columns and not _says_the_same(record, "prompt", shape):
        raise RecordError(
            "two formats",
            f"'prompt' stands beside {shape.describe()} and says something else ({shown(record['prompt'])}); set "
            f"data.format: {shape.format} to train on that alone, or take the column out",
        )


def example_from_record(record: dict[str, Any], shape: Shape) -> tuple[Chat | Plain, tuple[str, ...]]:
    """Check a record against its file's shape and return its content, and the columns that are not read."""
    if missing := [name for name in shape.columns if name not in record]:
        raise _not_of_shape(record, shape, missing=missing[0])
    unread = _unread(record, shape)
    context = _context(record, shape)
    values = {ours: record[theirs] for ours, theirs in shape.needs.items()}
    if shape.format == "text":
        return Plain("", string(values["text"], "text")), unread
    if shape.format == "prompt_completion":
        content = _prompt_completion(values, context)
        if isinstance(content, Plain):
            return content, unread
    elif shape.format == "alpaca":
        content = Chat(_alpaca(values, shape, given=context.get("input")))
    else:
        ((name, turns),) = ((shape.needs[name], turns) for name, turns in values.items())
        content = Chat(read_messages(turns, name))
    return _with_context(content, context), unread


def _fitting(record: dict[str, Any], *, record_format: str = "auto", renamed: Collection[str] = ()) -> list[Shape]:
    fitting = [
        shape
        for shape in fitting_shapes(tuple(record), record_format)
        if all(_is_list(record[name]) for name in shape.lists)
    ]
    meant = [shape for shape in fitting if any(name in renamed for name in shape.columns)]
    return meant or fitting


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _says_the_same(record: dict[str, Any], name: str, shape: Shape) -> bool:
    """Tell whether a column of another shape only repeats what the record says: it is empty, or one of its texts.

    The published alpaca files have the whole prompt in "text", UltraChat 200k the first question in "prompt".
    """
    value = record.get(name)
    if not value:
        return True
    if not isinstance(value, str):
        return False
    values = [record[column] for column in shape.columns]
    if shape.format == "alpaca":
        return all(isinstance(text, str) and text.strip() in value for text in values[:1])
    texts = [text for text in values if isinstance(text, str)]
    for turns in (turns for turns in values if isinstance(turns, list)):
        texts += [text for turn in turns if isinstance(turn, dict) for text in turn.values() if isinstance(text, str)]
        texts += [turn for turn in turns if isinstance(turn, str)]
    return value.strip() in (text.strip() for text in texts)


def _two_formats(first: Shape, other: Shape) -> RecordError:
    if first.format == other.format:
        fix = f"set {first.renaming()}, or {other.renaming()}"
    else:
        fix = f"set data.format: {first.format}, or data.format: {other.format}"
    return RecordError(
        "two formats",
        f"the record fits two formats, {first.describe()} and {other.describe()}; {fix}, or take out the columns of "
        "one of them",
    )


def _not_of_shape(record: dict[str, Any], shape: Shape, *, missing: str) -> RecordError:
    fitting = _fitting(record)
    other = fitting[0].format if fitting else "ready-made tokens" if "input_ids" in record else None
    if other not in (None, shape.format):
        return RecordError(
            "another format",
            f"this record is {other}, the file is {shape.format} (by data.format, or else by its first good record); "
            "one file has one format",
        )
    return RecordError("missing field", f"no {missing!r}, which {shape.format} needs; the record has {sorted(record)}")


def _unread(record: dict[str, Any], shape: Shape) -> tuple[str, ...]:
    """Return the columns that nothing reads; refuse one that by its name decides what is trained on."""
    # "" is how a CSV file writes null
    unread = [name for name, value in record.items() if name not in shape.names and value is not None and value != ""]
    for name in unread:
        if decides_targets(name):
            raise RecordError(
                "unknown column",
                f"the column {name!r} ({shown(record[name])}) sounds as if it decided what is trained on, and is not "
                "read: mark answers by train: false in their messages, or take the column out",
            )
    return tuple(unread)


def _context(record: dict[str, Any], shape: Shape) -> dict[str, tuple[str, Any]]:
    """Return what a record says beside its turns: (its column, its value), of those that are filled."""
    found: dict[str, tuple[str, Any]] = {}
    for kind, names in CONTEXT.items():
        for name in names:
            value = record.get(name)
            if not value or (isinstance(value, str) and not value.strip()):
                continue
            if name in shape.columns and shape.needs.get(kind) != name:  # one of its turns
                continue
            if name == "context" and kind not in RENDERED[shape.format]:  # often the name of something else
                continue
            if kind not in RENDERED[shape.format]:
                raise _not_rendered(name, kind, value, shape)
            if kind in found and found[kind][1] != value:
                raise RecordError("not supported", f"{found[kind][0]!r} and {name!r} differ; leave out one of them")
            found[kind] = (name, value)
    return found


def _not_rendered(name: str, kind: str, value: Any, shape: Shape) -> RecordError:
    if kind == "media":
        fix = "only text is read"
    elif kind == "documents":
        fix = "put it into chat_template_kwargs, if the chat template writes it, or take the column out"
    elif kind == "history":
        fix = "use messages for several turns"
    elif shape.format == "text":
        fix = "only a chat template could write it; use messages, or take the column out"
    else:
        fix = "make it part of the messages, or take the column out"
    return RecordError(
        "not supported", f"{name!r} ({shown(value)}) of a record in the format {shape.format} is not read: {fix}"
    )


def _prompt_completion(values: Mapping[str, Any], context: Mapping[str, tuple[str, Any]]) -> Chat | Plain:
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = read_messages(prompt, "prompt")
        return Chat(before + read_messages(completion, "completion"), first_target=len(before))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise RecordError("wrong type", "prompt and completion must both be text or both be lists of messages")
    for name, value in context.values():
        raise RecordError(
            "not supported",
            f"{name!r} ({shown(value)}) beside plain text: only a chat template could write it; for a chat of one "
            "question and its answer set data.columns: {instruction: prompt, output: completion} (with the file's own "
            "names), or use messages",
        )
    return Plain(string(prompt, "prompt"), string(completion, "completion"))


def _alpaca(values: Mapping[str, Any], shape: Shape, *, given: tuple[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """Instruction and input are one question: with a blank line between them, as in the published prompt."""
    name = shape.needs["instruction"]
    if isinstance(values["instruction"], list):  # Nemotron: all turns but the last answer
        asked = read_messages(values["instruction"], name)
    else:
        text = string(values["instruction"], name)
        if given is not None and (added := string(given[1], given[0])).strip():
            text = f"{text}\n\n{added}" if text.strip() else added
        asked = ({"role": "user", "content": text},)
    if "calls" in values:
        calls = read_calls(values["calls"], shape.needs["calls"])
        return (*asked, {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})})
    name = shape.needs["output"]
    return (
        *asked,
        {"role": "assistant", "content": "" if values["output"] is None else string(values["output"], name)},
    )


def _with_context(chat: Chat, context: Mapping[str, tuple[str, Any]]) -> Chat:
    """Put the system text, tools and variables of the template that stand beside the turns to them."""
    if "system" in context:
        name, value = context["system"]
        text = string(value, name)
        first = chat.messages[0]
        if first["role"] != "system":
            messages = ({"role": "system", "content": text}, *chat.messages)
            chat = replace(chat, messages=messages, first_target=chat.first_target and chat.first_target + 1)
        elif first["content"] != text:
            raise RecordError(
                "not supported", f"{name!r} and the first message are two system messages; leave out one of them"
            )
    variables = _variables(*context["chat_template_kwargs"]) if "chat_template_kwargs" in context else {}
    tools = read_tools(context["tools"][1], context["tools"][0]) if "tools" in context else ()
    if (inside := variables.pop("tools", None)) is not None:
        inside = read_tools(inside, "chat_template_kwargs.tools")
        if tools and inside and inside != tools:
            raise RecordError("not supported", "'tools' and chat_template_kwargs.tools differ; leave out one of them")
        tools = tools or inside
    return replace(chat, tools=tools, template_kwargs=variables)


def _variables(name: str, value: Any) -> dict[str, Any]:
    value = parsed(value, name) or {}
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"{name} must be an object, not {shown(value)}")
    if reserved := [key for key in value if key in _RESERVED]:
        raise RecordError("not supported", f"{name} sets {reserved[0]!r}, which is not the record's to set")
    return {key: inner for key, inner in value.items() if inner is not None}


# Refusals of what fits no shape


def _no_format(record: dict[str, Any]) -> RecordError:
    if "input_ids" in record:
        return RecordError("unknown format", _READY_MADE)
    renaming = _guess_columns(record)
    for shape in SHAPES:
        half = [name for name in shape.columns if name in record]
        if half and shape.needs.keys() == set(shape.columns) and len(shape.columns) > 1:
            other = next(name for name in shape.columns if name not in record)
            hint = renaming or f"data.columns: {{{other}: NAME}} renames what the file calls differently"
            return RecordError("missing field", f"{half[0]!r} without {other!r}; it has {sorted(record)}; {hint}")
    known = ", ".join(shape.describe() for shape in SHAPES[: len(FORMATS)])
    hint = renaming or _misspelt(record) or "data.columns renames what a file calls differently"
    return RecordError("unknown format", f"no format has the keys {sorted(record)}: {known}; {hint}")


def _guess_columns(record: dict[str, Any]) -> str | None:
    """Return the line of the settings by which a record could be read, None where its columns do not say."""
    filled = {name: value for name, value in record.items() if value}
    texts = {name: value for name, value in filled.items() if isinstance(value, str)}
    chats = [name for name, value in filled.items() if _is_chat(_turns(value))]
    if chats:  # of several, wanted and unwanted answers say, none is the one
        return f"set data.columns: {{messages: {chats[0]}}}" if len(chats) == 1 else None
    asked, answered = _called(texts, QUESTIONS), _called(texts, ANSWERS)
    if asked is None and answered is None and (document := _called(texts, DOCUMENTS)) is not None:
        return f"set data.columns: {{text: {document}}}"
    if asked is None or answered is None or asked == answered:
        return None
    if asked == "prompt" and "completion" not in record:
        return (
            f"set data.columns: {{completion: {answered}}}, or {{instruction: prompt, output: {answered}}} for a chat"
        )
    pairs = {"instruction": asked, "output": answered}
    return "set data.columns: {" + ", ".join(f"{ours}: {name}" for ours, name in pairs.items() if ours != name) + "}"


def _is_chat(turns: list[Any]) -> bool:
    return bool(turns) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)


def _turns(value: Any) -> list[Any]:
    try:
        return parsed(value, "") if _is_list(value) else []
    except RecordError:
        return []


def _called(texts: Mapping[str, str], words: tuple[str, ...]) -> str | None:
    """Return the column called by one of the words, or else by a name of several words that ends in one."""
    names = {name.lower(): name for name in texts}
    if (found := next((names[word] for word in words if word in names), None)) is not None:
        return found
    return next((names[name] for word in words for name in names if name.endswith(("_" + word, "-" + word))), None)


def _misspelt(record: dict[str, Any]) -> str | None:
    """Name the column that is nearly one of a format's, by its name and by the kind of its value."""
    names = {name for shape in SHAPES for name in shape.columns}
    turns = {name for shape in SHAPES for name in shape.columns if shape.needs.keys() <= {"messages", "conversations"}}
    for name, value in record.items():
        kinds = turns if isinstance(value, list) else names - turns if isinstance(value, str) else ()
        if name not in names and (match := difflib.get_close_matches(name, sorted(kinds), n=1, cutoff=0.85)):
            return f"did you write {name!r} for {match[0]!r}?"
    return None
