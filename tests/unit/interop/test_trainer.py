"""TrainingArguments become the settings they mean, with the FSDP or DeepSpeed that they ask for."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.folder import build_config, write_import
from fsdp_trainer.interop.key_table import load_table
from fsdp_trainer.interop.report import format_json, format_report
from fsdp_trainer.interop.trainer import import_trainer
from fsdp_trainer.interop.verdicts import Import, Verdict
from fsdp_trainer.optim.schedule import scheduled_rate

TABLE = load_table("arguments_keys")


def imported(folder: Path, arguments: dict[str, Any], *, world: int | None = 2) -> Import:
    path = folder / "args.json"
    path.write_text(json.dumps(arguments))
    return import_trainer(path, world_size=world)


def verdict(found: Import, name: str) -> Verdict:
    matching = [one for one in found.verdicts if one.key.name == name]
    assert len(matching) == 1, f"{name} has {len(matching)} verdicts"
    return matching[0]


def refused(found: Import) -> set[str]:
    return {one.key.name for one in found.of_kind("refused")}


def held(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_field_of_transformers_has_an_entry() -> None:
    """Read from the text of the installed version: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8")
    body = text[text.index("\nclass TrainingArguments") : text.index("def __post_init__")]
    fields = re.findall(r"^    (\w+): .*= field\(", body, flags=re.MULTILINE)
    assert len(fields) > 100
    known = set(TABLE.entries) | TABLE.sections
    assert [name for name in fields if name not in known] == []


