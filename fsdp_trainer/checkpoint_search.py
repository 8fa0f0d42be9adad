"""Find the checkpoint to go on from: every byte of it is read and compared before any weight of it is used.

All ranks take part: each hashes its share of the files, and all come to one verdict.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_trainer.agreement import gather_from_all, is_main, run_on_main
from fsdp_trainer.checkpoint_folder import published
from fsdp_trainer.checkpoint_manifest import find_changed_bytes, find_damage, read_state, share_files
from fsdp_trainer.checkpoint_pace import waiting_for
from fsdp_trainer.checkpoint_table import read_table
from fsdp_trainer.errors import CheckpointError

logger = logging.getLogger(__name__)


def find_checkpoint(
    output_dir: Path,
    *,
    resume: str,
    process_group: dist.ProcessGroup | None = None,
    log: Callable[[str], None] = logger.warning,
) -> Path | None:
    """Return the checkpoint to go on from, complete and intact, the same on all ranks. Collective.

    `resume` is auto (the newest intact one; each newer one that was skipped is logged with the reason), never, or the
    path of one. CheckpointError on every rank when that one is damaged, or when all that there are have been: to start
    anew over them would throw the run away.
    """
    if resume == "never":
        return None
    if resume != "auto":
        refuse_damage(Path(resume), process_group=process_group)
        return Path(resume)
    skipped: list[str] = []
    for path in run_on_main(lambda: published(Path(output_dir)), process_group=process_group):
        damage = find_damage_on_all(path, process_group=process_group)
        if damage is None:
            return path
        skipped.append(f"{path}: {damage}")
        if is_main(process_group):
            log(f"skipped {path}: {damage}")
    if skipped:
        raise CheckpointError(
            "No checkpoint of this run is intact.",
            values="; ".join(skipped),
            fix="restore one from a copy, or move them away to start anew",
        )
    return None


def refuse_damage(path: Path, *, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise CheckpointError on all ranks, naming the file, unless `path` is a complete and intact checkpoint."""
    if (damage := find_damage_on_all(path, process_group=process_group)) is not None:
        raise CheckpointError(
            "This is no complete and intact checkpoint.",
            values=f"{path}: {damage}",
            fix="name another one, or set checkpoint.resume: auto to take the newest intact one",
        )


def find_damage_on_all(path: Path, *, process_group: dist.ProcessGroup | None = None) -> str | None:
    """Return why the checkpoint at `path` must not be used, or None, the same on all ranks. Reads every byte of it."""

    def look() -> tuple[str | None, dict[str, Any]]:
        damage = find_damage(path)
        return damage, {} if damage else read_state(path)["files"]

    damage, files = run_on_main(look, process_group=process_group)
    if damage is not None:
        return damage
    rank, world_size = (
        (dist.get_rank(process_group), dist.get_world_size(process_group)) if dist.is_initialized() else (0, 1)
    )
    mine = share_files(files, rank=rank, world_size=world_size)
    with waiting_for(f"Verifying {path}", sum(file["bytes"] for file in files.values()), process_group=process_group):
        found = gather_from_all(lambda: find_changed_bytes(path, files, mine), process_group=process_group)
    if (damage := next(filter(None, found), None)) is not None:
        return damage
    return run_on_main(lambda: _find_table_damage(path, files), process_group=process_group)


def _find_table_damage(path: Path, files: dict[str, Any]) -> str | None:
    # Bytes that are as they were written can still be somebody else's: a hash is no signature.
    try:
        read_table(path, {name: file["bytes"] for name, file in files.items()})
    except CheckpointError as error:
        return error.values.removeprefix(f"{path}/")
    return None
