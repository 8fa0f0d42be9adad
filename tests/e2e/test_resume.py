"""A run that was killed goes on as if nothing had happened: every bit, every row, every line of the metrics."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import training_runs
from tests.checkpoint_runs import differing
from tests.e2e.tiny_run import SAVE_EVERY, assert_same_run, tiny
from tests.fault_runs import (
    Fault,
    checkpoints,
    comparable_metrics,
    end_state,
    read_seen,
    read_status,
    refusals_of,
    run,
    run_killed,
)
from tests.run_folders import contents
from tests.sweeps import share

Folder = Callable[[str], str]
VICTIMS = ((0, 1), (0,), (1,))


@dataclass(frozen=True)
class Case:
    kind: str
    victims: tuple[int, ...]
    sections: dict[str, Any] = field(default_factory=dict)


CASES = {
    "fp32, dropout, both ranks": Case("gpt2_dropout", (0, 1)),
    "fp32, packed, stage 2, rank 1": Case(
        "llama_tied", (1,), {"data": {"packing": True}, "sharding": {"zero_stage": 2}, "batch": {"micro_batch_size": 1}}
    ),
    "bf16, recomputed dropout, rank 0": Case(
        "gpt2_dropout", (0,), {"precision": "bf16", "activation_checkpointing": {"mode": "full"}}
    ),
    "bf16, stage 1, both ranks": Case("qwen3", (0, 1), {"precision": "bf16", "sharding": {"zero_stage": 1}}),
}
SHARE = ("fp32, packed, stage 2, rank 1", "bf16, recomputed dropout, rank 0")


@pytest.mark.parametrize("name", share(CASES, SHARE))
def test_killed_in_a_step(name: str, model_folder: Folder, tmp_path: Path) -> None:
    case, chance = CASES[name], random.Random(name)
    model = model_folder(case.kind)
    quiet, struck = (tiny(model, tmp_path, folder, **case.sections) for folder in ("quiet", "struck"))
    assert run(quiet, 2) == [0, 0]

    # Steps 6 to 8: the save of step 4 lies behind, that of step 6 perhaps, and an epoch ends with step 6.
    call, share = chance.randint(6, 8), chance.random()
    assert run_killed(struck, 2, Fault(signal.SIGKILL, case.victims, call=call, share=share))
    folder = Path(struck["output_dir"])
    kept = checkpoints(folder)
    begun = [len(read_seen(folder, rank)) for rank in (0, 1)]
    assert not (folder / "model").exists()

    assert run(struck, 2) == [0, 0]
    assert_same_run(quiet, struck)
    resumed_at = int(kept[-1].removeprefix("step-")) if kept else 0
    for rank in (0, 1):
        planned, seen = read_seen(Path(quiet["output_dir"]), rank), read_seen(folder, rank)
        assert seen[: begun[rank]] == planned[: begun[rank]]
        assert seen[begun[rank] :] == planned[resumed_at:]
    assert 0 < max(begun) - resumed_at <= SAVE_EVERY, "more than an interval was lost, or nothing to show anything by"


def test_killed_again_and_again_at_any_moment(model_folder: Folder, tmp_path: Path) -> None:
    """Seeded times over the whole life of the run: start, steps, saves, evaluations, export."""
    model, chance = model_folder("gpt2_dropout"), random.Random(1)
    quiet, struck = (tiny(model, tmp_path, name, checkpoint={"every_steps": 2}) for name in ("quiet", "struck"))
    start = time.monotonic()
    assert run(quiet, 2) == [0, 0]
    life, kills = time.monotonic() - start, 0
    for _ in range(5):
        delay = life * chance.random()
        kills += run_killed(struck, 2, Fault(signal.SIGKILL, chance.choice(VICTIMS), within=None, delay=delay))
    assert kills >= 2  # what is left of the run may be over before the time has come
    assert run(struck, 2) == [0, 0]
    assert_same_run(quiet, struck)


def test_two_ranks_go_on_as_one(model_folder: Folder, tmp_path: Path) -> None:
    model = model_folder("llama")
    quiet, struck = (tiny(model, tmp_path, name) for name in ("quiet", "struck"))
    assert run(quiet, 2) == [0, 0]
    assert run_killed(struck, 2, Fault(signal.SIGKILL, (0, 1), call=7, share=0.5))
    folder = Path(struck["output_dir"])
    begun = len(read_seen(folder, 0))
    resumed_at = int(checkpoints(folder)[-1].removeprefix("step-"))
    assert begun - SAVE_EVERY <= resumed_at < begun

    assert run(struck, 1) == [0]
    rows = [seen[:2] for seen in read_seen(folder, 0)[begun:]]
    assert rows == [seen[:2] for seen in read_seen(Path(quiet["output_dir"]), 0)[resumed_at:]]
    for row, expected in zip(comparable_metrics(folder), comparable_metrics(Path(quiet["output_dir"])), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    weights, quiet_weights = (training_runs.read_weights(Path(s["output_dir"]) / "model") for s in (struck, quiet))
    for weight_name, weight in weights.items():
        assert torch.allclose(weight, quiet_weights[weight_name], rtol=1e-4, atol=1e-6), weight_name


@pytest.fixture(scope="module")
def half_done(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a run that was killed after its first checkpoint."""
    settings = tiny(model_folder("llama"), tmp_path_factory.mktemp("half"), "run", eval={"every_steps": None})
    assert run_killed(settings, 2, Fault(signal.SIGKILL, (0, 1), call=7))
    return settings


