"""From `data.train` or `data.eval` to records: which files they name, and what each record in them holds.

A broken record takes its place in the stream, named by file and line: whether it stops the run is not decided here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from fsdp_trainer.config import DataConfig, SourceConfig
from fsdp_trainer.data.formats import Chat, Plain, RecordError, canonical
from fsdp_trainer.data.known_keys import Shape, columns_to_read
from fsdp_trainer.data.readers import (
    HOW_TO_WRITE,
    MAX_RECORD_BYTES,
    ONE_OBJECT_A_LINE,
    START,
    Mark,
    Record,
    file_kind,
    read_records,
    refuse_unreadable,
)
from fsdp_trainer.data.shapes import example_from_record, recognise_shape, refuse_second_shape
from fsdp_trainer.errors import DataError
from fsdp_trainer.run_folder import parse_json

_SPLIT_NAME = re.compile(
    r"(?:^|[-_. /])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?=[-_. /0-9])", re.IGNORECASE
)
_BESIDE_DATA = {"dataset_info.json", "dataset_infos.json"}
Named = str | Path | SourceConfig | Sequence[str | SourceConfig]  # what data.train and data.eval may be


@dataclass(frozen=True)
class BadRecord:
    """One record that cannot be used: `kind` is what such records are counted under, `where` is file:line."""

    kind: str
    where: str
    what: str

    def error(self) -> DataError:
        """Return the error that stops a strict run."""
        return DataError(
            f"{self.where}: {self.what}",
            fix="repair this record, or set data.on_bad_record: skip to leave such records out (they are counted)",
        )


@dataclass(frozen=True)
class Example:
    """One usable record: its content, its place, and a hash of its content that decides the side of a split."""

    content: Chat | Plain
    where: str
    digest: int
    unread: tuple[str, ...] = ()  # the columns of the record that nothing reads


@dataclass(frozen=True)
class Source:
    """Files that are read one after another and packed together; `weight` is None where nothing is mixed."""

    files: tuple[Path, ...]
    weight: float | None = None


def resolve_sources(named: Named) -> tuple[Source, ...]:
    """Return the sources of `data.train` or `data.eval`: one a weight, or a single one of all files without weights.

    Folders are searched through, a folder that `datasets` saved and a hub id give their Arrow files.
    """
    entries = [named] if isinstance(named, str | Path | SourceConfig) else list(named)
    if not entries:
        raise DataError("no data file is named", fix="set data.train to a file, a folder, a hub id or a list of them")
    sources = [entry if isinstance(entry, SourceConfig) else SourceConfig(path=str(entry)) for entry in entries]
    files = [_files_of(source) for source in sources]
    if sources[0].weight is None:  # the settings refuse weights for some only
        return (Source(tuple(file for group in files for file in group)),)
    return tuple(Source(group, source.weight) for source, group in zip(sources, files, strict=True))


def resolve_paths(named: Named) -> list[Path]:
    """Return the files of `data.train` or `data.eval` in the order they are read."""
    return [file for source in resolve_sources(named) for file in source.files]


def reading_of(data: DataConfig) -> dict[str, Any]:
    """Return what the settings say of how records are read, for `read_examples` and `read_file`."""
    return {"record_format": data.format, "columns": data.columns, "max_bytes": data.max_record_mib * 2**20}


def read_examples(
    paths: Sequence[Path],
    *,
    record_format: str = "auto",
    columns: Mapping[str, str] | None = None,
    max_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Example | BadRecord]:
    """Yield the records of the files in order; each file keeps to one format, the one of its first good record."""
    for path in paths:
        for example, _ in read_file(path, record_format=record_format, columns=columns, max_bytes=max_bytes):
            yield example


def read_file(
    path: Path,
    *,
    record_format: str = "auto",
    columns: Mapping[str, str] | None = None,
    start: Mark = START,
    max_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[tuple[Example | BadRecord, Mark]]:
    """Yield the records of one file from a mark on, each with the mark behind it; refuse a file without any."""
    columns = columns or {}
    wanted = partial(columns_to_read, columns=columns, record_format=record_format)
    read = partial(read_records, path, wanted=wanted, max_bytes=max_bytes)
    shape = None
    if start != START:  # the file's first good record is behind
        shape = _shape_of(read(), record_format=record_format, columns=columns)
    empty = True
    for record in read(start=start):
        empty = False
        try:
            value = _renamed(record, columns)
            shape = shape or recognise_shape(value, record_format=record_format, renamed=columns)
            content, unread = example_from_record(value, shape)
            refuse_second_shape(value, shape, record_format=record_format, renamed=columns)
        except RecordError as error:
            beside = record.unread if error.kind in ("unknown format", "missing field") else ()
            what = error.what + (f"; the file also has the columns {sorted(beside)}" if beside else "")
            yield BadRecord(kind=error.kind, where=record.where, what=what), record.after
        else:
            digest = xxhash.xxh3_64_intdigest(canonical(content))
            yield Example(content, record.where, digest, unread + record.unread), record.after
    if empty and start == START:
        fix = HOW_TO_WRITE.get(file_kind(path) or "", ONE_OBJECT_A_LINE)
        raise DataError("the data file holds no records", values=str(path), fix=fix)


def _shape_of(records: Iterable[Record], *, record_format: str, columns: Mapping[str, str]) -> Shape | None:
    for record in records:
        try:
            return recognise_shape(_renamed(record, columns), record_format=record_format, renamed=columns)
        except RecordError:
            continue
    return None


def _renamed(record: Record, columns: Mapping[str, str]) -> dict[str, Any]:
    if isinstance(record.value, RecordError):
        raise record.value
    if not columns:
        return record.value
    if missing := [name for name in columns.values() if name not in record.value]:
        raise RecordError(
            "missing field", f"no {missing[0]!r}, which data.columns names; the record has {sorted(record.value)}"
        )
    taken = set(columns.values())
    kept = {key: value for key, value in record.value.items() if key not in taken}
    return kept | {key: record.value[name] for key, name in columns.items()}


# Files


def _files_of(source: SourceConfig) -> tuple[Path, ...]:
    path = Path(source.path).expanduser()
    if not path.exists():
        if not _may_be_hub_id(source.path):
            raise DataError(
                "the data file does not exist",
                values=f"{path} (looked in {Path.cwd()})",
                fix="give the path of a file or folder, or a hub id such as org/name"
                + ("; patterns are not expanded: name the folder, or a list" if set("*?[") & set(source.path) else ""),
            )
        _refuse_unreachable(source)
        return _hub_files(source)
    if not path.is_file() and not path.is_dir():
        raise DataError(
            "the data file is a device, a pipe or a socket",
            values=str(path),
            fix="write what comes out of it to a file: data are read more than once",
        )
    for key in ("split", "subset"):
        if getattr(source, key) is not None:
            raise DataError(
                f"{key} has no effect on local files",
                values=f"{source.path}, {key}: {getattr(source, key)}",
                fix=f"leave it out, and name the files of that {key}",
            )
    if path.is_file():
        refuse_unreadable(path)
        return (path,)
    return _folder_files(path)


def _folder_files(folder: Path) -> tuple[Path, ...]:
    """Return the data files below a folder, in the order of their names.

    Hidden files and folders (. or _ in front) are not data, nor is what hub repositories keep beside it.
    """
    below = sorted(_files_below(folder, above=frozenset()))
    seen = [path for path in below if not any(part[0] in "._" for part in path.relative_to(folder).parts)]
    files = tuple(path for path in seen if file_kind(path) is not None and path.name not in _BESIDE_DATA)
    if not files:
        names = ", ".join(path.name for path in seen[:5]) or "nothing"
        raise DataError(
            "the folder holds no data files",
            values=f"{folder} holds {names}",
            fix="put .jsonl, .json, .parquet, .csv, .tsv, .txt or .arrow files in it (also as .gz or .zst)",
        )
    _refuse_mixed_splits(folder, files)
    return files


def _refuse_mixed_splits(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder with files for training and for testing, by the words that `datasets` looks for in names.

    All of it would be trained on, and an evaluation on the rest say nothing.
    """
    found: dict[str, Path] = {}
    for path in files:
        if (match := _SPLIT_NAME.search(path.relative_to(folder).as_posix())) is not None:
            found.setdefault(match.group(1).lower(), path)
    if any(name.startswith("train") for name in found) and not all(name.startswith("train") for name in found):
        raise DataError(
            "the folder holds files of several splits",
            values=f"{folder}: {', '.join(path.name for path in found.values())}",
            fix="name the files or folders to train on, as a list, and those to evaluate on in data.eval",
        )


