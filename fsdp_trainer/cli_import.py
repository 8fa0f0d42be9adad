"""`fsdp-trainer import-deepspeed | import-accelerate | import-trainer`: other tools' settings, and what they become."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import apply_overrides, check_command_flags
from fsdp_trainer.interop.folder import build_config, format_command, stopping, write_import
from fsdp_trainer.interop.report import format_json, format_report
from fsdp_trainer.interop.verdicts import Import
from fsdp_trainer.progress import log_line

_OUT = typer.Option("--out", help="Folder for run.yaml, accelerate.yaml, report.md and report.json.", metavar="DIR")
_ALLOW = typer.Option("--allow-differences", help="Write also where keys are refused, without them.")
_WORLD = typer.Option("--world-size", help="Number of GPUs, where the file does not say it.", min=1, metavar="N")
_GPUS = typer.Option(
    "--gpus", help="Say what the run takes there, before and after: such as 8xA100-80GB.", metavar="GPUS"
)
_HOST_RAM = typer.Option("--host-ram", help="RAM of one machine, for the best alternative.", metavar="RAM")
_AS_JSON = typer.Option("--json", help="Print the report as JSON and nothing else.")
EPILOG = (
    "Settings such as --model.path=DIR --data.train=FILE go into run.yaml as well. Exit code 0: written; 2: something "
    "is refused, and nothing was written."
)
_FLAGS = ("--out", "--allow-differences", "--json", "--gpus", "--host-ram")  # of all three


def import_deepspeed(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A DeepSpeed configuration (JSON).", metavar="DS.JSON")],
    out: Annotated[Path, _OUT],
    training_args: Annotated[
        Path | None,
        typer.Option(help="Transformers' TrainingArguments (JSON or YAML), which fill in auto.", metavar="FILE"),
    ] = None,
    world_size: Annotated[int | None, _WORLD] = None,
    gpus: Annotated[str | None, _GPUS] = None,
    host_ram: Annotated[str | None, _HOST_RAM] = None,
    allow_differences: Annotated[bool, _ALLOW] = False,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Turn a DeepSpeed configuration into the same training on FSDP2, and say what becomes of every key."""
    from fsdp_trainer.interop import deepspeed

    imported = deepspeed.import_deepspeed(file, training_args=training_args, world_size=world_size)
    _finish(
        imported,
        out,
        words=context.args,
        flags=("--training-args", "--world-size"),
        allow=allow_differences,
        as_json=as_json,
        gpus=gpus,
        host_ram=host_ram,
    )


def import_accelerate(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="An Accelerate profile (YAML).", metavar="PROFILE.YAML")],
    out: Annotated[Path, _OUT],
    gpus: Annotated[str | None, _GPUS] = None,
    host_ram: Annotated[str | None, _HOST_RAM] = None,
    allow_differences: Annotated[bool, _ALLOW] = False,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Turn an Accelerate profile for FSDP1, FSDP2, DeepSpeed or DDP into settings and a profile for this trainer."""
    from fsdp_trainer.interop import accelerate_profile

    given: dict[str, Any] = {}
    apply_overrides(given, context.args, root=Config)
    model, micro_batch_size = given.get("model", {}).get("path"), given.get("batch", {}).get("micro_batch_size")
    imported = accelerate_profile.import_accelerate(file, model=model, micro_batch_size=micro_batch_size)
    _finish(imported, out, words=context.args, allow=allow_differences, as_json=as_json, gpus=gpus, host_ram=host_ram)


def import_trainer(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Transformers' TrainingArguments (JSON or YAML).", metavar="ARGS.JSON")],
    out: Annotated[Path, _OUT],
    world_size: Annotated[int | None, _WORLD] = None,
    gpus: Annotated[str | None, _GPUS] = None,
    host_ram: Annotated[str | None, _HOST_RAM] = None,
    allow_differences: Annotated[bool, _ALLOW] = False,
    as_json: Annotated[bool, _AS_JSON] = False,
) -> None:
    """Turn the arguments of a Transformers Trainer into settings, with the DeepSpeed or FSDP that they ask for."""
    from fsdp_trainer.interop import trainer

    imported = trainer.import_trainer(file, world_size=world_size)
    _finish(
        imported,
        out,
        words=context.args,
        flags=("--world-size",),
        allow=allow_differences,
        as_json=as_json,
        gpus=gpus,
        host_ram=host_ram,
    )


def _finish(
    imported: Import,
    out: Path,
    *,
    words: Sequence[str],
    flags: Sequence[str] = (),
    allow: bool,
    as_json: bool,
    gpus: str | None,
    host_ram: str | None,
) -> None:
    check_command_flags(words, root=Config, flags=(*_FLAGS, *flags))
    memory = None
    if gpus is not None and not stopping(imported, allow=allow):
        from fsdp_trainer.memory.import_memory import compare_memory  # here only: the other answers are there at once

        memory = compare_memory(build_config(imported, words), gpus, host_ram=host_ram)
    found = format_json(imported) | ({"memory": memory.to_json()} if memory is not None else {})
    print(json.dumps(found, indent=2) if as_json else format_report(imported))
    lines = memory.lines() if memory is not None else ()
    config = write_import(imported, out, overrides=words, allow=allow, memory=lines)
    if not as_json:
        for line in lines:
            log_line(line)
        log_line(f"\nwritten to {out}; start it with {format_command(imported, config, out)}")


COMMANDS = {
    "import-deepspeed": import_deepspeed,
    "import-accelerate": import_accelerate,
    "import-trainer": import_trainer,
}
