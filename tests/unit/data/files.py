"""Write the same records as every kind of file that is read."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
from pyarrow import parquet

Record = dict


def write_jsonl(records: list[Record], path: Path) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_array(records: list[Record], path: Path) -> None:
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")


def write_csv(records: list[Record], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(records[0]), delimiter="\t" if ".tsv" in path.name else ",")
        table.writeheader()
        table.writerows(records)


def write_parquet(records: list[Record], path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=3)


def write_arrow(records: list[Record], path: Path) -> None:
    """The stream that `datasets` writes, in several batches."""
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_file(records: list[Record], path: Path) -> None:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[list[Record], Path], None]] = {
    "a.jsonl": write_jsonl,
    "a.json": write_array,
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": write_arrow_file,
}


def write_any(records: list[Record], folder: Path, name: str) -> Path:
    """Write records under a name of WRITERS, which may end in .gz or .zst as well."""
    plain = name.removesuffix(".gz").removesuffix(".zst")
    path = folder / plain
    WRITERS[plain](records, path)
    return path if plain == name else pack(path, folder / name)


def pack(path: Path, packed: Path) -> Path:
    if packed.suffix == ".gz":
        packed.write_bytes(gzip.compress(path.read_bytes()))
    else:
        with pyarrow.OSFile(str(packed), "wb") as sink, pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(path.read_bytes())
    path.unlink()
    return packed