def test_defaults_are_transformers(tmp_path: Path) -> None:
    """What is not given is what Transformers would have done, not this program's default."""
    config = build_config(imported(tmp_path, {}, world=4))
    assert (config.batch.micro_batch_size, config.batch.global_batch_size) == (8, 32)
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (5e-5, (0.9, 0.999), 0.0)
    assert (config.precision, config.train.epochs, config.train.seed) == ("fp32", 3, 42)
    assert (config.schedule.name, config.schedule.min_lr_ratio, config.schedule.warmup_steps) == ("linear", 0.0, 0)
    assert (config.sharding.zero_stage, config.activation_checkpointing.mode) == (0, "none")
    assert (config.data.packing, config.checkpoint.every_steps, config.log.every_steps) == (False, 500, 500)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bf16": True}, {"precision": "bf16"}),
        ({"fp16": "true"}, {"precision": "fp16"}),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, {"batch.global_batch_size": 64}),
        ({"gradient_accumulation_steps": 8}, {"batch.global_batch_size": 128, "batch.micro_batch_size": 8}),
        ({"gradient_checkpointing": True}, {"activation_checkpointing.mode": "full"}),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 3}},
            {"activation_checkpointing.mode": "every_n_layers", "activation_checkpointing.every_n": 3},
        ),
        ({"activation_checkpointing": True, "gradient_checkpointing": True}, {"activation_checkpointing.mode": "full"}),
        ({"optim": "adamw_torch"}, {"optim.name": "adamw"}),
        ({"optim": "adamw_bnb_8bit"}, {"optim.name": "adamw_8bit"}),
        ({"optim": "paged_adamw_8bit"}, {"optim.name": "adamw_8bit"}),
        ({"optim": "paged_adamw_32bit"}, {"optim.name": "adamw"}),
        ({"weight_decay": 0.1}, {"optim.weight_decay": 0.1, "optim.no_decay": ("norm", "bias")}),
        ({"max_grad_norm": 0.0}, {"optim.max_grad_norm": None}),
        ({"adam_beta2": 0.95}, {"optim.betas": (0.9, 0.95)}),
        ({"max_steps": 100, "num_train_epochs": 1.5}, {"train.max_steps": 100}),
        ({"num_train_epochs": 2.0}, {"train.epochs": 2}),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 10},
            {"schedule.name": "constant", "schedule.warmup_steps": 0},
        ),
        (
            {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
            {"schedule.warmup_ratio": 0.1, "schedule.warmup_steps": None},
        ),
        ({"warmup_ratio": 0.07, "max_steps": 100}, {"schedule.warmup_steps": 8}),  # math.ceil(100 * 0.07), as there
        ({"save_steps": 50, "save_total_limit": 3}, {"checkpoint.every_steps": 50, "checkpoint.keep_latest": 3}),
        ({"save_strategy": "epoch"}, {"checkpoint.every_steps": 500}),
        (
            {"logging_steps": 10, "report_to": ["tensorboard"]},
            {"log.every_steps": 10, "log.trackers": ("tensorboard",)},
        ),
        ({"report_to": "none"}, {"log.trackers": ()}),
        ({"eval_strategy": "steps", "eval_steps": 20}, {"eval.every_steps": None}),
        ({"validation_file": "e.jsonl", "eval_strategy": "steps", "eval_steps": 20}, {"eval.every_steps": 20}),
        ({"seed": 7, "ddp_timeout": 600}, {"train.seed": 7, "train.timeout_minutes": 10.0}),
        (
            {"model_name_or_path": "m", "max_seq_length": 512, "packing": True},
            {"model.path": "m", "data.seq_len": 512, "data.packing": True},
        ),
        ({"fsdp": "full_shard auto_wrap"}, {"sharding.zero_stage": 3, "sharding.offload": "none"}),
        ({"fsdp": "shard_grad_op auto_wrap offload"}, {"sharding.zero_stage": 2, "sharding.offload": "params"}),
        ({"fsdp": ["full_shard", "offload"]}, {"sharding.zero_stage": 3, "sharding.offload": "params"}),
        ({"fsdp": ["no_shard"]}, {"sharding.zero_stage": 0}),
        ({"fsdp": "hybrid_shard"}, {"sharding.zero_stage": 3}),
        (
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True}},
            {"sharding.zero_stage": 2, "sharding.offload": "params"},
        ),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_version": 1, "activation_checkpointing": True}},
            {"sharding.zero_stage": 3, "activation_checkpointing.mode": "full"},
        ),
        ({"fsdp": "", "fsdp_config": {"cpu_offload": True}}, {"sharding.zero_stage": 0, "sharding.offload": "none"}),
    ],
    ids=str,
)
def test_arguments_become_settings(arguments: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = imported(tmp_path, arguments)
    assert not refused(found)
    config = write_import(found, tmp_path / "out")
    for name, value in expected.items():
        assert held(config, name) == value, name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"bf16": True, "fp16": True}, "bf16"),
        ({"optim": "adafactor"}, "optim"),
        ({"optim": "lion_8bit"}, "optim"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "lr_scheduler_type"),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "lr_scheduler_type"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr": 1e-6}}, "lr_scheduler_kwargs.min_lr"),
        ({"num_train_epochs": 1.5}, "num_train_epochs"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"loss_type": "dft"}, "loss_type"),
        ({"torch_compile": True}, "torch_compile"),
        ({"save_only_model": True}, "save_only_model"),
        ({"fsdp": "fullshard"}, "fsdp"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": 8}}, "fsdp_config.reshard_after_forward"),
        ({"fsdp": True, "fsdp_config": {"offload_params": True}}, "fsdp_config.offload_params"),
        ({"gradient_checkpointing": True, "activation_checkpointing": False}, "activation_checkpointing"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": [1e-5]}, "learning_rate"),
        ({"fsdp_config": "missing.json"}, None),
        ({"deepspeed": "missing.json"}, None),
    ],
    ids=str,
)
def test_what_has_no_match_is_refused(arguments: dict[str, Any], name: str | None, tmp_path: Path) -> None:
    if name is None:
        with pytest.raises(ConfigError, match="does not exist"):
            imported(tmp_path, arguments)
        return
    assert name in refused(imported(tmp_path, arguments))


def test_the_number_of_gpus_must_be_known(tmp_path: Path) -> None:
    """Report 130: DataParallel once read 1 too early; here nothing is guessed."""
    found = imported(tmp_path, {"per_device_train_batch_size": 2}, world=None)
    assert "--world-size" in verdict(found, "per_device_train_batch_size").text
    with pytest.raises(ConfigError, match="world-size"):
        imported(tmp_path, {"bf16": True}, world=None)