def _files_below(folder: Path, *, above: frozenset[Path]) -> Iterator[Path]:
    """Yield the files of a folder and of all in it; links to folders are followed (Path.rglob does not before 3.13)."""
    real = folder.resolve()
    if real in above:  # a link to a folder that it stands in
        return
    if (folder / "dataset_dict.json").is_file():
        splits = parse_json((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise DataError(
            "the folder holds several splits that datasets saved",
            values=f"{folder}: {', '.join(splits)}",
            fix=f"name one of them, such as {folder / splits[0]}",
        )
    if _is_saved(folder):
        yield from _saved_files(folder)
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, above=above | {real})
        elif path.is_file():
            yield path


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_files(folder: Path) -> tuple[Path, ...]:
    """Return the Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote."""
    try:
        state = parse_json((folder / "state.json").read_text(encoding="utf-8"))
        files = tuple(folder / file["filename"] for file in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the folder is not one that datasets saved", values=f"{folder}/state.json: {error}", fix="save it again"
        ) from error
    if not files:
        raise DataError("the saved data set holds no records", values=str(folder), fix=HOW_TO_WRITE["table"])
    if missing := [file for file in files if not file.is_file()]:
        raise DataError("a file of the saved data set is missing", values=str(missing[0]), fix="copy the whole folder")
    return files


def _may_be_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and name[0] not in ".~" and file_kind(Path(name)) is None


def _refuse_unreachable(source: SourceConfig) -> None:
    """Ask the hub once for a data set that is in no cache; `datasets` would go on asking for half a minute."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    owner, name = source.path.split("/")
    cached = Path(config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(name)}"
    if config.HF_HUB_OFFLINE or cached.is_dir():
        return
    try:
        HfApi(endpoint=config.HF_ENDPOINT).dataset_info(source.path, timeout=10)
    except HfHubHTTPError:  # it answered: `datasets` says what is wrong
        return
    except Exception as error:  # of the HTTP library, which differs between releases of the hub's
        raise _not_loaded(source, f"the hub cannot be reached ({error}), and it is in no cache here") from error


def _not_loaded(source: SourceConfig, reason: str) -> DataError:
    return DataError(
        "the hub data set cannot be loaded",
        values=f"{source.path} (no such file or folder here), split {source.split or 'train'}: {reason}",
        fix="correct the path; or check the id, split, subset and connection, or save the data set once with "
        "Dataset.save_to_disk and name that folder",
    )


def _hub_files(source: SourceConfig) -> tuple[Path, ...]:
    """Return the Arrow files that `datasets` makes of a hub data set in its own cache."""
    import datasets

    split = source.split or "train"
    if not re.fullmatch(r"[\w.-]+", split):  # its files hold the whole split all the same
        raise DataError("only a whole split is read", values=f"split: {split}", fix="name one split, such as train")
    try:
        found = datasets.load_dataset(source.path, name=source.subset, split=split)
    except Exception as error:  # it has no common base: connection, missing split, missing subset, a script
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _not_loaded(source, reason) from error
    if not found.cache_files:
        raise _not_loaded(source, "it holds no records")
    return tuple(Path(file["filename"]) for file in found.cache_files)
