"""A profile says what the settings say, or is refused by name with both values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch_profile import (
    check_environment,
    check_layer_class,
    check_profile,
    read_profile,
    write_profile,
)

PROFILES = Path(__file__).with_name("profiles")
PLAIN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2},
}


def profile_with(*, fsdp: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    profile = copy.deepcopy(PLAIN)
    profile.update(top)
    profile["fsdp_config"].update(fsdp or {})
    return profile


def error_of(profile: dict[str, Any], settings: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_profile(profile, Config.load(None, settings or {}), source="p.yaml")
    return str(caught.value)


@pytest.mark.parametrize("use_cpu", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{}, {"sharding.zero_stage": 0}, {"sharding.zero_stage": 2, "sharding.offload": "params"}, {"precision": "fp32"}],
    ids=str,
)
def test_a_written_profile_agrees(tmp_path: Path, settings: dict[str, Any], use_cpu: bool) -> None:
    config = Config.load(None, settings)
    path = write_profile(tmp_path / "p.yaml", config, processes=2, use_cpu=use_cpu)
    profile = read_profile(path)
    check_profile(profile, config)
    assert profile["mixed_precision"] == "no"
    assert profile["use_cpu"] is use_cpu
    assert profile["fsdp_config"]["fsdp_version"] == 2
    assert "mixed_precision: 'no'" in path.read_text()


@pytest.mark.parametrize(
    ("fsdp", "settings", "parts"),
    [
        ({"fsdp_version": 1}, {}, ["fsdp_version: 1", "set fsdp_version: 2"]),
        ({"fsdp_version": None}, {}, ["Accelerate takes FSDP1"]),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {}, ["SHARD_GRAD_OP", "sharding.zero_stage: 3"]),
        ({"fsdp_sharding_strategy": 2}, {}, ["fsdp_sharding_strategy: 2", "sharding.zero_stage: 3"]),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {}, ["HYBRID_SHARD", "sharding.replicate: 1"]),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, {}, ["HYBRID_SHARD_ZERO2"]),
        ({"fsdp_reshard_after_forward": False}, {}, ["false", "sharding.zero_stage: 3"]),
        ({"fsdp_reshard_after_forward": True}, {"sharding.zero_stage": 2}, ["true", "sharding.zero_stage: 2"]),
        ({"fsdp_reshard_after_forward": 4}, {}, ["neither true nor false", "sharding.reshard_after_forward"]),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {}, ["SHARD_GRAD_OP", "sharding.zero_stage: 3"]),
        ({"fsdp_offload_params": True}, {}, ["fsdp_offload_params: true", "sharding.offload: 'none'"]),
        ({"fsdp_offload_params": "false"}, {"sharding.offload": "params"}, ["'false'", "sharding.offload: 'params'"]),
        ({"fsdp_offload_params": "“false”"}, {}, ["neither true nor false"]),
        ({"fsdp_activation_checkpointing": False}, {}, ["activation_checkpointing.mode: 'full'"]),
        ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing.mode": "none"}, ["mode: 'none'"]),
        ({"fsdp_activation_checkpointing_offload": True}, {}, ["activation_checkpointing.offload: false"]),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {}, ["SHARDED_STATE_DICT", "export.at_end"]),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, {}, ["fsdp_auto_wrap_policy"]),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {}, ["fsdp_auto_wrap_policy"]),
        ({"fsdp_ignored_modules": ".*head"}, {}, ["fsdp_ignored_modules"]),
        ({"fsdp_use_orig_params": False}, {}, ["fsdp_use_orig_params"]),
        ({"fsdp_sync_module_states": False}, {}, ["fsdp_sync_module_states"]),
        ({"fsdp_forward_prefetch": True}, {}, ["fsdp_forward_prefetch"]),
        ({"fsdp_backward_prefetch": "BACKWARD_POST"}, {}, ["fsdp_backward_prefetch"]),
        ({"fsdp_min_num_params": 1000}, {}, ["fsdp_min_num_params"]),
        ({"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, {}, ["nothing reads fsdp_backward_prefetch_policy"]),
        ({"fsdp_ofload_params": True}, {}, ["did you mean fsdp_offload_params?"]),
        ({"offload_params": True}, {}, ["fsdp_offload_params: true"]),
    ],
    ids=str,
)
def test_fsdp_config_that_cannot_hold(fsdp: dict[str, Any], settings: dict[str, Any], parts: list[str]) -> None:
    message = error_of(profile_with(fsdp=fsdp), settings)
    for part in [*parts, "found:", "to fix:", "p.yaml"]:
        assert part in message
    assert "settings are wrong" not in message  # one contradiction, one complaint


@pytest.mark.parametrize(
    ("top", "settings", "parts"),
    [
        ({"mixed_precision": "bf16"}, {"precision": "fp32"}, ["mixed_precision: bf16", "precision: fp32"]),
        ({"mixed_precision": "fp16"}, {}, ["mixed_precision: fp16", "precision: bf16"]),
        ({"mixed_precision": "fp8"}, {}, ["mixed_precision: fp8"]),
        ({"mixed_precision": False}, {}, ["in quotes: 'no'"]),
        ({"distributed_type": "MULTI_GPU"}, {}, ["MULTI_GPU", "distributed_type: FSDP"]),
        ({"distributed_type": "NO"}, {}, ["distributed_type: FSDP"]),
        ({"distributed_type": "fsdp"}, {}, ["capitals"]),
        ({"num_processes": -1}, {}, ["num_processes: -1"]),
        ({"num_processes": "2"}, {}, ["num_processes: '2'"]),
        ({"deepspeed_config": {"zero_stage": 2}}, {}, ["deepspeed_config", "sharding.zero_stage"]),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, {}, ["parallelism_config"]),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {}, ["compiling comes later"]),
        ({"enable_cpu_affinity": True}, {}, ["ignores enable_cpu_affinity"]),
        ({"rdzv_backend": "c10d"}, {}, ["ignores rdzv_backend"]),
        ({"gradient_accumulation_steps": 4}, {}, ["batch.global_batch_size"]),
        ({"fsdp_version": 2}, {}, ["write fsdp_version under fsdp_config"]),
        ({"num_process": 2}, {}, ["did you mean num_processes?"]),
    ],
    ids=str,
)
def test_top_level_that_cannot_hold(top: dict[str, Any], settings: dict[str, Any], parts: list[str]) -> None:
    message = error_of(profile_with(**top), settings)
    for part in [*parts, "found:", "to fix:"]:
        assert part in message


@pytest.mark.parametrize(
    ("fsdp", "top", "settings"),
    [
        ({}, {}, {}),
        ({}, {"mixed_precision": "bf16"}, {}),
        ({}, {"mixed_precision": "bf16"}, {"precision": "bf16_pure"}),
        ({}, {"mixed_precision": None}, {"precision": "fp16"}),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "true"}, {}, {}),
        ({"fsdp_sharding_strategy": 4}, {}, {"sharding.replicate": 2}),
        ({"fsdp_reshard_after_forward": False}, {}, {"sharding.zero_stage": 1}),
        ({"offload_params": "True"}, {}, {"sharding.offload": "params"}),
        ({"fsdp_use_orig_params": True, "fsdp_sync_module_states": True, "fsdp_forward_prefetch": False}, {}, {}),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True}, {}, {}),
        ({"fsdp_activation_checkpointing": True}, {}, {}),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}, {}, {}),
        ({}, {"rdzv_backend": "static", "same_network": True, "downcast_bf16": "no", "deepspeed_config": {}}, {}),
        ({}, {"distributed_type": "NO", "num_processes": 1}, {}),
    ],
    ids=str,
)
def test_profiles_that_agree(fsdp: dict[str, Any], top: dict[str, Any], settings: dict[str, Any]) -> None:
    check_profile(profile_with(fsdp=fsdp, **top), Config.load(None, settings))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("v2_with_v1_keys", ["fsdp_sharding_strategy: 'SHARD_GRAD_OP'"]),
        ("wrong_layer_class_case", ["fsdp_version", "FULL_STATE_DICT"]),
        ("numeric_strategy_and_old_prefetch_key", ["fsdp_backward_prefetch_policy", "FULL_STATE_DICT"]),
        ("deepspeed_zero2_plus_fsdp_block", ["DEEPSPEED", "fp16", "deepspeed_config"]),
    ],
)
def test_profiles_of_users(name: str, parts: list[str]) -> None:
    message = error_of(read_profile(PROFILES / f"{name}.yaml"))
    for part in parts:
        assert part in message


def test_user_profile_with_the_settings_it_asks_for() -> None:
    check_profile(read_profile(PROFILES / "v2_with_v1_keys.yaml"), Config.from_dict({"sharding": {"zero_stage": 2}}))
    check_profile(read_profile(PROFILES / "two_classes_comma_space.yaml"), Config())


@given(key=st.from_regex(r"[a-z_]{3,20}", fullmatch=True))
def test_no_unknown_key_of_fsdp_config_passes(key: str) -> None:
    from fsdp_trainer.launch_profile import _FSDP_RULES

    if key.removeprefix("fsdp_") in {name.removeprefix("fsdp_") for name in _FSDP_RULES}:
        return
    with pytest.raises(ConfigError, match="nothing reads"):
        check_profile(profile_with(fsdp={key: True}), Config())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "cannot be read"),
        ("a: &a [*a]", "anchors"),
        ("a: " + 3000 * "[", "cannot be read"),
        ("- a", "not a list of"),
        ("", "not a list of"),
    ],
)
def test_broken_profile(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_profile(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_profile(tmp_path / "nosuch.yaml")


# What a bare `accelerate launch` with a profile that says only "FSDP" exports (accelerate 1.15).
LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"sharding.zero_stage": 0}, {"sharding.zero_stage": 2}, {"sharding.offload": "params"}, {"precision": "fp16"}],
    ids=str,
)
def test_launch_defaults_are_nobodys_wish(settings: dict[str, Any]) -> None:
    check_environment(Config.load(None, settings), LAUNCHED)
    check_environment(Config.load(None, settings), {})


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_a_stale_variable_of_the_shell_is_not_blamed_on_the_profile(name: str) -> None:
    """A profile names one engine: what is set beside its FSDP was there before."""
    with pytest.raises(ConfigError) as caught:
        check_environment(Config.load(None), {**LAUNCHED, name: "true"})
    assert f"unset {name}" in str(caught.value) and "shell" in str(caught.value)
    without = {key: value for key, value in LAUNCHED.items() if key != "ACCELERATE_USE_FSDP"}
    with pytest.raises(ConfigError, match="use a profile for FSDP"):
        check_environment(Config.load(None), {**without, name: "true"})


@pytest.mark.parametrize(
    ("name", "value", "settings", "part"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", {"precision": "fp32"}, "precision: fp32"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", {}, "sharding.zero_stage: 3"),
        ("FSDP_OFFLOAD_PARAMS", "true", {}, "sharding.offload: 'none'"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", {"activation_checkpointing.mode": "none"}, "mode: 'none'"),
        ("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP", {}, "sharding.zero_stage: 3"),
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", {}, "fsdp_state_dict_type"),
        ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", {}, "fsdp_auto_wrap_policy"),
        ("FSDP_IGNORED_MODULES", ".*head", {}, "fsdp_ignored_modules"),
        ("FSDP_USE_ORIG_PARAMS", "false", {}, "fsdp_use_orig_params"),
        ("ACCELERATE_USE_DEEPSPEED", "true", {}, "ACCELERATE_USE_DEEPSPEED"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", {}, "FSDP2 alone"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, "compiling comes later"),
    ],
)
def test_what_differs_from_the_defaults_is_compared(name: str, value: str, settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(Config.load(None, settings), {**LAUNCHED, name: value})
    assert part in str(caught.value)
    assert "Accelerate profile" in str(caught.value)


def test_environment_that_agrees() -> None:
    environ = {**LAUNCHED, "FSDP_OFFLOAD_PARAMS": "true", "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_VERSION": "2"}
    config = Config.from_dict({"sharding": {"zero_stage": 2, "offload": "params"}})
    check_environment(config, environ)


def test_layer_class_of_a_profile() -> None:
    """Report 137: spaces are allowed, a class inside the layer is said, and a near miss is suggested."""
    classes = ["LlamaDecoderLayer", "LlamaAttention", "Linear", "LlamaMLP"]
    for right in ("", "LlamaDecoderLayer", " LlamaDecoderLayer ,"):
        assert check_layer_class({"FSDP_TRANSFORMER_CLS_TO_WRAP": right}, classes) == ""
    assert check_layer_class({}, classes) == ""
    for nested in ("LlamaDecoderLayer, LlamaMLP", "LlamaMLP,LlamaDecoderLayer"):
        remark = check_layer_class({"FSDP_TRANSFORMER_CLS_TO_WRAP": nested}, classes)
        assert "LlamaMLP inside LlamaDecoderLayer" in remark
    for wrong in ("LLaMADecoderLayer", "LlamaMLP", "GPT2Block", "LlamaDecoderLayer, GPT2Block"):
        with pytest.raises(ConfigError, match="LlamaDecoderLayer in the model") as caught:
            check_layer_class({"FSDP_TRANSFORMER_CLS_TO_WRAP": wrong}, classes)
        assert ("did you mean LlamaDecoderLayer?" in str(caught.value)) == (wrong == "LLaMADecoderLayer")
