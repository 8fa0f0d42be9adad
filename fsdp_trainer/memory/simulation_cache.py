"""Keep simulations on disk by content: what was simulated once is there at once, and never after anything changed.

The name of an entry covers the settings, the model's own config, the GPUs and the versions of the libraries. The entry
itself lists the files of this package that the simulation used, with their hashes, and counts as long as each is as it
was: an edit to a report's page throws nothing away. A look-up hashes those files again, without torch.
"""

import ast
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import version
from importlib.util import resolve_name
from pathlib import Path
from time import time_ns
from typing import Any

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import Config, ModelConfig
from fsdp_trainer.hub import refuse_unreachable
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.simulation import Simulation, check_known
from fsdp_trainer.memory.timing import StepTime
from fsdp_trainer.run_folder import parse_json, write_text_atomically

_SIZES = ("allocated", "reserved", "min_capacity", "host", "limit")
_KEPT = {field.name for field in fields(Simulation)} - {"ledger", "config", "gpus"}
_TIMES = {field.name for field in fields(StepTime)}
_LIBRARIES = ("torch", "transformers", "accelerate")
# Settings that change neither what is held nor for how long; a path's content is in the model's config.
_NO_MATTER = ("output_dir", "log", "schedule", "profile", "rehearse")
_PACKAGE = Path(__file__).resolve().parents[1]
# What a simulation uses is reached from here by imports; this module decides what is the same simulation.
_USED_FIRST = ("fsdp_trainer.memory.simulate", __name__)
_DATA = (".csv", ".yaml")
_LOADED_NS = time_ns()


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
    files = _files_used()
    if files is not None:
        values = {name: getattr(made, name) for name in sorted(_KEPT)}
        values["step_time"] = asdict(made.step_time) if made.step_time else None
        _write(_place(config, hardware, expandable_segments, folder), {**values, "files": files})
    return made


def find_simulation(
    config: Config, hardware: Hardware, *, expandable_segments: bool = True, folder: Path | None = None
) -> Simulation | None:
    """Return the simulation that `folder` (default: the user's cache) has, without a ledger; None where it has none."""
    found = _read(_place(config, hardware, expandable_segments, folder))
    if found is None:
        return None
    del found["files"]
    found |= {"config": config.to_dict(), "gpus": str(hardware)}
    found["step_time"] = StepTime(**found["step_time"]) if found["step_time"] else None
    return Simulation(**found)


def _place(config: Config, hardware: Hardware, expandable_segments: bool, folder: Path | None) -> Path:
    return (folder or cache_folder() / "simulations") / f"{content_key(config, hardware, expandable_segments)}.json"


def content_key(config: Config, hardware: Hardware, expandable_segments: bool) -> str:
    """Return a hash of everything the result depends on but this package, whose files the entry lists."""
    settings: dict[str, Any] = config.to_dict()
    for name in _NO_MATTER:
        del settings[name]
    content = {
        "settings": settings,
        "model": _model_content(config.model),
        "hardware": asdict(hardware),
        "expandable_segments": expandable_segments,
        "versions": {name: version(name) for name in _LIBRARIES},
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


def _files_used() -> dict[str, str] | None:
    """Return the files of ours that a simulation in this process used, as paths in the package, each with its hash.

    None where one was written since this process began: what is loaded may be what stood in it before.
    """
    try:
        hashes = {name: _hash(name) for name in _names_used()}
        # The change time, since a copy may set the other one back; looked at last, for a write while we read.
        written = max((_PACKAGE / name).stat().st_ctime_ns for name in hashes)
    except (OSError, SyntaxError, ValueError):  # gone, or in the middle of an edit
        return None
    return hashes if written < _LOADED_NS else None


def _names_used() -> list[str]:
    """Follow the imports of loaded modules from `_USED_FIRST`; return their files, and the data beside them.

    All that is loaded would be too much: in `fsdp-trainer simulate` that is the commands and their reports as well.
    What is reached but not loaded is an import in a function that was never called.
    """
    modules: dict[str, str] = {}
    waiting = list(_USED_FIRST)
    while waiting:
        name = waiting.pop()
        if name in modules or name not in sys.modules or name.partition(".")[0] != "fsdp_trainer":
            continue
        parent = name.rpartition(".")[0]
        is_package = hasattr(sys.modules[name], "__path__")
        modules[name] = "/".join([*name.split(".")[1:], *(["__init__"] if is_package else [])]) + ".py"
        waiting.append(parent)  # its __init__ runs first
        waiting += _imported_names((_PACKAGE / modules[name]).read_bytes(), package=name if is_package else parent)
    folders = {(_PACKAGE / name).parent for name in modules.values()}
    data = [path for folder in folders for path in folder.iterdir() if path.suffix in _DATA]
    return sorted([*modules.values(), *(path.relative_to(_PACKAGE).as_posix() for path in data)])


def _imported_names(source: bytes, *, package: str) -> Iterator[str]:
    """Yield what may be a module in the imports of a module of `package`, those inside functions too.

    Without those for type checkers. Modules that are imported by a string are not seen: only the package's own
    `__init__` does that, for users of its public names.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _hash(name: str) -> str:
    stat = (_PACKAGE / name).stat()
    return _hash_content(_PACKAGE / name, stat.st_ctime_ns, stat.st_size)


@cache
def _hash_content(path: Path, changed_ns: int, size: int) -> str:
    """Read a file again only where it was written to.

    A plan looks up a hundred simulations, each of a hundred files. Once a process would be too seldom: a notebook lives
    on after an edit, and what it asks for is simulated in new processes, from the files as they are now.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _are_unchanged(files: Any) -> bool:
    """Return whether `files`, as an entry has it, lists files in the package, and each is as it was."""
    if not isinstance(files, dict) or not files:
        return False
    if any(name.startswith("/") or ".." in name.split("/") for name in files):  # leads elsewhere: not ours
        return False
    try:
        return all(_hash(name) == value for name, value in files.items())
    except (OSError, ValueError):  # gone, or no name of a file
        return False


def _read(path: Path) -> dict[str, Any] | None:
    """Return what was kept; None, so that it is made anew, where nothing was, it is no simulation or of other files."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != _KEPT | {"files"}:
        return None
    time = found["step_time"]
    if time is not None and not (isinstance(time, dict) and time.keys() == _TIMES):
        return None
    sizes = [found[name] for name in _SIZES]
    for table in (found["phases"], found["breakdown"]):
        if not isinstance(table, dict):
            return None
        sizes += table.values()
    return found if all(isinstance(size, int) for size in sizes) and _are_unchanged(found["files"]) else None


def _write(path: Path, values: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # read-only or full: the answer is there without it
        write_text_atomically(path, json.dumps(values))
