"""Where this package keeps on a machine what takes time to make again: prepared rows, unpacked models, simulations."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return $FSDP_TRAINER_CACHE or, without it, fsdp_trainer in $XDG_CACHE_HOME or ~/.cache; nothing is made."""
    if chosen := os.environ.get("FSDP_TRAINER_CACHE"):
        return Path(chosen).expanduser()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # no home: a container's user without an entry
        base = tempfile.gettempdir()
    return Path(base) / "fsdp_trainer"


def remembered(kind: str, key: Sequence[str], modules: Iterable[str], make: Callable[[], Sequence[Any]]) -> list[Any]:
    """Return what `make` returned when it was last asked under the same `key`, as JSON has it; it is kept in a file.

    Other versions of torch or Transformers are asked anew, as are other texts of the `modules` of this package that the
    answer rests on. A file that cannot be read is made anew, and a place that cannot be written only costs the next
    start its seconds.
    """
    from fsdp_trainer.run_folder import parse_json, write_text_atomically

    made_by = [version("torch"), version("transformers")]
    made_by += [(Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in modules]
    name = hashlib.sha256(json.dumps([*key, *made_by]).encode()).hexdigest()[:32]
    place = cache_folder() / kind / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        if isinstance(found := parse_json(place.read_text(encoding="utf-8")), list):
            return found
    text = json.dumps(list(make()))
    with contextlib.suppress(OSError):
        write_text_atomically(place, text)
    return json.loads(text)
