"""Read a checkpoint's table of contents, DCP's `.metadata`, without running anything that it asks for.

The file is a pickle, and torch's own reader unpickles it, which runs code of whoever wrote it (pytorch#189308, declared
trusted). Here a small machine executes the few opcodes that such a table needs, and a name in it stays a name.
"""

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_trainer.checkpoint_manifest import METADATA_FILE
from fsdp_trainer.errors import CheckpointError

Kind = TypeVar("Kind")

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_CONTIGUOUS = 0  # of torch's _MEM_FORMAT_ENCODING
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_ARCHIVE_BYTES = 64 * 2**10  # what torch.save adds to a tensor's bytes at most: names, headers, alignment


@dataclass(frozen=True)
class _Name:
    """A global that the pickle asks for. It is not looked up."""

    module: str
    name: str


@dataclass(eq=False)
class _Record:
    """An object that the pickle builds: what class it claims, and the state it is given."""

    kind: str
    state: Any = None


@dataclass
class _Machine:
    """The state of a pickle machine: a stack, the stacks below open marks, the memo."""

    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: list[Any] = field(default_factory=list)

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items


class TableReader(FileSystemReader):
    """DCP's reader of a checkpoint folder, with the table of contents read by `read_table`."""

    def __init__(self, path: Path, files: Mapping[str, int]) -> None:
        super().__init__(path)
        self._folder, self._files = path, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table; called by DCP on every rank."""
        assert kwargs.get("rank") is None, "one table for all ranks is what save_checkpoint writes"
        metadata = read_table(self._folder, self._files)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_table(path: Path, files: Mapping[str, int]) -> Metadata:
    """Return which tensors the checkpoint at `path` holds and where; `files` are its files and their sizes in bytes.

    CheckpointError for everything that save_checkpoint does not write: other opcodes, names, files or sizes.
    """
    try:
        return _to_metadata(_run((path / METADATA_FILE).read_bytes()), files)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            "The checkpoint's table of contents cannot be read.",
            values=f"{path / METADATA_FILE}: {type(error).__name__}: {error}",
            fix="set checkpoint.resume to the path of another checkpoint; nothing of this one was used",
        ) from error


# The machine


def _run(data: bytes) -> Any:
    """Execute a pickle of protocol 4 or 5 as far as its opcodes are known; ValueError at the first that is not."""
    machine = _Machine()
    stream = io.BytesIO(data)
    for opcode, argument, position in pickletools.genops(stream):
        if opcode.name == "STOP":
            if stream.read(1) or machine.below or len(machine.stack) != 1:
                raise ValueError("it does not end as a pickle does")
            return machine.stack[0]
        if (execute := _OPCODES.get(opcode.name)) is None:
            raise ValueError(f"opcode {opcode.name} at byte {position} is not used in a table of contents")
        execute(machine, argument)
    raise ValueError("it has no end")


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _mark(machine: _Machine, _: Any) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _name(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not _is_allowed(module, name):
        raise ValueError(f"{module!r:.100} {name!r:.100} is not used in a table of contents")
    machine.stack.append(_Name(module, name))


def _is_allowed(module: Any, name: Any) -> bool:
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    return (module, name) in _RECORDS | _PATHS | _CALLS.keys() or (module == "torch" and name in _DTYPES)


def _new(machine: _Machine, _: Any) -> None:
    arguments, name = machine.stack.pop(), machine.stack.pop()
    if arguments != () or not isinstance(name, _Name) or (name.module, name.name) not in _RECORDS:
        raise ValueError(f"it makes an object of {name!r:.100}")
    machine.stack.append(_Record(name.name))


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, name = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, _Name) or not isinstance(arguments, tuple):
        raise ValueError(f"it calls {name!r:.100}")
    if (name.module, name.name) in _PATHS:
        machine.stack.append(None)  # where the checkpoint lay when it was saved; nothing reads it
    else:
        machine.stack.append(_CALLS[name.module, name.name](*arguments))


def _build(machine: _Machine, _: Any) -> None:
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], _Record):
        raise ValueError(f"it gives a state to {machine.stack[-1]!r:.100}")
    machine.stack[-1].state = state


def _append(machine: _Machine, _: Any) -> None:
    item = machine.stack.pop()
    _checked(machine.stack[-1], list).append(item)


def _appends(machine: _Machine, _: Any) -> None:
    items = machine.pop_mark()
    _checked(machine.stack[-1], list).extend(items)


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine.stack[-1], key, value)


def _set_items(machine: _Machine, _: Any) -> None:
    items = machine.pop_mark()
    for key, value in zip(items[::2], items[1::2], strict=True):
        _set(machine.stack[-1], key, value)


def _set(target: Any, key: Any, value: Any) -> None:
    # Of these alone a hash takes a bounded time and depth: a tuple nested a million times would end the process.
    if not isinstance(key, str | _Record):
        raise ValueError(f"a key is a {type(key).__name__}")
    _checked(target, dict)[key] = value


def _tuple_of_marked(machine: _Machine, _: Any) -> None:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    def execute(machine: _Machine, _: Any) -> None:
        if len(machine.stack) < count:
            raise IndexError("the stack is empty")
        items = tuple(machine.stack[len(machine.stack) - count :])
        del machine.stack[len(machine.stack) - count :]
        machine.stack.append(items)

    return execute


_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, length: None,
    "MARK": _mark,
    "MEMOIZE": lambda machine, _: machine.memo.append(machine.stack[-1]),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "STACK_GLOBAL": _name,
    "NEWOBJ": _new,
    "REDUCE": _reduce,
    "BUILD": _build,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "TUPLE": _tuple_of_marked,
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _push),
}


# What the calls in a table give


def _size(numbers: Any) -> torch.Size:
    if not all(type(number) is int and 0 <= number < 2**63 for number in _checked(numbers, tuple)):
        raise ValueError(f"a size or an offset is {numbers!r:.100}")
    return torch.Size(numbers)


def _layout(name: Any) -> torch.layout:
    if name != "torch.strided":
        raise ValueError(f"a tensor has the layout {name!r:.100}")
    return torch.strided


def _memory_format(encoding: Any) -> int:
    if encoding != _CONTIGUOUS:
        raise ValueError(f"a tensor has the memory format {encoding!r:.100}")
    return _CONTIGUOUS


def _member(owner: Any, name: Any) -> int:
    """Read an enum's member as Python 3.11.0 to 3.11.3 pickle it: getattr(enum, name) instead of enum(value)."""
    if owner != _Name(_METADATA, "_MEM_FORMAT_ENCODING") or name != "TORCH_CONTIGUOUS_FORMAT":
        raise ValueError(f"it takes {name!r:.100} of {owner!r:.100}")
    return _CONTIGUOUS


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("builtins", "getattr"): _member,
}


