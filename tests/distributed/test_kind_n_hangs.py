"""Hangs (reports N): nothing is decided by one rank alone.

Entries 110 and 113. Elsewhere: 108 in test_kind_a_loss.py (input d22: a rank whose rows lost all labels) and in
test_kind_h_schedule.py (skipped steps), 112 in tests/e2e/test_signals.py (a rank that raises) and test_lost_ranks.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import DistributedError
from tests import architectures, fault_runs, models, reference, step_runs
from tests import checkpoint_runs as runs
from tests.distributed.test_before_the_first_step import tiny, train_with_broken_writer
from tests.ranks import run_plainly, run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]

# After each step: the loss as rank 0 and as rank 1 has it. Rank 0's word counts: the first and the third are its best.
LOSSES = ((1.0, 2.0), (1.5, 0.1), (0.5, 9.0), (0.5, 0.4))


def evaluate_apart(run_settings: dict[str, Any]) -> list[int]:
    """Hand the saver losses that differ between the ranks; return the steps whose checkpoints are there."""
    from fsdp_trainer.checkpoint_folder import published
    from fsdp_trainer.checkpoint_manifest import Progress
    from fsdp_trainer.saving import Saver

    run = runs.build(run_settings)
    output_dir = Path(run.config.output_dir)
    saver = Saver(run, facts=runs.FACTS, process_group=runs.save_group(), output_dir=output_dir, saved_step=0)
    for step, losses in enumerate(LOSSES, start=1):
        runs.take_steps(run, step - 1, step)
        saver.evaluated(Progress(step=step), losses[run.runtime.rank])
    saver.close()
    return sorted(int(path.name.removeprefix("step-")) for path in published(output_dir))


def test_110_ranks_that_measure_different_losses_save_together(model_folder: ModelFolder, tmp_path: Path) -> None:
    checkpoint = {"keep_best": True, "keep_latest": 9}
    config = settings(
        model_folder("llama"),
        "unused.jsonl",
        tmp_path,
        checkpoint=checkpoint,
        data={"eval": "unused.jsonl"},
        eval={"at_end": True},
    )
    assert run_ranks(evaluate_apart, 2, config) == [[1, 3], [1, 3]]


def step_with_chosen_experts(run_settings: dict[str, Any], rows: list[Any]) -> tuple[dict[str, Any], list[set[int]]]:
    """Take a step; return the gradients, and which experts of each layer were asked on this rank."""
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    chosen: list[set[int]] = []
    for name, module in run.model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, inputs: chosen.append(set(inputs[1].flatten().tolist())))
    with step_runs.captured_gradients(run) as gradients:
        train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    return gradients, chosen


def lock_routers(folder: str) -> str:
    """Save a mixture whose routers send even tokens to experts 0 and 1, and odd ones to 2 and 3, in every layer."""
    import torch
    from transformers import AutoModelForCausalLM

    path = architectures.save_architecture("mixtral", folder)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        signs = torch.ones(model.config.vocab_size)
        signs[1::2] = -1.0
        model.get_input_embeddings().weight[:, 0] = 3.0 * signs  # stays the largest in the residual stream
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(0.01)
                parameter[:, 0] = torch.tensor([4.0, 4.0, -4.0, -4.0])
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_113_ranks_that_use_different_parts_of_the_model(zero_stage: int, tmp_path: Path) -> None:
    """Each rank asks two experts that the other never asks: nobody waits, and their gradients are those of one process.

    The public case is a batch without images; a mixture's experts are what a text model has of that kind.
    """
    model = run_ranks(lock_routers, 1, str(tmp_path / "model"))[0]
    # Sixteen tokens, so that no padding, which is even, comes with them.
    documents = [
        models.Document(tokens=tuple(range(20 + parity, 52 + parity, 2)), supervised=(True,) * 16) for parity in (0, 1)
    ]
    config = settings(
        model,
        "unused.jsonl",
        tmp_path,
        sharding={"zero_stage": zero_stage},
        optim={"max_grad_norm": None},
        batch={"global_batch_size": 2, "micro_batch_size": 1},
    )
    (got, chosen), (_, others) = run_ranks(step_with_chosen_experts, 2, config, [[one] for one in documents])
    assert chosen and len(chosen) == len(others)
    assert all(not one & other for one, other in zip(chosen, others, strict=True)), (chosen, others)
    _, gradients = run_plainly(reference.gradient_snapshot, model, documents)[0]
    assert max(reference.relative_errors(got, gradients).values()) < 1e-4


# Saves and loads that take longer than a step may hang


def save_slowly(settings: dict[str, Any], seconds: float) -> int:
    return train_with_broken_writer(settings, after=1000, slow=seconds)


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "background"])
def test_a_save_may_take_longer_than_a_step_may_hang(
    async_save: bool, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Before: a raw traceback, and "a rank is lost"."""
    settings = tiny(
        model_folder("llama"),
        tmp_path,
        checkpoint={"every_steps": 2, "async_save": async_save},
        train={"max_steps": 4, "timeout_minutes": 0.05},
    )
    assert run_ranks(save_slowly, 2, settings, 4.0, timeout=120.0) == [0, 0]
    assert fault_runs.checkpoints(tmp_path / "run")[-1] == "step-00000004"


def resume_slowly(settings: dict[str, Any], seconds: float) -> int:
    """Resume where one rank's disk is slow to be verified."""
    from fsdp_trainer import checkpoint_search

    find = checkpoint_search.find_changed_bytes

    def find_slowly(*args: Any) -> Any:
        time.sleep(seconds if os.environ["RANK"] == "1" else 0)
        return find(*args)

    checkpoint_search.find_changed_bytes = find_slowly
    try:
        return fault_runs.train(settings)
    finally:
        checkpoint_search.find_changed_bytes = find


def test_a_load_may_take_longer_than_a_step_may_hang(model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = tiny(
        model_folder("llama"), tmp_path, checkpoint={"every_steps": 2, "resume": "auto"}, train={"max_steps": 2}
    )
    assert fault_runs.run(settings, 2) == [0, 0]
    settings["train"] |= {"max_steps": 4, "timeout_minutes": 0.05}
    assert run_ranks(resume_slowly, 2, settings, 5.0, timeout=120.0) == [0, 0]


def wait_too_long(settings: dict[str, Any]) -> str:
    """Save with rank 1 behind a limit that is over; return what is said."""
    from fsdp_trainer import checkpoint_pace
    from tests import checkpoint_runs as runs

    run, group = runs.build(settings), runs.save_group()
    checkpoint_pace.LEAST_SECONDS = 0.0
    checkpoint_pace.DISK.speed = 1e12
    group.set_timeout(timedelta(seconds=1))
    if os.environ["RANK"] == "1":
        time.sleep(3)
    try:
        runs.save(run, 1, process_group=group).wait()
    except (DistributedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_save_that_never_ends_is_named(model_folder: ModelFolder, tmp_path: Path) -> None:
    said = run_ranks(wait_too_long, 2, tiny(model_folder("llama"), tmp_path))[0]
    assert said.startswith("DistributedError: The save of ") and "step-00000001 did not end in time" in said
