"""An Accelerate profile becomes the settings it means, whichever version and spelling it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.accelerate_profile import import_accelerate
from fsdp_trainer.interop.folder import build_config, write_import
from fsdp_trainer.interop.key_table import load_table
from fsdp_trainer.interop.report import format_json, format_report
from fsdp_trainer.interop.verdicts import Import, Verdict
from fsdp_trainer.launch_profile import check_profile, read_profile

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
TABLE = load_table("accelerate_keys")
PLAIN: dict[str, Any] = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2}


def imported(folder: Path, fsdp: dict[str, Any] | None = None, *, model: Path | None = None, **top: Any) -> Import:
    path = folder / "p.yaml"
    profile = {name: value for name, value in {**PLAIN, **top}.items() if value is not ...}
    path.write_text(yaml.safe_dump(profile | ({"fsdp_config": fsdp} if fsdp is not None else {}), sort_keys=False))
    return import_accelerate(path, model=model)


def verdict(found: Import, name: str) -> Verdict:
    matching = [one for one in found.verdicts if one.key.name == name]
    assert len(matching) == 1, f"{name} has {len(matching)} verdicts"
    return matching[0]


def fsdp_verdict(found: Import, name: str) -> Verdict:
    return verdict(found, f"fsdp_config.{name}")


def refused(found: Import) -> set[str]:
    return {one.key.name for one in found.of_kind("refused")}


def model_folder(folder: Path, model_type: str) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder / "model"


def held(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


# --- every file of the inputs is handled as it should be -------------------------------------------------------------


def test_version_2_with_keys_of_version_1(tmp_path: Path) -> None:
    """acc01, report 135: SHARD_GRAD_OP is stage 2, and what FSDP2 does not read is listed."""
    found = import_accelerate(PROFILES / "v2_with_v1_keys.yaml")
    assert not refused(found)
    for name in ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states"):
        assert fsdp_verdict(found, name).kind == "not needed"
    assert fsdp_verdict(found, "fsdp_sharding_strategy").kind == "mapped with a difference"
    config = write_import(found, tmp_path / "out")
    assert (config.sharding.zero_stage, config.precision) == (2, "bf16")
    assert read_profile(tmp_path / "out" / "accelerate.yaml")["fsdp_config"]["fsdp_reshard_after_forward"] is False


def test_a_class_with_another_capital_is_refused_with_the_right_one() -> None:
    """acc02, report 137."""
    found = import_accelerate(PROFILES / "wrong_layer_class_case.yaml")
    assert refused(found) == {"fsdp_config.fsdp_transformer_layer_cls_to_wrap"}
    assert "did you mean LlamaDecoderLayer?" in fsdp_verdict(found, "fsdp_transformer_layer_cls_to_wrap").text


def test_a_numeric_strategy_an_old_key_and_another_models_class(tmp_path: Path) -> None:
    """acc04, reports 137 and 138."""
    path = PROFILES / "numeric_strategy_and_old_prefetch_key.yaml"
    found = import_accelerate(path)
    assert not refused(found)
    assert fsdp_verdict(found, "fsdp_sharding_strategy").settings == {"sharding.zero_stage": 3}
    assert "another name of" in fsdp_verdict(found, "fsdp_backward_prefetch_policy").text
    on_llama = import_accelerate(path, model=model_folder(tmp_path, "llama"))
    assert refused(on_llama) == {"fsdp_config.fsdp_transformer_layer_cls_to_wrap"}


def test_two_classes_one_inside_the_other(tmp_path: Path) -> None:
    """acc05, reports 82 and 137: trimmed, with a warning; checkpointing goes round the layer alone."""
    found = import_accelerate(PROFILES / "two_classes_comma_space.yaml", model=model_folder(tmp_path, "llama"))
    assert not refused(found)
    classes = fsdp_verdict(found, "fsdp_transformer_layer_cls_to_wrap")
    assert (
        classes.kind == "mapped with a difference"
        and "WARNING: only the decoder layer (LlamaDecoderLayer)" in classes.text
    )
    assert build_config(found).activation_checkpointing.mode == "full"


def test_a_deepspeed_profile_with_an_empty_fsdp_block(tmp_path: Path) -> None:
    """acc07, reports 133 and 136: stage 2, clipping 0.5, 4 accumulated."""
    found = import_accelerate(PROFILES / "deepspeed_zero2_plus_fsdp_block.yaml")
    assert not refused(found)
    config = write_import(found, tmp_path / "out")
    assert (config.sharding.zero_stage, config.optim.max_grad_norm, config.precision) == (2, 0.5, "fp16")
    assert config.check_world(2) == 4
    other = import_accelerate(PROFILES / "deepspeed_zero2_plus_fsdp_block.yaml", micro_batch_size=3)
    assert build_config(other).batch.global_batch_size == 3 * 4 * 2


# --- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fsdp", "top", "expected"),
    [
        ({"fsdp_sharding_strategy": "full_shard"}, {}, (3, 1)),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {}, (2, 1)),
        ({"fsdp_sharding_strategy": 2}, {}, (2, 1)),
        ({"fsdp_sharding_strategy": "3"}, {}, (0, 1)),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {}, (0, 1)),
        ({"fsdp_sharding_strategy": 4}, {"num_processes": 8, "num_machines": 2}, (3, 2)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"num_processes": 16, "num_machines": 4}, (3, 4)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, {"num_processes": 8, "num_machines": 2}, (3, 2)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"num_processes": 8}, (3, 1)),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {}, (2, 1)),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {}, (2, 1)),
        ({"fsdp_reshard_after_forward": "NO_SHARD", "fsdp_sharding_strategy": "FULL_SHARD"}, {}, (3, 1)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, {}, (3, 1)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "no"}, {}, (2, 1)),
        ({"fsdp_version": "2", "fsdp_reshard_after_forward": "FULL_SHARD"}, {}, (3, 1)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_sharding_strategy": 2}, {}, (2, 1)),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}, {}, (0, 1)),
        ({"fsdp_version": 2}, {}, (3, 1)),
        ({}, {}, (3, 1)),
        (None, {"distributed_type": "fsdp"}, (3, 1)),
        (None, {"distributed_type": "MULTI_GPU"}, (0, 1)),
        (None, {"distributed_type": "NO", "num_processes": 1}, (0, 1)),
    ],
    ids=str,
)
def test_strategies(fsdp: Any, top: dict[str, Any], expected: tuple[int, int], tmp_path: Path) -> None:
    """Reports 135, 136 and 138: any case, numbers, old names; HYBRID_SHARD is one copy a machine."""
    found = imported(tmp_path, fsdp, **top)
    assert not refused(found)
    config = write_import(found, tmp_path / "out")
    assert (config.sharding.zero_stage, config.sharding.replicate) == expected
    check_profile(read_profile(tmp_path / "out" / "accelerate.yaml"), config)


def test_a_mesh_of_parallelism_config(tmp_path: Path) -> None:
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    config = build_config(imported(tmp_path, {"fsdp_version": 2}, num_processes=8, parallelism_config=sizes))
    assert (config.sharding.zero_stage, config.sharding.replicate) == (3, 2)
    wrong = imported(tmp_path, {"fsdp_version": 2}, num_processes=4, parallelism_config=sizes)
    assert "2 copies x 4 shards = 8 are not 4 processes" in "".join(one.text for one in wrong.of_kind("refused"))
    short = imported(tmp_path, {"fsdp_version": 2}, parallelism_config={"dp_shard_size": 2})
    assert "parallelism_config_dp_shard_size" in verdict(short, "parallelism_config.dp_shard_size").text


@pytest.mark.parametrize(
    ("fsdp", "top", "name"),
    [
        ({"fsdp_sharding_strategy": "ZERO3"}, {}, "fsdp_config.fsdp_sharding_strategy"),
        ({"fsdp_sharding_strategy": 9}, {}, "fsdp_config.fsdp_sharding_strategy"),
        ({"fsdp_version": 3}, {}, "fsdp_config.fsdp_version"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": 8}, {}, "fsdp_config.fsdp_reshard_after_forward"),
        (
            {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            {},
            "fsdp_config.fsdp_sharding_strategy",
        ),
        ({"fsdp_offload_params": "\u201cfalse\u201d"}, {}, "fsdp_config.fsdp_offload_params"),
        ({"fsdp_ignored_modules": ".*head"}, {}, "fsdp_config.fsdp_ignored_modules"),
        ({"fsdp_state_dict_type": "SHARD_STATE_DICT"}, {}, "fsdp_config.fsdp_state_dict_type"),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED"}, {}, "fsdp_config.fsdp_auto_wrap_policy"),
        ({}, {"mixed_precision": "fp8"}, "mixed_precision"),
        ({}, {"mixed_precision": "tf32"}, "mixed_precision"),
        ({}, {"distributed_type": "MEGATRON_LM"}, "distributed_type"),
        ({}, {"num_processes": 0}, "num_processes"),
        ({}, {"num_processes": 5, "num_machines": 2}, "num_processes"),
        ({}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config.dynamo_backend"),
        ({}, {"megatron_lm_config": {"tp": 2}}, "megatron_lm_config.tp"),
        ({}, {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment"),
        ({}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
    ],
    ids=str,
)
def test_what_cannot_hold_is_refused_alone(
    fsdp: dict[str, Any], top: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert refused(imported(tmp_path, fsdp, **top)) == {name}


@pytest.mark.parametrize("word", ["false", "False", "no", 0, False])
def test_false_in_any_form_is_false(word: Any, tmp_path: Path) -> None:
    """Report 139."""
    assert build_config(imported(tmp_path, {"fsdp_offload_params": word})).sharding.offload == "none"
    assert build_config(imported(tmp_path, {"fsdp_offload_params": "True"})).sharding.offload == "params"


def test_no_without_quotes_is_no(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("distributed_type: FSDP\nmixed_precision: no\nnum_processes: 2\n")
    assert build_config(import_accelerate(path)).precision == "fp32"


def test_what_launching_needs_stays_in_the_profile(tmp_path: Path) -> None:
    top = {"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    found = imported(tmp_path, {"fsdp_version": 2}, main_process_port=29511, **top)
    write_import(found, tmp_path / "out")
    profile = read_profile(tmp_path / "out" / "accelerate.yaml")
    assert {name: profile[name] for name in top} == top
    assert profile["main_process_port"] == 29511


@pytest.mark.parametrize("processes", [1, 2, 3, 6, 7, 48, 128])
def test_any_number_of_processes_gives_a_batch_that_divides(processes: int, tmp_path: Path) -> None:
    """Report 145 among others: 1 process too."""
    config = write_import(imported(tmp_path, {}, num_processes=processes), tmp_path / "out")
    assert config.check_world(processes) >= 1


# --- DeepSpeed profiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": "cpu"}, (3, "params")),
        ({"zero_stage": "2", "offload_optimizer_device": "cpu"}, (2, "optimizer")),
        ({"zero_stage": 1}, (1, "none")),
        ({"gradient_accumulation_steps": 2}, (2, "none")),
    ],
    ids=str,
)
def test_deepspeed_profiles(section: dict[str, Any], expected: tuple[int, str], tmp_path: Path) -> None:
    found = imported(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section)
    assert not refused(found)
    config = build_config(found)
    assert (config.sharding.zero_stage, config.sharding.offload) == expected
    for name in section:
        assert verdict(found, f"deepspeed_config.{name}").key.line > 1


def test_a_deepspeed_profile_refuses_what_deepspeed_files_do(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "offload_param_device": "nvme", "zero_stge": 2}
    found = imported(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section)
    assert refused(found) == {"deepspeed_config.offload_param_device", "deepspeed_config.zero_stge"}
    assert "did you mean deepspeed_config.zero_stage?" in verdict(found, "deepspeed_config.zero_stge").text


def test_a_deepspeed_file_beside_the_profile_is_read(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 3, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    section = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    found = imported(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=section, mixed_precision="bf16")
    assert not refused(found)
    config = write_import(found, tmp_path / "out")
    assert (config.sharding.zero_stage, config.batch.micro_batch_size, config.precision) == (1, 3, "fp16")
    assert verdict(found, "zero_optimization.stage").key.file.endswith("ds.json")


# --- every key has one verdict ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["example", None, [1], {"x": 1}, 7, "word", True])
@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_every_key_of_the_table_has_exactly_one_verdict(engine: str, value: Any, tmp_path: Path) -> None:
    examples = {"flag": True, "whole": 2, "text": "FULL_STATE_DICT", "any": "no", "number": 1.0}
    for name, entry in TABLE.entries.items():
        section, _, leaf = name.rpartition(".")
        if value == {"x": 1} and name in TABLE.sections | {"distributed_type", "num_processes"}:
            continue
        written = examples[entry.takes] if value == "example" else value
        if leaf == "deepspeed_config_file" and isinstance(written, str):
            continue  # a file to read
        profile: dict[str, Any] = {**PLAIN, "distributed_type": engine}
        profile |= {section: {leaf: written}} if section else {leaf: written}
        path = tmp_path / "p.yaml"
        path.write_text(yaml.safe_dump(profile))
        found = import_accelerate(path)
        inside = [one for one in found.verdicts if one.key.name == name or one.key.name.startswith(f"{name}.")]
        assert len(inside) == 1, name
        assert inside[0].settings or inside[0].text, name
        json.dumps(format_json(found), default=str)
        assert name in format_report(found)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("fsdp_config.fsdp_ofload_params", "fsdp_config.fsdp_offload_params"),
        ("fsdp_config.shardingstrategy", "fsdp_config.sharding_strategy"),
        ("fsdp_offload_params", "fsdp_config.fsdp_offload_params"),
        ("num_proceses", "num_processes"),
        ("mixed_precison", "mixed_precision"),
        ("fsdp_confg.fsdp_version", "fsdp_config.fsdp_version"),
        ("dynamo_config.dynamo_bakend", "dynamo_config.dynamo_backend"),
    ],
)
def test_a_mistyped_key_is_caught_with_the_right_name(wrong: str, right: str, tmp_path: Path) -> None:
    """Report 134: Accelerate ignores unknown keys of a section without a word."""
    section, _, leaf = wrong.rpartition(".")
    found = imported(tmp_path, **({section: {leaf: 1}} if section else {leaf: 1}))
    assert verdict(found, wrong).kind == "refused"
    assert f"did you mean {right}?" in verdict(found, wrong).text


@pytest.mark.parametrize("text", ["", "- a\n", "a: 1\n", "distributed_type: [FSDP\n", "FSDP"])
def test_odd_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="Accelerate profile"):
        import_accelerate(path)