def add_a_record(settings: dict[str, Any]) -> dict[str, Any]:
    source = Path(settings["data"]["train"])
    longer = source.with_name("longer.jsonl")
    longer.write_text(source.read_text() + json.dumps({"prompt": "w1", "completion": " w2 w3"}) + "\n")
    return {"train": str(longer)}


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "seed": (lambda _: {"train": {"seed": 8}}, "train.seed: 7 saved, 8 now"),
    "global batch": (
        lambda _: {"batch": {"global_batch_size": 4}},
        "batch.global_batch_size: 8 saved, 4 now",
    ),
    "shuffle": (lambda _: {"data": {"shuffle": False}}, "data.shuffle: true saved, false now"),
    "data": (lambda settings: {"data": add_a_record(settings)}, "data.rows: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_is_refused(change: str, half_done: dict[str, Any]) -> None:
    changed, message = CHANGES[change]
    sections = changed(half_done)
    settings = half_done | {name: {**half_done[name], **values} for name, values in sections.items()}
    folder = Path(half_done["output_dir"])
    before = contents(folder)
    assert run(settings, 2) == [4, 4]
    said = read_status(refusals_of(settings))
    assert said["exit_code"] == 4 and message in said["message"] and "another output_dir" in said["message"]
    touched = {name for name, of in contents(folder).items() if before.get(name) != of}
    of_this_test = re.compile(r"(settings|pid)-of-rank\d.*|\.lock(-owner\.json)?")
    assert [name for name in touched if not of_this_test.fullmatch(name)] == []


def test_a_finished_run_only_exports_again(half_done: dict[str, Any]) -> None:
    """It also shows that the refusals above left the run as it was."""
    folder = Path(half_done["output_dir"])
    assert run(half_done, 2) == [0, 0]
    before, begun = end_state(folder), len(read_seen(folder, 0))
    metrics, measured = ((folder / name).read_bytes() for name in ("metrics.jsonl", "memory.json"))
    saved = [path.stat().st_mtime_ns for path in sorted((folder / "checkpoints").iterdir())]
    (folder / "model" / "model.safetensors").unlink()

    assert run(half_done, 2) == [0, 0]
    assert len(read_seen(folder, 0)) == begun, "a step was taken"
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert [path.stat().st_mtime_ns for path in sorted((folder / "checkpoints").iterdir())] == saved
    assert differing(end_state(folder), before) == []
    assert read_status(folder)["state"] == "finished"
    assert (folder / "memory.json").read_bytes() == measured, "what was measured is gone"

    left = contents(folder)
    assert run(half_done, 2) == [0, 0]
    touched = {name for name, of in contents(folder).items() if left.get(name) != of}
    assert touched == {"settings-of-rank0.yaml", "settings-of-rank1.yaml"}, "nothing was left to do"  # the test's own
