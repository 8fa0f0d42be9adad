"""Configuration (reports Q): settings of other tools that were imported train here, at the rates they had there.

What each key becomes is in tests/unit/interop/; here the runs are started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import write_import
from tests import models, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.schedules import deepspeed_rates

Folder = Callable[[str], str]

STAGE_2_OFFLOAD: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 4e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 4e-3, "warmup_num_steps": 3},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "steps_per_print": 1,
    "wall_clock_breakdown": False,
}
STAGE_3_OFFLOADS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 40, "warmup_max_lr": 4e-3, "warmup_num_steps": 2, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
STAGE_2_OF_8_GPUS: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "communication_data_type": "bf16",
    "optimizer": {"type": "AdamW", "params": {"lr": 4e-3, "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 20, "warmup_num_steps": 2, "cos_min_ratio": 0.1},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True, "round_robin_gradients": True},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
}
FILES = {
    "stage-2-optimizer-offload": (STAGE_2_OFFLOAD, 2, "optimizer"),
    "stage-3-both-offloads": (STAGE_3_OFFLOADS, 2, "params"),
    "stage-2-bf16-of-8-gpus": (STAGE_2_OF_8_GPUS, 8, "none"),
}
LOG_3 = [0, 0, math.log(2) / math.log(3), 1, 1, 1, 1, 1, 1, 1]
RATES = {
    "stage-2-optimizer-offload": LOG_3,
    "stage-3-both-offloads": [0, 0, 0.5, *((40 - last) / 38 for last in range(2, 9))],
    "stage-2-bf16-of-8-gpus": [0, 0, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * n / 18)) for n in range(1, 8))],
}


def check_with_classes(run_settings: dict[str, Any], classes: str) -> str:
    """Check the model of a run as one whose profile names these classes; returns what was said."""
    import contextlib
    import io
    import os

    from fsdp_trainer.run import check_model
    from fsdp_trainer.runtime import build_runtime

    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = classes
    config = Config.from_dict(run_settings)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        check_model(config, build_runtime(timeout_minutes=1))
    return said.getvalue()


def test_a_profile_may_name_a_class_inside_the_layer(model_folder: Folder, tmp_path: Path) -> None:
    """Reports 82 and 137: with a remark; a class of another model is refused."""
    settings = training_runs.settings(model_folder("llama"), "unused.jsonl", tmp_path / "run")
    said = run_ranks(check_with_classes, 1, settings, "LlamaDecoderLayer, LlamaMLP")[0]
    assert "LlamaMLP inside LlamaDecoderLayer" in said
    with pytest.raises(ConfigError, match="LlamaDecoderLayer in the model"):
        run_ranks(check_with_classes, 1, settings, "LlamaDecoderLayer, GPT2Block")


def small_run(content: dict[str, Any], folder: Path, *, model: str, world: int, flags: list[str]) -> Config:
    """Import a DeepSpeed configuration for the tiny model, and return the settings that were written."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content))
    records, _ = models.make_records(32, seed=3)
    train_file = models.write_jsonl(records, folder / "train.jsonl")
    given = [
        *(f"--model.path={model}", f"--data.train={train_file}", "--data.format=prompt_completion"),
        *("--data.seq_len=40", f"--data.cache_dir={folder / 'cache'}", f"--output_dir={folder / 'run'}"),
        *("--checkpoint.every_steps=1000", "--log.samples=0", "--eval.at_end=false", "--export.at_end=false"),
    ]
    write_import(import_deepspeed(path, world_size=world), folder / "out", overrides=[*given, *flags])
    return Config.load(folder / "out" / "run.yaml")


@pytest.mark.parametrize("name", FILES)
def test_an_imported_deepspeed_run_trains(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """Ten steps on two ranks: the loss falls, and each step has the rate that DeepSpeed's formula gives it."""
    content, world, offload = FILES[name]
    config = small_run(content, tmp_path, model=model_folder("llama"), world=world, flags=["--train.max_steps=10"])
    assert (config.sharding.offload, config.precision) == (offload, "bf16")
    rows = [row for row in run_on_kept_ranks(training_runs.train, 2, config.to_dict())[0]["metrics"] if "loss" in row]
    assert [row["lr"] for row in rows] == pytest.approx([4e-3 * share for share in RATES[name]], rel=1e-6, abs=1e-12)
    losses = [row["loss"] for row in rows]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses


@pytest.mark.parametrize("world", [1, 4])
def test_rates_of_a_run_are_deepspeeds_at_any_number_of_ranks(world: int, model_folder: Folder, tmp_path: Path) -> None:
    """Report 145 with one rank; a schedule that `accelerator.prepare` steps would be four times too fast with four."""
    params = {"total_num_steps": 36, "warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
        "zero_optimization": {"stage": 2},
    }
    flags = ["--train.max_steps=40"]
    config = small_run(content, tmp_path, model=model_folder("llama"), world=world, flags=flags)
    assert config.batch.global_batch_size == world
    rows = [
        row for row in run_on_kept_ranks(training_runs.train, world, config.to_dict())[0]["metrics"] if "loss" in row
    ]
    expected = deepspeed_rates("WarmupDecayLR", 40, lr=1e-3, params=params)
    assert [row["lr"] for row in rows] == pytest.approx(expected, rel=1e-9, abs=1e-15)


def resting_bytes(run_settings: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of all live tensors of this rank between two steps, and how many parameters the model has."""
    import gc

    import torch

    from fsdp_trainer.step import train_step

    def live_bytes() -> int:
        gc.collect()
        tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
        # What FSDP2 holds of a gathered weight between two uses is a storage of no bytes.
        storages = {
            local.untyped_storage().data_ptr(): local.untyped_storage().nbytes() for local in map(local_of, tensors)
        }
        return sum(storages.values())

    def local_of(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    before = live_bytes()
    run = step_runs.build(run_settings)
    _, documents = models.make_records(8, seed=11)
    train_step(run, step_runs.window_of(run, [[one] for one in documents]), learning_rate=0.0, optimizer_step=0)
    run.optimizer.zero_grad()
    return live_bytes() - before, sum(parameter.numel() for parameter in run.model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_rest_in_the_bytes_that_the_page_says(stage: int, model_folder: Folder, tmp_path: Path) -> None:
    """Report 136: DeepSpeed's stage is the stage here, whole at 0 and shards from 1 on, measured on each rank."""
    content = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    config = small_run(content, tmp_path, model=model_folder("llama"), world=2, flags=[])
    assert config.sharding.zero_stage == stage
    for found, parameters in run_ranks(resting_bytes, 2, config.to_dict()):
        share = 1 if stage == 0 else 2
        assert found == pytest.approx(12 * parameters / share, rel=0.02)
