"""A DeepSpeed configuration becomes the same training, or is refused by the name and place of what cannot be."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import build_config, write_import
from fsdp_trainer.interop.key_table import Entry, load_table
from fsdp_trainer.interop.report import format_json, format_report
from fsdp_trainer.interop.verdicts import Import, Verdict
from tests.schedules import SCHEDULES, deepspeed_rates

INPUTS = Path(__file__).resolve().parents[2] / "inputs" / "deepspeed"
TABLE = load_table("deepspeed_keys")


def given(folder: Path, content: dict[str, Any] | str, name: str = "ds.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def nested(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return found


PLAIN = {"train_micro_batch_size_per_gpu": 2, "bf16.enabled": True, "zero_optimization.stage": 2}


def imported(
    folder: Path, changes: dict[str, Any], *, world: int | None = 2, args: dict[str, Any] | None = None
) -> Import:
    values = {name: value for name, value in {**PLAIN, **changes}.items() if value is not ...}
    arguments = given(folder, args, "args.json") if args is not None else None
    return import_deepspeed(given(folder, nested(values)), training_args=arguments, world_size=world)


def verdict(found: Import, name: str) -> Verdict:
    matching = [one for one in found.verdicts if one.key.name == name]
    assert len(matching) == 1, f"{name} has {len(matching)} verdicts"
    return matching[0]


def kinds(found: Import) -> dict[str, str]:
    return {one.key.name: one.kind for one in found.verdicts}


def refused(found: Import) -> set[str]:
    return {one.key.name for one in found.of_kind("refused")}


# --- every file of the inputs is handled as it should be -------------------------------------------------------------

ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-5,
    "bf16": True,
    "max_steps": 200,
    "warmup_steps": 10,
    "adam_beta2": 0.95,
}


def test_every_auto_is_filled_in_from_a_named_source(tmp_path: Path) -> None:
    """ds01, report 131: no auto is left, and each says where its value comes from."""
    path = given(tmp_path, ARGUMENTS, "args.json")
    found = import_deepspeed(INPUTS / "ds01_zero2_all_auto.json", training_args=path, world_size=4)
    assert not refused(found)
    for one in found.verdicts:
        if one.key.value == "auto" and "bucket" not in one.key.name and "sub_group" not in one.key.name:
            assert "auto is" in one.text and ("from" in one.text or "as Transformers" in one.text or " x " in one.text)
    config = write_import(found, tmp_path / "out")
    lines = (tmp_path / "out" / "run.yaml").read_text().splitlines()
    assert not [line for line in lines if "auto" in line and not line.startswith("#")]
    assert config.batch.global_batch_size == 2 * 8 * 4
    assert config.check_world(4) == 8
    assert (config.precision, config.optim.lr, config.optim.betas) == ("bf16", 2e-5, (0.9, 0.95))
    assert (config.schedule.warmup_steps, config.schedule.total_steps) == (10, 200)
    assert (config.optim.max_grad_norm, config.train.max_steps) == (1.0, 200)


def test_every_auto_without_arguments_is_named(tmp_path: Path) -> None:
    """ds01, report 131: an error that lists the paths."""
    found = import_deepspeed(INPUTS / "ds01_zero2_all_auto.json", world_size=4)
    with pytest.raises(ConfigError) as caught:
        write_import(found, tmp_path / "out", allow=True)
    for name in ("train_batch_size", "optimizer.params.lr", "scheduler.params.total_num_steps", "bf16.enabled"):
        assert name in str(caught.value)
    assert "--training-args" in verdict(found, "optimizer.params.lr").text
    assert not (tmp_path / "out").exists()


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    """ds03, reports 140 and 141: read with a note for each, and 5e8 is a whole number."""
    found = import_deepspeed(INPUTS / "ds03_comments_trailing_commas.json", world_size=2)
    assert not refused(found)
    assert sum("comment" in note for note in found.notes) == 2
    assert any("line 5" in note and "comma" in note for note in found.notes)
    assert verdict(found, "zero_optimization.reduce_bucket_size").kind == "not needed"
    config = write_import(found, tmp_path / "out")
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (16, 2)


def test_nvme_is_refused_and_host_memory_offered(tmp_path: Path) -> None:
    """ds04, report 142: no FSDP match; the aio block is dropped by name."""
    found = import_deepspeed(INPUTS / "ds04_zero3_nvme_param_and_optimizer.json", world_size=8)
    offload = {f"zero_optimization.offload_{what}.device" for what in ("param", "optimizer")}
    assert refused(found) == offload
    assert all("host memory" in verdict(found, name).text for name in offload)
    aio = {one.key.name for one in found.of_kind("not needed") if one.key.name.startswith("aio.")}
    assert len(aio) == 5
    with pytest.raises(ConfigError, match="--allow-differences"):
        write_import(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert write_import(found, tmp_path / "out", allow=True).sharding.offload == "params"


def test_both_precisions_are_refused(tmp_path: Path) -> None:
    """ds06, report 132: nothing can stand in for a choice."""
    found = import_deepspeed(INPUTS / "ds06_bf16_and_fp16_both_on.json", world_size=2)
    assert refused(found) == {"bf16.enabled", "fp16.enabled"}
    with pytest.raises(ConfigError):
        write_import(found, tmp_path / "out", allow=True)


def test_old_names_are_mapped_and_listed(tmp_path: Path) -> None:
    """ds07, reports 132 and 134: bfloat16, cpu_offload and the fp16 name of the gathered weights take effect."""
    found = import_deepspeed(INPUTS / "ds07_legacy_keys.json", world_size=2)
    assert not refused(found)
    for name in ("bfloat16.enabled", "zero_optimization.stage3_gather_fp16_weights_on_model_save"):
        assert "another name of" in verdict(found, name).text
    assert "old name of offload_optimizer" in verdict(found, "zero_optimization.cpu_offload").text
    config = write_import(found, tmp_path / "out")
    assert (config.precision, config.sharding.offload, config.sharding.zero_stage) == ("bf16", "optimizer", 2)
    assert (config.export.at_end, config.export.dtype) == (True, "bf16")


def test_onebit_adam_is_refused_with_a_substitute(tmp_path: Path) -> None:
    """ds08, report 136: 32 = 4 x 1 x 8 gives the world; stage 1 stays stage 1."""
    found = import_deepspeed(INPUTS / "ds08_zero1_onebit_adam.json")
    assert found.processes == 8
    assert refused(found) == {"optimizer.type"}
    config = write_import(found, tmp_path / "out", allow=True)
    assert (config.optim.name, config.optim.lr, config.sharding.zero_stage) == ("adamw", 2e-4, 1)


def test_lists_for_values_are_refused_by_name(tmp_path: Path) -> None:
    """ds10, report 143: a tuner's search space is no value."""
    found = import_deepspeed(INPUTS / "ds10_stage_as_list_autotuning.json", world_size=2)
    names = {"zero_optimization.stage", "zero_optimization.offload_optimizer.device", "autotuning.enabled"}
    assert names <= refused(found)
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        write_import(found, tmp_path / "out", allow=True)


