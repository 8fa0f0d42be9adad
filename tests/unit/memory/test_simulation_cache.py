"""Where simulations are kept: an answer is never lost to a cache that cannot be used, nor kept past a change."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fsdp_trainer
from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import Config
from fsdp_trainer.memory import simulation_cache
from fsdp_trainer.memory.hardware import parse_gpus
from tests.simulation_runs import settings

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
UNITS = simulation_cache._hash("units.py")
KEPT |= {"files": {"units.py": UNITS}}


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
        json.dumps({name: value for name, value in KEPT.items() if name != "files"}),  # of before files were listed
        *(
            json.dumps(KEPT | {"files": files})
            for files in (
                None,
                {},
                ["units.py"],
                "units.py",
                {"units.py": None},
                {"units.py": 0},
                {"units.py": "0" * 64},
                {"units.py": UNITS, "gone.py": UNITS},
                {"units.py": UNITS, "gone.py": None},
                {"units.py": UNITS, "memory": None},
                {"units.py": UNITS, "": None},
                {"units.py": UNITS, "\0": UNITS},
                {"units.py": UNITS, "\ud800": UNITS},
                {"units.py": UNITS, "x" * 5000: UNITS},
                {"../fsdp_trainer/units.py": UNITS},
                {"memory/../units.py": UNITS},
                {str(simulation_cache._PACKAGE / "units.py"): UNITS},
            )
        ),
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
    left = [path for path in (tmp_path / "cache").rglob("*.json") if path.parent.name != "causality"]
    assert not left and not list((tmp_path / "cache").rglob("tmp*"))


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


def test_the_key_follows_a_packed_model_and_the_entry_our_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    before = key(file)
    assert key(file) == before != key(tmp_path)
    file.write_bytes(b"other")
    os.utime(file, (1, 1))
    changed = key(file)
    assert changed != before
    simulation_cache._write(tmp_path / changed, KEPT)
    assert simulation_cache._read(tmp_path / changed) == KEPT
    monkeypatch.setattr(simulation_cache, "_hash", lambda name: "another version")
    assert key(file) == changed
    assert simulation_cache._read(tmp_path / changed) is None


# --- which files of the package a simulation depends on


# In a new interpreter: what one simulation loads and reads; then one by the command, all of the package being loaded;
# then one during which a file is written.
FIRST = """
import importlib, json, pkgutil, sys
from pathlib import Path

read = []
sys.addaudithook(lambda event, words: read.append(str(words[0])) if event == "open" else None)
from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.simulate import simulate

values = json.loads(sys.argv[1])
config, hardware = Config.from_dict(values), parse_gpus("8xA100-80GB")
simulate(config, hardware)
used = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "fsdp_trainer"]
used += [path for path in read if not path.endswith(".pyc")]

import fsdp_trainer
for module in pkgutil.walk_packages(fsdp_trainer.__path__, "fsdp_trainer."):
    if module.name.rpartition(".")[2] not in ("__main__", "train", "launch_agent"):  # programs
        importlib.import_module(module.name)
from fsdp_trainer import cli
from fsdp_trainer.memory.simulation_cache import simulate_cached

try:
    cli.main(sys.argv[2:])
except SystemExit as end:
    assert not end.code, end.code
(Path(cli.__file__).parent / "loss.py").touch()
simulate_cached(Config.from_dict({**values, "optim": {"name": "adamw_8bit"}}), hardware)
loaded = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "fsdp_trainer"]
print("\\n" + json.dumps({"used": used, "loaded": loaded}))
"""
LOOK_UP = """
import json, sys
from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.simulation_cache import find_simulation

