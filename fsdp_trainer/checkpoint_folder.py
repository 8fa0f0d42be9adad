"""The folders that checkpoints live in: names, what makes one complete, publishing, pruning, leftovers.

Everything here is plain files seen from rank 0; what is inside a checkpoint is checkpoint.py's business.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.run_folder import write_text_atomically

FORMAT = 1
STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by DCP; without it the parts cannot be read
CHECKPOINTS_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Data are a pure function of `step`, the learning rate of `optimizer_steps`."""

    step: int = 0  # optimizer windows consumed, whether or not they moved the weights
    optimizer_steps: int = 0
    skipped_steps: int = 0  # windows that did not move the weights: overflow, or a non-finite gradient
    consecutive_skipped: int = 0
    tokens_seen: int = 0
    supervised_tokens_seen: int = 0


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Return the folder that the checkpoint of `step` has once it is complete."""
    return Path(output_dir) / CHECKPOINTS_FOLDER / f"step-{step:08d}"


# Publishing


def make_empty(folder: Path) -> None:
    """Make `folder` anew; what an earlier attempt left in it goes."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    _sync_folder(folder.parent)
    _sync_folder(folder.parent.parent)


def publish(temporary: Path, target: Path, state: dict[str, Any]) -> None:
    """Make a folder that all ranks have written into a checkpoint: facts, sync, and the rename that counts."""
    sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
    write_text_atomically(temporary / STATE_FILE, json.dumps(state | {"files": sizes}, indent=1) + "\n")
    _sync_folder(temporary)
    if target.exists():
        _delete(target)
    temporary.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    # A rename or a new file is durable only once the folder that lists it is on disk too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Finding


def published(output_dir: Path) -> list[Path]:
    """Return the folders that carry a checkpoint's name, newest first; they are complete unless damaged since."""
    folder = Path(output_dir) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), reverse=True)


def read_state(path: Path) -> dict[str, Any]:
    """Return what state.json says: progress, world size, facts, and the name and size of every other file."""
    return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))


def find_damage(path: Path) -> str | None:
    """Return why `path` is no complete checkpoint, or None. Reads state.json and file sizes, no pickle."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / METADATA_FILE).is_file():
        return f"{METADATA_FILE} is missing: the save was not finished"
    try:
        state = read_state(path)
        version, sizes = state["format"], dict(state["files"])
        Progress(**state["progress"])
        lacking = {"world_size", "scaler", "facts"} - state.keys()
    except FileNotFoundError:
        return f"{STATE_FILE} is missing: the save was not finished"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"
    if version != FORMAT:
        return f"{STATE_FILE} has format {version}, this version reads {FORMAT}"
    if lacking:
        return f"{STATE_FILE} lacks {', '.join(sorted(lacking))}"
    for name, size in sizes.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes of {size}"
    return None


def refuse_damage(path: Path) -> None:
    """Raise CheckpointError, saying what is lacking, unless `path` is a complete checkpoint."""
    if (damage := find_damage(path)) is not None:
        raise CheckpointError(
            "This is no complete checkpoint.",
            values=f"{path}: {damage}",
            fix="name another one, or set checkpoint.resume: auto to take the newest complete one",
        )


# Deleting


def prune(output_dir: Path, *, keep_latest: int, just_saved: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep_latest` complete checkpoints and return what went. For rank 0 alone.

    Damaged folders that are newer than the oldest one kept stay, and do not count. `just_saved` stays, even where a run
    that went back to an early checkpoint saves among later ones.
    """
    assert keep_latest >= 1, "the checkpoint just written must stay"
    complete = [path for path in published(output_dir) if find_damage(path) is None]
    if len(complete) <= keep_latest:
        return []
    oldest = complete[keep_latest - 1]
    gone = [path for path in published(output_dir) if path.name < oldest.name and path != just_saved]
    try:
        for path in gone:
            _delete(path)
    except OSError as error:
        raise CheckpointError(
            "An old checkpoint cannot be deleted.", values=str(error), fix="give write access in output_dir"
        ) from error
    return gone


def _delete(path: Path) -> None:
    # Un-published first: a kill while the files go must not leave a name that promises a checkpoint.
    doomed = path.with_name(f".{path.name}.deleting")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    _sync_folder(path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(output_dir: Path) -> list[Path]:
    """Remove what killed saves and deletions left and return it. For rank 0 alone, before the first save."""
    folder = Path(output_dir) / CHECKPOINTS_FOLDER
    found = [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.deleting")]
    for path in found:
        shutil.rmtree(path)
    return found
