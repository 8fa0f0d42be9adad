"""Files as people have them: what the program that reads them does with each key decides, not how the key looks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.importers import make_table
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.accelerate_profile import import_accelerate
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import build_config
from fsdp_trainer.interop.trainer import import_trainer
from fsdp_trainer.interop.verdicts import Import, Verdict

ROOT = Path(__file__).resolve().parents[3]
INPUTS = ROOT / "tests" / "inputs" / "interop"
ARGUMENTS = INPUTS / "in01_args.json"


def deepspeed(folder: Path, content: dict[str, Any], *, world: int = 8, **given: Any) -> Import:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return import_deepspeed(path, world_size=world, **given)


def arguments(folder: Path, content: dict[str, Any], *, world: int = 8) -> Import:
    path = folder / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, **content}))
    return import_trainer(path, world_size=world)


def profile(folder: Path, text: str, **given: Any) -> Import:
    path = folder / "profile.yaml"
    path.write_text(text)
    return import_accelerate(path, **given)


def verdict(found: Import, name: str) -> Verdict:
    (only,) = [one for one in found.verdicts if one.key.name == name]
    return only


def refused(found: Import) -> dict[str, str]:
    return {one.key.name: one.text for one in found.of_kind("refused")}


def test_the_table_of_verdicts_is_as_kept() -> None:
    """One row a file; `python -m benchmarks.importers tests/inputs/interop tests/inputs/deepspeed` makes it anew."""
    made = make_table([INPUTS, ROOT / "tests" / "inputs" / "deepspeed"])
    assert made == (ROOT / "tests" / "golden" / "importers.md").read_text(encoding="utf-8").splitlines()


# --- DeepSpeed below Transformers ------------------------------------------------------------------------------------


def test_deepspeeds_schedule_is_the_only_one() -> None:
    """in01: constant after the warm-up, although the arguments say cosine."""
    found = import_deepspeed(INPUTS / "in01_ds_warmuplr.json", training_args=ARGUMENTS, world_size=8)
    config = build_config(found)
    assert (config.schedule.name, config.schedule.convention, config.optim.lr) == ("constant", "deepspeed", 2e-5)
    assert verdict(found, "lr_scheduler_type").kind == "not needed"


_THEIRS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}},
    *({"lr_scheduler_type": name} for name in ("constant", "linear", "cosine", "constant_with_warmup")),
    {},
)
_WARMUPS: tuple[dict[str, Any], ...] = ({}, {"warmup_steps": 10}, {"warmup_ratio": 0.03}, {"warmup_steps": 0.03})


@pytest.mark.parametrize("theirs", _THEIRS)
def test_no_schedule_of_the_arguments_goes_beside_deepspeeds(theirs: str, tmp_path: Path) -> None:
    params = {"warmup_num_steps": 50} | ({"total_num_steps": 500} if theirs != "WarmupLR" else {})
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "bf16": {"enabled": True}}
    content |= {"scheduler": {"type": theirs, "params": params}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    for ours, warmup in itertools.product(_SCHEDULES, _WARMUPS):
        given = {"deepspeed": "ds.json", "bf16": True, "learning_rate": 1e-5, **ours, **warmup}
        given = {name: value for name, value in given.items() if not (name == "warmup_steps" and value == 10)}
        found = arguments(tmp_path, given)
        assert not refused(found), given
        assert build_config(found).schedule.warmup_steps == 50
        assert build_config(found).schedule.convention == "deepspeed"


def test_steps_per_print_does_nothing_below_transformers(tmp_path: Path) -> None:
    """in03: Accelerate writes infinity over it."""
    found = import_deepspeed(INPUTS / "in03_ds_steps_per_print.json", training_args=ARGUMENTS, world_size=8)
    assert build_config(found).log.every_steps == 5
    assert "infinity" in verdict(found, "steps_per_print").text
    alone = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert build_config(deepspeed(tmp_path, alone | {"steps_per_print": 7})).log.every_steps == 7
    assert build_config(deepspeed(tmp_path, alone | {"steps_per_print": 10**9})).log.every_steps == 1


def test_what_accelerate_fills_in(tmp_path: Path) -> None:
    """in04 and its kin."""
    given = {"training_args": ARGUMENTS}
    for more in ({}, given):
        found = import_deepspeed(INPUTS / "in04_ds_auto_filled_by_accelerate.json", world_size=8, **more)
        assert not refused(found)
        gathered = verdict(found, "zero_optimization.stage3_gather_16bit_weights_on_model_save")
        assert gathered.kind == "not needed" and "Accelerate" in gathered.text
    devices = {"device": "auto", "nvme_path": "auto"}
    zero = {"stage": "auto", "offload_optimizer": devices, "offload_param": devices}
    content = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": "auto"}
    found = deepspeed(tmp_path, content | {"steps_per_print": "auto"})
    config = build_config(found)
    assert (config.sharding.zero_stage, config.sharding.offload, config.optim.max_grad_norm) == (2, "none", 1.0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}, (64, 2)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}, (64, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (64, 2)),
    ],
)
def test_one_size_follows_from_the_other_three_numbers(
    sizes: dict[str, Any], expected: tuple[int, int], tmp_path: Path
) -> None:
    found = deepspeed(tmp_path, {"bf16": {"enabled": True}, **sizes})
    assert not refused(found)
    config = build_config(found)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == expected
    assert any("follows from" in one.text for one in found.verdicts if one.key.value == "auto")
    two = {name: "auto" if name.startswith("gradient") else value for name, value in sizes.items()}
    if list(two.values()).count("auto") == 2:
        assert "gradient_accumulation_steps" in refused(deepspeed(tmp_path, two))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train_batch_size": 1}, "1 is not 1 or more rows x 8 ranks"),
        ({"train_batch_size": 12}, "12 is not 1 or more rows x 8 ranks"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}, "64 is not 3 micro x ranks"),
        ({"train_batch_size": 40, "train_micro_batch_size_per_gpu": 2}, "40 is not 2 micro x 8 ranks"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "32 is not 2 micro x 4 accumulation x 8 ranks, which is 64",
        ),
        (
            {"train_batch_size": 40, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            "40 is not 2 micro x 8 ranks",
        ),
    ],
)
def test_a_batch_that_does_not_come_out_names_what_is_given(
    sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    found = refused(deepspeed(tmp_path, {"bf16": {"enabled": True}, **sizes}))
    assert message in found["train_batch_size"]
    assert not [text for text in found.values() if "0 micro" in text or "0 accumulation" in text]


def test_a_section_in_place_of_a_value_keeps_the_keys_own_reason(tmp_path: Path) -> None:
    """in12: ZenFlow and LoCo are sections, and what needs nothing may be one too."""
    found = import_deepspeed(INPUTS / "in12_ds_zenflow.json", world_size=8)
    assert refused(found) == {"zero_optimization.zenflow.topk_ratio": "ZenFlow has no match here"}
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    zero = {"stage": 2, "zeropp_loco_param": {"err_beta": 0.8, "deep": {"er": 1}}}
    found = deepspeed(tmp_path, content | {"zero_optimization": zero, "compile": {"kwargs": {"mode": "x"}}})
    assert set(refused(found).values()) == {"LoCo has no match"}
    assert verdict(found, "compile.kwargs.mode").kind == "not needed"
    found = arguments(tmp_path, {"liger_kernel_config": {"rope": True}})
    assert not refused(found)


def test_unknown_sections_and_remarks(tmp_path: Path) -> None:
    """in13: a remark is none of DeepSpeed's keys, and an unknown section is named as one, without a far guess."""
    found = import_deepspeed(INPUTS / "in13_ds_unknown_sections.json", world_size=8)
    assert verdict(found, "_comment").kind == "not needed"
    assert refused(found) == {
        "monitor_config.enabled": "DeepSpeed has no section monitor_config",
        "monitor_config.tag": "DeepSpeed has no section monitor_config",
    }
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "//": "ours", "comment": "x"}
    found = deepspeed(tmp_path, content | {"zero_optimisation": {"stage": 2}, "gradient_cliping": 1.0})
    assert refused(found) == {
        "zero_optimisation.stage": "DeepSpeed has no such key; did you mean zero_optimization.stage?",
        "gradient_cliping": "DeepSpeed has no such key; did you mean gradient_clipping?",
    }


