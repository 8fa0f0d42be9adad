"""Hangs (reports N): nothing is decided by one rank alone.

Entry 110. Elsewhere: 108 in test_kind_a_loss.py (input d22: a rank whose rows lost all labels) and in
test_kind_h_schedule.py (skipped steps), 112 in tests/e2e/test_signals.py (a rank that raises) and test_lost_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import checkpoint_runs as runs
from tests.ranks import run_ranks
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
