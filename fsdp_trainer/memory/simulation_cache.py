"""Keep simulations on disk by content: what was simulated once is there at once, and never after anything changed.

The key covers the settings, the model's own config, the GPUs, the versions of the libraries and our own source.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import Config, ModelConfig
from fsdp_trainer.hub import refuse_unreachable
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.simulation import Simulation, check_known
from fsdp_trainer.memory.timing import StepTime

_SIZES = ("allocated", "reserved", "min_capacity", "host", "limit")
_KEPT = {field.name for field in fields(Simulation)} - {"ledger", "config", "gpus"}
_TIMES = {field.name for field in fields(StepTime)}
_LIBRARIES = ("torch", "transformers", "accelerate")
# Settings that change neither what is held nor for how long; a path's content is in the model's config.
_NO_MATTER = ("output_dir", "log", "schedule", "profile", "rehearse")


def simulate_cached(
    config: Config, hardware: Hardware, *, expandable_segments: bool = True, folder: Path | None = None
) -> Simulation:
    """Return the simulation from `folder` (default: the user's cache), or make it and leave it there.

    One that comes from the cache has no ledger.
    """
    check_known(config)
    found = find_simulation(config, hardware, expandable_segments=expandable_segments, folder=folder)
    if found is not None:
        return found
    from fsdp_trainer.memory.simulate import simulate  # here only: an answer from the cache needs no torch

    made = simulate(config, hardware, expandable_segments=expandable_segments)
    values = {name: getattr(made, name) for name in sorted(_KEPT)}
    values["step_time"] = asdict(made.step_time) if made.step_time else None
    _write(_place(config, hardware, expandable_segments, folder), values)
    return made


def find_simulation(
    config: Config, hardware: Hardware, *, expandable_segments: bool = True, folder: Path | None = None
) -> Simulation | None:
    """Return the simulation that `folder` (default: the user's cache) has, without a ledger; None where it has none."""
    found = _read(_place(config, hardware, expandable_segments, folder))
    if found is None:
        return None
    found |= {"config": config.to_dict(), "gpus": str(hardware)}
    found["step_time"] = StepTime(**found["step_time"]) if found["step_time"] else None
    return Simulation(**found)


def _place(config: Config, hardware: Hardware, expandable_segments: bool, folder: Path | None) -> Path:
    return (folder or cache_folder() / "simulations") / f"{content_key(config, hardware, expandable_segments)}.json"


def content_key(config: Config, hardware: Hardware, expandable_segments: bool) -> str:
    """Return a hash of everything the result depends on."""
    settings: dict[str, Any] = config.to_dict()
    for name in _NO_MATTER:
        del settings[name]
    content = {
        "settings": settings,
        "model": _model_content(config.model),
        "hardware": asdict(hardware),
        "expandable_segments": expandable_segments,
        "versions": {name: version(name) for name in _LIBRARIES},
        "source": _source_hash(),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _model_content(model: ModelConfig) -> dict[str, str]:
    """Return the text of the model's config and of its own code, from the folder or the hub's cache on this machine."""
    folder = Path(model.path)
    if folder.is_file() or any(folder.glob("*.gguf")):  # its config is inside: too large to read, so told by its date
        packed = [folder] if folder.is_file() else sorted(folder.iterdir())
        return {path.name: f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in packed}
    if not folder.is_dir():
        refuse_unreachable(model.path, revision=model.revision)
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(hf_hub_download(model.path, "config.json", revision=model.revision)).parent
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return {}  # `simulate` says in words what is wrong with it, and nothing is kept
    files = [folder / "config.json", *(folder.glob("*.py") if model.trust_remote_code else ())]
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()}


@cache
def _source_hash() -> str:
    """Hash our own source: the run that is simulated is this code."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.csv")]):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    """Return what was kept; None, so that it is made anew, where nothing was or it is no simulation."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != _KEPT:
        return None
    time = found["step_time"]
    if time is not None and not (isinstance(time, dict) and time.keys() == _TIMES):
        return None
    sizes = [found[name] for name in _SIZES]
    for table in (found["phases"], found["breakdown"]):
        if not isinstance(table, dict):
            return None
        sizes += table.values()
    return found if all(isinstance(size, int) for size in sizes) else None


def _write(path: Path, values: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # read-only or full: the answer is there without it
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(values, file)
            os.replace(name, path)  # readers see all of it or nothing
        except BaseException:  # Ctrl-C too
            os.unlink(name)
            raise
