"""Weight files and indexes that a loader must refuse: names that lead away, tables that lie, archives that unpack.

Each case is made in a folder of its own beside `OUTSIDE`, a file with just the tensors that the model wants: a loader
that followed a name there would load it and notice nothing.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Case = Callable[[Path], Any]
INDEX, GOOD, OUTSIDE = "model.safetensors.index.json", "part.safetensors", "outside.safetensors"


def weights() -> dict[str, Any]:
    """Return the tensors that every case pretends to hold."""
    import torch

    return {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5)}


def prepare(folder: Path) -> None:
    """Write the good part into `folder`, and the tempting file beside it."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(weights(), folder / GOOD)
    save_file(weights(), folder.parent / OUTSIDE)


def _write(weight_map: Any) -> Case:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _all(name: Any) -> Case:
    return _write({"a": name, "b": name})


def _text(content: str | bytes) -> Case:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / INDEX).write_bytes(data)


def _linked(target: str, name: str = "link.safetensors") -> Case:
    def make(folder: Path) -> None:
        (folder / name).symlink_to(target)
        _all(name)(folder)

    return make


def _through_a_linked_folder(folder: Path) -> None:
    (folder / "sub").symlink_to("..")
    _all(f"sub/{OUTSIDE}")(folder)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    _all("pipe.safetensors")(folder)


def _folder_as_a_file(folder: Path) -> None:
    (folder / "dir.safetensors").mkdir()
    _all("dir.safetensors")(folder)


def _index_is_a_link(target: str) -> Case:
    def make(folder: Path) -> None:
        _all(GOOD)(folder.parent)
        (folder.parent / INDEX).rename(folder.parent / "outside.json")
        (folder / INDEX).symlink_to(target)

    return make


def _huge_index(folder: Path) -> None:
    with (folder / INDEX).open("w") as file:
        file.write('{"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}, "metadata": "')
        file.truncate(2**40)  # a terabyte that takes no room


def indexes() -> dict[str, Case]:
    """Return hostile indexes by name; each is written beside the good part."""
    return {
        "parent": _all(f"../{OUTSIDE}"),
        "parent_twice": _all(f"sub/../../{OUTSIDE}"),
        "absolute": lambda folder: _all(str(folder.parent / OUTSIDE))(folder),
        "etc_passwd": _all("/etc/passwd"),
        "home": _all(f"~/{OUTSIDE}"),
        "backslashes": _all(f"..\\{OUTSIDE}"),
        "url": lambda folder: _all(f"file://{folder.parent / OUTSIDE}")(folder),
        "drive": _all(f"C:{OUTSIDE}"),
        "stream": _all(f"{GOOD}:stream"),
        "sub_folder": _all(f"sub/{GOOD}"),
        "linked_folder": _through_a_linked_folder,
        "link_to_a_file_outside": _linked(f"../{OUTSIDE}"),
        "link_in_a_circle": _linked("link.safetensors"),
        "link_to_a_device": _linked("/dev/zero"),
        "device": _all("/dev/zero"),
        "pipe": _pipe,
        "folder": _folder_as_a_file,
        "nul": _all(f"{GOOD}\0"),
        "newline": _all(f"{GOOD}\n../{OUTSIDE}"),
        "empty_name": _all(""),
        "dot": _all("."),
        "two_dots": _all(".."),
        "unpaired_surrogate": _text('{"weight_map": {"a": "\\ud800.safetensors", "b": "\\ud800.safetensors"}}'),
        "reversed_letters": _all("\u202epart.safetensors"),
        "long_name": _all("a" * 100_000 + ".safetensors"),
        "other_kind": _all("part.bin"),
        "number": _all(7),
        "nothing": _all(None),
        "list": _all([GOOD]),
        "table": _all({GOOD: GOOD}),
        "missing_file": _write({"a": GOOD, "b": "gone.safetensors"}),
        "one_bad_name": _write({"a": GOOD, "b": f"../{OUTSIDE}"}),
        "missing_tensor": _write({"a": GOOD, "b": GOOD, "c": GOOD}),
        "extra_tensor": _write({"a": GOOD}),
        "map_is_a_list": _write([GOOD]),
        "map_is_text": _write(GOOD),
        "map_is_empty": _write({}),
        "no_map": _text("{}"),
        "no_table": _text("[1, 2]"),
        "no_json": _text("weight_map: {a: part.safetensors}"),
        "not_utf8": _text(b'{"weight_map": {"\xff": "part.safetensors"}}'),
        "twice": _text(f'{{"weight_map": {{"a": "{GOOD}", "a": "{GOOD}", "b": "{GOOD}"}}}}'),
        "deep": _text('{"weight_map":' * 100_000),
        "terabyte": _huge_index,
        "index_is_a_link": _index_is_a_link("../outside.json"),
        "index_is_a_device": _index_is_a_link("/dev/zero"),
    }


def _header(header: Any, *, data: int = 68, length: int | None = None) -> Case:
    """Write a single file with the given header (text or table) and bytes of data."""

    def make(folder: Path) -> None:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        size = struct.pack("<Q", len(text) if length is None else length)
        (folder / "model.safetensors").write_bytes(size + text + bytes(data))

    return make


def _tensors(**changes: Any) -> dict[str, Any]:
    """Return a right header of two tensors, with the entry of `b` changed."""
    entry = {"dtype": "F32", "shape": [5], "data_offsets": [48, 68]} | changes
    return {"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, "b": entry}


def _huge_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**36) + b"{" + b" " * 1000)
        file.truncate(2**37)


