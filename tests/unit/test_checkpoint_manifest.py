"""state.json finds every change of itself, and the work of hashing is shared out evenly and completely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash

from fsdp_trainer.checkpoint_manifest import (
    FORMAT,
    MAX_STATE_BYTES,
    Progress,
    find_damage,
    hash_file,
    read_state,
    share_files,
    write_state,
)


def make_checkpoint(folder: Path) -> Path:
    path = folder / "step-00000001"
    path.mkdir()
    (path / ".metadata").write_bytes(b"table")
    state: dict[str, Any] = {
        "format": FORMAT,
        "progress": vars(Progress(step=1)),
        "world_size": 1,
        "scaler": None,
        "facts": {"lr": 1e-05, "name": "é", "not a number": float("nan")},
        "files": {".metadata": {"bytes": 5, "xxh3_128": hash_file(path / ".metadata")}},
    }
    write_state(path, state)
    return path


def test_every_single_bit_of_the_state_counts(tmp_path: Path) -> None:
    """Also those that leave the parsed values as they were: `1e-05` and `1E-05` differ in one bit."""
    path = make_checkpoint(tmp_path)
    assert find_damage(path) is None
    state = path / "state.json"
    content = state.read_bytes()
    # In place: ext4 waits for the disk where a file is emptied and written again, thousands of times here.
    with state.open("r+b", buffering=0) as file:
        for index in range(len(content)):
            for bit in range(8):
                changed = bytearray(content)
                changed[index] ^= 1 << bit
                file.seek(0)
                file.write(changed)
                assert find_damage(path) is not None, (index, bit)


def test_writing_again_what_was_read_changes_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    before = (path / "state.json").read_bytes()
    write_state(path, read_state(path))
    assert (path / "state.json").read_bytes() == before


@pytest.mark.parametrize("text", ["[" * 10**6, '{"format": ' * 10**5, "null", "[]", '{"format": 2}', ""])
def test_what_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "state.json").write_text(text)
    assert "state.json cannot be read" in (find_damage(path) or "")


def test_a_huge_state_is_not_even_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    with (path / "state.json").open("wb") as file:
        file.truncate(MAX_STATE_BYTES + 1)
    assert "at most" in (find_damage(path) or "")


def test_a_file_is_hashed_across_blocks(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000  # 10 MB: more than two blocks, and a part of one
    (tmp_path / "part").write_bytes(content)
    assert hash_file(tmp_path / "part") == xxhash.xxh3_128(content).hexdigest()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_file_is_hashed_by_one_rank_and_all_have_about_as_much(world_size: int) -> None:
    files = {f"__{index}_0.distcp": {"bytes": 1000 + index} for index in range(24)}
    shares = [share_files(files, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name]["bytes"] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 1023
