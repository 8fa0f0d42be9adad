"""Resume (reports G): the same run, whatever was done to it in between.

Entries 56, 60, 62, 63 and 64. Elsewhere: 51, 52, 53, 57 and 58 in test_checkpoint.py (bitwise, other worlds, dropout, a
save before the first step), 54 in tests/e2e/test_resume.py (a kill after an epoch has ended), 55 in
tests/e2e/test_elastic_resume.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests import models, reference, step_runs
from tests.export_runs import train_and_export
from tests.ranks import REPOSITORY, run_on_kept_ranks, run_plainly, run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
OTHER_WORLD = REPOSITORY / "tests" / "inputs" / "checkpoints" / "c05_saved_with_other_world_size.json"


def resume_as_saved_by(run_settings: dict[str, Any], facts: dict[str, Any]) -> tuple[Any, list[str], runs.Digests]:
    """Save, let the checkpoint say that it is of another world, and load it; return progress, notes, random states."""
    import dataclasses

    import torch.distributed as dist

    from fsdp_trainer.agreement import run_on_main
    from fsdp_trainer.checkpoint_manifest import read_state, write_state

    run = runs.build(run_settings)
    saved = runs.save(run, facts["global_step"]).wait()
    progress = {"step": facts["global_step"], "tokens_seen": facts["samples_seen"]}

    def rewrite() -> None:
        state = read_state(saved)
        state["world_size"] = facts["world_size"]
        state["progress"] |= progress
        write_state(saved, state)

    run_on_main(rewrite)
    notes: list[str] = []
    found = runs.load(run, saved, log=notes.append)
    dist.barrier()
    return dataclasses.asdict(found), notes, runs.local_digests(run)


def test_56_saved_by_eight_ranks_and_resumed_on_two(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Input c05: what was seen is kept, and the rule for the random states, of which there are too many, is said."""
    facts = json.loads(OTHER_WORLD.read_text())
    assert (facts["world_size"], len(facts["rng_files"])) == (8, 8)
    answers = []
    for name in ("once", "again"):
        config = settings(model_folder("llama"), "unused.jsonl", tmp_path / name)
        answers.append(run_ranks(resume_as_saved_by, 2, config, facts))
    for rank, (progress, notes, digests) in enumerate(answers[0]):
        assert (progress["step"], progress["tokens_seen"]) == (100, 6400)
        said = ["saved by 8 ranks, this run has 2 on cpu: its random states do not fit" in note for note in notes]
        assert said == ([True] if rank == 0 else []), notes
        assert f"(seed {runs.SEED}, step 100, rank)" in "".join(notes) or rank
        assert runs.differing(digests, answers[1][rank][2]) == [], "derived, so the same in every resume"
    assert answers[0][0][2]["rng.0.cpu"] != answers[0][1][2]["rng.1.cpu"]


def leave_and_come_back(run_settings: dict[str, Any]) -> dict[str, Any]:
    """Save, train on, and load in the same process; return losses on one window and what the weights then are."""
    from fsdp_trainer.step import eval_step
    from tests.step_runs import window_of

    run = runs.build(run_settings)

    def loss() -> float:
        window = window_of(run, runs.documents())
        total = sum(eval_step(run, micro_batch).item() for micro_batch in window.micro_batches)
        run.sharding.reshard_all()
        return total

    runs.take_steps(run, 0, 2)
    before, saved_loss = runs.local_digests(run), loss()
    path = runs.save(run, 2).wait()
    runs.take_steps(run, 2, 4)
    trained_on = loss()
    runs.load(run, path)
    after = runs.local_digests(run)
    return {
        "losses": (saved_loss, trained_on, loss()),
        "differing": runs.differing(before, after),
        "dtypes": sorted({str(parameter.dtype) for parameter in run.model.parameters()}),
    }


@pytest.mark.parametrize("sharding", [{"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "offload": "params"}])
def test_60_62_63_back_in_the_same_process(sharding: dict[str, Any], model_folder: ModelFolder, tmp_path: Path) -> None:
    """From a bf16 source: the masters come back in fp32, bit by bit, and no compute copy of the later ones stays."""
    source = run_ranks(save_in_bf16, 1, model_folder("llama_tied"), str(tmp_path / "source"))[0]
    config = settings(source, "unused.jsonl", tmp_path / "run", precision="bf16", sharding=sharding)
    for answer in run_ranks(leave_and_come_back, 2, config):
        saved, trained_on, loaded = answer["losses"]
        assert loaded == saved != trained_on
        assert answer["differing"] == []
        assert answer["dtypes"] == ["torch.float32"]


def save_in_bf16(model: str, folder: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def first_loss(run_settings: dict[str, Any], rows: list[Any]) -> tuple[float, str]:
    """Return the loss before any step, and what a start says of the model it starts from."""
    from fsdp_trainer.training import evaluate

    run = step_runs.build(run_settings)
    loss = evaluate(run, step_runs.make_rows(rows))
    assert loss is not None
    return loss, next(fact for fact in run.facts if fact.startswith("model "))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_64_a_new_run_starts_from_the_weights_it_names(
    zero_stage: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Also from what an earlier run exported: before any step the loss is that model's own, and not the base's."""
    documents = models.make_records(8, seed=31)[1]
    rows = [[document] for document in documents]
    base, trained = model_folder("llama"), tmp_path / "trained"
    config = settings(base, "unused.jsonl", tmp_path / "earlier", sharding={"zero_stage": zero_stage})
    run_on_kept_ranks(train_and_export, 2, config, str(trained), {"dtype": "fp32"})
    losses = []
    for source in (base, str(trained)):
        config = settings(source, "unused.jsonl", tmp_path / "new", sharding={"zero_stage": zero_stage})
        answers = run_ranks(first_loss, 2, config, rows)
        expected, _ = run_plainly(reference.gradient_snapshot, source, documents)[0]
        for loss, said in answers:
            assert loss == pytest.approx(expected, rel=1e-5)
            assert said.startswith(f"model {source}: ")
        losses.append(expected)
    assert abs(losses[0] - losses[1]) > 1e-2, "the two sources must differ here"
