"""Damage a checkpoint and an exported model in every way a disk, a copy or a person can, and count what is found.

    python -m benchmarks.sweeps.damage [FOLDER --other FOLDER] [--flips 10000 --others 1000 --clean 1000 --seed 0]

Without a folder: those of a tiny run, made for it. Each damage is put into a copy, verified, and taken back. Nothing
may be missed, and an intact copy never refused.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import checkpoint_runs, models, training_runs
from tests.export_runs import export
from tests.ranks import run_ranks

BLOCK = 4096


@dataclass(frozen=True)
class Count:
    """How many damages of each kind were tried and found, false alarms on intact copies, and seconds a verification."""

    tried: Counter[str]
    found: Counter[str]
    clean: int
    false_alarms: int
    seconds: float

    @property
    def missed(self) -> int:
        return self.tried.total() - self.found.total()


def damage_folder(folder: Path, *, flips: int, others: int, clean: int, seed: int, other: Path | None = None) -> Count:
    """Damage a copy of a checkpoint or an export again and again; files of `other`, of the same run, are mixed in."""
    chance = random.Random(seed)
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch) / folder.name))
        files = {path.name: path.read_bytes() for path in copy.iterdir()}
        started = time.perf_counter()
        false_alarms = sum(is_found(copy) for _ in range(clean))
        seconds = (time.perf_counter() - started) / max(1, clean)
        for kind, damage in KINDS.items():
            for _ in range(flips if damage is flip_bit else others):
                name = pick_file(files, chance)
                damaged = damage(files[name], chance)
                if damaged != files[name]:  # a block of zeros may have been zeroed
                    (copy / name).write_bytes(damaged)
                    tried[kind] += 1
                    found[kind] += is_found(copy)
                    (copy / name).write_bytes(files[name])
        for kind, change in whole_file_changes(copy, files, other).items():
            change()
            tried[kind] += 1
            found[kind] += is_found(copy)
            shutil.rmtree(copy)
            copy.mkdir()
            for name, content in files.items():
                (copy / name).write_bytes(content)
        false_alarms += is_found(copy)
    return Count(tried, found, clean + 1, false_alarms, seconds)


def is_found(folder: Path) -> bool:
    """Return whether a checkpoint is refused by what a start asks first, or an export by `fsdp-trainer verify`."""
    from fsdp_trainer.checkpoint_search import find_damage_on_all
    from fsdp_trainer.export_checksums import find_export_damage

    look = find_damage_on_all if folder.name.startswith("step-") else find_export_damage
    return look(folder) is not None


def pick_file(files: dict[str, bytes], chance: random.Random) -> str:
    """Choose a file: by its size, but every fifth time any, since that would hardly ever hit the small ones."""
    if chance.random() < 0.2:
        return chance.choice(list(files))
    return chance.choices(list(files), weights=[len(content) for content in files.values()])[0]


def flip_bit(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def zero_block(content: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(max(1, len(content) // BLOCK)) * BLOCK
    length = min(BLOCK, len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def swap_blocks(content: bytes, chance: random.Random) -> bytes:
    size = min(BLOCK, len(content) // 2)
    first, second = sorted(chance.sample(range(len(content) // size), 2))
    one, two = (content[index * size : (index + 1) * size] for index in (first, second))
    return (
        content[: first * size]
        + two
        + content[(first + 1) * size : second * size]
        + one
        + content[(second + 1) * size :]
    )


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def lengthen(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.randint(1, BLOCK))


KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bit": flip_bit,
    "zeroed 4 KiB block": zero_block,
    "swapped blocks": swap_blocks,
    "truncated": truncate,
    "lengthened": lengthen,
}


def whole_file_changes(copy: Path, files: dict[str, bytes], other: Path | None) -> dict[str, Callable[[], object]]:
    """Return changes that concern whole files: missing, extra, two exchanged, or one from another checkpoint."""
    changes: dict[str, Callable[[], object]] = {}
    parts = [name for name in files if name.endswith((".distcp", ".safetensors"))]
    for name in files:
        changes[f"{name} missing"] = (copy / name).unlink
        changes[f"{name} became a folder"] = lambda name=name: ((copy / name).unlink(), (copy / name).mkdir())
        changes[f"{name} became a link"] = lambda name=name: (
            (copy / name).rename(copy.parent / "elsewhere"),
            (copy / name).symlink_to(copy.parent / "elsewhere"),
        )
        if other is not None and (other / name).is_file() and (other / name).read_bytes() != files[name]:
            changes[f"{name} of another one"] = lambda name=name: shutil.copy(other / name, copy / name)
    for name in ("__9_0.distcp", "notes.txt", ".hidden"):
        changes[f"{name} added"] = lambda name=name: (copy / name).write_bytes(b"x")
    changes["folder added"] = (copy / "folder").mkdir
    if len(parts) > 1:
        changes["parts exchanged"] = lambda: [
            (copy / a).write_bytes(files[b]) for a, b in zip(parts, parts[1:] + parts[:1], strict=True)
        ]
    return changes


def save_two(settings: dict[str, Any], folder: str) -> None:
    """On a rank: save and export a run after one step and after two, the export in several files."""
    run = checkpoint_runs.build(settings)
    for step in (1, 2):
        checkpoint_runs.take_steps(run, step - 1, step)
        checkpoint_runs.save(run, step)
        export(run, Path(folder) / f"model-{step}", max_file_bytes=100_000)


def make_folders(scratch: Path) -> list[tuple[Path, Path]]:
    """Return a checkpoint and an export of a tiny run on two ranks, each with another one of the same run."""
    model = run_ranks(models.save_model, 1, "llama", str(scratch / "start"))[0]
    run_ranks(save_two, 2, training_runs.settings(model, "unused.jsonl", scratch), str(scratch))
    checkpoints = scratch / "checkpoints"
    return [
        (checkpoints / "step-00000001", checkpoints / "step-00000002"),
        (scratch / "model-1", scratch / "model-2"),
    ]


def is_good(folder: Path, other: Path | None, asked: argparse.Namespace) -> bool:
    """Print what was found in a damaged copy of a folder; return whether it was all, and no intact one refused."""
    count = damage_folder(
        folder, flips=asked.flips, others=asked.others, clean=asked.clean, seed=asked.seed, other=other
    )
    for kind, tried in count.tried.items():
        print(f"{kind:50} {tried:6} tried {count.found[kind]:6} found")
    print(
        f"{folder.name}: {count.missed} of {count.tried.total()} missed; {count.false_alarms} of {count.clean} intact "
        f"ones refused; {count.seconds * 1e3:.2f} ms a verification",
        flush=True,
    )
    return count.missed == 0 and count.false_alarms == 0


def main() -> int:
    """Damage and count; 1 when anything was missed, or an intact one refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint or an export")
    parser.add_argument("--other", type=Path, help="another checkpoint or export of the same run, to mix files with")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--others", type=int, default=1_000)
    parser.add_argument("--clean", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [(asked.folder, asked.other)] if asked.folder else make_folders(Path(scratch))
        good = [is_good(folder, other, asked) for folder, other in folders]
    print(f"{sum(good)} of {len(good)} folders: all damage found, no intact copy refused")
    return int(not all(good))


if __name__ == "__main__":
    raise SystemExit(main())
