"""Every kind of file gives the same records, also from a place in its middle, and says what is wrong with it."""

import csv
import gzip
import json
import time
from pathlib import Path

import pyarrow
import pytest

from fsdp_trainer.data.formats import RecordError
from fsdp_trainer.data.readers import START, Mark, Record, read_records
from fsdp_trainer.errors import DataError
from tests.unit.data.files import WRITERS, pack, write_any, write_arrow, write_csv, write_jsonl, write_parquet

# Quotes, separators, line ends of all kinds inside a text, and letters of more than one byte.
RECORDS = [{"prompt": f'q{i}, "é"\t\u2028x\nline {"y" * i}', "completion": f" 答 {i}"} for i in range(8)]
NAMES = [name + packed for name in WRITERS for packed in ("", ".gz", ".zst")]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_gives_the_same_records_from_every_place(tmp_path: Path, name: str):
    path = write_any(RECORDS, tmp_path, name)
    records = list(read_records(path))
    assert [record.value for record in records] == RECORDS
    assert all(str(path) in record.where for record in records)
    marks = [START, *(record.after for record in records)]
    for index, mark in enumerate(marks):
        rest = list(read_records(path, start=mark))
        assert rest == records[index:]  # the same places and marks too


def test_where_says_what_a_person_looks_for(tmp_path: Path):
    write_csv(RECORDS, tmp_path / "a.csv")
    write_parquet(RECORDS, tmp_path / "a.parquet")
    wheres = [record.where.rsplit("a.csv", 1)[1] for record in read_records(tmp_path / "a.csv")]
    assert wheres == [f":{2 + 2 * i}" for i in range(8)]  # the header, then two lines each
    assert [record.where for record in read_records(tmp_path / "a.parquet")][4].endswith("a.parquet: row 5")


def test_only_the_wanted_columns_of_a_table_are_read(tmp_path: Path):
    records = [record | {"embedding": [0.5] * 4} for record in RECORDS]
    for writer in (write_parquet, write_arrow):
        path = tmp_path / f"{writer.__name__}.{writer.__name__.removeprefix('write_')}"
        writer(records, path)
        some = list(read_records(path, wanted=lambda names: {*names} & {"prompt", "completion", "text"}))
        assert [r.value for r in some] == RECORDS
        assert {r.unread for r in some} == {("embedding",)}
        assert [r.value for r in read_records(path, wanted=lambda names: None)] == records


def test_a_text_file_is_one_record(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\x0b\x85".replace(b"\x85", "\u2029".encode()) + b"end")
    (record,) = read_records(path)
    assert record.value == {"text": "one\n\ntwo\x0b\u2029end"}
    assert list(read_records(path, start=record.after)) == []
    assert next(iter(read_records(pack(path, tmp_path / "a.txt.zst")))).value == record.value
    path.write_bytes(b"")
    assert list(read_records(path)) == []


def test_a_text_file_that_is_no_document(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fsdp_trainer.data.readers._MAX_TEXT_BYTES", 10)
    (tmp_path / "a.txt").write_text("more than ten bytes")
    with pytest.raises(DataError, match="one record"):
        list(read_records(tmp_path / "a.txt"))


def read_text(path: Path, text: str | bytes) -> list[Record]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_records(path))


def test_broken_csv_rows_are_named_and_the_rest_is_kept(tmp_path: Path):
    records = read_text(
        tmp_path / "a.csv", b'\xef\xbb\xbfprompt,completion\r\nq,a\r\n\r\nshort\r\n"x"y,z\r\nlast,"two\r\nlines"'
    )
    kinds = [record.value.kind if isinstance(record.value, RecordError) else record.value for record in records]
    good = {"prompt": "q", "completion": "a"}
    assert kinds == [good, "broken CSV", "broken CSV", {"prompt": "last", "completion": "two\nlines"}]
    assert [record.where.rsplit(":", 1)[1] for record in records] == ["2", "4", "5", "6"]
    assert "1 cell where the header names 2" in str(records[1].value)


def test_a_long_cell_is_read(tmp_path: Path):
    limit = csv.field_size_limit(100)
    try:
        (record,) = read_text(tmp_path / "a.csv", "text\n" + "x" * 200_000)
    finally:
        csv.field_size_limit(limit)
    assert isinstance(record.value, dict)
    assert len(record.value["text"]) == 200_000


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", 'text\nfine\n"opened\nnever closed\n', r"a\.csv:3: a quote is opened here and never closed"),
        ("a.csv", "text,text\na,b", "two columns have one name"),
        ("a.csv", b"text\ncaf\xe9", r"a\.csv:2, byte 8"),
        ("a.txt", b"caf\xe9", r"a\.txt:1, byte 3"),
        ("a.txt", "caf\xe9".encode("utf-16"), "UTF-16"),
        ("a.json", '[{"text": "a"}, {"text": "b"]', "nor part of a JSON array"),
        ("a.json", '[{"text": "a", "text": "b"}]', "stands twice"),
        ("a.parquet", "no table", "cannot be read"),
        ("a.arrow", "no table", "cannot be read"),
        ("a.jsonl.gz", "not packed", "cannot be read"),
        ("a.jsonl.zst", "not packed", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_whole_file_is_never_skipped(tmp_path: Path, name: str, text: str | bytes, says: str):
    with pytest.raises(DataError, match=says):
        read_text(tmp_path / name, text)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.parquet", "a.parquet.gz", "a.arrow"])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str):
    records = [{"prompt": f"{i * 7919 % 1000003:x}", "completion": f"{i * 104729 % 1000003:x}"} for i in range(4000)]
    path = write_any(records, tmp_path, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match="cannot be read to its end"):
        list(read_records(path))
    if name.endswith(("gz", "zst")) and "parquet" not in name:
        with pytest.raises(DataError, match=r"cannot be read|shorter"):
            list(read_records(path, start=Mark(10**6, 5)))


def test_a_table_with_text_that_is_no_utf8(tmp_path: Path):
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"caf\xe9")]
    )
    table = pyarrow.table({"text": column})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_records(tmp_path / "a.arrow"))


