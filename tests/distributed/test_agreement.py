"""What one rank fails at is known to all, and no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks


def act(kind: str, failing: int) -> list[Any]:
    import torch.distributed as dist

    from fsdp_trainer.agreement import all_true, run_on_all, run_on_main
    from fsdp_trainer.errors import ConfigError, FsdpTrainerError

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def action() -> str:
        if rank != failing:
            return f"rank {rank}"
        if kind == "ours":
            raise ConfigError("Wrong.", values="a", fix="b")
        raise OSError(28, "No space left on device") if kind == "full" else OSError(5, "Input/output error")

    def outcome(run: Callable[[Callable[[], str]], str]) -> Any:
        try:
            return run(action)
        except (FsdpTrainerError, OSError) as error:
            return type(error).__name__, str(error)

    # The ranks are still in step after a failure.
    return [outcome(run_on_main), outcome(run_on_all), all_true(True), all_true(rank != failing)]


def test_results_and_agreement() -> None:
    assert run_ranks(act, 2, "ours", 9) == [
        ["rank 0", "rank 0", True, True],
        ["rank 0", "rank 1", True, True],
    ]


def test_own_error_keeps_its_kind_and_text_on_every_rank() -> None:
    wrong = ("ConfigError", "Wrong.\n  found: a\n  to fix: b")
    assert run_ranks(act, 2, "ours", 0) == [[wrong, wrong, True, False]] * 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("kind", "number", "text", "elsewhere", "named"),
    [
        ("foreign", 5, "Input/output error", "DistributedError", "Rank {} failed."),
        ("full", 28, "No space left on device", "OutputError", "rank {}: "),  # the same code on every rank
    ],
)
def test_foreign_error_names_its_rank_elsewhere(
    kind: str, number: int, text: str, elsewhere: str, named: str, failing: int
) -> None:
    answers = run_ranks(act, 2, kind, failing)
    here, there = answers[failing], answers[1 - failing]
    assert here[1] == ("OSError", f"[Errno {number}] {text}")
    assert there[1][0] == elsewhere
    assert named.format(failing) in there[1][1]
    assert text in there[1][1]
    assert here[0] == (here[1] if failing == 0 else "rank 0"), "rank 1 never runs the main rank's action"
    assert here[2:] == there[2:] == [True, False]
