"""The real DeepSpeed on CPU beside what its configuration becomes here: the same losses, the same learning rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config, ScheduleConfig
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import write_import
from fsdp_trainer.optim.schedule import scheduled_rate
from tests import deepspeed_peer, models, training_runs
from tests.ranks import IMPORT_TIME_ENVIRONMENT, free_port, run_on_kept_ranks
from tests.schedules import SCHEDULES

RANKS, STEPS, RATES, LR = 2, 20, 40, 2e-5
# DeepSpeed no longer takes a warm-up of no steps; its formulas do (tests/unit/interop/test_deepspeed.py).
TAKEN = [(kind, params) for kind, params in SCHEDULES if params.get("warmup_num_steps") != 0]
Trained = dict[str, dict[str, list[float]]]


def make_config(stage: int, **zero: Any) -> dict[str, Any]:
    """Return a ds_config.json in fp32 whose clipping, decay and schedule all act within 20 steps."""
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        # torch_adam: without it DeepSpeed compiles an operator for the CPU, which takes a minute and more.
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 25, "warmup_max_lr": 2e-3, "warmup_num_steps": 4},
        },
        "zero_optimization": {"stage": stage, **zero},
    }


CONFIGS = {
    "stage-0": make_config(0),
    "stage-1": make_config(1),
    "stage-2": make_config(2, overlap_comm=True, contiguous_gradients=True),
    "stage-3": make_config(3, stage3_param_persistence_threshold=0),
}


def write_rows(path: Path) -> str:
    """Write records with the same number of supervised tokens each.

    Only then is the mean over micro-batches, DeepSpeed's loss, the mean over a step's tokens.
    """
    records, _ = models.make_records(48, seed=5, shortest=24, longest=24)
    words = [(record["prompt"] + record["completion"]).split() for record in records]
    even = [{"prompt": " ".join(row[:6]), "completion": " " + " ".join(row[6:])} for row in words]
    return models.write_jsonl(even, path)


def imported(name: str, folder: Path, *, model: str, train: str) -> Config:
    """Return the settings that `fsdp-trainer import-deepspeed` writes for one of CONFIGS."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    flags = [
        *(f"--model.path={model}", f"--data.train={train}", "--data.format=prompt_completion", "--data.seq_len=32"),
        *(f"--data.cache_dir={folder / 'cache'}", f"--output_dir={folder / name}-run", "--eval.at_end=false"),
        *(f"--train.max_steps={STEPS}", "--checkpoint.every_steps=1000", "--log.samples=0", "--export.at_end=false"),
    ]
    write_import(import_deepspeed(file, world_size=RANKS), folder / name, overrides=flags)
    return Config.load(folder / name / "run.yaml")


def run_deepspeed(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a job with the real DeepSpeed on two gloo ranks and return what it wrote."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    environment = {
        **os.environ,
        **IMPORT_TIME_ENVIRONMENT,
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, deepspeed_peer.__file__, str(path)]
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for log in logs:
            log.seek(0)
            print(log.read()[-8000:])
            log.close()
    assert codes == [0] * RANKS
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def train(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Run settings on two ranks and return the loss and the rate of each step."""
    rows = [row for row in run_on_kept_ranks(training_runs.train, RANKS, settings)[0]["metrics"] if "loss" in row]
    return {"losses": [row["loss"] for row in rows], "rates": [row["lr"] for row in rows]}


@pytest.fixture(scope="module")
def both(
    model_folder: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trained, dict[str, Any]]:
    """Train with both, once: ours, and all that DeepSpeed wrote."""
    if not (deepspeed_peer.PACKAGES / "deepspeed").is_dir():
        pytest.skip("DeepSpeed is not here: ./launch.sh test installs it for the tests")
    folder, model = tmp_path_factory.mktemp("deepspeed"), model_folder("llama")
    rows = write_rows(folder / "train.jsonl")
    configs = {name: imported(name, folder, model=model, train=rows) for name in CONFIGS}
    settings = {name: config.to_dict() for name, config in configs.items()}
    steps = run_on_kept_ranks(training_runs.documents_by_step, 1, settings["stage-3"], STEPS)[0]
    ours = {name: train(run_settings) for name, run_settings in settings.items()}
    job = {
        "model": model,
        "steps": [[{"tokens": d.tokens, "supervised": d.supervised} for d in documents] for documents in steps],
        "configs": CONFIGS,
        "schedules": TAKEN,
        "rates": RATES,
        "lr": LR,
    }
    return ours, run_deepspeed(job, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_run_has_deepspeeds_losses(name: str, both: tuple[Trained, dict[str, Any]]) -> None:
    ours, theirs = both[0][name], both[1]["trained"][name]
    assert len(theirs["losses"]) == STEPS
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4, rel=0)
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9, abs=1e-15)
    assert theirs["losses"][-1] < theirs["losses"][0] - 0.1  # there was something to differ in


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(TAKEN)), ids=lambda index: str(TAKEN[index]))
def test_rates_are_those_of_deepspeeds_own_schedules(
    index: int, both: tuple[Trained, dict[str, Any]], tmp_path: Path
) -> None:
    kind, params = TAKEN[index]
    file = tmp_path / "ds.json"
    optimizer, scheduler = {"type": "AdamW", "params": {"lr": LR}}, {"type": kind, "params": params}
    content = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "scheduler": scheduler}
    file.write_text(json.dumps(content), encoding="utf-8")
    config = write_import(import_deepspeed(file, world_size=RANKS), tmp_path / "out")
    schedule: ScheduleConfig = config.schedule
    rates = [scheduled_rate(step, schedule=schedule, peak=config.optim.lr, total_steps=RATES) for step in range(RATES)]
    assert rates == pytest.approx(both[1]["rates"][index], rel=1e-9, abs=1e-15)
