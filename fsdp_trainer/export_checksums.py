"""Sizes and hashes of the files of an exported model, in `checksums.json` beside them, and whether they still hold.

Transformers and the hubs leave that file alone. As with a checkpoint's manifest, the hash finds what disks and copies
do to bytes; it is no signature. A run that starts from an exported model looks at it by itself: at the small files
before the data are prepared, and at the weights before any of them is used.
"""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp_trainer.checkpoint_manifest import (
    describe_file,
    find_changed_bytes,
    find_other_files,
    read_sealed,
    share_files,
    write_sealed,
)
from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.run_folder import CHECKSUMS

_FORMAT = 1
_MARK = b"xxh3_128"  # in every file of ours, also in a damaged one; another tool's of that name is none of our business
_WEIGHTS = ".safetensors"
_UNUSED = ("README.md",)  # written for readers, and edited by them


def write_checksums(folder: Path) -> None:
    """Describe every file that lies in `folder` now; the last thing written into an export."""
    files = {name: describe_file(path) for name, path in sorted(_present(folder).items())}
    write_sealed(folder / CHECKSUMS, {"format": _FORMAT, "files": files})


def find_export_damage(folder: Path) -> str | None:
    """Return why the files of an export are not those that were written, or None. Reads every byte of them."""
    try:
        files = _listed(folder)
    except _UNREADABLE as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})"
    if (folder / CHECKSUMS).is_symlink():
        return f"{CHECKSUMS} is no plain file"
    sizes = {name: file["bytes"] for name, file in files.items()}
    return find_other_files(_present(folder), sizes) or find_changed_bytes(folder, files, files)


def verify_export(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file of an export is as it was written."""
    if (damage := find_export_damage(folder)) is not None:
        raise CheckpointError(
            "This exported model is not as it was written.",
            values=f"{folder}: {damage}",
            fix="export it again from its checkpoint: fsdp-trainer export RUN --out DIR; an edit of your own, to "
            "README.md say, counts too",
        )


# As the model that a run starts from


def refuse_damaged_sides(folder: Path) -> None:
    """Raise CheckpointError, naming the file, if `folder` is an export whose config, tokenizer or code has changed.

    Sizes of the weights are compared too. Nothing is asked of a folder without our checksums, nor of files that were
    added to an export or are only read by people.
    """
    _refuse(folder, lambda files: {name for name in files if not name.endswith(_WEIGHTS)})


def refuse_damaged_weights(folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
    """Raise CheckpointError, naming the file, if `folder` is an export whose weights have changed; reads all of them.

    Of `ranks` that see the same folder each reads a share.
    """

    def mine(files: dict[str, Any]) -> set[str]:
        weights = {name: file for name, file in files.items() if name.endswith(_WEIGHTS)}
        return set(share_files(weights, rank=rank, world_size=ranks))

    _refuse(folder, mine)


def _refuse(folder: Path, choose: Callable[[dict[str, Any]], set[str]]) -> None:
    if (damage := _find_damage(folder, choose)) is not None:
        raise CheckpointError(
            "The model to start from is not as it was exported.",
            values=f"{folder}: {damage}",
            fix=f"use a clean copy of it or export it again; if the change is your own, delete {CHECKSUMS} there",
        )


def _find_damage(folder: Path, choose: Callable[[dict[str, Any]], set[str]]) -> str | None:
    if not (folder / CHECKSUMS).is_file() or _MARK not in (folder / CHECKSUMS).read_bytes():
        return None
    try:
        files = {name: file for name, file in _listed(folder).items() if name not in _UNUSED}
    except _UNREADABLE as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})"
    for name, file in files.items():
        if not _is_inside(name) or not (folder / name).is_file():  # a link of the hub's cache is as good as a file
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != file["bytes"]:
            return f"{name} has {found} bytes of {file['bytes']}"
    return find_changed_bytes(folder, files, sorted(choose(files)))


def _is_inside(name: str) -> bool:
    return not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError)


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of every file that was written, by its name in the folder; one of _UNREADABLE otherwise."""
    listed: dict[str, Any] = read_sealed(folder / CHECKSUMS, version=_FORMAT)["files"]
    return {name: {"bytes": int(of["bytes"]), "xxh3_128": str(of["xxh3_128"])} for name, of in listed.items()}


def _present(folder: Path) -> dict[str, Path]:
    """Return what lies in the folder by its name in it, without the checksums and the folders that hold files."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    holding = {parent.as_posix() for name in found for parent in Path(name).parents}
    return {name: path for name, path in found.items() if name != CHECKSUMS and name not in holding}
