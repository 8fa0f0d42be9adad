"""Where simulations are kept: an answer is never lost to a cache that cannot be used, nor kept past a change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.memory import simulation_cache
from fsdp_trainer.memory.hardware import parse_gpus

HARDWARE = parse_gpus("8xA100-80GB")


def key(path: Path) -> str:
    config = Config.from_dict({"model": {"path": str(path)}, "batch.global_batch_size": 8})
    return simulation_cache.content_key(config, HARDWARE, True)


def test_a_cache_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    simulation_cache._write(tmp_path / "file" / "simulations" / "key.json", {"allocated": 1})
    assert simulation_cache._read(tmp_path / "file" / "simulations" / "key.json") is None
    simulation_cache._write(tmp_path / "folder" / "key.json", {"allocated": 1})
    assert simulation_cache._read(tmp_path / "folder" / "key.json") == {"allocated": 1}


def test_without_a_home_there_is_still_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert simulation_cache.cache_folder() == tmp_path / "fsdp_trainer" / "simulations"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert simulation_cache.cache_folder().is_absolute()


def test_the_key_follows_our_source_and_a_packed_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = key(file)
    assert key(file) == before != key(tmp_path)
    file.write_bytes(b"other")
    os.utime(file, (1, 1))
    changed = key(file)
    assert changed != before
    monkeypatch.setattr(simulation_cache, "_source_hash", lambda: "another version")
    assert key(file) != changed
