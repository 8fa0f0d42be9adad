"""Where this package keeps on a machine what takes time to make again: prepared rows, unpacked models, simulations."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return $FSDP_TRAINER_CACHE or, without it, fsdp_trainer in $XDG_CACHE_HOME or ~/.cache; nothing is made."""
    if chosen := os.environ.get("FSDP_TRAINER_CACHE"):
        return Path(chosen).expanduser()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home: a container's user without an entry
        base = tempfile.gettempdir()
    return Path(base) / "fsdp_trainer"
