"""Python code that comes with a model: run only where asked for, from one pinned commit, and known by its digest.

`model.trust_remote_code` lets Transformers run it; what is here says which code that may be, gives the export a copy,
and lets a resume notice that it is no longer the same.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock
from transformers import PreTrainedConfig, dynamic_module_utils

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.weight_files import download

COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_CODE_BYTES = 2**24


def check_custom_code(path: str, *, revision: str | None) -> None:
    """Refuse code that is not pinned: `path` on the hub without a commit, or code of another repository than the model.

    Reads config.json alone and runs nothing. To be called before Transformers is told to trust the code.
    """
    try:
        settings, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    except (OSError, ValueError):  # said better by whoever reads the config next
        return
    references = _references(settings.get("auto_map"))
    if not references:
        return
    others = [reference for reference in references if "--" in reference and reference.split("--")[0] != path]
    if others:
        raise ConfigError(
            "The model's code lies in another repository than the model, where no commit of it is pinned.",
            values=f"model.path: {path}, auto_map: {', '.join(others)}",
            fix="download both, put the .py files beside config.json, and set model.path to that folder",
        )
    if not Path(path).exists() and not COMMIT.fullmatch(revision or ""):
        raise ConfigError(
            "Code from the hub is run from a pinned commit alone: a branch or tag can move between two starts.",
            values=f"model.path: {path}, model.revision: {revision or 'main'}, code: {', '.join(references)}",
            fix="read the code, then set model.revision to the 40 digits of the commit that you read",
        )


@contextmanager
def one_at_a_time(*, trust_remote_code: bool) -> Iterator[None]:
    """Let one process at a time import a model's code: Transformers copies it to a cache that the ranks share."""
    if not trust_remote_code:
        yield
        return
    cache = Path(dynamic_module_utils.HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "fsdp_trainer.lock"):
        yield


def building_arguments(hf_config: Any, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return what `from_config` needs so that a model's class comes from the same commit as its config.

    It would take the code of the main branch otherwise (Transformers 5.24, auto_factory.py, `from_config`).
    """
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    commit = getattr(hf_config, "_commit_hash", None)
    if trust_remote_code and commit and "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {}):
        arguments["code_revision"] = commit
    return arguments


def read_custom_code(hf_config: Any) -> dict[str, bytes]:
    """Return the `.py` files beside the config that names them, by their path in the folder; none without an auto_map.

    ConfigError for more code than a model has, or for a link that leads out of the folder.
    """
    if not _references(getattr(hf_config, "auto_map", None)):
        return {}
    path, commit = hf_config._name_or_path, getattr(hf_config, "_commit_hash", None)
    folder = Path(path) if Path(path).is_dir() else download(path, revision=commit, patterns=["*.py"])
    files = sorted(file for file in folder.rglob("*.py") if file.is_file())
    # The hub's cache holds links into its blobs, and nothing that the repository could point elsewhere.
    stray = [] if commit else [file for file in files if not file.resolve().is_relative_to(folder.resolve())]
    size = sum(file.stat().st_size for file in files)
    if stray or size > MAX_CODE_BYTES:
        raise ConfigError(
            "The model's code is not just a few files in its folder.",
            values=f"{stray[0]} leads out of it" if stray else f"{folder}: {len(files)} .py files of {size} bytes",
            fix="keep in the model's folder what config.json names, and nothing else that ends in .py",
        )
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def digest_of_code(files: Mapping[str, bytes]) -> str | None:
    """Return a digest of names and contents; None for a model without code of its own."""
    if not files:
        return None
    digest = xxhash.xxh3_128()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def write_custom_code(hf_config: Any, folder: Path) -> None:
    """Copy the model's code beside the config just written to `folder`, which then names it without a repository."""
    for name, content in read_custom_code(hf_config).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def local_auto_map(auto_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return an auto_map whose classes lie in the folder itself, not in a repository on the hub."""

    def local(reference: Any) -> Any:
        if isinstance(reference, list | tuple):
            return [local(one) for one in reference]
        return reference.split("--")[-1] if isinstance(reference, str) else reference

    return {name: local(reference) for name, reference in auto_map.items()}


def _references(auto_map: Any) -> list[str]:
    values = auto_map.values() if isinstance(auto_map, Mapping) else []
    found = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [reference for reference in found if isinstance(reference, str)]