@pytest.mark.parametrize("world", [None, 1, 2, 8])
def test_a_batch_that_is_whole_for_no_world(world: int | None) -> None:
    """ds12, report 130: 96 rows are not 5 micro-batches on any number of ranks."""
    found = import_deepspeed(INPUTS / "ds12_missing_micro_batch.json", world_size=world)
    assert "96 is not 5 accumulation" in verdict(found, "train_batch_size").text


def test_hpz_quantised_communication_and_the_checkpointing_section(tmp_path: Path) -> None:
    """ds13, reports 37, 134 and 140."""
    found = import_deepspeed(INPUTS / "ds13_zero3_partitioned_ac_and_hpz.json", world_size=16)
    assert {name.rsplit(".")[-1] for name in refused(found)} == {
        "zero_quantized_weights",
        "zero_quantized_gradients",
    }
    assert "cut to 15099494" in verdict(found, "zero_optimization.stage3_prefetch_bucket_size").text
    config = write_import(found, tmp_path / "out", allow=True)
    assert config.activation_checkpointing.mode == "none"
    assert config.sharding.reshard_after_forward == 8
    assert config.export.at_end, "the final export works"


def test_clipping_off_and_two_learning_rates(tmp_path: Path) -> None:
    """ds15, reports 18, 105 and 133: 0 is off; the scheduler's rate is the one DeepSpeed trains with."""
    found = import_deepspeed(INPUTS / "ds15_zero3_cpu_offload_clip_zero.json", world_size=4)
    assert not refused(found)
    assert "CONFLICT" in verdict(found, "optimizer.params.lr").text
    assert "CONFLICT" in verdict(found, "scheduler.params.warmup_max_lr").text
    config = write_import(found, tmp_path / "out")
    assert (config.optim.max_grad_norm, config.optim.lr, config.sharding.offload) == (None, 5e-5, "params")
    assert (config.schedule.warmup_shape, config.schedule.convention) == ("log", "deepspeed")


