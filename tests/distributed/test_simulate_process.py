"""`fsdp_trainer.simulate` from a process that trains: the answer of a fresh one, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models, simulation_runs, step_runs, training_runs
from tests.ranks import run_ranks

Folder = Callable[[str], str]


def between_steps(run_settings: dict[str, Any], documents: list[Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Take a step, simulate, take another; return both losses, the answer, and how a model that is not there ends."""
    import sys

    from fsdp_trainer import Config, simulate
    from fsdp_trainer.errors import ConfigError
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    windows = [step_runs.window_of(run, rows) for rows in documents]
    losses = [train_step(run, windows[0], learning_rate=1e-3, optimizer_step=0).loss.item()]
    result = simulate(Config.from_dict(asked), "8xA100-80GB")
    losses.append(train_step(run, windows[1], learning_rate=1e-3, optimizer_step=1).loss.item())
    assert result.ledger is not None
    try:
        simulate(Config.from_dict({**asked, "model": {"path": "/not/there"}}), "8xA100-80GB")
        error = ""
    except ConfigError as caught:
        error = str(caught)
    import torch

    registered = hasattr(torch, "simgpu") or "fsdp_trainer.simulated" in sys.modules
    return {"losses": losses, "json": result.to_json(), "error": error, "registered": registered}


def plain_steps(run_settings: dict[str, Any], documents: list[Any]) -> list[float]:
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    return [
        train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=step).loss.item()
        for step, rows in enumerate(documents)
    ]


def test_simulating_in_the_middle_of_a_run(model_folder: Folder, tmp_path: Path) -> None:
    settings = training_runs.settings(
        model_folder("llama"), "unused.jsonl", tmp_path, batch={"global_batch_size": 4, "micro_batch_size": 2}
    )
    documents = [[[document] for document in models.make_records(4, seed=seed)[1]] for seed in (1, 2)]
    asked = simulation_runs.settings(tmp_path)
    got = run_ranks(between_steps, 1, settings, documents, asked, timeout=300)[0]
    fresh = run_ranks(simulation_runs.simulate_all, 1, {"it": asked}, "8xA100-80GB")[0]["it"]["json"]
    assert got["json"] == fresh
    assert got["losses"] == run_ranks(plain_steps, 1, settings, documents)[0]
    assert "/not/there" in got["error"] and "to fix" in got["error"]
    assert not got["registered"]


def test_a_process_that_ends_without_an_answer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_trainer import Config
    from fsdp_trainer.errors import FsdpTrainerError
    from fsdp_trainer.memory import simulation_process

    monkeypatch.setattr(
        simulation_process, "_CODE", "import sys; print('no memory left', file=sys.stderr); sys.exit(9)"
    )
    with pytest.raises(FsdpTrainerError, match=r"without an answer[\s\S]*exit code 9; no memory left"):
        simulation_process.simulate(Config.from_dict(simulation_runs.settings(tmp_path)), "8xA100-80GB")
