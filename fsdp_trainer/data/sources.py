"""Read the records of JSON Lines files, with the place of each one for error messages.

A broken record takes its place in the stream, named by file and line: whether it stops the run is not decided here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp_trainer.data.formats import FORMATS, Chat, Plain, RecordError, example_from_record, recognise_format
from fsdp_trainer.errors import DataError

_LATER = {
    ".parquet": "Parquet files",
    ".arrow": "Arrow files",
    ".csv": "CSV files",
    ".tsv": "TSV files",
    ".txt": "plain text files",
    ".gz": "gzip files",
    ".zst": "zstd files",
    ".zip": "zip files",
    ".xz": "xz files",
}
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_RECORDS_FIX = "write one JSON object a line, such as " + json.dumps(
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
)


@dataclass(frozen=True)
class BadRecord:
    """One record that cannot be used: `kind` is what such records are counted under, `where` is file:line."""

    kind: str
    where: str
    what: str

    def error(self) -> DataError:
        """Return the error that stops a strict run."""
        return DataError(
            f"{self.where}: {self.what}",
            fix="repair this record, or set data.on_bad_record: skip to leave such records out (they are counted)",
        )


@dataclass(frozen=True)
class Example:
    """One usable record: its content, its place, and a hash of its text that decides the side of a split."""

    content: Chat | Plain
    where: str
    digest: int


def resolve_paths(source: str | Path | Sequence[str]) -> list[Path]:
    """Return the files of `data.train` or `data.eval`; refuse what is missing or not read by this version."""
    names = [source] if isinstance(source, str | Path) else list(source)
    if not names:
        raise DataError("no data file is named", fix="set data.train to a JSONL file or a list of them")
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if path.is_dir():
            raise DataError("folders are not read yet", values=str(path), fix="list its JSONL files in data.train")
        if not path.exists():
            raise DataError(
                "the data file does not exist",
                values=f"{path} (looked in {Path.cwd()})",
                fix="give the path of a JSONL file; hub ids, folders, Parquet and CSV are not read yet",
            )
        if (later := _LATER.get(path.suffix.lower())) is not None:
            raise DataError(f"{later} are not read yet", values=str(path), fix="convert it to JSONL: one record a line")
    return paths


def read_examples(paths: Sequence[Path], *, record_format: str = "auto") -> Iterator[Example | BadRecord]:
    """Yield the records of the files in order; each file keeps to one format, the one of its first good record."""
    if record_format not in ("auto", *FORMATS):
        raise DataError(
            f"data.format {record_format} is not read yet", fix=f"convert the records to one of {', '.join(FORMATS)}"
        )
    for path in paths:
        file_format = None if record_format == "auto" else record_format
        lines = 0
        for line, where in _lines(path):
            lines += 1
            try:
                value = parse_record(line)
                file_format = file_format or recognise_format(value)
                content = example_from_record(value, file_format)
            except RecordError as error:
                yield BadRecord(kind=error.kind, where=where, what=error.what)
            else:
                yield Example(content, where, xxhash.xxh3_64_intdigest(line))
        if not lines:
            raise DataError("the data file holds no records", values=str(path), fix=_NO_RECORDS_FIX)


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse one line of UTF-8; raise RecordError for broken JSON, repeated keys, lone surrogates, or not an object."""
    try:
        value = json.loads(line, object_pairs_hook=_object_without_repeats)
    except json.JSONDecodeError as error:
        raise RecordError("broken JSON", f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        raise RecordError("broken JSON", f"not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError("wrong type", f"a record is a JSON object, this is a {json_type(value)}")
    if _SURROGATE_ESCAPE.search(line):
        _refuse_lone_surrogates(value)
    return value


def json_type(value: Any) -> str:
    """Name the type of a JSON value as its author would."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield the lines that hold something, checked to be UTF-8, each with its place."""
    offset, first = 0, True
    with path.open("rb") as file:  # binary: lines end at \n alone; U+2028 or \x85 inside a string does not end one
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            _refuse_other_encodings(raw, path=path, number=number, offset=offset)
            offset += len(raw)
            line = line.strip()
            if not line:
                continue
            if first and line.startswith(b"["):
                yield from _elements(path, number)
                return
            first = False
            yield line, f"{path}:{number}"


def _elements(path: Path, number: int) -> Iterator[tuple[bytes, str]]:
    """Yield the elements of a file that is one JSON array, as if each stood on its own line."""
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
        values = json.loads(text, object_pairs_hook=_object_without_repeats)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset=error.start, where=f"byte {error.start}") from None
    except (ValueError, RecordError) as error:
        raise DataError(
            f"{path}:{number}: starts with [ but is neither a record nor part of a JSON array",
            values=str(error),
            fix=_NO_RECORDS_FIX,
        ) from None
    for index, value in enumerate(values):
        yield json.dumps(value, ensure_ascii=True).encode(), f"{path}: element {index} of the array"


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RecordError("repeated key", f"the key {repeated!r} stands twice in one object; only one could be used")
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise RecordError("lone surrogate", f"{code} is half of a character pair and stands for no text") from None


def _refuse_other_encodings(raw: bytes, *, path: Path, number: int, offset: int) -> None:
    # Never skipped, whatever data.on_bad_record says: the whole file is in another encoding, and dropping every line
    # with an accent would leave a data set that looks healthy.
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(
            path, offset=offset + error.start, where=f"{path}:{number}, byte {offset + error.start}"
        ) from None


def _not_utf8(path: Path, *, offset: int, where: str) -> DataError:
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(offset)
        byte = file.read(1)
    guess = "UTF-16" if head in (b"\xff\xfe", b"\xfe\xff") else "latin-1 or windows-1252"
    return DataError(
        f"the data file is not UTF-8 ({where})",
        values=f"byte 0x{byte.hex()} at offset {offset} of {path}; perhaps {guess}",
        fix=f"convert it: iconv -f {guess.split()[0].upper()} -t UTF-8 {path} > utf8.jsonl",
    )
