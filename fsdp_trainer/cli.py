"""The `fsdp-trainer` command: reads the settings, refuses what is wrong at once, and starts the run.

Nothing here imports torch, so help and errors answer in well under a second.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdp_trainer import __version__, cli_import, cli_ladder, cli_plan, cli_report, cli_watch
from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import check_command_flags
from fsdp_trainer.errors import ConfigError, FsdpTrainerError
from fsdp_trainer.launch import Machines, launch
from fsdp_trainer.memory.simulation_text import format_simulation
from fsdp_trainer.progress import bear_any_text, log_error, log_line, make_console
from fsdp_trainer.run_folder import CHECKSUMS, STATUS, explain_no_room

app = typer.Typer(
    name="fsdp-trainer",
    help="Full-parameter fine-tuning of Hugging Face causal LMs on PyTorch FSDP2 through Accelerate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fsdp-trainer {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every setting can be given as --section.key=value, as in --optim.lr=1e-5; `fsdp-trainer schema` lists "
    "them. A flag wins over the file, the file over the defaults.",
)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).", metavar="RUN.YAML")] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Number of processes, of all machines; default one per visible GPU, or 1 on CPU.", metavar="N"
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Accelerate profile; without it, one is written for this machine.", metavar="FILE"),
    ] = None,
    resume_anyway: Annotated[
        str | None,
        typer.Option(help="Settings that may differ from the checkpoint's (docs/resuming.md).", metavar="NAME,NAME"),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="auto: plan for this machine what no setting says of memory and speed.", metavar="auto"),
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Machines of this run; give the same command on each.", min=1, metavar="N")
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="Which of the machines this is, the first being 0.", metavar="R")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Where the first machine is reached from all.", metavar="HOST[:PORT]")
    ] = None,
) -> None:
    """Fine-tune a model: every process is started, watched and, on Ctrl-C or SIGTERM, saved before it ends."""
    if config is None and not context.args:
        raise ConfigError(
            "nothing says what to train",
            values="neither --config nor a setting",
            fix="give --config RUN.YAML, such as one of configs/recipes/, or at least --model.path and --data.train",
        )
    flags = ("--config", "--processes", "--profile", "--resume-anyway", "--plan", "--nodes", "--node-rank", "--address")
    check_command_flags(context.args, root=Config, flags=flags)
    words = list(context.args)
    if resume_anyway is not None:
        words.append(f"--checkpoint.resume_anyway=[{resume_anyway}]")
    settings = Config.load(config, words)
    if plan not in (None, "auto"):
        fix = "write --plan auto; a plan that was written is started with --config DIR/run.yaml"
        raise ConfigError("This is no plan.", values=f"--plan {plan}", fix=fix)
    arguments = ["--config", str(config)] if config is not None else []
    arguments += ["--plan", plan] if plan is not None else []  # all ranks plan: rank 0 decides (train.py)
    machines = _machines(nodes, node_rank=node_rank, address=address)
    arguments += words
    started = time.time()
    code = launch(
        settings,
        arguments=arguments,
        profile=profile,
        processes=processes,
        machines=machines,
        typed=["fsdp-trainer", *sys.argv[1:]],
        unsaid=_planned() if plan is not None else (),
    )
    if code and not node_rank:
        _finish_report(settings, since=started)
    raise typer.Exit(code)


def _planned() -> Sequence[str]:
    from fsdp_trainer.memory.plan_files import PLANNED  # here: the planner's code is read by those who plan

    return PLANNED


def _finish_report(settings: Config, *, since: float) -> None:
    """Write report.html where rank 0 of a run that failed had no time to, or wrote it before the last was known."""
    folder = Path(settings.output_dir)
    status = folder / STATUS
    if not settings.log.report or not status.is_file() or status.stat().st_mtime < since:
        return  # not this run's folder: it ended before it began
    from fsdp_trainer.report.run_html import is_stale, leave_report

    if is_stale(folder):
        leave_report(folder)


def _machines(nodes: int, *, node_rank: int | None, address: str | None) -> Machines | None:
    if nodes > 1:
        return Machines.parse(nodes, rank=node_rank, address=address)
    if node_rank or address is not None:
        values = f"--node-rank {node_rank}" if node_rank else f"--address {address}"
        raise ConfigError("A run on one machine has no others to meet.", values=values, fix="give --nodes as well")
    return None


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Settings are given as for `train`; nothing is trained and no weight is loaded.",
)
def data(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).", metavar="RUN.YAML")] = None,
    rows: Annotated[int, typer.Option(help="Rows to show, spread over the data.", min=0, metavar="N")] = 2,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the records' lengths into a picture (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the prepared rows for the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON and nothing else.")] = False,
) -> None:
    """Show what a run would train on: counts, lengths, rows with their targets, and what looks wrong."""
    flags = ("--config", "--rows", "--plot", "--write", "--json")
    check_command_flags(context.args, root=Config, flags=flags)
    settings = Config.load(config, context.args)
    with _says_when_stopped("nothing is left behind"):
        _show_data(settings, rows=rows, plot=plot, write=write, as_json=as_json)


def _show_data(settings: Config, *, rows: int, plot: Path | None, write: bool, as_json: bool) -> None:
    # Imported here: help and errors about settings answer without torch.
    from fsdp_trainer.hub import refuse_unreachable_model
    from fsdp_trainer.preview import check_plot, preview_data, save_plot

    check_plot(plot)
    refuse_unreachable_model(settings.model.path, tokenizer=settings.model.tokenizer, revision=settings.model.revision)
    with preview_data(settings, write=write, show=not as_json) as preview:
        if as_json:
            print(json.dumps(preview.to_dict(), indent=2))
        else:
            for line in preview.format_lines(samples=rows, colour=make_console().is_terminal):
                log_line(line)
        if plot is not None:
            save_plot(preview, plot)


@contextmanager
def _says_when_stopped(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        log_error(f"stopped by Ctrl-C; {what}")
        raise


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder (its newest checkpoint), or one checkpoint.", metavar="RUN")],
    out: Annotated[Path, typer.Option(help="New folder to write.", metavar="DIR")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default the run's export.dtype.", metavar="DTYPE")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder: without the training processes, in one process on the CPU."""
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise ConfigError("This dtype cannot be exported.", values=f"--dtype {dtype}", fix="use fp32, bf16 or fp16")
    # Before the import that brings torch: a wrong path is said at once.
    from fsdp_trainer.export_source import check_new, find_run

    find_run(run)
    check_new(out)
    from fsdp_trainer.offline_export import export_checkpoint

    export_checkpoint(run, out, dtype=dtype)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def simulate(
    context: typer.Context,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Such as 8xH100-80GB, 2x8xA100-80GB, 2xCPU or a YAML file; default this machine's.", metavar="GPUS"
        ),
    ] = None,
    host_ram: Annotated[
        str | None, typer.Option(help="RAM of one machine, such as 128GiB; default not checked.", metavar="RAM")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (YAML).", metavar="RUN.YAML")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    classic: Annotated[
        bool,
        typer.Option(
            "--classic-segments", help="As with PYTORCH_ALLOC_CONF=expandable_segments:False; a run has True."
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Closed form: an estimate, at once, of the common architectures.")
    ] = False,
    picture: Annotated[
        str | None, typer.Option(help="Draw memory over time: a .png file, or - for the terminal.", metavar="FILE")
    ] = None,
) -> None:
    """Say what a run would take on GPUs you name, by running it on fake tensors: needs a config.json and no GPU."""
    flags = ("--config", "--gpus", "--host-ram", "--json", "--classic-segments", "--quick", "--picture")
    check_command_flags(context.args, root=Config, flags=flags)
    if as_json and picture == "-":
        raise ConfigError("JSON and a picture do not go together.", values="--json --picture -", fix="name a file")
    settings = Config.load(config, list(context.args))
    from fsdp_trainer.memory.hardware import detect, parse_gpus
    from fsdp_trainer.report.memory_picture import check_picture

    if picture not in (None, "-"):
        check_picture(picture)
    hardware = parse_gpus(gpus) if gpus is not None else detect()
    settings.check_world(hardware.count)
    ram = None
    if host_ram is not None:
        from fsdp_trainer.memory.planning import read_ram

        ram = read_ram(host_ram)
    with _says_when_stopped("nothing is left behind"):
        result, text, timeline = (_quick if quick else _simulate)(settings, hardware, classic, picture is not None)
    if ram is not None:
        from fsdp_trainer.memory.simulation_text import check_host

        result, line = check_host(result, ram, ranks=hardware.gpus_per_node, on_cpu=hardware.is_cpu)
        text = f"{text}\n{line}"
    print(json.dumps(result, indent=2) if as_json else text)
    if picture == "-":
        from fsdp_trainer.report.memory_picture import format_memory

        log_line(format_memory(timeline))
    elif picture is not None:
        from fsdp_trainer.report.memory_picture import draw_memory

        title = f"{settings.model.path} on {hardware}"
        path = draw_memory(timeline, picture, title=title, limit_bytes=result["limit"] * 2**30)
        log_line(f"picture: {path}", is_main=not as_json)