# From records to torch's own objects, every value looked at


def _to_metadata(found: Any, files: Mapping[str, int]) -> Metadata:
    state = _state(found, "Metadata")
    places = dict(_to_place(*item, files) for item in _checked(state["storage_data"], dict).items())
    tensors, chunks = {}, {}
    for name, entry in _checked(state["state_dict_metadata"], dict).items():
        tensors[_checked(name, str)] = tensor = _to_tensor(entry, at_most=len(places) - len(chunks))
        for chunk in tensor.chunks:
            chunks[name, chunk.offsets] = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
    for index, place in places.items():
        size = chunks.pop((index.fqn, index.offset))
        if not size <= place.length <= size + _ARCHIVE_BYTES:
            raise ValueError(f"{index.fqn:.100} takes {place.length} bytes for {size}")
    if chunks:
        raise ValueError(f"{next(iter(chunks))!r:.100} lies nowhere")
    return Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta())


def _to_tensor(entry: Any, *, at_most: int) -> TensorStorageMetadata:
    state = _state(entry, "TensorStorageMetadata")
    dtype, layout, requires_grad, _, _ = _checked(_state(state["properties"], "TensorProperties"), tuple)
    # A list that many tensors share would be longer altogether than the file it comes from.
    if len(_checked(state["chunks"], list)) > at_most:
        raise ValueError("it names more parts than it says where to find")
    properties = TensorProperties(_DTYPES[_checked(dtype, _Name).name], layout, _checked(requires_grad, bool))
    chunks = [
        ChunkStorageMetadata(_checked(chunk["offsets"], torch.Size), _checked(chunk["sizes"], torch.Size))
        for chunk in (_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"])
    ]
    size = _checked(state["size"], torch.Size)
    for chunk in chunks:
        if any(first + count > whole for first, count, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"a part at {list(chunk.offsets)} of {list(chunk.sizes)} is not inside {list(size)}")
    return TensorStorageMetadata(properties, size, chunks)


def _to_place(index: Any, place: Any, files: Mapping[str, int]) -> tuple[MetadataIndex, _StorageInfo]:
    found, info = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if _checked(name, str) not in files or name == METADATA_FILE or info.get("transform_descriptors"):
        raise ValueError(f"{name!r:.100} is no file of this checkpoint")
    if min(_checked(offset, int), _checked(length, int)) < 0 or offset + length > files[name]:
        raise ValueError(f"{name} has {files[name]} bytes, not {length} from {offset} on")
    where = MetadataIndex(_checked(found["fqn"], str), _checked(found["offset"], torch.Size), found["index"])
    return where, _StorageInfo(name, offset, length)


def _state(record: Any, kind: str) -> Any:
    if _checked(record, _Record).kind != kind:
        raise ValueError(f"a {record.kind} stands where a {kind} belongs")
    return record.state


def _checked(value: Any, kind: type[Kind]) -> Kind:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value
