"""JSON as data files may hold it: no repeated key, no half of a character pair, and no number that is none."""

import json
import math
import re
from typing import Any, NoReturn

from fsdp_trainer.data.formats import RecordError

BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse one line of UTF-8; raise RecordError for broken JSON, repeated keys, lone surrogates, or not an object."""
    try:
        # Decoded here: json would take bytes with every second one NUL for UTF-16.
        value = DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise RecordError("broken JSON", what + _explain_broken(line, error.msg)) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        raise RecordError("broken JSON", f"not readable as JSON: {error}") from None
    return checked_object(value, surrogates=_SURROGATE_ESCAPE.search(line) is not None)


def _explain_broken(line: bytes, message: str) -> str:
    if line.startswith(BOM):
        return "; a byte order mark (BOM) stands here, as between files put behind each other"
    if line.strip() == b"{":
        return "; an object stands on one line, not over several"
    if message == "Extra data":
        return "; a line holds one record, and ends with \\n" + (" (here \\r alone stands)" if b"\r" in line else "")
    return ""


def json_type(value: Any) -> str:
    """Name the type of a JSON value as its author would."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def parsed(value: Any, at: str) -> Any:
    """Return JSON that stands in a string (many files keep calls and tools so), anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = DECODER.decode(value)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise RecordError("lone surrogate", f"{at} holds {code}, half of a character pair") from None
    except (ValueError, RecursionError) as error:
        raise RecordError("broken JSON", f"{at} is text, but not the JSON it should be: {error}") from None
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError("broken JSON", f"{name} is no JSON, and no value that could be meant; write null or leave it out")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse_constant(digits)


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        name = first_repeated([name for name, _ in pairs])
        raise RecordError("repeated key", f"the key {name!r} stands twice in one object; only one could be used")
    return value


def first_repeated(names: list[str]) -> str | None:
    """Return the first name that stands twice in a list."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def checked_object(value: Any, *, surrogates: bool) -> dict[str, Any]:
    """Return a parsed record; RecordError where it is no object or, if that is asked, where its text is none."""
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"a record is a JSON object, this is a {json_type(value)}")
    if surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            raise RecordError("lone surrogate", f"{code} is half of a character pair and stands for no text") from None
    return value


DECODER = json.JSONDecoder(  # json.loads would build one for every record
    object_pairs_hook=_object_without_repeats, parse_constant=_refuse_constant, parse_float=_finite
)
