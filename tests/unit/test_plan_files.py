"""The files of a plan: they load back to what was planned, overwrite nothing, and are known when the run starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import parse_settings
from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.launch_profile import check_profile, read_profile
from fsdp_trainer.memory.plan import Plan
from fsdp_trainer.memory.plan_files import differing, find_prediction, prediction_of, write_plan
from tests.plans import make_plan

GIVEN = ("model.path", "data.seq_len", "batch.global_batch_size", "optim.lr", "log.samples")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(tmp_path, fixed=GIVEN, optim={"lr": 3e-5}, output_dir="runs/mine")


def chosen(plan: Plan) -> Config:
    assert plan.chosen is not None
    return plan.chosen.config


def test_settings_load_back_and_hold_only_what_says_something(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "out")
    text = (tmp_path / "out" / "run.yaml").read_text(encoding="utf-8")
    assert Config.load(tmp_path / "out" / "run.yaml") == chosen(plan)
    written = parse_settings(text, source="run.yaml")
    assert text.startswith("# Planned by fsdp-trainer for 8xH100-80GB: ")
    # What differs from the defaults, what was planned, and what was given although it is the default.
    assert written["optim"]["lr"] == 3e-5
    assert written["output_dir"] == "runs/mine"
    assert written["sharding"]["zero_stage"] == 3
    assert written["precision"] == "bf16"
    assert written["log"] == {"samples": 2}
    for name in ("train", "schedule", "export", "eval"):
        assert name not in written


def test_profile_agrees_with_the_settings(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "out")
    profile = read_profile(tmp_path / "out" / "accelerate.yaml")
    check_profile(profile, chosen(plan))
    assert profile["num_processes"] == 8
    assert profile["use_cpu"] is False


def test_the_one_command_names_both_files(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    (command,) = write_plan(plan, folder)
    words = shlex.split(command)
    assert words[:2] == ["fsdp-trainer", "train"]
    assert words[2:] == ["--config", str(folder / "run.yaml"), "--profile", str(folder / "accelerate.yaml")]


def test_several_machines_get_a_command_each_that_accelerate_takes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, gpus="2x8xH100-80GB")
    commands = write_plan(plan, tmp_path / "out")
    assert [f"--machine_rank {node} " in command for node, command in enumerate(commands)] == [True, True]
    profile = yaml.safe_load((tmp_path / "out" / "accelerate.yaml").read_text())
    assert (profile["num_machines"], profile["num_processes"]) == (2, 16)
    check_profile(profile, chosen(plan))
    assert Path(shlex.split(commands[0])[-3]).name == "train.py"


def test_nothing_is_overwritten_and_the_same_again_is_no_harm(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_plan(plan, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_plan(plan, folder)
    (folder / "run.yaml").write_text("mine: yes\n")
    (folder / "accelerate.yaml").unlink()
    with pytest.raises(ConfigError, match="other files of these names") as caught:
        write_plan(plan, folder)
    assert "run.yaml" in caught.value.values
    assert "plan.json" not in caught.value.values
    assert (folder / "run.yaml").read_text() == "mine: yes\n"
    assert not (folder / "accelerate.yaml").exists()  # nothing is written where not all can be
    assert set(before) == {"run.yaml", "accelerate.yaml", "plan.json"}


def test_a_plan_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_plan(make_plan(tmp_path, fits=False), tmp_path / "out")
    assert "3.2 GiB of GPU memory" in caught.value.values
    assert "data.seq_len: 2048" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_prediction_is_found_beside_the_settings_of_the_same_run(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_plan(plan, folder)
    file = folder / "run.yaml"
    config = Config.load(file)
    assert find_prediction(file, config, processes=8) == json.loads(json.dumps(prediction_of(plan)))
    # What changes neither memory nor the time of a step may be another.
    assert find_prediction(file, Config.load(file, ["--optim.lr=1e-4", "--output_dir=x"]), processes=8) is not None
    assert find_prediction(file, config, processes=4) is None
    for flag in ("--sharding.zero_stage=2", "--data.seq_len=512", "--batch.micro_batch_size=1", "--loss.kind=plain"):
        assert find_prediction(file, Config.load(file, [flag]), processes=8) is None, flag
    assert find_prediction(None, config, processes=8) is None
    (folder / "plan.json").write_text('{"flights": []}')
    assert find_prediction(file, config, processes=8) is None


def test_difference_is_named(plan: Plan) -> None:
    config = chosen(plan)
    other = Config.from_dict({**config.to_dict(), "precision": "fp32"})
    assert differing(config.to_dict(), config) == []
    assert differing(config.to_dict(), other) == ["precision"]


def test_a_folder_that_cannot_be_made_is_said_with_its_flag(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"plan cannot be written[\s\S]*file[\s\S]*--write"):
        write_plan(plan, tmp_path / "file" / "out")