# --- every key has one verdict, and a mistyped one is caught ---------------------------------------------------------

EXAMPLES = {"flag": True, "whole": 4, "number": 0.5, "numbers": [0.9, 0.99], "text": "fp32", "list": ["a"], "any": "x"}
EXAMPLES["stage"] = 3
PARENTS = {
    "scheduler.params": {"scheduler.type": "WarmupDecayLR"},
    "optimizer.params": {"optimizer.type": "AdamW"},
}


def example(name: str, entry: Entry) -> dict[str, Any]:
    """Return a file with this key in it, and what it must stand beside."""
    values = {"train_micro_batch_size_per_gpu": 2, **PARENTS.get(name.rpartition(".")[0], {})}
    return {**values, name: EXAMPLES[entry.takes]}


@pytest.mark.parametrize("value", ["example", None, "auto", [1, 2], {"x": 1}, 10**40])
def test_every_key_of_the_table_has_exactly_one_verdict(value: Any, tmp_path: Path) -> None:
    for name, entry in TABLE.entries.items():
        if name == "zero_optimization" and value == {"x": 1}:
            continue  # a section, and its key is an unknown one
        values = example(name, entry)
        if value != "example":
            values[name] = value
        path = given(tmp_path, nested(values))
        found = import_deepspeed(path, world_size=2)
        inside = [one for one in found.verdicts if one.key.name == name or one.key.name.startswith(f"{name}.")]
        assert len(inside) == 1, name
        assert inside[0].kind in ("mapped", "mapped with a difference", "not needed", "refused")
        assert inside[0].key.line == 1 and inside[0].key.column > 1
        # "mapped" with neither a setting nor a reason would be a key that does nothing.
        assert inside[0].settings or inside[0].text, name
        json.dumps(format_json(found))
        assert name in format_report(found)


def test_a_whole_section_is_refused_or_off(tmp_path: Path) -> None:
    for section in TABLE.whole:
        on = imported(tmp_path, {f"{section}.enabled": True, f"{section}.some_key": 1})
        assert {f"{section}.enabled", f"{section}.some_key"} <= refused(on), section
        off = imported(tmp_path, {f"{section}.enabled": False, f"{section}.some_key": 1})
        assert not refused(off), section
        assert (
            f"did you mean {section}.enabled"
            in verdict(imported(tmp_path, {f"{section}.enabld": True}), f"{section}.enabld").text
        )


def misspell(leaf: str, kind: int) -> str:
    """Return a name with a letter left out, doubled, or swapped with the one before it."""
    middle = len(leaf) // 2
    swapped = leaf[: middle - 1] + leaf[middle] + leaf[middle - 1] + leaf[middle + 1 :]
    return (leaf[:middle] + leaf[middle + 1 :], leaf[:middle] + leaf[middle] + leaf[middle:], swapped)[kind % 3]


