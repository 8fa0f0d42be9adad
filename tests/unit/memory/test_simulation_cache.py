"""Where simulations are kept: an answer is never lost to a cache that cannot be used, nor kept past a change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import Config
from fsdp_trainer.memory import simulation_cache
from fsdp_trainer.memory.hardware import parse_gpus

HARDWARE = parse_gpus("8xA100-80GB")


def key(path: Path) -> str:
    config = Config.from_dict({"model": {"path": str(path)}, "batch.global_batch_size": 8})
    return simulation_cache.content_key(config, HARDWARE, True)


KEPT = {
    **dict.fromkeys(("allocated", "reserved", "min_capacity", "host", "limit"), 1),
    "phases": {"load": 1},
    "breakdown": {"parameters": 1},
}
KEPT |= dict.fromkeys(simulation_cache._KEPT - KEPT.keys())


def test_a_cache_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    simulation_cache._write(tmp_path / "file" / "simulations" / "key.json", KEPT)
    assert simulation_cache._read(tmp_path / "file" / "simulations" / "key.json") is None
    simulation_cache._write(tmp_path / "folder" / "key.json", KEPT)
    assert simulation_cache._read(tmp_path / "folder" / "key.json") == KEPT
    (tmp_path / "taken.json").mkdir()  # cannot be replaced: nothing is left behind either
    simulation_cache._write(tmp_path / "taken.json", KEPT)
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00" * 300,
        "null",
        "3",
        "[]",
        "{}",
        json.dumps(KEPT)[:-20],
        json.dumps(KEPT | {"allocated": "many"}),
        json.dumps(KEPT | {"phases": None}),
        json.dumps(KEPT | {"phases": {"load": None}}),
        json.dumps(KEPT | {"of_another_version": 1}),
        json.dumps({name: value for name, value in KEPT.items() if name != "host"}),
    ],
)
def test_what_is_no_simulation_is_made_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert simulation_cache._read(tmp_path / "key.json") is None


def test_readers_beside_writers_see_all_or_nothing(tmp_path: Path) -> None:
    path, other = tmp_path / "key.json", KEPT | {"breakdown": {f"kind {n}": n for n in range(2000)}}
    with ThreadPoolExecutor() as threads:
        writing = [threads.submit(simulation_cache._write, path, values) for values in (KEPT, other) * 20]
        seen = [simulation_cache._read(path) for _ in range(60)]
        for written in writing:
            written.result()
    assert all(found in (None, KEPT, other) for found in [*seen, simulation_cache._read(path)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["key.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """In the middle of a simulation that would take a minute."""
    model = Path(__file__).parents[3] / "benchmarks" / "models" / "llama-3.1-70b.json"
    (tmp_path / "config.json").write_text(model.read_text())
    words = [f"--model.path={tmp_path}", "--gpus=8xH100", "--batch.global_batch_size=64"]
    child = subprocess.Popen(
        [sys.executable, "-m", "fsdp_trainer", "simulate", *words],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while "_safetensors_rust" not in Path(f"/proc/{child.pid}/maps").read_text():  # of the last that is imported
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert "stopped by Ctrl-C; nothing is left behind" in said and "Traceback" not in said
    assert not list((tmp_path / "cache").rglob("*.json")) and not list((tmp_path / "cache").rglob("tmp*"))


def test_without_a_home_there_is_still_a_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FSDP_TRAINER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fsdp_trainer"
    monkeypatch.setenv("FSDP_TRAINER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FSDP_TRAINER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fsdp_trainer"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder().is_absolute()


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
