"""Rules across settings, what comes later, and what depends on the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError


def error_of(overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(None, overrides)
    return str(caught.value)


# --- rules across settings


LATER = [
    {"activation_checkpointing.mode": "selective"},
    {"activation_checkpointing.offload": True},
    {"compile.enabled": True},
]


@pytest.mark.parametrize("overrides", LATER, ids=str)
def test_what_comes_later_is_refused_by_name(overrides: dict[str, Any]) -> None:
    (path,) = overrides
    message = error_of(overrides)
    assert f"{path}: " in message
    assert "comes later" in message
    assert f"until then set {path}" in message


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sharding": {"replicate": 2, "zero_stage": 2}}, ["sharding.replicate", "sharding.zero_stage"]),
        (
            {"sharding": {"reshard_after_forward": 2, "zero_stage": 1}},
            ["sharding.reshard_after_forward", "sharding.zero_stage"],
        ),
        ({"sharding": {"offload": "params", "zero_stage": 0}}, ["sharding.offload", "sharding.zero_stage"]),
        ({"optim.offload_step": "device"}, ["optim.offload_step", "sharding.offload: 'none'"]),
        ({"sharding.offload": "params", "optim.offload_step": "device"}, ["optim.offload_step", "sharding.offload"]),
        ({"sharding.reduce_dtype": "fp16"}, ["sharding.reduce_dtype", "precision"]),
        ({"precision": "fp16", "optim.implementation": "foreach"}, ["precision", "optim.implementation"]),
        ({"precision": "bf16_pure", "optim.implementation": "foreach"}, ["precision", "optim.implementation"]),
        ({"optim": {"state_dtype": "bf16", "implementation": "foreach"}}, ["state_dtype", "optim.implementation"]),
        ({"precision": "bf16_pure", "sharding.reduce_dtype": "fp16"}, ["precision", "sharding.reduce_dtype"]),
        ({"train.on_nonfinite": "skip", "optim.implementation": "foreach"}, ["train.on_nonfinite", "optim.implem"]),
        ({"activation_checkpointing.every_n": 2}, ["activation_checkpointing.every_n", "every_n_layers"]),
        ({"activation_checkpointing": {"every_n": 2, "mode": "none"}}, ["activation_checkpointing.every_n"]),
        ({"optim.no_decay": ["norm"]}, ["optim.no_decay", "optim.weight_decay"]),
        ({"checkpoint": {"enabled": False, "every_steps": 7}}, ["checkpoint.every_steps", "checkpoint.enabled: false"]),
        ({"checkpoint": {"enabled": False, "keep_best": True}, "data.eval": 0.1}, ["checkpoint.keep_best", "is saved"]),
        ({"optim": {"name": "adamw_8bit", "implementation": "foreach"}}, ["optim.implementation", "optim.name"]),
        ({"optim": {"name": "adamw_8bit", "state_dtype": "bf16"}}, ["optim.state_dtype", "optim.name"]),
        ({"optim.name": "paged_adamw_8bit", "sharding.offload": "optimizer"}, ["optim.name", "sharding.offload"]),
        (
            {"optim.name": "paged_adamw_8bit", "sharding.offload": "params"},
            ["optim.name", "set optim.name: adamw_8bit"],
        ),
        ({"loss": {"kind": "plain", "chunk_tokens": 8}}, ["loss.chunk_tokens", "loss.kind"]),
        ({"schedule": {"warmup_steps": 5, "warmup_ratio": 0.1}}, ["schedule.warmup_ratio", "schedule.warmup_steps"]),
        ({"schedule": {"name": "constant", "min_lr_ratio": 0.5}}, ["schedule.min_lr_ratio", "schedule.name"]),
        ({"schedule.warmup_shape": "log"}, ["schedule.warmup_shape", "schedule.convention"]),
        (
            {"schedule": {"warmup_min_ratio": 0.1, "warmup_steps": 0}},
            ["schedule.warmup_min_ratio", "schedule.warmup_steps"],
        ),
        (
            {"schedule": {"name": "constant", "warmup_steps": 2, "total_steps": 10}},
            ["schedule.total_steps", "schedule.name"],
        ),
        ({"schedule.warmup_steps": 11, "train.max_steps": 10}, ["schedule.warmup_steps", "train.max_steps"]),
        ({"profile.steps": 5}, ["profile.steps", "profile.start"]),
        ({"data": {"format": "text", "train_on": "all"}}, ["data.train_on", "data.format"]),
        ({"data.columns": {"promt": "q"}}, ["data.columns", "did you mean prompt?"]),
        ({"data.train": [{"path": "a", "weight": 1.0}, "b"]}, ["data.train", "give each source a weight, or none"]),
        ({"data.train": [{"path": "a", "weight": 1.0}]}, ["data.train", "single source"]),
        ({"data.eval": [{"path": "a", "weight": 1.0}]}, ["data.eval", "weights"]),
        ({"data.streaming": True}, ["data.streaming", "set train.max_steps"]),
        ({"data": {"streaming": True, "eval": 0.1}, "train.max_steps": 9}, ["data.eval", "data.streaming"]),
        ({"data.shuffle_buffer": 5}, ["data.shuffle_buffer", "data.streaming"]),
        ({"eval.every_steps": 10}, ["eval.every_steps", "data.eval"]),
        ({"data.eval": 0.1, "eval.at_end": False}, ["data.eval", "eval.at_end"]),
        ({"batch": {"global_batch_size": 7, "micro_batch_size": 2}}, ["7 / 2 = 3.5", "batch.global_batch_size: 8"]),
    ],
    ids=str,
)
def test_conflicts_have_three_parts(overrides: dict[str, Any], named: list[str]) -> None:
    message = error_of(overrides)
    for part in [*named, "found:", "to fix:"]:
        assert part in message


@pytest.mark.parametrize(
    "overrides",
    [
        {"schedule": {"warmup_steps": 5}},
        {"schedule.warmup_steps": 0},
        {"schedule": {"warmup_shape": "log", "convention": "deepspeed"}},
        {"schedule": {"name": "constant"}},
        {"activation_checkpointing": {"mode": "every_n_layers", "every_n": 3}},
        {"precision": "fp16", "sharding.reduce_dtype": "fp16"},
        {"precision": "fp16", "train.on_nonfinite": "skip"},
        {"precision": "fp16", "optim.state_dtype": "bf16"},
        {"precision": "bf16_pure", "train.on_nonfinite": "skip", "sharding.reduce_dtype": "bf16"},
        {"train": {"max_steps": 10, "epochs": 2}},
        {"data.eval": 0.02, "eval.every_steps": 10},
        {"data": {"columns": {"messages": "talk", "tools": "functions"}, "format": "sharegpt"}},
        {"data.train": [{"path": "a", "weight": 0.5}, {"path": "b", "weight": 2.0}]},
        {"data": {"train": {"path": "org/name", "split": "validation"}, "eval": ["a.csv", {"path": "b.txt"}]}},
        {"data": {"streaming": True, "shuffle_buffer": 5, "eval": "a.jsonl"}, "train.max_steps": 9},
        {"data": {"packing": False, "on_too_long": "drop", "on_bad_record": "skip", "train_on": "last_assistant"}},
        {"sharding": {"offload": "params", "zero_stage": 1}},
        {"sharding": {"offload": "optimizer", "zero_stage": 0}},
        {"sharding.offload": "optimizer", "optim.offload_step": "device", "precision": "bf16_pure"},
        {"optim": {"weight_decay": 0.1, "no_decay": ["norm"]}},
        {"log.trackers": ["tensorboard", "wandb"]},
        {"rehearse": False},
        {"checkpoint": {"async_save": False, "resume": "never"}},
        {"optim.implementation": "foreach"},
    ],
    ids=str,
)
def test_accepted(overrides: dict[str, Any]) -> None:
    Config.load(None, overrides)


@pytest.mark.parametrize(("stage", "ranks", "fits"), [(3, 1, True), (0, 4, True), (1, 2, False), (3, 4, False)])
def test_paged_moments_are_for_who_owns_whole_parameters(stage: int, ranks: int, fits: bool) -> None:
    config = Config.load(None, {"optim.name": "paged_adamw_8bit", "sharding.zero_stage": stage})
    if fits:
        assert config.check_world(ranks) == 64 // ranks
        return
    with pytest.raises(ConfigError) as caught:
        config.check_world(ranks)
    for part in (
        f"{ranks} ranks",
        "optim.name: 'paged_adamw_8bit'",
        f"zero_stage: {stage}",
        "set optim.name: adamw_8bit",
    ):
        assert part in str(caught.value)


def test_splitting_needs_packing() -> None:
    message = error_of({"data": {"packing": False, "on_too_long": "split"}})
    assert "data.packing: false" in message


def test_output_dir_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("x")
    for folder in (file, file / "deeper"):
        assert "output_dir is not a folder" in error_of({"output_dir": str(folder)})
    Config.load(None, {"output_dir": str(tmp_path / "new" / "deeper")})


def test_chat_template_must_be_a_file(tmp_path: Path) -> None:
    assert "data.chat_template is not a file" in error_of({"data.chat_template": str(tmp_path / "nosuch.jinja")})


def test_python_construction_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr cannot be -1"):
        Config.model_validate({"optim": {"lr": -1}})
    with pytest.raises(ConfigError, match="did you mean"):
        Config(optimm={})  # type: ignore[call-arg]


# --- the number of ranks


@pytest.mark.parametrize(
    ("size", "micro", "world", "steps"), [(64, 1, 1, 64), (64, 2, 8, 4), (6, 1, 3, 2), (8, 8, 1, 1)]
)
def test_accumulation_is_derived(size: int, micro: int, world: int, steps: int) -> None:
    config = Config.from_dict({"batch": {"global_batch_size": size, "micro_batch_size": micro}})
    assert config.check_world(world) == steps


@pytest.mark.parametrize(
    ("overrides", "world", "parts"),
    [
        ({"batch.global_batch_size": 7}, 2, ["7 = 1 x accumulation x 2", "3.5", "6 or 8"]),
        ({"batch.global_batch_size": 2}, 4, ["2 = 1 x accumulation x 4", "0.5", "set batch.global_batch_size: 4"]),
        ({"sharding.replicate": 3}, 4, ["4 ranks / 3 copies", "[2]"]),
        ({"sharding.replicate": 4}, 4, ["nothing to shard", "zero_stage: 0"]),
        ({"sharding.replicate": 2}, 1, ["1 rank / 2 copies"]),
        ({"sharding": {"offload": "optimizer", "zero_stage": 0}}, 2, ["sharding.zero_stage: 0", "every rank"]),
        ({"sharding.reshard_after_forward": 3}, 4, ["4 ranks", "groups of 3", "[2]"]),
        ({"sharding.reshard_after_forward": 4}, 4, ["groups of 4"]),
        ({"sharding.reshard_after_forward": 2, "sharding.replicate": 2}, 4, ["2 of 4 ranks hold a copy, groups of 2"]),
    ],
    ids=str,
)
def test_world_that_does_not_fit(overrides: dict[str, Any], world: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(None, overrides).check_world(world)
    for part in [*parts, "found:", "to fix:"]:
        assert part in str(caught.value)


def test_an_offloaded_run_is_not_told_to_keep_whole_copies() -> None:
    """What one refusal tells to set must not be refused by another."""
    with pytest.raises(ConfigError, match="nothing to shard") as caught:
        Config.from_dict({"sharding": {"replicate": 4, "offload": "optimizer"}}).check_world(4)
    assert "zero_stage" not in caught.value.fix and "[2]" in caught.value.fix


def test_worlds_that_fit() -> None:
    assert Config.from_dict({"sharding": {"replicate": 2}}).check_world(4) == 16
    assert Config.from_dict({"sharding": {"reshard_after_forward": 2}}).check_world(4) == 16
    assert Config().check_world(1) == 64


@given(micro=st.integers(1, 16), accumulation=st.integers(1, 16), world=st.integers(1, 64))
def test_every_exact_product_is_accepted(micro: int, accumulation: int, world: int) -> None:
    size = micro * accumulation * world
    config = Config.from_dict({"batch": {"global_batch_size": size, "micro_batch_size": micro}})
    assert config.check_world(world) == accumulation
