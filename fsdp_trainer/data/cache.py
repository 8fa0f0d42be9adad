"""Where the prepared rows of a data set are kept: a folder named by a hash of everything they depend on.

A changed file, tokenizer, template or setting gives another folder, so nothing stale is ever read.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import transformers
import xxhash

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.sources import Named, resolve_paths, resolve_sources
from fsdp_trainer.data.template_files import read_chat_template
from fsdp_trainer.errors import DataError
from fsdp_trainer.run_folder import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]
_HASHES = "hashes.json"
_CACHE_FORMAT = 6  # raise it when the same input would give other rows


def evaluation_source(data: DataConfig) -> Named | None:
    """Return what split="eval" is read from: `data.eval`, or `data.train` when it is a share of that; None for none."""
    return data.train if isinstance(data.eval, float | int) else data.eval


def evaluation_share(data: DataConfig) -> float | None:
    """Return the share of `data.train` that evaluates; None where evaluation has files of its own or none."""
    return data.eval if isinstance(data.eval, float) else None


def compares_with_training(data: DataConfig, *, split: Split) -> bool:
    """Tell whether the report of these rows counts the records that train as well, for which `data.train` is read."""
    return split == "eval" and evaluation_share(data) is None and not data.streaming


def cache_path(
    source: Named,
    *,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    split: Split = "train",
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
) -> Path:
    """Return the folder for these rows: named by a hash of the files' bytes, the tokenizer and every setting used."""
    sources = resolve_sources(source)
    paths = [path for one in sources for path in one.files]
    share = evaluation_share(data)
    settings = {
        "version": (_CACHE_FORMAT, transformers.__version__),
        "files": [_file_hash(path) for path in paths],
        "sources": [len(one.files) for one in sources],  # each is packed apart; how they are mixed changes no row
        "train": [_file_hash(path) for path in resolve_paths(data.train)]
        if compares_with_training(data, split=split)
        else None,
        "names": [str(path) for path in paths],  # they stand in the report's messages
        "tokenizer": _tokenizer_hash(tokenizer),
        "chat_template": read_chat_template(data.chat_template, tokenizer=tokenizer),
        "split": (split, share, seed) if share else None,
        "vocab_size": vocab_size,
        "stop_ids": sorted(stop_ids),
        "data": {
            name: getattr(data, name)
            for name in (
                "format",
                "columns",
                "train_on",
                "seq_len",
                "packing",
                "on_too_long",
                "on_bad_record",
                "sanitize_control_tokens",
            )
        },
    }
    digest = _hash_json(settings)
    root = Path(data.cache_dir).expanduser() if data.cache_dir else cache_folder() / "data"
    return root / f"{paths[0].stem}-{split}-{digest}"


def write_hashes(folder: Path) -> None:
    """Write the hashes of all files of a folder beside them, with a hash of the list itself."""
    hashes = {path.name: _file_hash(path) for path in sorted(folder.iterdir())}
    (folder / _HASHES).write_text(json.dumps(hashes | {_HASHES: _hash_json(hashes)}), encoding="utf-8")


def remove_damaged(folder: Path) -> str | None:
    """Remove prepared rows of which a byte is not as it was written; return what was found, None where all is whole.

    Reads all of them: from the page cache 5 to 10 GB a second.
    """
    read = _identity(folder)
    if read is None or (damage := _find_damage(folder)) is None:
        return None
    # Out of the way in one operation: another run may still read these files, or be about to build them.
    try:
        aside = Path(tempfile.mkdtemp(prefix=".damaged.", dir=folder.parent))
        if _identity(folder) == read:  # else another machine built them anew meanwhile
            folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise DataError(
            "the prepared rows are damaged and cannot be removed",
            values=f"{folder}: {damage}; {error}",
            fix="delete this folder, or set data.cache_dir to another one",
        ) from error
    return damage


def _identity(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.exists() else None


def _find_damage(folder: Path) -> str | None:
    try:
        written = (folder / _HASHES).read_bytes()
        hashes = parse_json(written)
        listed = hashes.pop(_HASHES)
        if listed != _hash_json(hashes) or json.dumps(hashes | {_HASHES: listed}).encode() != written:
            return f"{_HASHES} is not as it was written"
        return next(
            (f"{name} is not as it was written" for name in hashes if _file_hash(folder / name) != hashes[name]), None
        )
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{_HASHES} is not as it was written"


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash what the tokenizer does, not where it came from: vocabulary, merges, added tokens, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = {"special": tokenizer.special_tokens_map, "kind": type(tokenizer).__name__}
    if backend is None:
        return _hash_json(state | {"vocab": tokenizer.get_vocab()})
    text: str = backend.to_str()
    # Before it stand truncation and padding alone, which an earlier call set and nothing here uses. Inside a string its
    # quotes would be escaped. Parsing the text would cost a quarter of a second and 40 MiB.
    behind = text.index(',"added_tokens":')
    return _hash_json(state | {"backend": xxhash.xxh3_128_hexdigest(text[behind:].encode())})


def _hash_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())
