"""Whether the run that settings describe has ended already: told from its folder, before torch is imported.

Without this the same command would load everything only to export once more, over what the run has measured.
"""

from collections.abc import Collection
from pathlib import Path

from fsdp_trainer.config import Config, SourceConfig
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.resume_rules import find_changes
from fsdp_trainer.run_folder import CHECKSUMS, SETTINGS, STATUS, read_json
from fsdp_trainer.run_lock import is_held
from fsdp_trainer.units import format_number


def describe_finished(config: Config, *, unsaid: Collection[str] = ()) -> str | None:
    """Return the line about a run that has finished with these settings, None where there is something left to do.

    `unsaid` names settings that a plan chooses where `config` does not give them. Nothing is written, and of the files
    of the run only their sizes are looked at.
    """
    folder = Path(config.output_dir)
    status = read_json(folder / STATUS) or {}
    if status.get("state") != "finished" or is_held(folder):
        return None
    try:
        ended = Config.load(folder / SETTINGS)
    except FsdpTrainerError:  # gone, or of another version
        return None
    before, now = ended.to_dict(), config.to_dict()
    chosen = set(unsaid) - set(config.given)
    if any(change.name not in chosen for change in find_changes({"config": before}, {"config": now})):
        return None
    if before["checkpoint"]["resume"] != now["checkpoint"]["resume"] or _is_newer(config, status.get("updated")):
        return None
    if config.export.at_end and not _is_whole(folder / "model"):
        return None
    longer = "train.max_steps" if config.train.max_steps is not None else "train.epochs"
    return (
        f"finished already: {format_number(int(status.get('step') or 0), 'step')}, {folder} (nothing was touched; "
        f"to train on raise {longer}, to train anew set another output_dir)"
    )


def _is_newer(config: Config, ended: object) -> bool:
    """Return whether a local file of the data was changed after the run: its rows may be others, which a run finds."""
    if not isinstance(ended, int | float):
        return True
    for named in (config.data.train, config.data.eval):
        for entry in named if isinstance(named, list | tuple) else [named]:
            if not isinstance(entry, str | SourceConfig):
                continue
            path = Path(entry if isinstance(entry, str) else entry.path)
            files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            if any(file.stat().st_mtime > ended for file in files if file.exists()):
                return True
    return False


def _is_whole(model: Path) -> bool:
    listed = (read_json(model / CHECKSUMS) or {}).get("files")
    if not isinstance(listed, dict) or not listed:
        return False
    return all(
        isinstance(described, dict)
        and (model / name).is_file()
        and (model / name).stat().st_size == described.get("bytes")
        for name, described in listed.items()
        if name != "README.md"  # for readers, who may edit it
    )