def _quick(settings: Config, hardware: Any, classic: bool, with_timeline: bool) -> tuple[dict[str, Any], str, Any]:
    from fsdp_trainer.memory.quick import format_quick, quick_timeline, simulate_quick

    if classic:
        raise ConfigError(
            "The closed form knows no allocator.", values="--quick --classic-segments", fix="leave out one of them"
        )
    result = simulate_quick(settings, hardware)
    return result, format_quick(result), quick_timeline(settings, hardware) if with_timeline else None


def _simulate(settings: Config, hardware: Any, classic: bool, with_timeline: bool) -> tuple[dict[str, Any], str, Any]:
    from fsdp_trainer.memory.simulation_process import hide_gpus

    hide_gpus(os.environ)  # before torch is imported
    if with_timeline:  # what the cache keeps has none
        from fsdp_trainer.memory.simulate import simulate

        found = simulate(settings, hardware, expandable_segments=not classic)
    else:
        from fsdp_trainer.memory.simulation_cache import simulate_cached

        found = simulate_cached(settings, hardware, expandable_segments=not classic)
    result = found.to_json()
    timeline = found.ledger.timeline if found.ledger is not None else None
    return result, format_simulation(result, gpus=str(hardware), on_cpu=hardware.is_cpu), timeline


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Settings are given as for `train`; data.train is not needed. See docs/planning.md.",
)(cli_plan.plan)
app.command()(cli_report.report)