def test_one_mistyped_key_in_any_section_is_caught_with_the_right_name(tmp_path: Path) -> None:
    """Report 134: a key that nothing reads is an error."""
    missed = []
    for number, name in enumerate(TABLE.entries):
        section, _, leaf = name.rpartition(".")
        wrong = misspell(leaf, number)
        mistyped = f"{section}.{wrong}".lstrip(".")
        if mistyped in TABLE.entries:
            continue  # two letters that are the same were swapped
        found = verdict(imported(tmp_path, {mistyped: 1}), mistyped)
        assert found.kind == "refused", mistyped
        if f"did you mean {name}?" not in found.text:
            meant = found.text.rpartition("did you mean ")[2].rstrip("?")
            # Two names may be equally far: then the other one is no worse.
            near = [difflib.SequenceMatcher(None, wrong, one.rpartition(".")[2]).ratio() for one in (meant, name)]
            if near[0] < near[1]:
                missed.append((mistyped, found.text))
    assert not missed, missed


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("zero_optimisation.stage", "zero_optimization.stage"),
        ("zero.stage", "zero_optimization.stage"),
        ("bf.enabled", "bf16.enabled"),
        ("stage", "zero_optimization.stage"),
        ("optimizer.lr", "optimizer.params.lr"),
        ("zero_optimization.gradient_clipping", "gradient_clipping"),
        ("zero_optimization.offload_optimiser.device", "zero_optimization.offload_optimizer.device"),
        ("zero_optimization.offload_param.ratio", "zero_optimization.offload_optimizer.ratio"),
    ],
)
def test_a_key_in_the_wrong_place_is_found(wrong: str, right: str, tmp_path: Path) -> None:
    found = verdict(imported(tmp_path, {wrong: 1, "zero_optimization.stage": ...}), wrong)
    assert found.kind == "refused"
    assert f"did you mean {right}?" in found.text


# --- values in other forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "setting", "expected"),
    [
        ("zero_optimization.stage", "3", "sharding.zero_stage", 3),
        ("zero_optimization.stage", 3.0, "sharding.zero_stage", 3),
        ("bf16.enabled", "true", "precision", "bf16"),
        ("bf16.enabled", 1, "precision", "bf16"),
        ("gradient_clipping", "0.5", "optim.max_grad_norm", 0.5),
        ("train_micro_batch_size_per_gpu", "4", "batch.micro_batch_size", 4),
        ("steps_per_print", "2e3", "log.every_steps", 2000),
        ("communication_data_type", "torch.bfloat16", "sharding.reduce_dtype", "bf16"),
    ],
)
def test_values_written_as_text(name: str, value: Any, setting: str, expected: Any, tmp_path: Path) -> None:
    """Reports 139 and 140."""
    found = imported(tmp_path, {name: value})
    assert verdict(found, name).settings[setting] == expected


@pytest.mark.parametrize("word", ["False", "false", "no", "off", "0", 0, False])
def test_false_in_any_form_is_false(word: Any, tmp_path: Path) -> None:
    """Report 139: a string false had switched offloading on."""
    found = imported(tmp_path, {"zero_optimization.cpu_offload": word})
    assert verdict(found, "zero_optimization.cpu_offload").kind == "not needed"
    assert build_config(found).sharding.offload == "none"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_optimization.cpu_offload", "\u201cfalse\u201d"),
        ("zero_optimization.cpu_offload", "maybe"),
        ("zero_optimization.stage", 4),
        ("zero_optimization.stage", -1),
        ("zero_optimization.stage", "two"),
        ("zero_optimization.stage", True),
        ("zero_optimization.stage", 10**400),
        ("gradient_clipping", -1),
        ("gradient_clipping", [1.0]),
        ("gradient_clipping", "1e999"),
        ("gradient_clipping", "0x10"),
        ("train_micro_batch_size_per_gpu", 0),
        ("train_micro_batch_size_per_gpu", 2**70),
        ("optimizer.params.betas", [0.9]),
        ("optimizer.params.betas", [0.9, "x"]),
        ("optimizer.params.betas", 0.9),
        ("optimizer.params.lr", 0),
        ("communication_data_type", "int8"),
        ("zero_optimization.offload_optimizer.device", "gpu"),
        ("zero_optimization.offload_optimizer.device", True),
        ("zero_optimization", "stage2"),
        ("optimizer", "AdamW"),
        ("bf16", True),
    ],
    ids=str,
)
def test_values_that_mean_nothing_block(name: str, value: Any, tmp_path: Path) -> None:
    changes = {**PLAIN, "optimizer.type": "AdamW"}
    kept = {key: old for key, old in changes.items() if not key.startswith(f"{name}.")}
    path = given(tmp_path, nested({**kept, name: value}))
    found = import_deepspeed(path, world_size=2)
    assert verdict(found, name).kind == "refused"
    with pytest.raises(ConfigError, match=name):
        write_import(found, tmp_path / "out", allow=True)


