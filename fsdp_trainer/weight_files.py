"""Open the weight files of a model folder without trusting them: plain names, real sizes, no pickle that runs code.

A tensor is known by its header; its values are read a block at a time, straight into where they belong.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import SafetensorError, safe_open

from fsdp_trainer.bin_archive import check_archive, check_storages
from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.gguf_model import local_model
from fsdp_trainer.hub import refuse_unreachable

# In the order in which Transformers looks for them (modeling_utils.py, `_get_resolved_checkpoint_files`).
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
# Real ones are far smaller: a table of 200,000 tensors takes 22 MB, as a header or as an index.
MAX_TABLE_BYTES = 2**25
MAX_NAME_BYTES = 255  # what file systems allow
FLOATING = {"F64", "F32", "F16", "BF16"}
BLOCK_BYTES = 2**26  # read at once
# Pages of a mapped file stay in the process's resident size until the file is closed.
REOPEN_BYTES = 2**27

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file. `dtype` is the file's word for it, `read` returns a slice of it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Any], torch.Tensor]

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """Copy the part of this tensor that `ranges` (start and stop of each dimension) names, cast to the target's."""
        if not self.shape:
            target.copy_(self.read(...))
            return
        (first, last), *rest = ranges
        row_bytes = max(1, target[:1].numel() * 8)
        step = max(1, BLOCK_BYTES // row_bytes)
        for start in range(first, last, step):
            stop = min(last, start + step)
            block = self.read((slice(start, stop), *(slice(a, b) for a, b in rest)))
            target[start - first : stop - first].copy_(block)


def find_folder(path: str, *, revision: str | None = None) -> Path:
    """Return the model folder that `path` names: itself, what its GGUF file became, or that of the hub's cache.

    What the cache lacks is downloaded, safetensors where the repository has them; ranks of a node share the cache and
    wait for each other's files. CheckpointError when there is neither such a folder nor such a repository in reach.
    """
    if Path(path).exists():
        return Path(local_model(path))
    refuse_unreachable(
        path, revision=revision, files=[name + end for name in (SAFETENSORS, BIN) for end in ("", INDEX)]
    )
    try:
        for name in (SAFETENSORS, BIN):
            patterns = [name, name + INDEX, f"*{Path(name).suffix}"]
            folder = download(path, revision=revision, patterns=patterns)
            if any((folder / file).exists() for file in patterns[:2]):
                return folder
    except (OSError, ValueError) as error:  # the hub's own errors are both
        raise CheckpointError(
            "The model's weights cannot be found.",
            values=f"model.path: {path}, revision {revision or 'main'}: {str(error).splitlines()[0]}",
            fix="set model.path to a folder with safetensors, or to a hub id that is in reach or was downloaded before",
        ) from error
    return folder


def download(path: str, *, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the hub's cached snapshot of a repository with the files of its top folder that `patterns` name."""
    return Path(
        snapshot_download(
            path,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            # Said aloud: huggingface_hub 1.33 asks the server for the list of files of a commit even when offline.
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    )


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder by name: safetensors or, where there are none, `.bin` files.

    CheckpointError for a folder without weights and for a file that is damaged or not what its index says.
    """
    for name, opener in ((SAFETENSORS, _open_safetensors), (BIN, _open_bin)):
        if (folder / name).is_file():
            return opener(_inside(folder, name, folder / name))
        if (folder / (name + INDEX)).is_file():
            return _open_indexed(folder, _inside(folder, name + INDEX, folder / (name + INDEX)), opener)
    raise CheckpointError(
        "The model folder holds no weights.",
        values=f"{folder}: neither {SAFETENSORS} nor {SAFETENSORS}{INDEX} nor {BIN}",
        fix="set model.path to a folder saved with save_pretrained, or model.init: random to start without weights",
    )


def _open_indexed(
    folder: Path, index: Path, opener: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    weight_map = _read_index(index)
    suffix = index.name.removesuffix(INDEX).rpartition(".")[2]
    # Every name before any file, so that one bad name keeps all of them shut.
    paths = {file: _inside(folder, file, index, suffix=suffix) for file in sorted(set(weight_map.values()))}
    files = {file: opener(path) for file, path in paths.items()}
    wrong = [name for name, file in weight_map.items() if name not in files[file]]
    wrong += [name for file, tensors in files.items() for name in tensors if weight_map.get(name) != file]
    if wrong:
        raise CheckpointError(
            "The weight index and the files do not agree.",
            values=f"{index}: {sorted(set(wrong))[:5]} ({len(set(wrong))} names)",
            fix="use a clean copy of the folder",
        )
    return {name: files[file][name] for name, file in weight_map.items()}


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        if index.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes, an index has at most {MAX_TABLE_BYTES}")
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)["weight_map"]
        plain = all(isinstance(text, str) for pair in weight_map.items() for text in pair)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, error) from error
    if not plain or not weight_map:
        raise _damaged(index, ValueError("weight_map is not a table of names and files"))
    return weight_map


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _inside(folder: Path, name: str, index: Path, *, suffix: str = "") -> Path:
    """Return the file `name` of `folder`; CheckpointError unless it is plainly in it, also after symbolic links.

    The hub's cache is the one exception: there, `snapshots/<commit>` holds links into `blobs` beside it.
    """
    plain = name not in ("", ".", "..") and not set(name) & set("/\\\0:") and name.isprintable()
    plain = plain and name.endswith(suffix) and len(name.encode()) <= MAX_NAME_BYTES
    if not plain or not _stays_in(folder, name):
        raise CheckpointError(
            "A weight file lies outside its folder, or has no name that a weight file has.",
            values=f"{index}: {name[:MAX_NAME_BYTES]!r}",
            fix="use a clean copy",
        )
    real = folder / name
    if not real.is_file():
        raise CheckpointError(
            "A weight file is missing.", values=f"{real}, named in {index}", fix="use a complete copy of the folder"
        )
    return real


def _stays_in(folder: Path, name: str) -> bool:
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    try:
        real = (folder / name).resolve()
    except (OSError, RuntimeError):  # links in a circle: RuntimeError before Python 3.13
        return False
    return any(real.is_relative_to(home) for home in homes)


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "A weight file cannot be read.",
        values=f"{path}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        fix="use a clean copy of the folder",
    )


class _MappedFile:
    """A mapped safetensors file that is opened anew now and then, so that what was read stops being resident."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0
        self.opened: Any = safe_open(path, framework="pt")

    def read(self, name: str, part: Any) -> torch.Tensor:
        if self._read_bytes > REOPEN_BYTES:
            self.opened, self._read_bytes = safe_open(self._path, framework="pt"), 0
        block = self.opened.get_slice(name)[part]
        self._read_bytes += block.nbytes
        return block


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    try:
        _check_header_size(path)
        # The library compares the header with the file's size and the tensors with the header before it hands any out.
        file = _MappedFile(path)
        slices = {name: file.opened.get_slice(name) for name in list(file.opened.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return {
        name: StoredTensor(
            name, path, tuple(found.get_shape()), found.get_dtype(), lambda part, name=name: file.read(name, part)
        )
        for name, found in slices.items()
    }


def _check_header_size(path: Path) -> None:
    """Refuse a header that the file cannot hold or that no model has, before the library makes a table of it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_TABLE_BYTES, path.stat().st_size - 8):
        raise ValueError(f"its header claims {length} bytes of a file of {path.stat().st_size}")


def _open_bin(path: Path) -> dict[str, StoredTensor]:
    try:
        declared = check_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
        ):
            raise TypeError("it holds something else than tensors by name")
        check_storages(tensors, declared)
    except _NOT_READABLE as error:
        raise _damaged(path, error) from error
    return {
        name: StoredTensor(
            name, path, tuple(tensor.shape), _DTYPES.get(tensor.dtype, str(tensor.dtype)), tensor.__getitem__
        )
        for name, tensor in tensors.items()
    }


# All that torch's restricted reader raises for a pickle that asks for more than tensors.
_NOT_READABLE = (pickle.UnpicklingError, RuntimeError, OSError, ValueError, TypeError, LookupError, AttributeError)
_NOT_READABLE += (EOFError, AssertionError, MemoryError, OverflowError)

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
