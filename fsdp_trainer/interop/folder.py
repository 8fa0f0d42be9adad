"""Writes what an import found: settings, Accelerate profile and report, in a folder that holds none of them yet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config, dump_settings
from fsdp_trainer.config_reading import apply_overrides, merge_settings
from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.interop.report import format_json, format_markdown
from fsdp_trainer.interop.verdicts import Import, Verdict
from fsdp_trainer.launch_profile import write_profile

SETTINGS, PROFILE, REPORT, REPORT_JSON = "run.yaml", "accelerate.yaml", "report.md", "report.json"
_NAMED = 20  # refused keys that an error names; the report has all
_MISSING = ("--world-size N", "--training-args FILE")  # flags that say what a file leaves to its program


def build_config(imported: Import, overrides: Sequence[str] = ()) -> Config:
    """Return the imported settings with `--section.key=value` words over them.

    Raises ConfigError where the settings do not fit together, or not the number of processes.
    """
    settings = merge_settings({}, imported.settings())
    try:
        apply_overrides(settings, overrides, root=Config)
        config = Config.from_dict(settings)
        if imported.processes is not None:
            config.check_world(imported.processes)
    except ConfigError as error:
        fix = error.fix or "correct the file, or give --section.key=value to say it otherwise"
        raise ConfigError(
            f"{error.what} (settings made from {imported.source})", values=error.values, fix=fix
        ) from None
    return config


def write_import(
    imported: Import,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    allow: bool = False,
    memory: Sequence[str] = (),
) -> Config:
    """Write run.yaml, accelerate.yaml, report.md and report.json; return the settings.

    `memory` are lines that the report ends with: what the run takes, before and after.

    Raises ConfigError, and writes nothing, where something is refused that `allow` does not let pass, where the
    settings do not fit together, and where the folder holds one of these files; OutputError where it cannot be written.
    """
    folder = Path(folder)
    check_refused(imported, allow=allow)
    config = build_config(imported, overrides)
    _check_folder(folder)
    try:
        _write_files(imported, config, folder, memory=memory)
    except OSError as error:
        found = f"{error.filename or folder}: {error.strerror}"
        raise OutputError("The import cannot be written.", values=found, fix="give another --out") from None
    return config


def _write_files(imported: Import, config: Config, folder: Path, *, memory: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(_format_settings(imported, config), encoding="utf-8")
    if imported.processes is not None:
        write_profile(
            folder / PROFILE,
            config,
            processes=imported.processes,
            use_cpu=imported.use_cpu,
            further=imported.profile,
        )
    (folder / REPORT).write_text(format_markdown(imported, config, memory=memory), encoding="utf-8")
    (folder / REPORT_JSON).write_text(json.dumps(format_json(imported), indent=2) + "\n", encoding="utf-8")


def format_command(imported: Import, config: Config, folder: str | Path) -> str:
    """Return the command that starts the imported run, with what the files do not say left open."""
    folder, defaults = Path(folder), Config()
    command = f"fsdp-trainer train --config {folder / SETTINGS}"
    if imported.processes is not None:
        command += f" --profile {folder / PROFILE}"
    if config.model.path == defaults.model.path:
        command += " --model.path=MODEL"
    return command + (" --data.train=FILE" if config.data.train == defaults.data.train else "")


def stopping(imported: Import, *, allow: bool) -> list[Verdict]:
    """Return the refused keys that nothing is written with; `allow` lets pass those something can stand in for."""
    return [verdict for verdict in imported.of_kind("refused") if verdict.blocks or not allow]


def check_refused(imported: Import, *, allow: bool) -> None:
    """Raise ConfigError that names the refused keys; `allow` lets pass those that something can stand in for."""
    found = stopping(imported, allow=allow)
    if not found:
        return
    count = "1 key is" if len(found) == 1 else f"{len(found)} keys are"
    raise ConfigError(
        f"{count} refused, so nothing was written",
        values=_places(found),
        fix=f"{_fix(found)}; the report says why",
    )


def _places(verdicts: Sequence[Verdict]) -> str:
    """Name keys with line and column, and their file once."""
    places: dict[str, list[str]] = {}
    for verdict in verdicts[:_NAMED]:
        key = verdict.key
        places.setdefault(key.file, []).append(f"{key.name} ({key.line}:{key.column})")
    named = "; ".join(f"{file}: {', '.join(names)}" for file, names in places.items())
    return named + (f" and {len(verdicts) - _NAMED} more" if len(verdicts) > _NAMED else "")


def _fix(verdicts: Sequence[Verdict]) -> str:
    """Say which flags give what the file leaves open, and whether it must be corrected besides."""
    flags = [flag for flag in _MISSING if any(flag.split()[0] in verdict.text for verdict in verdicts)]
    rest = [verdict for verdict in verdicts if not any(flag.split()[0] in verdict.text for flag in flags)]
    fixes = [f"give {' and '.join(flags)}"] if flags else []
    if any(verdict.blocks for verdict in rest):
        fixes.append("correct the file")
    elif rest:
        fixes.append("change the file, or give --allow-differences to go on without them")
    return "; ".join(fixes)


def _check_folder(folder: Path) -> None:
    for parent in (folder, *folder.parents):
        if parent.exists() and not parent.is_dir():
            raise ConfigError("the folder to write is a file", values=str(parent), fix="give another --out")
    there = [name for name in (SETTINGS, PROFILE, REPORT, REPORT_JSON) if (folder / name).exists()]
    if there:
        raise ConfigError(
            "the folder holds such files already, and nothing is written over",
            values=f"{folder}: {', '.join(there)}",
            fix="give another --out, or take these files away",
        )


def _format_settings(imported: Import, config: Config) -> str:
    """Return what differs from the defaults and what the import decided, so that the file says all that was meant."""
    values, defaults, decided = config.to_dict(), Config().to_dict(), imported.settings()
    kept: dict[str, Any] = {}
    for section, held in values.items():
        if not isinstance(held, Mapping):
            if section in decided or held != defaults[section]:
                kept[section] = held
            continue
        names = [name for name in held if f"{section}.{name}" in decided or held[name] != defaults[section][name]]
        if names:
            kept[section] = {name: held[name] for name in names}
    head = f"# From {imported.source} ({imported.tool}); {REPORT} says what became of every key.\n"
    lacking = [
        name for name in ("model.path", "data.train") if name.split(".")[1] not in kept.get(name.split(".")[0], {})
    ]
    if lacking:
        head += f"# It says nothing of {' and '.join(lacking)}: give them here or as --{lacking[0]}=...\n"
    return head + dump_settings(kept)
