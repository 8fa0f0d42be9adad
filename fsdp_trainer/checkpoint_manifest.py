"""What `state.json` promises about the files of a checkpoint (size and hash of each), and whether they still keep it.

The hash, xxh3-128, finds what disks, networks and memory do to bytes. It is no signature: whoever can write to the
folder can make one that fits, so nothing here protects against tampering (reading a file never runs code, though).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fsdp_trainer.run_folder import write_text_atomically

FORMAT = 2
STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by DCP; without it the parts cannot be read
MAX_STATE_BYTES = 64 * 2**20  # before it is parsed; a run over thousands of ranks stays under one
_BLOCK_BYTES = 2**20
_NO_DIGEST = "0" * 32


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Data are a pure function of `step`, the learning rate of `optimizer_steps`.

    Of a data stream, which has no such function, `stream` says where the next window begins.
    """

    step: int = 0  # optimizer windows consumed, whether or not they moved the weights
    optimizer_steps: int = 0
    skipped_steps: int = 0  # windows that did not move the weights: overflow, or a non-finite gradient
    consecutive_skipped: int = 0
    tokens_seen: int = 0
    supervised_tokens_seen: int = 0
    stream: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Best:
    """The lowest evaluation loss of a run so far, and the step it was measured after."""

    step: int
    eval_loss: float


# Writing


def describe_file(path: Path) -> dict[str, Any]:
    """Return what the manifest keeps of a file: `bytes` and `xxh3_128`."""
    return {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, in hexadecimal."""
    found, block = xxhash.xxh3_128(), bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found.update(memoryview(block)[:count])
    return found.hexdigest()


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state.json of the checkpoint `path`, see `write_sealed`."""
    write_sealed(path / STATE_FILE, state)


def write_sealed(file: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON, whole or not at all, with a digest over every other byte of the file."""
    text = json.dumps({"digest": _NO_DIGEST} | {k: v for k, v in content.items() if k != "digest"}, indent=1) + "\n"
    write_text_atomically(file, text.replace(_NO_DIGEST, _digest(text), 1))


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode("utf-8")).hexdigest()


# Reading


def read_state(path: Path) -> dict[str, Any]:
    """Return what state.json says: progress, world size, facts, size and hash of every file. ValueError if damaged."""
    return read_sealed(path / STATE_FILE, version=FORMAT)


def read_sealed(file: Path, *, version: int) -> dict[str, Any]:
    """Return the content of a file of `write_sealed` whose `format` is `version`; ValueError if it is damaged."""
    if (size := file.stat().st_size) > MAX_STATE_BYTES:
        raise ValueError(f"it has {size:,} bytes, at most {MAX_STATE_BYTES:,} are read")
    text = file.read_bytes().decode("utf-8")
    try:
        content = json.loads(text)
        if (found := content["format"]) != version:
            raise ValueError(f"it has format {found}, this version reads {version}")
        # The digest comes first, so its first occurrence is its own.
        intact = content["digest"] == _digest(text.replace(content["digest"], _NO_DIGEST, 1))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not intact:
        raise ValueError("its bytes do not fit its digest")
    return content


def find_damage(path: Path) -> str | None:
    """Return why `path` is no complete checkpoint, or None. Reads state.json, names and sizes, not the files' bytes."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / METADATA_FILE).is_file():
        return f"{METADATA_FILE} is missing: the save was not finished"
    try:
        state = read_state(path)
        files = {str(name): (int(file["bytes"]), str(file["xxh3_128"])) for name, file in state["files"].items()}
        Progress(**state["progress"])
        lacking = {"world_size", "scaler", "facts"} - state.keys()
    except FileNotFoundError:
        return f"{STATE_FILE} is missing: the save was not finished"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"
    if lacking:
        return f"{STATE_FILE} lacks {', '.join(sorted(lacking))}"
    if (path / STATE_FILE).is_symlink():
        return f"{STATE_FILE} is no plain file"
    present = {file.name: file for file in path.iterdir() if file.name != STATE_FILE}
    return find_other_files(present, {name: size for name, (size, _) in files.items()})


def find_other_files(present: Mapping[str, Path], sizes: Mapping[str, int]) -> str | None:
    """Return which file is missing, does not belong, is no plain file or has another size, or None."""
    for name in sorted(present.keys() | sizes.keys()):
        if name not in sizes:
            return f"{name} does not belong to it"
        if name not in present:
            return f"{name} is missing"
        # A link could lead anywhere; and a name of the list alone, "../x" say, is never among those that are present.
        if present[name].is_symlink() or not present[name].is_file():
            return f"{name} is no plain file"
        if (found := present[name].stat().st_size) != sizes[name]:
            return f"{name} has {found} bytes of {sizes[name]}"
    return None


def find_changed_bytes(path: Path, files: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return which of the `names` has other bytes than the manifest's `files` say, or None. Reads all of them."""
    for name in names:
        try:
            found = hash_file(path / name)
        except OSError as error:
            return f"{name} cannot be read ({type(error).__name__}: {error})"
        if found != files[name]["xxh3_128"]:
            return f"{name} is damaged: its bytes hash to {found}, {files[name]['xxh3_128']} were written"
    return None


def share_files(files: Mapping[str, Any], *, rank: int, world_size: int) -> list[str]:
    """Return the files that `rank` hashes, so that all ranks have about the same number of bytes to read."""
    loads, mine = [0] * world_size, []
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"]
        if least == rank:
            mine.append(name)
    return mine
