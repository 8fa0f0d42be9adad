"""Read one data file record by record: JSON Lines, a JSON array, CSV, Parquet, Arrow or plain text, packed or not.

Each record comes with its place for messages, and with the mark from which reading can go on after it.
"""

import csv
import gzip
import io
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_trainer.data.formats import RecordError
from fsdp_trainer.data.strict_json import BOM, DECODER, checked_object, first_repeated, parse_record
from fsdp_trainer.errors import DataError
from fsdp_trainer.units import format_number

PACKED = {".gz": "gzip", ".zst": "zstd"}
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
KINDS |= {".parquet": "table", ".arrow": "table"}
# What a person may name by mistake: read as JSON Lines these would only give an odd message.
_UNREADABLE = {".zip", ".xz", ".bz2", ".7z", ".tar", ".tgz", ".xlsx", ".xls", ".pdf", ".docx", ".pkl", ".pt", ".npy"}
MAX_RECORD_BYTES = 64 * 2**20  # where no setting says it: data.max_record_mib
_MAX_TEXT_BYTES = 2**30  # of a file that is held in memory as a whole: a plain text, which is one record, or an array
_TABLE_ROWS = 1024  # rows of a table turned into Python objects at a time
# The first bytes of what a file may be in spite of its name, with the ending that name should have; "": never read.
_SIGNATURES = {b"\x1f\x8b": ("gzip", ".gz"), b"\x28\xb5\x2f\xfd": ("zstd", ".zst"), b"PAR1": ("Parquet", ".parquet")}
_SIGNATURES |= {
    b"ARROW1": ("Arrow", ".arrow"),
    b"PK\x03\x04": ("zip", ""),
    b"BZh": ("bzip2", ""),
    b"\xfd7zXZ": ("xz", ""),
}
_BLANKS = re.compile("[ \\t\\n\\r]*")
ONE_OBJECT_A_LINE = "write one JSON object a line, such as " + json.dumps(
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
)
# What makes a file of each kind one that holds records.
HOW_TO_WRITE = {
    "csv": "write the columns' names on the first line, such as prompt,completion, and one record a row below",
    "table": "write one record a row, in columns such as prompt and completion",
    "text": "put the text in it, or leave the file out",
}


class Mark(NamedTuple):
    """A place between two records: `offset` bytes of the unpacked file (rows of a table), after `line` lines (rows)."""

    offset: int = 0
    line: int = 0


START = Mark()


class Record(NamedTuple):
    """One record as it stands in its file, or why it cannot be read; `after` is where the next one starts."""

    value: dict[str, Any] | RecordError
    where: str
    after: Mark
    unread: tuple[str, ...] = ()  # the columns of its table that were left out


# Given the names of a table's columns: which of them are read, None for all.
Wanted = Callable[[list[str]], Collection[str] | None]


