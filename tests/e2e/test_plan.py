"""A plan for this machine's CPU, written, started and measured: what was predicted is what real ranks hold."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import parse_settings
from tests import live_phases, models, training_runs
from tests.e2e.commands import executable, run_command
from tests.fault_runs import read_status
from tests.ranks import run_ranks

Folder = Callable[[str], str]
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
SEQ_LEN, ROWS = 40, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def question(model_folder: Folder, folder: Path) -> Path:
    """A settings file that leaves all but the stage to the plan; its rows are full and every token is supervised."""
    words = [f"w{number}" for number in range(SEQ_LEN // 2 - 1)]  # and the end of the document
    records = [{"text": " ".join(words[start:] + words[:start])} for start in range(16)]
    data = models.write_jsonl(records, folder / "train.jsonl")
    settings = {
        "model": {"path": model_folder("qwen3_tied")},
        "data": {"train": data, "eval": data, "format": "text", "seq_len": SEQ_LEN, "cache_dir": str(folder / "rows")},
        "sharding": {"zero_stage": 3},
        "batch": {"global_batch_size": ROWS},
        "train": {"max_steps": 2},
        "export": {"at_end": False},
        "log": {"samples": 0},
        "output_dir": "planned",
    }
    path = folder / "question.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cache(folder: Path) -> Any:
    """A cache of simulations that this module's commands share."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def written(question: Path, folder: Path, cache: None) -> list[str]:
    """Plan for two ranks on this CPU; return the command that was printed, as words."""
    words = ["plan", "--config", question.name, "--gpus", "2xCPU", "--write", "out"]
    ended = run_command([executable("fsdp-trainer"), *words], cwd=folder)
    assert ended.returncode == 0
    # The ledger comes with the simulation, though that ran in another process and may be of another day.
    assert "#1 on one rank, by a full simulation, in MiB" in ended.stdout
    assert re.search(r"^optimizer state +\d\.\d +\d\.\d +\d\.\d$", ended.stdout, flags=re.MULTILINE)
    (command,) = re.findall(r"start it with:\n  (.*)", ended.stdout)
    return shlex.split(command)


def prediction(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["candidates"][found["chosen"]]


def test_the_same_question_again_is_answered_from_the_cache(written: list[str], question: Path, folder: Path) -> None:
    """Without torch, and the same to the byte: the files that are there stay, and nothing says they differ."""
    words = ["plan", "--config", question.name, "--gpus", "2xCPU", "--write", "out"]
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    code = (
        f"import sys; from fsdp_trainer import cli\ntry: cli.main({words})\n"
        "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    ended = run_command([sys.executable, "-c", code], cwd=folder, cold=True)
    assert ended.returncode == 0
    assert "by a full simulation" in ended.stdout
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before


def test_printed_command_starts_the_planned_run(written: list[str], folder: Path) -> None:
    assert written[0] == "fsdp-trainer"
    ended = run_command([executable("fsdp-trainer"), *written[1:]], cwd=folder)
    assert ended.returncode == 0
    output = folder / "planned"
    assert read_status(output)["state"] == "finished"
    assert len([row for row in training_runs.read_metrics(output) if "loss" in row]) == 2
    # The run's folder says what was predicted of it, and on what it ran.
    assert json.loads((output / "plan.json").read_text()) == json.loads((folder / "out" / "plan.json").read_text())
    assert Config.load(output / "config.yaml") == Config.load(folder / "out" / "run.yaml")
    assert json.loads((output / "devices.json").read_text())["ranks"] == 2


def test_measured_live_bytes_are_the_predicted_ones(written: list[str], folder: Path) -> None:
    """To the byte, in every phase; of a save the copy alone is measured (tests/distributed/test_simulate_exact.py)."""
    predicted = prediction(folder / "out" / "plan.json")
    assert predicted["source"] == "simulation"
    expected = {name: size * 2**30 for name, size in predicted["phases"].items() if name != "save"}
    assert predicted["allocated_gib"] == max(predicted["phases"].values())
    settings = parse_settings((folder / "out" / "run.yaml").read_text(encoding="utf-8"), source="run.yaml")
    assert settings["sharding"]["zero_stage"] == 3  # what was given is kept
    settings["output_dir"] = str(folder / "measured")
    size = SEQ_LEN // 2
    half = models.Document(tuple(range(5, 5 + size)), (False, *(True,) * (size - 1)))  # nothing comes before its first
    steps = [[[half, half]] * ROWS] * 2  # one window, twice
    measured: dict[str, float] = {}
    for _ in range(6):  # gloo's threads may let go of a tensor late, which only adds
        real = run_ranks(live_phases.measure_all, 2, {"plan": (settings, steps)}, timeout=200)[0]["plan"]
        assert isinstance(real, dict), real
        phases = {name: size for name, size in real.items() if name not in ("save", "export")}
        measured = {name: min(size, measured.get(name, size)) for name, size in phases.items()}
        if measured == expected:
            break
    assert measured == expected


def test_train_plan_auto_plans_for_the_ranks_it_gets(written: list[str], question: Path, folder: Path) -> None:
    """Rank 0 decides, both ranks run the same; the answer is that of the command, here from its cache."""
    words = ["train", "--plan", "auto", "--config", question.name, "--processes", "2", "--output_dir", "auto"]
    ended = run_command([executable("fsdp-trainer"), *words], cwd=folder)
    assert ended.returncode == 0
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("planned for 2xCPU: stage 3")]
    assert "KiB allocated" in line
    output = folder / "auto"
    assert read_status(output)["state"] == "finished"
    ran, planned = prediction(output / "plan.json"), prediction(folder / "out" / "plan.json")
    assert {**ran["config"], "output_dir": ""} == {**planned["config"], "output_dir": ""}
    assert Config.load(output / "config.yaml") == Config.from_dict(ran["config"])


def test_a_run_on_cpu_measured_nothing_to_calibrate_by(written: list[str], folder: Path, question: Path) -> None:
    run = folder / "planned"
    words = ["plan", "--config", question.name, "--gpus", "2xCPU", "--calibrate", str(run)]
    ended = run_command([executable("fsdp-trainer"), *words], cwd=folder)
    assert ended.returncode == 2
    assert "too short to calibrate by" in ended.stderr
