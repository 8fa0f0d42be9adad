"""What an export by hand reads and where it writes, checked before torch is imported: a bad path is refused at once."""

from pathlib import Path

from fsdp_trainer.checkpoint_folder import published
from fsdp_trainer.checkpoint_manifest import STATE_FILE, find_damage
from fsdp_trainer.errors import CheckpointError, ConfigError
from fsdp_trainer.run_folder import SETTINGS


def find_run(source: Path) -> tuple[Path, bool]:
    """Return the run folder of `source`, and whether `source` is one of its checkpoints and not the folder itself.

    ConfigError when it is neither, CheckpointError for a checkpoint whose files are not those of its manifest, and for
    a run without any.
    """
    is_checkpoint = (source / STATE_FILE).is_file() or source.parent.name == "checkpoints"
    run = source.parent.parent if is_checkpoint else source
    settings = run / SETTINGS
    if not settings.is_file():
        raise ConfigError(
            "This is no run folder and no checkpoint in one.",
            values=f"{source}: there is no {settings}" if source.exists() else f"{source} does not exist",
            fix="give the output_dir of a run, or one of the folders in its checkpoints/",
        )
    if is_checkpoint and (damage := find_damage(source)) is not None:
        raise CheckpointError(
            "This is no complete and intact checkpoint.",
            values=f"{source}: {damage}",
            fix="use another checkpoint of the run, or restore this one from a copy",
        )
    if not is_checkpoint and not published(run):
        raise CheckpointError(
            "The run has no complete checkpoint.", values=str(run), fix="train until its first checkpoint is saved"
        )
    return run, is_checkpoint


def check_new(out: Path) -> None:
    """Refuse an output folder that holds something, or is a file."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "The folder to write exists and is not empty.", values=f"--out {out}", fix="name a new folder, or empty it"
        )
