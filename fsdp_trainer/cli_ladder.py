"""`fsdp-trainer ladder`: what each technique does to memory, speed and loss, one rung after the other."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import check_command_flags
from fsdp_trainer.errors import ConfigError, FsdpTrainerError
from fsdp_trainer.ladder_result import LADDER, PAGE, LadderResult
from fsdp_trainer.ladder_rungs import LEAST_STEPS, STEPS
from fsdp_trainer.progress import log_error, log_line

FLAGS = (
    *("--config", "--processes", "--steps", "--rungs", "--only", "--until-fits", "--skip-unfit", "--fresh", "--out"),
    "--json",
)


def climb(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).", metavar="RUN.YAML")] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Number of processes; default one per visible GPU, or 1 on CPU.", metavar="N"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each rung.", min=LEAST_STEPS, metavar="N")] = STEPS,
    rungs: Annotated[
        Path | None, typer.Option(help="Rungs of your own: a YAML list of {name, settings}.", metavar="FILE")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Measure these rungs of the ladder alone.", metavar="NAME,NAME")
    ] = None,
    until_fits: Annotated[bool, typer.Option("--until-fits", help="Stop at the first rung that gets through.")] = False,
    skip_unfit: Annotated[
        bool, typer.Option("--skip-unfit", help="Leave out rungs that are predicted not to fit.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier start in DIR has measured.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the ladder; default output_dir with -ladder.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ladder.json instead of a table.")] = False,
) -> None:
    """Measure one memory technique after the other, each on top of those before: peak memory, speed and loss."""
    check_command_flags(context.args, root=Config, flags=FLAGS)
    if config is None and not context.args:
        raise ConfigError(
            "Nothing says which model to measure on which data.",
            values="neither --config nor a setting",
            fix="give --config RUN.YAML, or at least --model.path and --data.train",
        )
    settings = Config.load(config, list(context.args))
    # Imported here: help and errors about settings answer without the planner.
    from fsdp_trainer.ladder_run import ladder
    from fsdp_trainer.report.ladder_text import format_ladder

    with _watching(quiet=as_json) as watch:
        found = ladder(
            settings,
            processes=processes,
            out=out,
            steps=steps,
            rungs=rungs,
            only=[name.strip() for name in only.split(",")] if only is not None else (),
            until_fits=until_fits,
            skip_unfit=skip_unfit,
            fresh=fresh,
            watch=watch,
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        log_line(format_ladder(found.to_json(), width=_width()))
        log_line(f"{found.folder / LADDER}, {found.folder / PAGE}")
    if found.fits is None:
        raise typer.Exit(FsdpTrainerError.exit_code)


def _width() -> int:
    return min(120, max(72, shutil.get_terminal_size(fallback=(80, 24)).columns))


@contextmanager
def _watching(*, quiet: bool) -> Iterator[Any]:
    """Give what shows the ladder as it grows: a table in a terminal, else a line for each thing that happens."""
    from fsdp_trainer.report.ladder_text import build_table

    console = Console(stderr=quiet, highlight=False)
    if not console.is_terminal:
        yield _say_lines(log_error if quiet else log_line)
        return
    # transient: what stays on the screen is the table that is printed at the end.
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(result: LadderResult, running: str | None, line: str) -> None:
            last = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
            live.update(Group(build_table(result.to_json(), live=True, running=running), last))

        yield show


def _say_lines(say: Any) -> Any:
    """Tell what happens to rungs; what a rung's own processes say stands in its folder."""

    def show(result: LadderResult, running: str | None, line: str) -> None:
        if line and (running is None or line.startswith(f"{running}: ")):
            say(line)

    return show
