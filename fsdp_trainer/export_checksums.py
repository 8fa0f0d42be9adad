"""Sizes and hashes of the files of an exported model, in `checksums.json` beside them, and whether they still hold.

Transformers and the hubs leave that file alone. As with a checkpoint's manifest, the hash finds what disks and copies
do to bytes; it is no signature.
"""

from pathlib import Path
from typing import Any

from fsdp_trainer.checkpoint_manifest import (
    describe_file,
    find_changed_bytes,
    find_other_files,
    read_sealed,
    write_sealed,
)
from fsdp_trainer.errors import CheckpointError

CHECKSUMS = "checksums.json"
_FORMAT = 1


def write_checksums(folder: Path) -> None:
    """Describe every file that lies in `folder` now; the last thing written into an export."""
    files = {name: describe_file(path) for name, path in sorted(_present(folder).items())}
    write_sealed(folder / CHECKSUMS, {"format": _FORMAT, "files": files})


def find_export_damage(folder: Path) -> str | None:
    """Return why the files of an export are not those that were written, or None. Reads every byte of them."""
    try:
        listed: dict[str, Any] = read_sealed(folder / CHECKSUMS, version=_FORMAT)["files"]
        files = {name: {"bytes": int(of["bytes"]), "xxh3_128": str(of["xxh3_128"])} for name, of in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
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


def _present(folder: Path) -> dict[str, Path]:
    """Return what lies in the folder by its name in it, without the checksums and the folders that hold files."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    holding = {parent.as_posix() for name in found for parent in Path(name).parents}
    return {name: path for name, path in found.items() if name != CHECKSUMS and name not in holding}
