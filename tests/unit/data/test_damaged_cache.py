"""Prepared rows of which a byte changed are found and built anew, whatever changed and in whichever file."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.cache import remove_damaged, write_hashes
from fsdp_trainer.data.prepare import prepare_rows

CASES = 200


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(path: Path, *, draw: random.Random) -> str:
    """Flip a bit, zero a stretch, or cut the end of a file; return what was done. The bytes do change."""
    before = path.read_bytes()
    while True:
        kind = draw.choice(["flip", "zero", "cut", "cut to nothing", "append", "remove"])
        at = draw.randrange(len(before))
        after = bytearray(before)
        if kind == "flip":
            after[at] ^= 1 << draw.randrange(8)
        elif kind == "zero":
            end = min(len(before), at + draw.randint(1, 64))
            after[at:end] = bytes(end - at)
        elif kind == "append":
            after += bytes([draw.randrange(256)])
        else:
            after = after[: 0 if kind == "cut to nothing" else at]
        if kind == "remove":
            path.unlink()
            return kind
        if after != before:
            path.write_bytes(after)
            return f"{kind} at {at}"


@pytest.fixture
def cached(prepared, jsonl, tmp_path: Path):
    """Return a function that prepares the same rows again, and the folder of their cache."""
    path = jsonl(*({"prompt": f"hello {number}", "completion": f"fox {number}"} for number in range(50)))
    prepared(path)
    (folder,) = (tmp_path / "cache").iterdir()
    return (lambda: prepared(path)), folder


def test_damage_of_every_kind_in_every_file_is_found_and_built_anew(cached) -> None:
    again, folder = cached
    written = digest(folder)
    assert remove_damaged(folder) is None
    draw = random.Random(17)
    names = sorted(written)
    for case in range(CASES):
        name = names[case % len(names)]
        done = damage(folder / name, draw=draw)
        rows, report = again()
        assert any("were damaged" in warning and name in warning for warning in report.warnings), (name, done)
        assert digest(folder) == written, (name, done)
        assert rows.n_documents == 50
    assert not any("were damaged" in warning for warning in again()[1].warnings)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing damaged is kept beside it


def test_inverted_targets_are_not_trained_on(cached) -> None:
    again, folder = cached
    expected = np.array(again()[0].supervised)
    mask = np.load(folder / "supervised.npy")
    np.save(folder / "supervised.npy", ~mask)
    rows, report = again()
    assert np.array_equal(rows.supervised, expected)
    assert f"the prepared rows in {folder} were damaged (supervised.npy" in "".join(report.warnings)


def test_rows_that_another_run_has_mapped_stay_readable_while_they_are_built_anew(cached) -> None:
    again, folder = cached
    rows, _ = again()
    tokens = rows.tokens.tolist()
    (folder / "report.json").write_text("{}")
    again()
    assert rows.tokens.tolist() == tokens


def test_a_folder_without_its_hashes_is_not_believed(cached) -> None:
    again, folder = cached
    (folder / "hashes.json").unlink()
    assert re.search("hashes.json cannot be read", "".join(again()[1].warnings))
    (folder / "hashes.json").write_text("[]")
    assert re.search("hashes.json is not as it was written", "".join(again()[1].warnings))


def test_only_the_process_that_builds_verifies(jsonl, tokenizer, tmp_path: Path) -> None:
    path = jsonl({"text": "hello fox"})
    data = DataConfig(train=str(path), cache_dir=str(tmp_path / "cache"), seq_len=64)
    calls: list[str] = []

    def wait() -> None:
        calls.append("waited")
        prepare_rows(path, data=data, tokenizer=tokenizer, seed=0)

    prepare_rows(path, data=data, tokenizer=tokenizer, seed=0)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "tokens.npy").write_bytes(b"")
    rows, report = prepare_rows(path, data=data, tokenizer=tokenizer, seed=0, is_writer=False, wait=wait)
    assert calls == ["waited"]
    assert rows.n_documents == 1
    assert not report.warnings


def test_the_list_of_hashes_is_hashed_itself(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a").write_bytes(b"one")
    write_hashes(folder)
    written = (folder / "hashes.json").read_bytes()
    for at in range(len(written)):
        shutil.copytree(folder, tmp_path / "copy")
        (tmp_path / "copy" / "hashes.json").write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
        assert remove_damaged(tmp_path / "copy") is not None, at
        assert not (tmp_path / "copy").exists()
