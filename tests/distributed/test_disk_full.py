"""A disk that fills up in a save: every rank says so, nothing half-written stays, and the one before still loads."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests.ranks import run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
LARGEST = 64 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, whose size a test can change while it runs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={LARGEST}", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def save_on_disks_of_many_sizes(config: dict[str, Any], disk: str, steps: int, asynchronous: bool) -> dict[str, Any]:
    """Save again and again with room for 0 to 1.2 times a checkpoint; return what each save said and left."""
    import torch.distributed as dist

    from fsdp_trainer.agreement import run_on_main
    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    run, group, output = runs.build(config), runs.save_group(), Path(config["output_dir"])
    runs.take_steps(run, 0, 1)
    before = runs.local_digests(run)
    good = runs.save(run, 1, process_group=group).wait()
    size = sum(path.stat().st_size for path in good.iterdir())
    answers = []
    for number in range(steps):
        run_on_main(lambda number=number: resize(disk, room=int(1.2 * size * number / (steps - 1))))
        said = ""
        try:
            runs.save(run, 2, asynchronous=asynchronous, process_group=group).wait()
        except CheckpointError as error:
            said = str(error)
        run_on_main(lambda: resize(disk, room=None))
        found = find_checkpoint(output, resume="auto")
        assert found is not None
        runs.load(run, found, already_verified=True)
        wrong = runs.differing(before, runs.local_digests(run))
        names = sorted(path.name for path in (output / "checkpoints").iterdir())
        dist.barrier()
        run_on_main(lambda: [remove(path) for path in (output / "checkpoints").iterdir() if path != good])
        answers.append((said, found.name, names, wrong))
    return {"answers": answers, "size": size}


def remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path)


def resize(disk: str, *, room: int | None) -> None:
    """Give the file system so many free bytes, or all it can have."""
    import os

    stats = os.statvfs(disk)
    used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
    size = LARGEST if room is None else used + room
    subprocess.run(["mount", "-o", f"remount,size={max(size, 4096)}", disk], check=True)


def check_sweep(answers: list[dict[str, Any]], steps: int) -> tuple[int, int]:
    """Return how many saves failed and how many succeeded, after every one of them was looked at."""
    for rank, answer in enumerate(answers):
        assert len(answer["answers"]) == steps
        for (said, found, names, wrong), first in zip(answer["answers"], answers[0]["answers"], strict=True):
            assert bool(said) == bool(first[0]), f"rank {rank} heard something else than rank 0"
            assert wrong == []
            if said:
                assert "No space left on device" in said, said
                assert (found, names) == ("step-00000001", ["step-00000001"])
            else:
                assert found == "step-00000002"
    failed = sum(bool(said) for said, *_ in answers[0]["answers"])
    return failed, steps - failed


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "background"])
def test_disk_limits_swept(asynchronous: bool, small_disk: Path, model_folder: ModelFolder) -> None:
    """The kind of a full disk that leaves half a checkpoint, or costs the one before."""
    config = settings(model_folder("llama"), "unused.jsonl", small_disk / "run")
    answers = run_ranks(save_on_disks_of_many_sizes, 2, config, str(small_disk), 12, asynchronous, timeout=120.0)
    failed, succeeded = check_sweep(answers, 12)
    assert failed >= 8 and succeeded >= 1