app.command()(cli_watch.watch)
app.command()(cli_watch.runs)
app.command(
    name="ladder",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Settings are given as for `train`. See docs/ladder.md.",
)(cli_ladder.climb)


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(help="A checkpoint (step-...), an exported model, or a run folder.", metavar="FOLDER")
    ],
) -> None:
    """Read every byte of a checkpoint or an exported model and compare it with what was written."""
    from fsdp_trainer.export_checksums import verify_export

    for part in _verifiable(folder):
        if (part / CHECKSUMS).exists():
            verify_export(part)
        else:
            from fsdp_trainer.checkpoint_search import refuse_damage  # torch comes with it; an export needs none

            refuse_damage(part)
        print(f"{part}: every byte is as it was written")


def _verifiable(folder: Path) -> list[Path]:
    """Return the checkpoints and exported models that `folder` is or, as a run folder, has."""
    if (folder / CHECKSUMS).exists() or folder.name.startswith("step-"):
        return [folder]
    found = [*sorted(folder.glob("checkpoints/step-*")), *(p.parent for p in folder.glob(f"model/{CHECKSUMS}"))]
    if not found:
        what = "The folder does not exist." if not folder.exists() else "This is neither a checkpoint nor an export."
        raise ConfigError(
            what,
            values=f"{folder} has no {CHECKSUMS} and holds no checkpoints",
            fix="give checkpoints/step-N of a run, an exported folder, or a run folder for all it has",
        )
    return found


for _name, _command in cli_import.COMMANDS.items():
    app.command(
        name=_name,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        epilog=cli_import.EPILOG,
    )(_command)


@app.command()
def profile(
    gpus: Annotated[
        str | None,
        typer.Option(help="Such as 2xRTX4090, 2x8xH100-80GB or 2xCPU; default this machine's.", metavar="GPUS"),
    ] = None,
) -> None:
    """Print an Accelerate profile for GPUs you name, as `accelerate launch --config_file` takes it."""
    from fsdp_trainer.interop.gpu_profile import format_profile
    from fsdp_trainer.memory.hardware import detect, parse_gpus

    print(format_profile(parse_gpus(gpus) if gpus is not None else detect()), end="")


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs are to be written.", metavar="DIR")] = Path("runs"),
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Try the collectives between two or more ranks.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what this machine has, what it means for a run, and what would break one (then the exit code is 1)."""
    # Imported here: help and errors about settings answer without torch.
    from fsdp_trainer.doctor import any_broken, examine, to_json
    from fsdp_trainer.report.findings import format_findings

    findings = examine(folder, self_test=self_test, say=log_error)  # not among the findings, which may go to a file
    print(json.dumps(to_json(findings), indent=2) if as_json else format_findings(to_json(findings)["findings"]))
    if any_broken(findings):
        raise typer.Exit(1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the settings file, with the reason and the trade-off of every setting."""
    print(json.dumps(Config.model_json_schema(), indent=2))


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    bear_any_text()
    try:
        app(args=list(words) if words is not None else None, standalone_mode=True)
    except FsdpTrainerError as error:
        log_error(error.headed())
        sys.exit(error.exit_code)
    except Exception as error:
        if (full := explain_no_room(error)) is None:
            raise
        log_error(full.headed())
        sys.exit(full.exit_code)