def headers() -> dict[str, Case]:
    """Return forged safetensors files by name."""
    twice = json.dumps(_tensors())[:-1] + ', "b": {"dtype": "F32", "shape": [4], "data_offsets": [48, 64]}}'
    return {
        "longer_than_the_file": _header(_tensors(), length=10_000),
        "longest": _header(_tensors(), length=2**63 - 1),
        "negative_length": _header(_tensors(), length=2**64 - 1),
        "no_length": lambda folder: (folder / "model.safetensors").write_bytes(b"\1\2\3"),
        "gigabytes_of_header": _huge_header,
        "no_json": _header("<html>"),
        "no_table": _header("[]"),
        "deep": _header('{"a":' * 100_000),
        "unknown_dtype": _header(_tensors(dtype="F33")),
        "dtype_number": _header(_tensors(dtype=4)),
        "negative_size": _header(_tensors(shape=[-5])),
        "fraction": _header(_tensors(shape=[2.5, 2])),
        "overflow": _header(_tensors(shape=[2**62, 2**62])),
        "overflow_to_the_right_size": _header(_tensors(shape=[2**63, 2, 5])),
        "too_large": _header(_tensors(shape=[2**40])),
        "too_small": _header(_tensors(shape=[4])),
        "overlap": _header(_tensors(data_offsets=[44, 64]), data=64),
        "gap": _header(_tensors(data_offsets=[52, 72]), data=72),
        "reversed": _header(_tensors(data_offsets=[68, 48])),
        "beyond_the_file": _header(_tensors(data_offsets=[48, 68]), data=60),
        "c01_truncated": _header({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}, data=20),
        "more_than_said": _header(_tensors(), data=100),
        "offsets_as_text": _header(_tensors(data_offsets=["48", "68"])),
        "three_offsets": _header(_tensors(data_offsets=[48, 60, 68])),
        "no_offsets": _header({"a": {"dtype": "F32", "shape": [3, 4]}}),
        "twice": _header(twice),
        "metadata_is_a_tensor": _header({"__metadata__": {"a": [1]}, **_tensors()}),
    }


def archive(table: bytes, *, compression: int = zipfile.ZIP_STORED, data: bytes = bytes(48)) -> bytes:
    """Return a `.bin` archive as torch.save lays it out, with `table` as its pickle and `data` as its one storage."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in (("data.pkl", table), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n")):
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def table_of(numel: int = 12, shape: tuple[int, ...] = (3, 4), stride: tuple[int, ...] = (4, 1)) -> bytes:
    """Return the pickle of a table with one tensor `a` over one storage of `numel` floats."""
    import pickle
    from collections import OrderedDict

    import torch
    from torch._utils import _rebuild_tensor_v2

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if obj == "the storage" else None

    class Tensor:
        def __reduce__(self) -> Any:
            return _rebuild_tensor_v2, ("the storage", 0, shape, stride, False, OrderedDict())

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"a": Tensor()})
    return buffer.getvalue()


def _encrypted() -> bytes:
    content = bytearray(archive(table_of()))
    for mark, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        start = 0
        while (start := content.find(mark, start)) >= 0:
            content[start + offset] |= 1
            start += 4
    return bytes(content)


def _forged_directory(offset: int, value: int) -> bytes:
    """Change a 4-byte field of the directory's entry of the storage: 20 is its packed, 24 its real size."""
    content = bytearray(archive(table_of()))
    name = content.rfind(b"archive/data/0")
    content[name - 46 + offset : name - 42 + offset] = struct.pack("<I", value)
    return bytes(content)


def _shared_bytes() -> bytes:
    """Every entry of the directory points at the same stored megabyte, as in a zip bomb without compression."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", table_of())
        file.writestr("archive/data/0", bytes(2**20))
        for index in range(1, 200):
            again = zipfile.ZipInfo(f"archive/data/{index}")
            again.file_size = again.compress_size = 2**20
            again.CRC, again.header_offset = file.infolist()[1].CRC, file.infolist()[1].header_offset
            file.filelist.append(again)
            file.NameToInfo[again.filename] = again
        file._didModify = True  # type: ignore[attr-defined]
    return buffer.getvalue()


def _two_tables() -> bytes:
    buffer = io.BytesIO(archive(table_of()))
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr("other/data.pkl", table_of())
    return buffer.getvalue()


def archives() -> dict[str, bytes]:
    """Return hostile `.bin` files by name."""
    import pickle

    good = archive(table_of())
    return {
        "deflated": archive(table_of(12 * 2**20, (12, 2**20), (2**20, 1)), compression=zipfile.ZIP_DEFLATED,
                            data=bytes(48 * 2**20)),
        "deflated_with_bzip2": archive(table_of(), compression=zipfile.ZIP_BZIP2),
        "encrypted": _encrypted(),
        "packed_size_declared_larger": _forged_directory(20, 2**31),
        "real_size_declared_larger": _forged_directory(24, 2**31),
        "entries_share_their_bytes": _shared_bytes(),
        "two_tables": _two_tables(),
        "no_table": archive(b"").replace(b"data.pkl", b"data.pkk"),
        "truncated": good[:-40],
        "empty": b"",
        "old_format": pickle.dumps({"a": [1.0]}),
        "table_claims_a_larger_storage": archive(table_of(10**6, (10**6,), (1,))),
        "table_claims_a_smaller_storage": archive(table_of(6, (6,), (1,))),
        "shape_beyond_its_storage": archive(table_of(12, (300, 400), (400, 1))),
        "not_a_table": archive(pickle.dumps([1, 2, 3], protocol=2)),
        "table_of_other_things": archive(pickle.dumps({"a": 1.5}, protocol=2)),
        "table_is_cut_short": archive(table_of()[:-20]),
        "deep_tuple": archive(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."),
    }  # fmt: skip
