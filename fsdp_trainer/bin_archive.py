"""Look a `.bin` file over before torch opens it: a zip of stored entries within the file, with a shallow pickle.

`torch.load(weights_only=True)` runs no code, but it unpacks a deflated entry (66 KB became 67 MB, measured with torch
2.15), and hashing a tuple nested a million deep ends the process.
"""

import pickletools
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch

MAX_ENTRIES = 10**6
MAX_PICKLE_BYTES = 2**26  # the table of names and shapes; 100,000 tensors take 20 MB
MAX_DEPTH = 50  # a table of tensors is 4 deep


def check_archive(path: Path) -> int:
    """Return the bytes that all tensors of the archive take; ValueError for what `torch.save` does not write.

    Reads the zip's directory and its pickle's opcodes, and nothing else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(entries, path.stat().st_size)
            tables = [entry for entry in entries if PurePosixPath(entry.filename).name == "data.pkl"]
            if len(tables) != 1 or tables[0].file_size > MAX_PICKLE_BYTES:
                raise ValueError(f"{len(tables)} tables of contents, where one of at most {MAX_PICKLE_BYTES} bytes is")
            _check_depth(archive.read(tables[0]))
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError) as error:
        raise ValueError(f"{error}: only files that torch.save writes as a zip are read") from error
    return sum(entry.file_size for entry in entries if PurePosixPath(entry.filename).parent.name == "data")


def _check_entries(entries: list[zipfile.ZipInfo], file_bytes: int) -> None:
    if len(entries) > MAX_ENTRIES or len({entry.filename for entry in entries}) != len(entries):
        raise ValueError(f"{len(entries)} entries, or two of one name")
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
    if packed:
        raise ValueError(f"entries are compressed or encrypted, such as {packed[0]!r}")
    wrong = [entry.filename for entry in entries if entry.file_size != entry.compress_size]
    if wrong:
        raise ValueError(f"entries declare another size than they have, such as {wrong[0]!r}")
    # Entries that share their bytes would be many times the file.
    declared = sum(entry.file_size for entry in entries)
    if declared > file_bytes:
        raise ValueError(f"the entries declare {declared} bytes, the file has {file_bytes}")


def _check_depth(data: bytes) -> None:
    """Follow how deep the pickle's values nest, by what each opcode takes from the stack and puts there."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for opcode, found, _ in pickletools.genops(data):
        argument: Any = found
        if opcode.name == "MARK":
            marks.append(len(stack))
            continue
        if "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
            continue
        if "GET" in opcode.name:
            stack.append(memo[int(argument)])
            continue
        before = opcode.stack_before
        if pickletools.markobject in before:
            start = marks.pop() - before.index(pickletools.markobject)
        else:
            start = len(stack) - len(before)
        taken = stack[max(start, 0) :]
        del stack[max(start, 0) :]
        depth = 1 + max(taken, default=0)
        if depth > MAX_DEPTH:
            raise ValueError(f"its table of contents nests more than {MAX_DEPTH} deep")
        stack += [depth] * len(opcode.stack_after)


def check_storages(tensors: dict[str, torch.Tensor], declared: int) -> None:
    """Compare the bytes that the pickle gives its storages with those of the zip's entries; ValueError by both."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    real = sum(storage.nbytes() for storage in storages.values())
    if real != declared:
        raise ValueError(f"its tensors claim {real} bytes, its entries hold {declared}")
