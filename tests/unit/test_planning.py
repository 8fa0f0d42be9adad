"""The question as a person puts it: what was given is held fixed, RAM is read, and what cannot be planned is said."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.planning import read_ram
from tests import light_imports as light
from tests.plans import model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128GiB", 128 * 2**30),
        ("128 gib", 128 * 2**30),
        ("64g", 64 * 2**30),
        ("64GB", 64 * 10**9),
        ("0.5TiB", 2**39),
        (str(2**34), 2**34),
        (2**34, 2**34),
    ],
)
def test_ram_is_read_as_people_write_it(text: str | int, size: int) -> None:
    assert read_ram(text) == size


@pytest.mark.parametrize("text", ["128", "", "lots", "-1GiB", "12 parsecs", "1.2.3GiB", "9" * 400])
def test_what_is_no_ram_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no amount of host RAM") as caught:
        read_ram(text)
    assert "128GiB" in caught.value.fix


def test_given_settings_are_those_that_were_written(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optim: {lr: 1e-5}\nprecision: bf16\ndata:\n")  # the defaults, and an empty section
    config = Config.load(file, ["--sharding.zero_stage=3"])
    assert set(config.given) == {"optim.lr", "precision", "sharding.zero_stage"}
    assert Config().given == ()
    assert Config.from_dict({"batch": {"micro_batch_size": 1}}).given == ("batch.micro_batch_size",)
    assert "train.seed" in Config.from_dict(Config().to_dict()).given


def test_settings_file_with_names_loads_back() -> None:
    config = Config.from_dict({"optim": {"lr": 2e-5}, "data": {"train": ["a.jsonl", "b.jsonl"]}, "precision": "fp32"})
    text = config.to_yaml(names={"sharding.zero_stage", "precision"})
    lines = [line.strip() for line in text.splitlines()]
    expected = ["data:", "train:", "- a.jsonl", "- b.jsonl", "sharding:", "zero_stage: 3", "precision: fp32"]
    assert lines == [*expected, "optim:", "lr: 2.0e-05"]
    assert Config.from_dict(Config().to_dict()).to_yaml(names=()) == "{}\n"


def command(*words: str, cwd: Path, cold: bool = False) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("COLUMNS", None)
    words = (sys.executable, "-m", "fsdp_trainer", "plan", *words)
    if cold:
        return subprocess.run(words, capture_output=True, text=True, env=environ, cwd=cwd, check=False)
    return light.run(words, env=environ, cwd=cwd, imported=light.COMMANDS)


def question(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *(f"--model.path={model_folder(folder)}", "--gpus=2xRTX4090", "--host-ram=128GiB"),
        *("--data.seq_len=4096", "--batch.global_batch_size=64", "--quick", *more),
    )


def test_quick_answer_as_json_holds_what_was_given(tmp_path: Path) -> None:
    """The keys of simulate in every candidate, the fixed settings in all, and no time to import torch."""
    words = question(tmp_path, "--json", "--batch.micro_batch_size=2", "--train.max_steps=1000", "--write=out")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = command(*words, cwd=tmp_path, cold=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == 0, ended.stderr
    assert after.ru_utime - before.ru_utime < 3.0
    found = json.loads(ended.stdout)
    assert set(found) >= {"candidates", "chosen", "hardware", "fixed", "remedies", "margins", "considered", "seconds"}
    keys = {"allocated_gib", "reserved_gib", "min_capacity_gib", "host_gib", "phases", "breakdown", "step_seconds"}
    keys |= {"tokens_per_second_per_gpu", "fits", "limit", "config", "quality", "gives_up", "host_node_gib", "lacks"}
    for candidate in found["candidates"]:
        assert keys <= set(candidate)
        assert candidate["config"]["batch"]["micro_batch_size"] == 2
        assert candidate["host_node_gib"] <= 128 or not candidate["fits"]
    chosen = found["candidates"][found["chosen"]]
    assert chosen["fits"] is True
    assert chosen["run_seconds"] == pytest.approx(1000 * chosen["step_seconds"])
    assert Config.load(tmp_path / "out" / "run.yaml") == Config.from_dict(chosen["config"])


def test_text_goes_into_a_pipe_in_80_columns_with_the_command_last(tmp_path: Path) -> None:
    ended = command(
        *question(
            tmp_path,
            "--write=out",
            "--picture=m.png",
            "--top=2",
            "--sharding.zero_stage=3",
            "--batch.micro_batch_size=2",
        ),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert last == "  fsdp-trainer train --config out/run.yaml --profile out/accelerate.yaml"
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    assert "\x1b" not in ended.stdout
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert "more: --top" in ended.stdout
    assert "by the closed form" in ended.stdout


def test_nothing_fits_is_exit_code_2_and_writes_nothing(tmp_path: Path) -> None:
    ended = command(
        *question(tmp_path, "--precision=fp32", "--sharding.offload=none", "--sharding.zero_stage=3", "--write=out"),
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert "NOTHING FITS" in ended.stdout
    assert "nearest, #" in ended.stdout
    assert "lacks" in ended.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["Nothing says which model", "--model.path"]),
        (["--model.path=m", "--prefer=cost"], ["prefer: cost", "quality or speed"]),
        (["--model.path=m", "--host-ram=much"], ["no amount of host RAM", "much"]),
        (["--model.path=m", "--gpus=2xRTX4091"], ["not in the catalogue", "RTX4090"]),
        (["--model.path=m", "--gpu=2xRTX4090"], ["did you mean --gpus?"]),
        (["--model.path=./nosuch", "--gpus=2xRTX4090"], ["does not exist", "nosuch"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--batch.global_batch_size=7"], ["7 = 1 x accumulation x 2"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--calibrate=nosuch"], ["no run", "nosuch"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--write=a_file"], ["--write", "a_file is a file"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--write="], ["--write ''", "or . for this one"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--picture=a_file/m.png"], ["--picture", "a_file is a file"]),
        (["--model.path=m", "--gpus=8xT4", "--optim.implementation=foreach"], ["precision: 'fp16'", "fused"]),
        (["--model.path=m", "--gpus=2xRTX4090", "--picture=memory.xyz"], ["memory.xyz", ".png"]),
    ],
    ids=str,
)
def test_errors_have_three_parts(words: list[str], parts: list[str], tmp_path: Path) -> None:
    if "--model.path=m" in words:
        words = [
            word.replace("=m", f"={model_folder(tmp_path)}") if word == "--model.path=m" else word for word in words
        ]
    (tmp_path / "a_file").touch()
    ended = command(*words, "--quick", cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout == ""
    for part in (*parts, "found:", "to fix:"):
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