def file_kind(path: Path) -> str | None:
    """Return how a file is read: json, csv, table or text; None when its name does not say."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def refuse_unreadable(path: Path) -> None:
    """Raise DataError for a kind of file that is never read."""
    for suffix in (part.lower() for part in path.suffixes[-2:]):
        if suffix in _UNREADABLE:
            raise DataError(
                f"{suffix} files are not read",
                values=str(path),
                fix="convert or unpack it: JSONL, JSON, Parquet, CSV, TSV, text and Arrow files are read, also as .gz "
                "or .zst",
            )


def read_records(
    path: Path, *, start: Mark = START, wanted: Wanted = lambda names: None, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[Record]:
    """Yield the records of a file from a mark on; of tables only the columns that `wanted` names.

    No line and no cell of CSV has more than `max_bytes`, unpacked: a small packed file may hold gigabytes in one.
    DataError for what is wrong with the whole file: another encoding, a damaged or cut file, a header without a name.
    """
    kind = file_kind(path)
    if kind == "csv":
        delimiters = "\t" if ".tsv" in path.name.lower() else ",;\t|"
        return _read_csv(path, start=start, delimiters=delimiters, max_bytes=max_bytes)
    if kind == "table":
        return _read_table(path, start=start, wanted=wanted)
    if kind == "text":
        return _read_text(path, start=start)
    if _is_array(path):
        return _read_array(path, start=start)
    return _read_json_lines(path, start=start, max_bytes=max_bytes)


# JSON


def _read_json_lines(path: Path, *, start: Mark, max_bytes: int) -> Iterator[Record]:
    for line, after in _lines(path, start=start, max_bytes=max_bytes):
        if not (text := line.strip()):
            continue
        try:
            value: dict[str, Any] | RecordError = parse_record(text)
        except RecordError as error:
            value = error
        yield Record(value, f"{path}:{after.line}", after)


def _is_array(path: Path) -> bool:
    """Return whether the first byte that is no blank opens a list; an array may be one line, longer than any record."""
    seen = b""
    with closing(_open(path)) as file:
        while not seen and (block := _guarded(file.read, 1 << 16, path=path, at="at its start")):
            seen = block.removeprefix(BOM).lstrip()
    return seen.startswith(b"[")


def _read_array(path: Path, *, start: Mark) -> Iterator[Record]:
    """Yield the elements of a file that is one JSON array; its text is held in memory whole, its elements are not."""
    text = _whole_text(path, fix=ONE_OBJECT_A_LINE)
    elements = _elements(text)
    for index in itertools.count():
        try:
            value = next(elements)
        except StopIteration:
            return
        except (ValueError, RecursionError, RecordError) as error:
            raise DataError(
                f"{path}:1: starts with [ but is neither a record nor part of a JSON array",
                values=f"element {index}: {error}",
                fix=ONE_OBJECT_A_LINE,
            ) from None
        if index < start.offset:
            continue
        try:
            value = checked_object(value, surrogates=True)
        except RecordError as error:
            value = error
        yield Record(value, f"{path}: element {index} of the array", Mark(index + 1, index + 1))


def _elements(text: str) -> Iterator[Any]:
    at = _after_blanks(text, text.index("[") + 1)
    more = text[at : at + 1] != "]"
    while more:
        value, at = DECODER.raw_decode(text, at)
        yield value
        at = _after_blanks(text, at)
        if text[at : at + 1] not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        more = text[at] == ","
        at = _after_blanks(text, at + 1) if more else at
    if (end := _after_blanks(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _after_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    assert match is not None  # it matches nothing as well
    return match.end()


# CSV and plain text


def _read_csv(path: Path, *, start: Mark, delimiters: str, max_bytes: int) -> Iterator[Record]:
    csv.field_size_limit(max_bytes)  # the default, 128 KiB, is shorter than many a document
    header, delimiter, first = _csv_header(path, delimiters=delimiters, max_bytes=max_bytes)
    if (repeated := first_repeated(header)) is not None:
        raise DataError(
            f"{path}:1: two columns have one name", values=f"{repeated!r} in {header}", fix="rename one of them"
        )
    with closing(_lines(path, start=max(start, first), max_bytes=max_bytes)) as lines:
        text = _Text(lines, after=max(start, first))
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        while True:
            where = f"{path}:{text.after.line + 1}"
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):  # never skipped: it swallowed the rest of the file
                    raise DataError(
                        f"{where}: a quote is opened here and never closed", values=str(path), fix="close the quote"
                    ) from None
                yield Record(RecordError("broken CSV", f"not valid CSV: {error}"), where, text.after)
                continue
            if not cells or (len(cells) < len(header) and not "".join(cells).strip()):  # a blank line
                continue
            value: dict[str, Any] | RecordError = dict(zip(header, cells, strict=False))
            if len(cells) != len(header):
                found = format_number(len(cells), "cell")
                value = RecordError("broken CSV", f"{found} where the header names {len(header)}")
            yield Record(value, where, text.after)


def _csv_header(path: Path, *, delimiters: str, max_bytes: int) -> tuple[list[str], str, Mark]:
    """Return the columns' names, the first delimiter that gives more than one of them, and the mark behind the line."""
    found: tuple[list[str], str, Mark] | None = None
    reason = ""
    for delimiter in delimiters:
        with closing(_lines(path, start=START, max_bytes=max_bytes)) as lines:
            text = _Text(lines)
            try:
                rows = csv.reader(text, delimiter=delimiter, strict=True)
                header = [name.strip() for name in next((row for row in rows if "".join(row).strip()), [])]
            except csv.Error as error:
                reason = reason or str(error)
                continue
        if found is None or len(header) > 1:
            found = header, delimiter, text.after
        if len(header) > 1:
            break
    if found is not None:
        return found
    closes = "unexpected end of data" in reason
    raise DataError(
        f"{path}:1: the columns' names cannot be read",
        values="a quote is opened and never closed" if closes else reason.partition(" - ")[0],
        fix="close the quote"
        if closes
        else "end each line with \\n or \\r\\n, not with \\r alone; close what is quoted",
    )