found = find_simulation(Config.from_dict(json.loads(sys.argv[1])), parse_gpus("8xA100-80GB"))
assert "torch" not in sys.modules
print(found and found.host)
"""


class Copy:
    """A copy of the package, so that it may be edited, with a cache of its own and one small simulation in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder, folder / "fsdp_trainer"
        shutil.copytree(simulation_cache._PACKAGE, self.package)
        self.values = settings(folder, model={"num_hidden_layers": 1}, data={"seq_len": 64})
        self.words = ["simulate", "--gpus=8xA100-80GB", f"--model.path={self.values['model']['path']}", "--json"]
        self.words += ["--data.packing=false", "--data.seq_len=64", "--batch.global_batch_size=8"]
        self.words += ["--batch.micro_batch_size=1", "--activation_checkpointing.mode=none"]
        said = json.loads(self.run("-c", FIRST, json.dumps(self.values), *self.words).splitlines()[-1])
        self.used, self.loaded = self.names(said["used"]), self.names(said["loaded"])
        config = Config.from_dict(self.values)
        name = simulation_cache.content_key(config, HARDWARE, True)
        self.entry = folder / "cache" / "simulations" / f"{name}.json"
        self.first = json.loads(self.entry.read_text())

    def run(self, *words: str) -> str:
        """Return what a new interpreter says in which the package is this copy."""
        environment = {**os.environ, "FSDP_TRAINER_CACHE": str(self.folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = str(self.folder)
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def names(self, paths: list[str]) -> set[str]:
        """Return those in the package, as the entry lists them."""
        start = f"{self.package}/"
        return {path.removeprefix(start) for path in paths if path.startswith(start)}

    def keep(self, **changes: Any) -> None:
        """Leave the first entry again, with these changes."""
        self.entry.write_text(json.dumps(self.first | changes))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_all_that_a_simulation_loads_or_reads_is_listed(copy: Copy) -> None:
    assert {"__init__.py", "memory/simulate.py", "run.py", "memory/overheads.csv"} <= copy.used
    assert copy.used <= copy.first["files"].keys()


def test_commands_and_pages_are_not_listed_although_loaded(copy: Copy) -> None:
    others = {name for name in copy.loaded if name.startswith(("cli", "interop/", "launch.", "report/", "training"))}
    others |= {"memory/plan.py", "memory/planner.py", "memory/simulation_workers.py"}
    assert others <= copy.loaded and {"cli.py", "launch.py", "report/page.py", "report/run_html.py"} <= others
    assert not others & copy.first["files"].keys()
    assert {Path(name).suffix for name in copy.first["files"]} == {".py", ".csv"}


def test_no_listed_module_imports_another_by_a_string(copy: Copy) -> None:
    """Which the list would miss; the package's own `__init__` does, for users of its public names."""
    texts = {name: (copy.package / name).read_text() for name in copy.first["files"] if name.endswith(".py")}
    by_string = re.compile(r"import_module\(|__import__\(|run_path\(|run_module\(")
    assert [name for name, text in texts.items() if by_string.search(text)] == ["__init__.py"]
    public = re.compile(rf"from fsdp_trainer import .*\b({'|'.join(fsdp_trainer._HOMES)})\b")
    assert not [name for name, text in texts.items() if public.search(text)]


def test_nothing_is_kept_where_a_file_was_written_during_a_simulation(copy: Copy) -> None:
    """The last simulation of FIRST: what was loaded may not be what the file holds now."""
    assert [entry.name for entry in copy.entry.parent.iterdir()] == [copy.entry.name]


def test_an_edit_to_a_page_or_a_command_keeps_simulations(copy: Copy) -> None:
    copy.keep(host=1)
    for name in ("report/plan.html.jinja", "report/run_html.py", "cli.py", "memory/planner.py", "interop/profiles.csv"):
        with (copy.package / name).open("a") as file:
            file.write("\n")
    (copy.package / "added.py").write_text("")
    assert copy.run("-c", LOOK_UP, json.dumps(copy.values)).split() == ["1"]


@pytest.mark.parametrize("name", ["__init__.py", "loss.py", "memory/simulation.py", "memory/rates.csv"])
def test_an_edit_to_a_listed_file_is_seen_by_a_process_that_lives_on(
    name: str, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation_cache, "_PACKAGE", copy.package)
    config, folder, file = Config.from_dict(copy.values), copy.entry.parent, copy.package / name

    def is_found() -> bool:
        return simulation_cache.find_simulation(config, HARDWARE, folder=folder) is not None

    copy.keep()
    before = file.read_bytes()
    assert is_found()
    file.write_bytes(before + b"\n")
    assert not is_found()
    file.unlink()
    assert not is_found()
    file.write_bytes(before)
    assert is_found()


def test_after_an_edit_it_is_made_anew_and_takes_the_place_of_the_entry(copy: Copy) -> None:
    copy.keep(host=1)
    loss = copy.package / "loss.py"
    loss.write_bytes(loss.read_bytes() + b"# edited\n")
    said = json.loads(copy.run("-m", "fsdp_trainer", *copy.words))
    again = json.loads(copy.entry.read_text())
    assert said["host_gib"] * 2**30 == again["host"] == copy.first["host"] != 1
    assert {name for name, value in again["files"].items() if copy.first["files"][name] != value} == {"loss.py"}
    assert again == {**copy.first, "files": again["files"]}
    assert copy.run("-c", LOOK_UP, json.dumps(copy.values)).split() == [str(again["host"])]
