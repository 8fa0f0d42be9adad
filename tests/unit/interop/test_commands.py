"""The import commands as a person types them, and the page that shows them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fsdp_trainer import cli
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from tests import simulation_runs

ROOT = Path(__file__).resolve().parents[3]
INPUTS = ROOT / "tests" / "inputs"


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_the_commands_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them on the page's own files; the one that simulates, with a small model of this machine."""
    page = (ROOT / "docs" / "from_deepspeed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shown = [text for kind, text in blocks if kind in ("json", "yaml")]
    for name, text in zip(("ds_config.json", "ds_auto.json", "args.json", "fsdp.yaml"), shown, strict=True):
        Path(name).write_text(text)
    model = simulation_runs.settings(tmp_path)["model"]["path"]
    commands = [line for kind, block in blocks if kind == "bash" for line in block.splitlines()]
    assert len(commands) == 6
    for command in commands:
        is_simulated = "--gpus" in command
        program, *words = shlex.split(command.replace("Qwen/Qwen2.5-7B", model) if is_simulated else command)
        result = run(*words)
        assert program == "fsdp-trainer" and result.exit_code == 0, result.output
        assert "mapped:" in result.output and "written to" in result.output
        assert ("at the peak of a GPU" in result.output) == is_simulated
    config = Config.load(Path("named") / "run.yaml")
    assert config.model.path == "Qwen/Qwen2.5-7B"
    assert (config.sharding.zero_stage, config.sharding.offload) == (2, "optimizer")
    assert config.check_world(8) == 4
    filled, arguments = (Config.load(Path(name) / "run.yaml") for name in ("filled", "from_arguments"))
    assert (filled.sharding.zero_stage, filled.optim.lr, filled.check_world(8)) == (3, 2e-5, 4)
    assert arguments.activation_checkpointing.mode == filled.activation_checkpointing.mode == "full"
    assert Config.load(Path("from_profile") / "run.yaml").sharding.replicate == 2


def test_exit_codes_and_what_is_written(tmp_path: Path) -> None:
    words = ["import-deepspeed", str(INPUTS / "deepspeed" / "ds04_zero3_nvme_param_and_optimizer.json")]
    words += ["--world-size", "8", "--out", str(tmp_path / "out")]
    result = run(*words)
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 2
    assert "refused:" in result.output and "10:7" in result.output
    assert not (tmp_path / "out").exists()
    result = run(*words, "--allow-differences", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["counts"]["refused"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "accelerate.yaml",
        "report.json",
        "report.md",
        "run.yaml",
    ]
    again = run(*words, "--allow-differences")
    assert isinstance(again.exception, ConfigError) and "written over" in str(again.exception)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--optim.lrr=1"], "did you mean optim.lr?"),
        (["--world-sise=2"], "did you mean --world-size?"),
        (["--optim.lr=-1"], "optim.lr"),
    ],
)
def test_wrong_words(words: list[str], part: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": true}}')
    result = run("import-deepspeed", str(path), "--world-size", "2", "--out", str(tmp_path / "out"), *words)
    assert isinstance(result.exception, ConfigError)
    assert part in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_a_report_that_ends_with_memory(tmp_path: Path) -> None:
    """Before and after: the imported run simulated, DeepSpeed's own formula, and the best combination that fits."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((ROOT / "benchmarks" / "models" / "qwen3-0.6b.json").read_text())
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "optimizer": optimizer,
                "zero_optimization": {"stage": 3},
            }
        )
    )
    words = ["import-deepspeed", str(file), "--world-size", "2", "--data.seq_len=4096", f"--model.path={model}"]
    result = run(*words, "--gpus", "2xRTX4090", "--out", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    memory = json.loads(result.output)["memory"]
    parameters, gib = 596_049_920, 2**30
    assert memory["deepspeed_gib"]["gpu"] == pytest.approx((18 * parameters / 2 + 4 * 151_936 * 1024) / gib)
    assert not memory["imported"]["fits"]
    assert memory["best"]["fits"] and memory["best"]["allocated_gib"] < memory["imported"]["allocated_gib"]
    assert memory["best_changes"]
    assert memory["best"]["config"]["precision"] == "bf16"
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "## Memory" in report and f"{memory['imported']['allocated_gib']:.2f} GiB at the peak" in report


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("command", "content", "flags"),
    [
        ("import-accelerate", {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2}, ()),
        ("import-trainer", {"per_device_train_batch_size": 2, "bf16": True}, ("--world-size", "2")),
    ],
)
def test_the_other_imports_end_with_memory_too(
    command: str, content: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    model = simulation_runs.settings(tmp_path)["model"]["path"]
    words = [command, str(file), *flags, f"--model.path={model}", "--data.seq_len=256", "--gpus", "2xRTX4090"]
    result = run(*words, "--out", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    memory = json.loads(result.output)["memory"]
    assert memory["imported"]["fits"] and memory["best"]["fits"]
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert f"{memory['imported']['allocated_gib']:.2f} GiB at the peak" in report


@pytest.mark.parametrize(
    ("command", "content", "flags"),
    [
        ("import-accelerate", {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "fp8"}, ()),
        ("import-trainer", {"per_device_train_batch_size": 2, "optim": "lion_8bit"}, ("--world-size", "2")),
    ],
)
def test_exit_codes_of_the_other_imports(
    command: str, content: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    words = [command, str(file), *flags, "--out", str(tmp_path / "out")]
    refused = run(*words)
    assert isinstance(refused.exception, ConfigError) and refused.exception.exit_code == 2
    assert "--allow-differences" in str(refused.exception) and not (tmp_path / "out").exists()
    assert run(*words, "--allow-differences").exit_code == 0
    assert Config.load(tmp_path / "out" / "run.yaml").check_world(2)


def test_memory_without_a_model_is_refused_and_nothing_written(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')
    words = ["import-deepspeed", str(file), "--world-size", "2", "--out", str(tmp_path / "out"), "--gpus", "2xRTX4090"]
    result = run(*words)
    assert isinstance(result.exception, ConfigError) and "--model.path" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("ds01_zero2_all_auto", "give --training-args FILE; the report"),
        ("ds03_comments_trailing_commas", "give --world-size N; the report"),
        ("ds04_zero3_nvme_param_and_optimizer", "give --world-size N; change the file, or give --allow-differences"),
        ("ds06_bf16_and_fp16_both_on", "give --world-size N; correct the file; the report"),
        ("ds12_missing_micro_batch", "correct the file; the report"),
    ],
)
def test_what_a_flag_would_say_is_not_called_wrong_in_the_file(name: str, fix: str, tmp_path: Path) -> None:
    file = INPUTS / "deepspeed" / f"{name}.json"
    error = run("import-deepspeed", str(file), "--out", str(tmp_path / "out")).exception
    assert isinstance(error, ConfigError) and f"to fix: {fix}" in str(error)
    assert str(error).count(str(file)) == 1  # and each key with its line and column
    assert re.search(rf"{re.escape(str(file))}: \w+ \([23]:3\), ", str(error))


def test_a_flag_of_another_import_is_not_suggested(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    error = run("import-accelerate", str(file), "--out", str(tmp_path / "out"), "--world-size=2").exception
    assert isinstance(error, ConfigError) and "did you mean --world-size" not in str(error)