def test_yaml_and_separate_files(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"version": 2,\n "reshard_after_forward": "false"}')
    path = tmp_path / "args.yaml"
    path.write_text("bf16: true\nlearning_rate: 2e-5\nfsdp: true\nfsdp_config: fsdp.json\n")
    found = import_trainer(path, world_size=2)
    assert not refused(found)
    one = verdict(found, "fsdp_config.reshard_after_forward")
    assert one.key.place.endswith("fsdp.json:2:2")
    config = build_config(found)
    assert (config.sharding.zero_stage, config.optim.lr, config.precision) == (2, 2e-5, "bf16")


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@pytest.mark.parametrize("form", ["file", "section"])
def test_deepspeed_named_by_the_arguments(form: str, tmp_path: Path) -> None:
    """The DeepSpeed file goes before; what it leaves is Transformers'."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "gradient_checkpointing": True,
        "deepspeed": "ds.json" if form == "file" else DEEPSPEED,
    }
    found = imported(tmp_path, arguments, world=4)
    assert not refused(found)
    config = write_import(found, tmp_path / "out")
    assert (config.sharding.zero_stage, config.sharding.offload, config.precision) == (3, "optimizer", "bf16")
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (32, 2)
    assert (config.optim.lr, config.optim.betas) == (3e-5, (0.9, 0.999))
    assert (config.schedule.name, config.schedule.convention, config.schedule.warmup_steps) == (
        "cosine",
        "transformers",
        5,
    )
    assert config.activation_checkpointing.mode == "full"


def test_secrets_stay_out_of_reports(tmp_path: Path) -> None:
    found = imported(tmp_path, {"hub_token": "hf_secret"})
    write_import(found, tmp_path / "out")
    assert "hf_secret" not in format_report(found)
    assert not [path for path in (tmp_path / "out").iterdir() if "hf_secret" in path.read_text()]


@pytest.mark.parametrize("value", ["example", None, [1], {"x": 1}, "word", -3, True, 10**30])
def test_every_key_of_the_table_has_exactly_one_verdict(value: Any, tmp_path: Path) -> None:
    examples = {"flag": True, "whole": 2, "text": "steps", "any": True, "number": 0.5, "list": ["tensorboard"]}
    for name, entry in TABLE.entries.items():
        section, _, leaf = name.rpartition(".")
        top, _, inner = section.partition(".")
        written = examples[entry.takes] if value == "example" else value
        if (name in TABLE.sections and value == {"x": 1}) or name == "deepspeed":
            continue
        if name == "fsdp_config" and isinstance(written, str):
            continue  # a file to read
        nested: dict[str, Any] = {leaf: written}
        for part in reversed([part for part in (top, inner) if part]):
            nested = {part: nested}
        if not section:
            nested = {leaf: written}
        found = imported(tmp_path, nested)
        inside = [one for one in found.verdicts if one.key.name == name or one.key.name.startswith(f"{name}.")]
        assert len(inside) == 1, name
        assert inside[0].settings or inside[0].text, name
        json.dumps(format_json(found))
        assert name in format_report(found)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("learnig_rate", "learning_rate"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("fsdp_config.reshard_after_foward", "fsdp_config.reshard_after_forward"),
        ("lr_scheduler_kwargs.min_lr_rat", "lr_scheduler_kwargs.min_lr_rate"),
        ("gradient_checkpointing_kwargs.use_rentrant", "gradient_checkpointing_kwargs.use_reentrant"),
        ("accelerator_config.split_batch", "accelerator_config.split_batches"),
        ("warmup_step", "warmup_steps"),
    ],
)
def test_a_mistyped_key_is_caught_with_the_right_name(wrong: str, right: str, tmp_path: Path) -> None:
    section, _, leaf = wrong.rpartition(".")
    found = imported(tmp_path, {section: {leaf: 1}} if section else {leaf: 1})
    assert verdict(found, wrong).kind == "refused"
    assert f"did you mean {right}?" in verdict(found, wrong).text


def transformers_share(kind: str, step: int, *, warmup: int, total: int, floor: float) -> float:
    """The share of the rate that Transformers' LambdaLR gives step `step`, from the words of its documentation."""
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    done = (step - warmup) / max(1, total - warmup)
    if kind == "constant_with_warmup":
        return 1.0
    if kind in ("linear", "polynomial"):
        return floor + (1.0 - floor) * max(0.0, 1.0 - done)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


@pytest.mark.parametrize(
    ("kind", "kwargs", "floor"),
    [
        ("constant", {}, 0.0),
        ("constant_with_warmup", {}, 0.0),
        ("linear", {}, 0.0),
        ("cosine", {}, 0.0),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, 0.2),
        ("cosine_with_min_lr", {"min_lr": 2e-6}, 0.1),
        ("polynomial", {"lr_end": 1e-6, "power": 1.0}, 0.05),
    ],
)
@pytest.mark.parametrize("warmup", [0, 6])
def test_learning_rates_are_transformers(kind: str, kwargs: Any, floor: float, warmup: int, tmp_path: Path) -> None:
    arguments = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup, "max_steps": 30}
    found = imported(tmp_path, {**arguments, "learning_rate": 2e-5})
    assert not refused(found)
    config = build_config(found)
    rates = [scheduled_rate(step, schedule=config.schedule, peak=config.optim.lr, total_steps=30) for step in range(30)]
    shares = [transformers_share(kind, step, warmup=warmup, total=30, floor=floor) for step in range(30)]
    assert rates == pytest.approx([2e-5 * share for share in shares], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_odd_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="training arguments"):
        import_trainer(path, world_size=2)
