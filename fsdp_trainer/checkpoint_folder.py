"""The folders that checkpoints live in: names, publishing, pruning, leftovers.

Everything here is plain files seen from rank 0; what is inside a checkpoint is checkpoint.py's business.
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_trainer.checkpoint_manifest import Best, describe_file, find_damage, read_state, write_state
from fsdp_trainer.errors import FailedSave
from fsdp_trainer.run_folder import CHECKPOINTS, remove_torn

CHECKPOINTS_FOLDER = CHECKPOINTS
TRIAL = "step-trial"  # no checkpoint's name: what is written before the first step, and removed again
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Return the folder that the checkpoint of `step` has once it is complete."""
    return Path(output_dir) / CHECKPOINTS_FOLDER / f"step-{step:08d}"


# Publishing


def make_empty(folder: Path) -> None:
    """Make `folder` anew; what an earlier attempt left in it goes."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    sync(folder.parent)
    sync(folder.parent.parent)


def publish(temporary: Path, target: Path, state: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Make a folder that all ranks have written into a checkpoint: facts, sync, and the rename that counts.

    `files` is what the ranks say of the files they wrote (see `describe_file`); what nobody speaks of is read here.
    """
    described = {
        file.name: files[file.name] if file.name in files else describe_file(file)
        for file in sorted(temporary.iterdir())
    }
    write_state(temporary, {**state, "files": described})
    sync(temporary)
    if target.exists():
        _delete(target)
    temporary.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Have a file, or what a folder lists, on disk: a rename or a new file is durable only once its folder is, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The best one


def read_best(path: Path) -> Best | None:
    """Return the best evaluation that the run of this checkpoint had seen, if the checkpoint of it is still there."""
    found = read_state(path)["best"]
    best = None if found is None else Best(**found)
    if best is None or find_damage(path.with_name(checkpoint_path(path, best.step).name)) is not None:
        return None
    return best


def record_best(path: Path, best: Best) -> None:
    """Write into a published checkpoint that it is the best so far: for an evaluation that came after the save."""
    write_state(path, read_state(path) | {"best": asdict(best)})


# Finding


def published(output_dir: Path) -> list[Path]:
    """Return the folders that carry a checkpoint's name, newest first; they are complete unless damaged since."""
    folder = Path(output_dir) / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), reverse=True)


# Deleting


def prune(output_dir: Path, *, keep_latest: int, keep: Collection[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep_latest` complete checkpoints and return what went. For rank 0 alone.

    Damaged folders that are newer than the oldest one kept stay, and do not count. Those in `keep` stay whatever
    their age: the best one, and the one just saved, where a run that went back to an early checkpoint saves among later
    ones.
    """
    assert keep_latest >= 1, "the checkpoint just written must stay"
    complete = [path for path in published(output_dir) if find_damage(path) is None]
    if len(complete) <= keep_latest:
        return []
    oldest = complete[keep_latest - 1]
    gone = [path for path in published(output_dir) if path.name < oldest.name and path not in keep]
    try:
        for path in gone:
            _delete(path)
    except OSError as error:
        raise FailedSave(
            "An old checkpoint cannot be deleted.", values=str(error), fix="give write access in output_dir"
        ) from error
    return gone


def _delete(path: Path) -> None:
    # Un-published first: a kill while the files go must not leave a name that promises a checkpoint.
    doomed = path.with_name(f".{path.name}.deleting")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    sync(path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(output_dir: Path) -> list[Path]:
    """Remove what killed saves and deletions left and return it. For rank 0 alone, before the first save."""
    folder = Path(output_dir) / CHECKPOINTS_FOLDER
    found = [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.deleting"), *folder.glob(TRIAL)]
    for path in found:
        shutil.rmtree(path)
    for place in (Path(output_dir), *published(output_dir)):
        remove_torn(place)
    return found
