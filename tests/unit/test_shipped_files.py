"""The settings, profiles and data that ship with the project: each loads, and says what is true of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import make_data
from fsdp_trainer.config import Config
from tests.e2e.commands import environment

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def processes_in(name: str) -> int:
    match = re.search(r"(\d+)x", name)
    return int(match.group(1)) if match else 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_divides(path: Path) -> None:
    config = Config.load(path)
    assert config.check_world(processes_in(path.stem)) >= 1
    assert config.output_dir.startswith("runs/")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_comment_names_its_own_file_and_processes(path: Path) -> None:
    command = re.search(r"fsdp-trainer train --config (\S+) --processes (\d+)", path.read_text(encoding="utf-8"))
    assert command
    assert ROOT / command.group(1) == path
    assert int(command.group(2)) == processes_in(path.stem)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_profiles_for_cpus_start(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "seen = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'FSDP_VERSION', 'ACCELERATE_USE_FSDP')]\n"
        "pathlib.Path(sys.argv[1], 'rank' + seen[0]).write_text(' '.join(seen))\n"
    )
    profile = ROOT / "configs" / "accelerate" / f"cpu-x{ranks}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(profile), str(script)]
    inherited = {
        name: value for name, value in environment().items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    }
    subprocess.run([*command, str(tmp_path)], check=True, timeout=200, env=inherited)
    seen = [(tmp_path / f"rank{rank}").read_text() for rank in range(ranks)]
    assert seen == [f"{rank} {ranks} 2 true" for rank in range(ranks)]


def read_records(name: str) -> list[dict]:
    lines = (ROOT / "examples" / "demo" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_demo_data_is_what_its_script_writes() -> None:
    train, held_out = make_data.build_data()
    assert read_records("train.jsonl") == train
    assert read_records("held_out.jsonl") == held_out


def test_held_out_pairs_never_train() -> None:
    def pairs(records: list[dict]) -> set[str]:
        return {record["messages"][-1]["content"].split()[0] for record in records}

    train, held_out = pairs(read_records("train.jsonl")), pairs(read_records("held_out.jsonl"))
    assert not train & held_out
    # ... but every room and every device of a held-out question is seen in training with others.
    for position in (0, 1):
        assert {pair.split("/")[position] for pair in held_out} <= {pair.split("/")[position] for pair in train}
    assert len(train | held_out) == len(make_data.ROOMS) * len(make_data.SWITCHED + make_data.MOVED)


def test_demo_answers_follow_from_requests() -> None:
    """The language is unambiguous: the same request never has two answers."""
    answers: dict[str, str] = {}
    for record in read_records("train.jsonl") + read_records("held_out.jsonl"):
        _, user, assistant = (message["content"] for message in record["messages"])
        assert answers.setdefault(user, assistant) == assistant
    assert len(answers) == make_data.TRAIN_RECORDS + make_data.HELD_OUT_RECORDS
