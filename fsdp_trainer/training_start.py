"""Where a run begins: at its newest checkpoint, another one, or step 0; and whether its length makes sense."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from fsdp_trainer.agreement import run_on_main
from fsdp_trainer.checkpoint_folder import published, remove_leftovers
from fsdp_trainer.checkpoint_manifest import read_state
from fsdp_trainer.checkpoint_search import find_checkpoint
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.export_folder import recover
from fsdp_trainer.progress import log_line
from fsdp_trainer.resume_rules import check_resume
from fsdp_trainer.runtime import Runtime
from fsdp_trainer.units import format_number


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a run's numbers depend on."""
    return {"torch": torch.__version__, "accelerate": accelerate.__version__, "transformers": transformers.__version__}


def find_start(config: Config, runtime: Runtime, output_dir: Path, *, facts: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint to go on from, after what kills left is put right.

    CheckpointError on every rank when it is of another run than `facts` describe; what else changed is logged.
    """
    resume, newest = run_on_main(lambda: _choose_start(config.checkpoint.resume, output_dir))
    found = find_checkpoint(output_dir, resume=resume, log=log_line)
    if resume != "auto" and newest is not None and (found is None or found.resolve() != newest):
        raise ConfigError(
            "The run folder holds newer checkpoints: auto would take them up again later, a new run would delete them.",
            values=f"checkpoint.resume: {resume}, newest {newest}",
            fix="set another output_dir, set checkpoint.resume: auto, or move the newer checkpoints away",
        )
    if found is not None:
        anyway = config.checkpoint.resume_anyway
        compare = partial(check_resume, now=facts, anyway=anyway, source=str(found))
        for line in run_on_main(lambda: compare(read_state(found)["facts"])):
            log_line(line, is_main=runtime.is_main)
    return found


def _choose_start(resume: str, output_dir: Path) -> tuple[str, Path | None]:
    """Return where to look for a checkpoint and the newest in `output_dir`, after what kills left is put right.

    A path outside a folder that has checkpoints of its own is where the folder's run once began: that run goes on.
    """
    remove_leftovers(output_dir)
    recover(output_dir / "model")
    newest = next((path.resolve() for path in published(output_dir)), None)
    elsewhere = (
        resume not in ("auto", "never") and newest is not None and Path(resume).resolve().parent != newest.parent
    )
    if elsewhere:
        log_line(f"{output_dir} has checkpoints of its own: going on from those, not from {resume}")
    return ("auto" if elsewhere else resume), newest


def check_length(config: Config, *, total_steps: int, step: int) -> None:
    """Refuse settings that cannot take effect in a run of this length, known only now."""
    warmup, every = config.schedule.warmup_steps, config.eval.every_steps
    if warmup is not None and warmup > total_steps:
        raise ConfigError(
            "The warm-up is longer than the run, so the learning rate never gets to optim.lr.",
            values=f"schedule.warmup_steps: {warmup}, {format_number(total_steps, 'step')} in all",
            fix=f"set schedule.warmup_steps to at most {total_steps}, or train longer",
        )
    if config.data.eval is not None and not config.eval.at_end and every is not None and every > total_steps:
        raise ConfigError(
            "The held-out data would never be measured.",
            values=f"eval.every_steps: {every}, eval.at_end: false, {format_number(total_steps, 'step')} in all",
            fix="set eval.at_end: true, or lower eval.every_steps",
        )
    if step > total_steps:
        raise ConfigError(
            "The run is further than the steps asked for.",
            values=f"the checkpoint is at step {step}, the settings make {format_number(total_steps, 'step')}",
            fix="raise train.max_steps or train.epochs, or set checkpoint.resume to an earlier checkpoint elsewhere",
        )


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Flatten nested settings into what trackers accept as hyperparameters."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str | int | float | bool) else str(value)
    return flat