def test_a_name_that_stands_twice_blocks(tmp_path: Path) -> None:
    """DeepSpeed refuses it too; json.load would take the last one."""
    text = '{"train_batch_size": 8,\n "zero_optimization": {"stage": 2,\n  "stage": 3}, "bf16": {"enabled": true},'
    text += ' "bf16": {}}'
    found = import_deepspeed(given(tmp_path, text), world_size=1)
    twice = [one for one in found.of_kind("refused") if "twice" in one.text]
    assert [(one.key.name, one.key.line) for one in twice] == [("zero_optimization.stage", 3), ("bf16", 3)]
    old_and_new = imported(tmp_path, {"bfloat16.enabled": False})
    assert "another name of bf16.enabled" in verdict(old_and_new, "bfloat16.enabled").text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a"}', "null", '"x"', "[{}]"])
def test_odd_files(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DeepSpeed configuration"):
        import_deepspeed(given(tmp_path, text))


@pytest.mark.parametrize("content", [{}, {"bf16": {"enabled": True}}, {"zero_optimization": True}])
def test_a_file_without_a_batch(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say the batch"):
        import_deepspeed(given(tmp_path, content), world_size=2)


# --- batch arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (32, 4, 2, 4, (32, 4, 2)),
        (32, 4, 2, None, (32, 4, 2)),
        (32, 4, None, 4, (32, 4, 2)),
        (32, None, 2, 4, (32, 4, 2)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 4, 2, 4, (32, 4, 2)),
        (None, 4, None, 4, (16, 4, 1)),
        (32, 4, 2, 1, None),
        (30, 4, None, 4, None),
        (30, None, None, 4, None),
        (2, None, None, 4, None),
        (32, 4, 3, None, None),
        (None, 4, 2, None, None),
        (32, 4, None, None, None),
        (None, None, 2, 4, None),
    ],
)
def test_batch_arithmetic(train: Any, micro: Any, steps: Any, world: int | None, expected: Any, tmp_path: Path) -> None:
    """Report 130: what is left out is derived as DeepSpeed does, and the product is checked."""
    values = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    given_values = {name: value for name, value in values.items() if value is not None}
    found = import_deepspeed(given(tmp_path, nested({**given_values, "zero_optimization.stage": 1})), world_size=world)
    if expected is None:
        assert refused(found) == set(given_values)
        with pytest.raises(ConfigError):
            write_import(found, tmp_path / "out", allow=True)
        return
    config = build_config(found)
    assert found.processes is not None
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == expected[:2]
    assert config.check_world(found.processes) == expected[2]