def test_array_elements_are_checked_one_by_one(tmp_path: Path):
    records = read_text(tmp_path / "a.json", '[{"text": "\\ud83d"}, 7, {"text": "\\ud83d\\ude00"}]')
    assert [getattr(record.value, "kind", record.value) for record in records] == [
        "lone surrogate",
        "wrong type",
        {"text": "\U0001f600"},
    ]


def test_a_packed_file_in_several_members_is_read_whole(tmp_path: Path):
    write_jsonl(RECORDS[:4], tmp_path / "a.jsonl")
    write_jsonl(RECORDS[4:], tmp_path / "b.jsonl")
    for suffix in (".gz", ".zst"):
        parts = []
        for name in ("a", "b"):
            copy = tmp_path / f"{name}2.jsonl"
            copy.write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
            parts.append(pack(copy, tmp_path / f"{name}.jsonl{suffix}").read_bytes())
        (tmp_path / f"both.jsonl{suffix}").write_bytes(b"".join(parts))
        assert [record.value for record in read_records(tmp_path / f"both.jsonl{suffix}")] == RECORDS


LINE = json.dumps({"prompt": "q", "completion": "a"})


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
@pytest.mark.parametrize(
    ("encoding", "says"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE"), ("utf-32", "UTF-32")],
)
def test_a_wide_encoding_is_named_with_or_without_its_mark(tmp_path: Path, name: str, encoding: str, says: str):
    """Without a mark every byte of it is valid UTF-8, and json reads single lines of it."""
    text = "prompt,completion\nq,a\n" if name == "a.csv" else f"{LINE}\n{LINE}\n"
    with pytest.raises(DataError, match=rf"not UTF-8 text .*[\s\S]*perhaps {says}\n"):
        read_text(tmp_path / name, text.encode(encoding))


def test_nul_bytes_are_no_text_and_a_broken_line_where_text_came_before(tmp_path: Path):
    with pytest.raises(DataError, match=r"byte 0x00 at offset 3 .*stands in no text"):
        read_text(tmp_path / "a.txt", b"abc\0\0\0d")
    records = read_text(tmp_path / "a.jsonl", f"{LINE}\n".encode() + b"\0" * 50)
    assert [getattr(record.value, "kind", "good") for record in records] == ["good", "broken JSON"]
    (record,) = read_text(tmp_path / "b.jsonl", '{"text": "a\\u0000b"}')  # written out it is a character as any other
    assert record.value == {"text": "a\0b"}


@pytest.mark.parametrize(
    ("pack", "says"),
    [
        (gzip.compress, r"a gzip file\n.*a\.jsonl\.gz"),
        (lambda data: pyarrow.compress(data, codec="zstd", asbytes=True), r"a zstd file\n.*a\.jsonl\.zst"),
        (lambda data: b"PAR1\x15\x04\0\0" + data, r"a Parquet file\n.*a\.jsonl\.parquet"),
        (lambda data: b"PK\x03\x04\x14\0\0\0" + data, r"a zip file\n.*unpack it"),
    ],
    ids=["gzip", "zstd", "parquet", "zip"],
)
def test_a_file_of_another_kind_than_its_name_says(tmp_path: Path, pack, says: str):
    with pytest.raises(DataError, match=says):
        read_text(tmp_path / "a.jsonl", pack(LINE.encode() * 20))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{LINE}\r{LINE}\r", "here \\r alone stands"),
        (LINE + LINE, "a line holds one record"),
        (json.dumps(json.loads(LINE), indent=1), "not over several"),
    ],
    ids=["carriage returns", "two on a line", "indented"],
)
def test_a_line_that_is_not_one_object_says_so(tmp_path: Path, text: str, says: str):
    value = read_text(tmp_path / "a.jsonl", text)[0].value
    assert isinstance(value, RecordError)
    assert says in str(value)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_the_delimiter_of_a_csv_file_is_that_of_its_header(tmp_path: Path, delimiter: str, quote: str):
    names, cells = ("prompt ", " completion"), ("a, b; c", 'said ""x""')
    text = "".join(
        delimiter.join(f"{mark}{cell}{mark}" for cell in row) + "\r\n" for mark, row in ((quote, names), ('"', cells))
    )
    (record,) = read_text(tmp_path / "a.csv", text + "   \n")
    assert record.value == {"prompt": "a, b; c", "completion": 'said "x"'}
    assert list(read_records(tmp_path / "a.csv", start=record.after)) == []