class _Text:
    """Lines as text for csv.reader, which takes them one by one; `after` is the mark behind the last it took."""

    def __init__(self, lines: Iterator[tuple[bytes, Mark]], *, after: Mark = START) -> None:
        self._lines, self.after = lines, after

    def __iter__(self) -> "_Text":
        return self

    def __next__(self) -> str:
        line, self.after = next(self._lines)
        return (line[:-2] + b"\n" if line.endswith(b"\r\n") else line).decode()


def _read_text(path: Path, *, start: Mark) -> Iterator[Record]:
    """Yield the whole file as one record: where a text is cut into documents is not for its line ends to say."""
    if not start.offset and (text := _whole_text(path, fix=_ONE_FILE_A_DOCUMENT)):
        yield Record({"text": text.replace("\r\n", "\n")}, str(path), Mark(1, 1))


_ONE_FILE_A_DOCUMENT = 'cut it into documents: one file each, or one {"text": ...} a line of a JSONL file'


def _whole_text(path: Path, *, fix: str) -> str:
    """Return a file that is held in memory as a whole."""
    parts, left = [], _MAX_TEXT_BYTES
    try:
        for line, _ in _lines(path, start=START, max_bytes=_MAX_TEXT_BYTES):
            parts.append(line)
            if (left := left - len(line)) < 0:
                raise _TooLong
    except _TooLong:
        found = f"{path}: more than {_MAX_TEXT_BYTES >> 30} GiB"
        raise DataError("the file is read as one record or array, and it is too large", values=found, fix=fix) from None
    return b"".join(parts).decode()


class _TooLong(DataError):
    """A line is longer than what may be held."""

    def __init__(self, what: str = "", *, values: str = "", fix: str = "") -> None:
        super().__init__(what, values=values, fix=fix)


# Bytes


def _lines(path: Path, *, start: Mark, max_bytes: int = MAX_RECORD_BYTES) -> Generator[tuple[bytes, Mark], None, None]:
    """Yield each line with its end, checked to be UTF-8 and without the file's BOM, and the mark behind it."""
    # Binary: lines end at \n alone; U+2028 or \x85 inside a string does not end one.
    with closing(_open(path)) as file:
        offset, number = start
        _skip(file, offset, path=path)
        while raw := _next_line(file, path=path, number=number + 1, max_bytes=max_bytes):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, raw, at=error.start, offset=offset, number=number + 1) from None
            if not number and b"\0" in raw:  # no text: later lines with one are broken records, each by itself
                raise _not_utf8(path, raw, at=raw.index(b"\0"), offset=0, number=1)
            offset, number = offset + len(raw), number + 1
            yield raw.removeprefix(BOM) if number == 1 else raw, Mark(offset, number)


def _open(path: Path) -> IO[bytes]:
    packed = path.suffix.lower()
    if packed == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if packed == ".zst":
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream, 1 << 20)  # type: ignore[arg-type]
    return path.open("rb")


def _skip(file: IO[bytes], count: int, *, path: Path) -> None:
    if path.suffix.lower() not in PACKED:
        file.seek(count)
        return
    while count:  # what is packed has to be unpacked from its start
        if not (block := _guarded(file.read, min(count, 1 << 20), path=path, at="before the place to go on from")):
            raise _damaged(path, "it is shorter than when it was read before")
        count -= len(block)


def _next_line(file: IO[bytes], *, path: Path, number: int, max_bytes: int) -> bytes:
    line = _guarded(file.readline, max_bytes + 1, path=path, at=f"line {number}")
    if len(line) > max_bytes:
        raise _TooLong(
            f"{path}:{number}: this line is too long to be a record",
            values=f"more than {max_bytes / 2**20:g} MiB",
            fix="end each record with \\n, or raise data.max_record_mib where a record is that long",
        )
    return line


def _guarded(read: Any, size: int, *, path: Path, at: str) -> bytes:
    try:
        return read(size)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise _damaged(path, f"{at}: {error}") from error


def _damaged(path: Path, what: str) -> DataError:
    return DataError("the data file cannot be read to its end", values=f"{path}, {what}", fix="copy or make it again")