# --- what the sections become ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_optimization.stage": stage}, {"sharding.zero_stage": stage, "sharding.offload": "none"})
        for stage in range(4)
    ]
    + [
        ({"zero_optimization.stage": ...}, {"sharding.zero_stage": 0}),
        ({"zero_optimization.stage": ..., "zero_optimization": True}, {"sharding.zero_stage": 1}),
        ({"zero_optimization.offload_optimizer.device": "cpu"}, {"sharding.offload": "optimizer"}),
        ({"zero_optimization.offload_param.device": "cpu"}, {"sharding.offload": "none"}),
        (
            {"zero_optimization.offload_param.device": "cpu", "zero_optimization.offload_optimizer.device": "cpu"},
            {"sharding.offload": "optimizer", "sharding.zero_stage": 2},
        ),
        (
            {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu"},
            {"sharding.offload": "optimizer"},
        ),
        (
            {"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"},
            {"sharding.offload": "params"},
        ),
        (
            {
                "zero_optimization.stage": 3,
                "zero_optimization.offload_param.device": "cpu",
                "zero_optimization.offload_optimizer.device": "cpu",
            },
            {"sharding.offload": "params", "sharding.zero_stage": 3},
        ),
        ({"zero_optimization.stage": 3, "zero_optimization.mics_shard_size": 2}, {"sharding.replicate": 2}),
        ({"zero_optimization.stage": 3, "zero_optimization.mics_shard_size": 4}, {"sharding.replicate": 1}),
        (
            {"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 2},
            {"sharding.reshard_after_forward": 2},
        ),
        (
            {"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 4},
            {"sharding.reshard_after_forward": None},
        ),
        ({"bf16.enabled": False}, {"precision": "fp32"}),
        ({"bf16.enabled": ..., "fp16.enabled": True}, {"precision": "fp16"}),
        ({"bf16.bf16_master_weights_and_grads": True}, {"precision": "bf16_pure"}),
        (
            {"bf16.enabled": ..., "torch_autocast.enabled": True, "torch_autocast.dtype": "float16"},
            {"precision": "fp16"},
        ),
        ({"bf16.check_grad_overflow": True}, {"train.on_nonfinite": "skip"}),
        ({}, {"optim.max_grad_norm": 1.0, "data.packing": False, "activation_checkpointing.mode": "none"}),
        ({"optimizer.type": "Adam"}, {"optim.lr": 1e-3, "optim.betas": (0.9, 0.999), "optim.weight_decay": 0.0}),
        ({"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False}, {"optim.name": "adamw"}),
        ({"optimizer.type": "adamw", "optimizer.params.weight_decay": 0.1}, {"optim.no_decay": ()}),
        ({"optimizer.type": "AdamW", "optimizer.params.torch_adam": True}, {"optim.weight_decay": 0.01}),
        ({"tensorboard.enabled": True, "wandb.enabled": True}, {"log.trackers": ("tensorboard", "wandb")}),
    ],
    ids=str,
)
def test_sections_become_settings(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """Reports 136 and 142."""
    found = imported(tmp_path, changes, world=4)
    assert not refused(found)
    config = build_config(found)
    for name, value in expected.items():
        held: Any = config
        for part in name.split("."):
            held = getattr(held, part)
        assert held == value, name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (
            {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False, "optimizer.params.weight_decay": 0.1},
            "optimizer.type",
        ),
        ({"optimizer.type": "Lamb"}, "optimizer.type"),
        ({"optimizer.type": "AdamW", "optimizer.params.max_grad_norm": 1.0}, "optimizer.params.max_grad_norm"),
        ({"optimizer.type": "AdamW", "optimizer.params.freeze_step": 1}, "optimizer.params.freeze_step"),
        ({"scheduler.type": "OneCycle"}, "scheduler.type"),
        ({"scheduler.type": "LRRangeTest"}, "scheduler.type"),
        ({"scheduler.type": "StepLR"}, "scheduler.type"),
        (
            {"zero_optimization.stage": 0, "zero_optimization.offload_optimizer.device": "cpu"},
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 3},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"zero_optimization.offload_optimizer.ratio": 0.5}, "zero_optimization.offload_optimizer.ratio"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({"tensor_parallel.autotp_size": 4}, "tensor_parallel.autotp_size"),
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"amp.enabled": True}, "amp.enabled"),
    ],
    ids=str,
)
def test_what_has_no_match_is_refused_alone(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    found = imported(tmp_path, changes, world=4)
    assert refused(found) == {name}
    assert write_import(found, tmp_path / "out", allow=True)


def test_a_misspelt_type_is_suggested(tmp_path: Path) -> None:
    found = imported(tmp_path, {"optimizer.type": "AdmaW", "scheduler.type": "WarmupCosinLR"})
    assert "did you mean adamw?" in verdict(found, "optimizer.type").text
    assert "did you mean WarmupCosineLR?" in verdict(found, "scheduler.type").text


def test_offload_param_below_stage_3_is_a_warning(tmp_path: Path) -> None:
    """Report 142: DeepSpeed ignores it."""
    one = verdict(
        imported(tmp_path, {"zero_optimization.offload_param.device": "cpu"}), "zero_optimization.offload_param.device"
    )
    assert one.kind == "not needed" and "WARNING" in one.text


def test_what_the_arguments_contradict_is_refused(tmp_path: Path) -> None:
    """Report 133: all conflicts at once, with both values."""
    changes = {
        "gradient_clipping": 0.5,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 1e-4,
        "optimizer.params.betas": [0.9, 0.999],
    }
    args = {
        "max_grad_norm": 1.0,
        "learning_rate": 2e-5,
        "adam_beta2": 0.95,
        "per_device_train_batch_size": 4,
        "fp16": True,
    }
    found = imported(tmp_path, changes, args=args)
    names = {"gradient_clipping", "optimizer.params.lr", "optimizer.params.betas", "train_micro_batch_size_per_gpu"}
    assert refused(found) == names
    for part in ("0.0001 here", "2e-05", "args.json:1:"):
        assert part in verdict(found, "optimizer.params.lr").text


# --- the learning rates are DeepSpeed's ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("kind", "params"), SCHEDULES, ids=str)
def test_learning_rates_are_deepspeeds(kind: str, params: dict[str, Any], world: int, tmp_path: Path) -> None:
    """Report 65 among others: 40 steps, whatever the world size, rate by rate."""
    from fsdp_trainer.optim.schedule import scheduled_rate

    changes = {
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 2e-5,
        "scheduler.type": kind,
        **{f"scheduler.params.{name}": value for name, value in params.items()},
    }
    config = write_import(imported(tmp_path, changes, world=world), tmp_path / "out")
    config = Config.load(tmp_path / "out" / "run.yaml")
    rates = [scheduled_rate(step, schedule=config.schedule, peak=config.optim.lr, total_steps=40) for step in range(40)]
    assert rates == pytest.approx(deepspeed_rates(kind, 40, lr=2e-5, params=params), rel=1e-9, abs=1e-15)


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_loads_and_is_never_written_over(tmp_path: Path) -> None:
    from fsdp_trainer.launch_profile import check_profile, read_profile

    out = tmp_path / "deep" / "out"
    found = imported(tmp_path, {"zero_optimization.offload_optimizer.device": "cpu"})
    config = write_import(found, out, overrides=["--model.path=m", "--data.seq_len=128"])
    assert Config.load(out / "run.yaml") == config
    assert config.data.seq_len == 128
    profile = read_profile(out / "accelerate.yaml")
    check_profile(profile, config)
    assert profile["num_processes"] == 2
    assert len(json.loads((out / "report.json").read_text())["keys"]) == len(found.verdicts)
    report = (out / "report.md").read_text()
    assert all(f"`{one.key.name}`" in report for one in found.verdicts)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match="nothing is written over"):
        write_import(found, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(ConfigError, match="is a file"):
        write_import(found, out / "run.yaml")


def test_settings_that_do_not_fit_together_name_the_file(tmp_path: Path) -> None:
    changes = {"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": 100}
    found = imported(tmp_path, changes, args={"max_steps": 10, "per_device_train_batch_size": 2, "bf16": True})
    with pytest.raises(ConfigError, match=r"ds\.json"):
        write_import(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()