def test_sections_that_nobody_reads_refuse_nothing(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    section = {"partition_activations": True, "cpu_checkpointing": True}
    found = deepspeed(tmp_path, content | {"activation_checkpointing": section})
    assert not refused(found)
    assert "does not switch checkpointing on" in verdict(found, "activation_checkpointing.partition_activations").text
    found = deepspeed(tmp_path, content | {"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}})
    assert not refused(found)


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_every_report_says_what_the_masters_are(word: str, tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, word: {"enabled": True}}
    made = [
        deepspeed(tmp_path, content),
        arguments(tmp_path, {word: True}),
        profile(tmp_path, f"distributed_type: FSDP\nmixed_precision: {word}\nnum_processes: 2\n"),
        profile(tmp_path, f"distributed_type: DEEPSPEED\nmixed_precision: {word}\nnum_processes: 2\n"),
    ]
    for found in made:
        assert [note for note in found.remarks if note.startswith(f"{word} computes, and masters")], found.tool


def test_pure_bf16_and_fp32_say_it_too(tmp_path: Path) -> None:
    content: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert [note for note in deepspeed(tmp_path, content).remarks if "everything is fp32" in note]
    content["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert [note for note in deepspeed(tmp_path, content).remarks if "no fp32 masters" in note]


def test_torchs_adam_with_a_decay_that_is_said(tmp_path: Path) -> None:
    """torch_adam's default decay has no place beside a decay of the arguments, which is 0 here."""
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    content = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
    found = deepspeed(tmp_path, content | {"optimizer": {"type": "AdamW", "params": params}}, training_args=ARGUMENTS)
    assert build_config(found).optim.weight_decay == 0.0


def test_the_argument_that_contradicts_the_batch_is_named(tmp_path: Path) -> None:
    content = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    found = refused(deepspeed(tmp_path, content, training_args=ARGUMENTS))
    assert "gradient_accumulation_steps: 4" in found["gradient_accumulation_steps"]
    assert "make both the same" in found["gradient_accumulation_steps"]


def test_a_section_one_level_too_high_is_found_where_it_belongs(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "offload_optimizer": {"device": "cpu"}}
    found = refused(deepspeed(tmp_path, content))
    assert found["offload_optimizer.device"].endswith("did you mean zero_optimization.offload_optimizer.device?")


# --- Accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["bf16", "fp16", "no"])
def test_a_16_bit_save_is_in_the_profiles_precision(word: str, tmp_path: Path) -> None:
    """in02."""
    assert build_config(import_accelerate(INPUTS / "in02_accelerate_zero3_bf16.yaml")).export.dtype == "bf16"
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
    text += "deepspeed_config: {zero_stage: 3, zero3_save_16bit_model: true}\n"
    config = build_config(profile(tmp_path, f"{text}mixed_precision: '{word}'\n"))
    expected = "fp32" if word == "no" else word
    assert (config.precision, config.export.dtype) == (expected, expected)


@pytest.mark.parametrize(
    ("section", "word", "precision"),
    [
        ({}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp16", "fp16"),
        ({"bf16": {"enabled": True}}, "no", "bf16"),
        ({"bf16": {"enabled": False}}, "bf16", "fp32"),
        ({"fp16": {"enabled": "auto"}}, "no", "fp32"),
    ],
)
def test_the_precision_of_a_named_deepspeed_file(
    section: dict[str, Any], word: str, precision: str, tmp_path: Path
) -> None:
    """Accelerate fills auto from mixed_precision, and adds a section that the file lacks."""
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto", **section}
    (tmp_path / "ds.json").write_text(json.dumps(content | {"zero_optimization": {"stage": 2}}))
    text = f"distributed_type: DEEPSPEED\nmixed_precision: '{word}'\nnum_processes: 4\n"
    found = profile(tmp_path, f"{text}deepspeed_config: {{deepspeed_config_file: ds.json}}\n")
    assert not refused(found)
    config = build_config(found)
    assert (config.precision, config.batch.global_batch_size) == (precision, 8)


def test_the_precision_of_the_file_goes_before_the_profiles(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
    found = profile(tmp_path, f"{text}deepspeed_config: {{deepspeed_config_file: ds.json}}\n")
    assert not refused(found)
    assert build_config(found).precision == "fp16"


def test_autos_that_only_the_script_knows_name_no_flag_that_is_not_there(tmp_path: Path) -> None:
    content = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **content}))
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
    found = profile(tmp_path, f"{text}deepspeed_config: {{deepspeed_config_file: ds.json}}\n")
    text = refused(found)["optimizer.params.lr"]
    assert "import-deepspeed" in text and "--training-args" in text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("dp_shard_size: 4, parallelism_config_cp_size: 2", None),
        ("dp_shard_size: 2, parallelism_config_cp_size: 2, parallelism_config_tp_size: 2", None),
        ("dp_shard_size: 4, parallelism_config_cp_size: 4", "1 copies x 4 shards x 4 cp = 16 are not 8 processes"),
        ("dp_shard_size: 4", "1 copies x 4 shards = 4 are not 8 processes"),
    ],
)
def test_the_other_ways_of_splitting_count_too(sizes: str, message: str | None, tmp_path: Path) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {{parallelism_config_{sizes}}}\n"
    found = refused(profile(tmp_path, text))
    assert found.get("parallelism_config.parallelism_config_dp_shard_size") == message


def test_a_remark_without_an_end_is_not_left_open(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: %s}\n"
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        found = verdict(profile(tmp_path, text % name), "fsdp_config.fsdp_reshard_after_forward")
        assert not found.text.rstrip().endswith(";"), found.text


# --- TrainingArguments -----------------------------------------------------------------------------------------------


def test_a_share_of_a_run(tmp_path: Path) -> None:
    """x13: no advice that a setting cannot take; with max_steps a share is steps, as Transformers counts them."""
    found = import_trainer(INPUTS / "x13_save_steps_ratio.json", world_size=8)
    for name in ("save_steps", "eval_steps"):
        assert "0.1" not in verdict(found, name).text and "max_steps" in verdict(found, name).text
    shares = {"save_steps": 0.1, "logging_steps": 0.25, "eval_steps": 0.034, "max_steps": 101}
    found = arguments(tmp_path, {**shares, "eval_strategy": "steps", "validation_file": "e.jsonl"})
    config = build_config(found)
    assert (config.checkpoint.every_steps, config.log.every_steps, config.eval.every_steps) == (11, 26, 4)
    found = arguments(tmp_path, {"eval_steps": 0.1, "max_steps": 50, "eval_strategy": "steps"})
    assert "eval.every_steps: 5" in verdict(found, "eval_steps").text


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 100, "num_stable_steps": 200, "decay_type": "1-sqrt"}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("inverse_sqrt", {"timescale": 10}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-6, "warmup_lr_rate": 0.1}),
        ("reduce_lr_on_plateau", {"factor": 0.5, "patience": 3}),
    ],
)
def test_a_schedule_that_is_not_here_is_known_all_the_same(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """x13b: its own keys are no unknown ones, and no other schedule is what was meant."""
    found = arguments(tmp_path, {"lr_scheduler_type": kind, "lr_scheduler_kwargs": keys})
    assert refused(found) == {"lr_scheduler_type": "the schedules here are constant, linear and cosine"}
    assert all(verdict(found, f"lr_scheduler_kwargs.{key}").text.startswith(kind) for key in keys)
    found = arguments(tmp_path, {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_decay_steps": 1}})
    assert "linear takes no such key" in refused(found)["lr_scheduler_kwargs.num_decay_steps"]


def test_evaluation_falls_back_to_logging_steps(tmp_path: Path) -> None:
    given = {"eval_strategy": "steps", "validation_file": "e.jsonl", "logging_steps": 7}
    assert build_config(arguments(tmp_path, given)).eval.every_steps == 7


def test_what_an_older_transformers_wrote_is_read(tmp_path: Path) -> None:
    """`to_json_string()` writes every field, those that are gone now among them."""
    gone = {"use_ipex": False, "tpu_metrics_debug": False, "past_index": -1, "use_legacy_prediction_loop": False}
    gone |= {"mp_parameters": "", "torchdynamo": None, "ray_scope": "last", "sharded_ddp": [], "xpu_backend": None}
    gone |= {"dispatch_batches": None, "split_batches": None, "some_later_field": None}
    trl = {"dataset_text_field": "text", "packing_strategy": "bfd", "dataset_num_proc": 8, "completion_only_loss": None}
    trl["loss_type"] = "nll"
    fsdp = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    found = arguments(tmp_path, {**gone, **trl, "fsdp": ["full_shard", "auto_wrap"], "fsdp_config": fsdp})
    assert not refused(found)
    assert "mp_parameters" in refused(arguments(tmp_path, {"mp_parameters": "partitions=2"}))


def test_nothing_promises_the_share_of_the_peak(tmp_path: Path) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    found = deepspeed(tmp_path, content | {"flops_profiler": {"enabled": True}})
    assert "peak" not in verdict(found, "flops_profiler.enabled").text
    assert isinstance(build_config(found), Config)
    with pytest.raises(ConfigError):
        import_deepspeed(tmp_path / "none.json")
