"""The folder that an exported model lies in: it takes its name only when it is whole, and there is always one.

Where the system can exchange two names in one operation, as Linux does on most file systems, a new model takes the
place of an older one at once. Elsewhere there is a moment between two renames; what a kill leaves then is put right by
`recover`, with which every start of a run begins.
"""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from fsdp_trainer.checkpoint_folder import sync
from fsdp_trainer.export_checksums import write_checksums

_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)  # by the system, or by a file system such as NFS


def unfinished(folder: Path) -> Path:
    """Return the name that the folder has until it is whole."""
    return folder.with_name(f".{folder.name}.tmp")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def make_empty(part: Path) -> None:
    """Make the unfinished folder anew."""
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def replace_folder(folder: Path, part: Path) -> None:
    """Give `part`, with checksums of all that is in it, the name `folder`; what had it goes last."""
    write_checksums(part)
    for path in [*part.rglob("*"), part]:
        sync(path)
    _restore(folder)
    if folder.exists():
        old = part if _exchange(part, folder) else _rename_both(part, folder)
    else:
        part.rename(folder)
        old = None
    sync(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put right what a kill left of an export: the last whole model has its name, the rest goes. For rank 0 alone."""
    _restore(folder)
    if unfinished(folder).exists():
        shutil.rmtree(unfinished(folder))


def _restore(folder: Path) -> None:
    old = _replaced(folder)
    if old.exists() and folder.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(folder)
        sync(folder.parent)


def _rename_both(part: Path, folder: Path) -> Path:
    old = _replaced(folder)
    folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one operation; False where that is not offered."""
    try:  # Python has no call for it
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, TypeError, AttributeError):
        return False
    if call(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