def test_blank_lines_before_a_csv_header_are_none(tmp_path: Path):
    for record in read_text(tmp_path / "a.csv", "\n  \nprompt,completion\nq,a\n"):
        assert record.value == {"prompt": "q", "completion": "a"}
        assert record.where.endswith("a.csv:4")
    assert len(list(read_records(tmp_path / "a.csv"))) == 1


def test_a_csv_file_of_one_column_has_no_delimiter(tmp_path: Path):
    records = read_text(tmp_path / "a.csv", "text\none; two\n")
    assert [record.value for record in records] == [{"text": "one; two"}]


@pytest.mark.parametrize(
    ("text", "says"), [("prompt,completion\rq,a\r", r"\\r alone"), ('"prompt,completion\nq,a\n', "never closed")]
)
def test_a_csv_header_that_cannot_be_read(tmp_path: Path, text: str, says: str):
    with pytest.raises(DataError, match=rf"a\.csv:1: the columns' names[\s\S]*{says}"):
        read_text(tmp_path / "a.csv", text)


def test_fields_that_only_other_rows_of_a_table_have_are_left_out(tmp_path: Path):
    """A column of objects has the fields of all its rows, and null where a row has none: no row was written so."""
    written = [
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "r", "name": "f"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"y": [{"a": 1}, {"b": 2}]}}]}]},
    ]
    for name in ("a.parquet", "a.arrow"):
        assert [record.value for record in read_records(write_any(written, tmp_path, name))] == written
    (record,) = read_records(write_any([{"prompt": "q", "completion": None}], tmp_path, "a.parquet"))
    assert record.value == {"prompt": "q", "completion": None}  # a column that is there says something


@pytest.mark.parametrize("text", ["[]", "[ ]\n", "[1]", "[1,2 ,3]\n\n", '[{"a": "]"}, [2]]', '\n[\n{"a": [1, 2]}\n]\n'])
def test_an_array_read_element_by_element_is_the_array(tmp_path: Path, text: str):
    records = read_text(tmp_path / "a.json", text)
    assert len(records) == len(json.loads(text))
    found = [record.value for record in records if isinstance(record.value, dict)]
    assert found == [value for value in json.loads(text) if isinstance(value, dict)]


@pytest.mark.parametrize("text", ["[1,]", "[1 2]", "[1", "[", "[1]]", "[1] x", "[,1]"])
def test_what_is_no_array_is_refused_where_it_stops_being_one(tmp_path: Path, text: str):
    with pytest.raises(DataError, match="nor part of a JSON array"):
        read_text(tmp_path / "a.json", text)


def packed(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts:
            file.write(part)
    return path


MIB = b"0" * 2**20


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("line.jsonl.gz", [b'{"text": "', *[MIB] * 3]),
        ("second.jsonl.gz", [b'{"text": "a"}\n{"text": "', *[MIB] * 3]),
        ("cell.csv.gz", [b"text\n", *[MIB] * 3]),
        ("header.csv.gz", [*[MIB] * 3]),
    ],
)
def test_a_line_longer_than_any_record_is_not_held(name: str, parts: list[bytes], tmp_path: Path) -> None:
    path = packed(tmp_path / name, *parts)
    assert path.stat().st_size < 2**15 * 3
    number = 1 + any(b"\n" in part for part in parts)
    with pytest.raises(DataError, match=rf"{name}:{number}: this line is too long") as caught:
        list(read_records(path, max_bytes=2**20))
    assert "more than 1 MiB" in caught.value.values and "data.max_record_mib" in caught.value.fix


def test_an_open_quote_does_not_take_the_whole_file_for_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\n"never closed\n' + "a line\n" * 1000)
    records = list(read_records(path, max_bytes=100))
    assert isinstance(records[0].value, RecordError) and "field limit" in records[0].value.what


def test_an_array_on_one_line_may_be_longer_than_a_record(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.json.gz", b' \n [{"text": "a"}', *[b', {"text": "b"}'] * 1000, b"]")
    assert len(list(read_records(path, max_bytes=1000))) == 1001


def test_a_record_of_many_keys_takes_time_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    keys = ", ".join(f'"k{number}": 1' for number in range(100_000))
    path.write_text(f'{{{keys}}}\n{{{keys}, "k99999": 2}}\n')
    start = time.process_time()
    good, bad = (record.value for record in read_records(path))
    assert time.process_time() - start < 5, "each key was looked for among all others"
    assert isinstance(good, dict) and len(good) == 100_000
    assert isinstance(bad, RecordError) and "'k99999' stands twice" in bad.what
