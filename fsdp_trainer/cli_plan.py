"""`fsdp-trainer plan`: what fits on GPUs that are named or here, which is fastest, and the files that start it."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import check_model_path
from fsdp_trainer.config_reading import check_command_flags
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.progress import log_error, log_line

FLAGS = (
    *("--config", "--gpus", "--host-ram", "--prefer", "--quick", "--json", "--write", "--picture"),
    *("--calibrate", "--top"),
)


def _named_folder(text: str) -> Path:
    """The folder of a flag; an empty word, from a variable that was not set, would be the one the user is in."""
    if not text.strip():
        raise ConfigError("No folder is named.", values=f"--write {text!r}", fix="name one, or . for this one")
    return Path(text)


def plan(
    context: typer.Context,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Such as 2xRTX4090, 2x8xH100-80GB, 2xCPU or a YAML file; default this machine's.", metavar="GPUS"
        ),
    ] = None,
    host_ram: Annotated[
        str | None,
        typer.Option(help="RAM of one machine, such as 128GiB; default this machine's, or not checked.", metavar="RAM"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).", metavar="RUN.YAML")] = None,
    prefer: Annotated[
        str, typer.Option(help="quality: fp32 masters before less; speed: whatever is fastest.", metavar="WHAT")
    ] = "quality",
    quick: Annotated[bool, typer.Option("--quick", help="By the closed form alone, in 2 seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Leave run.yaml, accelerate.yaml and plan.json in DIR.", metavar="DIR", parser=_named_folder),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the memory of the best one over time (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Folder of a finished run on such GPUs, to correct by.", metavar="RUN")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows of the table.", min=1, metavar="N")] = 10,
) -> None:
    """Say what fits on your GPUs and which is fastest: settings that are given stay, the rest is searched."""
    check_command_flags(context.args, root=Config, flags=FLAGS)
    settings = Config.load(config, list(context.args))
    if "model.path" not in settings.given:
        raise ConfigError(
            "Nothing says which model to plan for.",
            values="neither --model.path nor a settings file with model.path",
            fix="such as --model.path Qwen/Qwen2.5-7B, or a folder with a config.json",
        )
    check_model_path(settings.model.path)
    check_place("--write", write)
    check_place("--picture", picture.parent if picture is not None else None)
    from fsdp_trainer.memory.planning import plan as plan_for
    from fsdp_trainer.report.memory_picture import check_picture

    if picture is not None:
        check_picture(picture)

    if not as_json and not quick:
        log_error("planning: estimates first, then the best in full, some seconds for each ...")
    found = plan_for(
        settings,
        gpus,
        host_ram=host_ram,
        prefer=prefer,  # type: ignore[arg-type]  # checked there
        quick=quick,
        calibrate=calibrate,
    )
    started = _write(found, write) if write is not None and found.chosen is not None else []
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _show(found, top=top)
        if calibrate is not None:
            from fsdp_trainer.memory.calibration import describe_run

            log_line(describe_run(calibrate, model=settings.model.path))
    if picture is not None and found.chosen is not None:
        _draw(found, picture, quiet=as_json)
    for line in started:
        log_line(line, is_main=not as_json)
    if found.chosen is None:
        raise typer.Exit(ConfigError.exit_code)


def check_place(flag: str, folder: Path | None) -> None:
    """Refuse before the search a folder that cannot be made or written."""
    if folder is None:
        return
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is a file" if not nearest.is_dir() else "cannot be written by this user"
        raise ConfigError(
            f"Nothing can be written where {flag} says.",
            values=f"{folder}: {nearest} {what}",
            fix=f"give {flag} another place",
        )


def _show(found: Any, *, top: int) -> None:
    from fsdp_trainer.report.plan_text import format_plan

    # 120 columns say it all; what goes into a file or a pipe is kept to 80, which every reader has.
    width = min(120, max(72, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else _piped_width()
    log_line(format_plan(found.to_json(), _timeline(found), width=width, top=top))


def _piped_width() -> int:
    return min(120, max(72, shutil.get_terminal_size(fallback=(80, 24)).columns))


def _timeline(found: Any) -> Any:
    """The chosen run's memory over time; None where nothing was chosen."""
    if found.chosen is None:
        return None
    from fsdp_trainer.memory.planning import timeline_of

    return timeline_of(found)


def _draw(found: Any, path: Path, *, quiet: bool) -> None:
    from fsdp_trainer.report.memory_picture import draw_memory

    chosen = found.chosen
    title = f"{chosen.config.model.path} on {found.hardware}"
    drawn = draw_memory(_timeline(found), path, title=title, limit_bytes=chosen.prediction["limit"] * 2**30)
    log_line(f"picture: {drawn}", is_main=not quiet)


def _write(found: Any, folder: Path) -> list[str]:
    from fsdp_trainer.memory.plan_files import PROFILE_FILE, SETTINGS_FILE, write_plan
    from fsdp_trainer.run_folder import PREDICTION

    commands = write_plan(found, folder)
    lines = [f"wrote {', '.join(str(folder / name) for name in (SETTINGS_FILE, PROFILE_FILE, PREDICTION))}"]
    if "data.train" not in found.fixed:
        lines.append(f"data.train is {found.chosen.config.data.train} until you say otherwise")
    several = " on each machine, FIRST_MACHINE being the first one's address" if len(commands) > 1 else ""
    lines.append(f"start it with{several}:")
    return [*lines, *(f"  {command}" for command in commands)]