def _not_utf8(path: Path, raw: bytes, *, at: int, offset: int, number: int) -> DataError:
    # Never skipped, whatever data.on_bad_record says: the whole file is in another encoding, and dropping every line
    # with an accent would leave a data set that looks healthy.
    what = f"the data file is not UTF-8 text ({path}:{number}, byte {offset + at})"
    found = f"byte 0x{raw[at : at + 1].hex()} at offset {offset + at} of {path}"
    with path.open("rb") as file:
        start = file.read(8)
    known = next((names for mark, names in _SIGNATURES.items() if start.startswith(mark)), None)
    if known is not None and path.suffix.lower() not in PACKED:
        kind, ending = known
        fix = f"name it so: {path.name}{ending}" if ending else "unpack it: a file is read as it is, or as .gz or .zst"
        return DataError(what, values=f"{found}; its first bytes are those of a {kind} file", fix=fix)
    guess = _guess_encoding(raw if number == 1 else b"")
    if not guess:
        return DataError(what, values=f"{found}, which stands in no text", fix="copy or make it again")
    return DataError(
        what,
        values=f"{found}; perhaps {guess}",
        fix=f"convert it: iconv -f {guess.split()[0].upper()} -t UTF-8 {path} > utf8{path.suffix}",
    )


def _guess_encoding(first_line: bytes) -> str:
    """Name the encoding that a file which is no UTF-8 may have, "" for none: it is damaged or no text."""
    if first_line[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "UTF-32"
    if first_line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    # Without a mark of its byte order: every second byte of plain text is NUL.
    for name, high, low in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        if first_line[high:64:2] and not any(first_line[high:64:2].rstrip(b"\n")) and any(first_line[low:64:2]):
            return name
    return "" if b"\0" in first_line else "latin-1 or windows-1252"


# Tables


def _read_table(path: Path, *, start: Mark, wanted: Wanted) -> Iterator[Record]:
    import pyarrow

    try:
        for first, batch, unread in _batches(path, start=start.offset, wanted=wanted):
            for row, value in enumerate(batch.to_pylist(), start=first + 1):
                filled = {name: _without_nulls(cell) for name, cell in value.items()}
                yield Record(filled, f"{path}: row {row}", Mark(row, row), unread)
    except UnicodeDecodeError as error:
        raise DataError(
            "a text of the table is not UTF-8", values=f"{path}: {error}", fix="write the table again as UTF-8"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error


def _without_nulls(value: Any) -> Any:
    """Leave out the null fields of a cell's objects: a table writes every field of any row into every row.

    A tool's schema or a call's arguments would otherwise be trained on with all fields of all other tools, as null.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _batches(path: Path, *, start: int, wanted: Wanted) -> Iterator[tuple[int, Any, tuple[str, ...]]]:
    """Yield (number of its first row, batch, columns left out), from row `start` on; what is before is not decoded."""
    if ".parquet" in path.name.lower():
        yield from _parquet_batches(path, start=start, wanted=wanted)
        return
    import pyarrow

    with _seekable(path) as file:
        source = pyarrow.PythonFile(file) if path.suffix.lower() in PACKED else pyarrow.memory_map(str(path))
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        columns, unread = _columns(reader.schema.names, path=path, wanted=wanted)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        first = 0
        for batch in batches:
            after = first + batch.num_rows
            for at in range(max(first, start), after, _TABLE_ROWS):
                yield at, batch.select(columns).slice(at - first, min(_TABLE_ROWS, after - at)), unread
            first = after


def _parquet_batches(path: Path, *, start: int, wanted: Wanted) -> Iterator[tuple[int, Any, tuple[str, ...]]]:
    from pyarrow import parquet

    with _seekable(path) as file, parquet.ParquetFile(file) as table:
        columns, unread = _columns(table.schema_arrow.names, path=path, wanted=wanted)
        first = 0
        for group in range(table.num_row_groups):
            after = first + table.metadata.row_group(group).num_rows
            if after > start:
                for batch in table.iter_batches(_TABLE_ROWS, row_groups=[group], columns=columns):
                    if (skipped := min(batch.num_rows, max(0, start - first))) < batch.num_rows:
                        yield first + skipped, batch.slice(skipped), unread
                    first += batch.num_rows
            first = after


def _seekable(path: Path) -> IO[bytes]:
    """Open a table, which is read from its end; one inside gzip or zstd is unpacked into a temporary file first."""
    if path.suffix.lower() not in PACKED:
        return path.open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        with closing(_open(path)) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        file.close()
        raise _damaged(path, str(error)) from error
    file.seek(0)
    return file


def _columns(names: list[str], *, path: Path, wanted: Wanted) -> tuple[list[str], tuple[str, ...]]:
    if (repeated := first_repeated(names)) is not None:
        raise DataError(f"{path}: two columns have one name", values=repr(repeated), fix="rename one of them")
    read = wanted(names)
    if read is None:
        return names, ()
    return [name for name in names if name in read], tuple(name for name in names if name not in read)
