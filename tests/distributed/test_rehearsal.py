"""A rehearsed run: the same to the last bit, and out of memory before the first step where a later one would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import fault_runs, models, training_runs
from tests.out_of_memory_runs import run, run_out
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.sweeps import share

ModelFolder = Callable[[str], str]

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "gpt2"},  # which draws dropout
    "fp16": {"precision": "fp16", "sharding": {"zero_stage": 2}},
    "pure bf16": {
        "precision": "bf16_pure",
        "optim": {"state_dtype": "bf16"},
        "activation_checkpointing": {"mode": "full"},
    },
    "8-bit": {"precision": "bf16", "optim": {"name": "adamw_8bit"}, "sharding": {"zero_stage": 1}},
    "optimizer offload": {"precision": "bf16", "sharding": {"zero_stage": 3, "offload": "optimizer"}},
    "offload, step on the device": {
        "precision": "bf16",
        "sharding": {"zero_stage": 2, "offload": "optimizer"},
        "optim": {"name": "adamw_8bit", "offload_step": "device"},
    },
    "params offload": {"precision": "bf16", "sharding": {"zero_stage": 3, "offload": "params"}},
}


def settings(model: str, folder: Path, case: dict[str, Any], **sections: Any) -> dict[str, Any]:
    train, _ = models.make_records(40, seed=30)
    held_out, _ = models.make_records(5, seed=31)
    folder.mkdir(exist_ok=True)
    base: dict[str, Any] = {
        "data": {"eval": models.write_jsonl(held_out, folder / "eval.jsonl")},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "schedule": {"warmup_steps": 1, "total_steps": 4},
        "eval": {"at_end": True},
        "checkpoint": {"every_steps": 2, "resume": "auto"},
    }
    for section, values in [*case.items(), *sections.items()]:
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    base.pop("kind", None)
    data = {"cache_dir": str(folder / "cache"), **base.pop("data")}
    made = training_runs.settings(model, models.write_jsonl(train, folder / "train.jsonl"), folder / "run", **base)
    made["data"] = {**made["data"], **data}
    made["train"] = {"max_steps": 4, **base.get("train", {})}
    return made


def comparable(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in fault_runs.UNEQUAL} for row in found["metrics"]]


@pytest.mark.parametrize("name", share(CASES, ["adamw", "8-bit", "optimizer offload"]))
def test_a_rehearsed_run_is_the_same_to_the_last_bit(name: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """Begun with a rehearsal and, from its checkpoint, gone on with after another one."""
    model, case = model_folder(CASES[name].get("kind", "llama")), CASES[name]
    expected = run_on_kept_ranks(training_runs.train, 2, settings(model, tmp_path / "plain", case))[0]
    first = settings(model, tmp_path / "rehearsed", case, rehearse=True, train={"max_steps": 2})
    run_on_kept_ranks(training_runs.train, 2, first)
    found = run_on_kept_ranks(training_runs.train, 2, settings(model, tmp_path / "rehearsed", case, rehearse=True))[0]
    steps = [row for row in comparable(found) if "loss" in row]
    assert steps == [row for row in comparable(expected) if "loss" in row]
    assert len(steps) == 4
    assert all(found["weights"][key].equal(tensor) for key, tensor in expected["weights"].items())


def test_the_rehearsed_window_is_the_longest(model_folder: ModelFolder, tmp_path: Path) -> None:
    made = settings(model_folder("llama"), tmp_path, {}, data={"packing": False})
    longest, any_step = run_ranks(longest_and_steps, 2, made)[0]
    assert longest >= max(any_step)
    assert longest == max(any_step)  # unpacked, so that some step has the longest rows of all


def longest_and_steps(made: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the width of the longest micro-batch of a rehearsal, and of the run's own of two epochs."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import build_window
    from fsdp_trainer.rehearsal import longest_window
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.training_data import load_training_data

    config = Config.from_dict(made)
    runtime = build_runtime(timeout_minutes=1)
    data = runtime.main_first("data", lambda: load_training_data(config, is_writer=runtime.rank == 0, show=False))
    run = build_run(config, runtime, load=False)

    def width(window: Any) -> int:
        return max(batch.input_ids.shape[1] for batch in window.micro_batches)

    windows = [
        build_window(
            data.train,
            step=step,
            global_batch_size=8,
            micro_batch_size=2,
            rank=runtime.rank,
            world_size=2,
            seed=config.train.seed,
            shuffle=True,
            seq_len=config.data.seq_len,
            packing=False,
        )
        for step in range(10)
    ]
    return width(longest_window(data.train, run, data)), [width(window) for window in windows]


def test_out_of_memory_comes_before_the_first_step(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The limit lets the first steps through: only the longest rows, met later, are too much."""
    lengths = [4] * 12 + [36] * 4  # long records, which the order of the rows puts into the last step
    records = [{"prompt": "w1", "completion": " " + " ".join("w2" for _ in range(n))} for n in lengths]
    made = settings(model_folder("llama"), tmp_path, {}, data={"shuffle": False, "eval": None})
    made["schedule"] = {"name": "constant", "warmup_steps": 1}
    made["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
    made |= {"eval": {"at_end": False}, "loss": {"kind": "plain"}, "sharding": {"zero_stage": 0}}
    made["data"]["train"] = models.write_jsonl(records, tmp_path / "long.jsonl")
    made["log"] = {"samples": 0, "report": False, "trace_step": False}
    made["checkpoint"] = {"enabled": False}
    made["export"] = {"at_end": False}

    def with_(name: str, **changed: Any) -> dict[str, Any]:
        return {**made, "output_dir": str(tmp_path / name), **changed}

    usual = max(peak["forward"] for peak in run(with_("short", train={"max_steps": 2})))
    whole = max(peak["forward"] for peak in run(with_("whole")))
    assert whole > 1.02 * usual
    limit = (usual + whole) // 2
    assert run_out(with_("late"), limit=limit, phase="forward")[1] == 8
    assert len(training_runs.read_metrics(tmp_path / "late")) == 3
    assert run_out(with_("soon", rehearse=True), limit=limit, phase="forward")[1] == 8
    found = json.loads((tmp_path / "soon" / "out_of_memory.json").read_text())
    assert (found["rehearsal"], found["phase"], found["step"]) == (True, "forward", 0)
    assert not (tmp_path / "soon" / "metrics.jsonl").exists()


def test_a_window_of_few_rows_takes_them_again() -> None:
    assert np.resize([3, 1], 5).tolist() == [3, 1, 3, 1, 3]
