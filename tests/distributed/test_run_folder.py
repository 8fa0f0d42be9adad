"""The run folder: one run at a time, room for what will be written, and the best checkpoint beside the latest."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FolderInUse
from fsdp_trainer.launch import launch
from tests import checkpoint_runs as runs
from tests import fault_runs, models, training_runs
from tests.ranks import run_ranks

ModelFolder = Callable[[str], str]


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Settings of a run of eight steps that saves every second one."""
    train, _ = models.make_records(16, seed=30)
    held_out, _ = models.make_records(5, seed=31)
    base: dict[str, Any] = {
        "data": {"eval": models.write_jsonl(held_out, folder / "eval.jsonl"), "cache_dir": str(folder / "cache")},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"max_steps": 8},
        "eval": {"every_steps": 1, "at_end": True},
        "checkpoint": {"every_steps": 2, "keep_latest": 1, "resume": "auto"},
        "export": {"at_end": False},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return training_runs.settings(model, models.write_jsonl(train, folder / "train.jsonl"), folder / "run", **base)


# Lock


def hold(folder: str, done: str) -> None:
    from fsdp_trainer.run_lock import lock_folder

    lock = lock_folder(Path(folder), log=print)
    Path(done).touch()
    time.sleep(60)
    lock.release()


def holder(folder: Path) -> Any:
    """Start a process that holds the lock and wait until it does."""
    from tests.ranks import _context

    process = _context().Process(target=hold, args=(str(folder), str(folder) + ".done"))
    process.start()
    deadline = time.monotonic() + 20
    while not Path(f"{folder}.done").exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.005)
    return process


def test_second_run_is_refused_at_once_and_the_first_unharmed(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of a job that was started twice."""
    settings = tiny(model_folder("llama"), tmp_path, train={"max_steps": 3})
    assert fault_runs.run(settings, 2) == [0, 0]
    folder = Path(settings["output_dir"])
    before = content(folder)
    first = holder(folder)
    try:
        started = time.monotonic()
        assert fault_runs.run(settings, 2) == [2, 2]
        assert time.monotonic() - started < 10
        assert content(folder) == before, "the refused run has touched the folder"
        with pytest.raises(FolderInUse, match=f"process {first.pid} on "):
            lock_here(folder)
        with pytest.raises(FolderInUse, match="end that run first"):  # before any rank is started
            launch(Config.from_dict(settings), arguments=[], processes=2)
    finally:
        first.kill()
        first.join()
    assert fault_runs.run(settings, 2) == [0, 0]


def content(folder: Path) -> dict[str, bytes]:
    harness = ("settings-of-", "seen-", "pid-of-", ".lock")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(harness))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def lock_here(folder: Path) -> list[str]:
    from fsdp_trainer.run_lock import lock_folder, unlock_folder

    lines: list[str] = []
    unlock_folder(lock_folder(folder, log=lines.append))
    return lines


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    first = holder(tmp_path / "run")
    first.kill()
    first.join()
    started = time.monotonic()
    (line,) = lock_here(tmp_path / "run")
    assert time.monotonic() - started < 2
    assert f"process {first.pid} on " in line
    assert lock_here(tmp_path / "run") == [], "a run that ended by itself leaves nothing to take over"


def race(folder: str, rounds: int) -> list[tuple[str, list[str], int]]:
    """Start for one folder at the same time as the other rank, again and again; return how each start went.

    Every second folder has the owner file that a killed run leaves.
    """
    import torch.distributed as dist

    from fsdp_trainer.run_lock import lock_folder, unlock_folder

    dist.init_process_group("gloo")
    answers = []
    for number in range(rounds):
        run, said, taken = Path(folder) / f"run-{number}", "", None
        lines: list[str] = []
        if number % 2 and dist.get_rank() == 0:
            run.mkdir()
            (run / ".lock-owner.json").write_text(json.dumps({"host": "here", "pid": 0, "boot": "an earlier one"}))
        dist.barrier()
        try:
            taken = lock_folder(run, log=lines.append)
        except FolderInUse as error:
            said = str(error)
        dist.barrier()
        if taken is not None:
            unlock_folder(taken)
        answers.append((said, lines, os.getpid()))
    return answers


def test_of_two_starts_at_once_one_runs_and_the_other_names_it(tmp_path: Path) -> None:
    first, second = run_ranks(race, 2, str(tmp_path), 50)
    winners = []
    for number, ((said, lines, pid), (other_said, other_lines, other_pid)) in enumerate(
        zip(first, second, strict=True)
    ):
        assert bool(said) != bool(other_said), f"start {number}: {said!r} {other_said!r}"
        winner = other_pid if said else pid
        assert f"process {winner} on " in said + other_said, f"start {number}: the owner is not named"
        taken_over = ["process 0 on here (boot an earlier one)" in line for line in lines + other_lines]
        assert taken_over == ([True] if number % 2 else []), f"start {number}"
        winners.append(winner)
    print(f"rank 0 won {winners.count(first[0][2])} of {len(winners)}")


def hold_and_fork(folder: str, done: str) -> None:
    from fsdp_trainer.run_lock import lock_folder

    lock = lock_folder(Path(folder), log=print)
    if child := os.fork():
        Path(done).write_text(str(child))
    time.sleep(60)
    lock.release()


def test_a_child_that_outlives_a_killed_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    """The kind of a data worker that keeps what it inherited."""
    from tests.ranks import _context

    folder, done = tmp_path / "run", tmp_path / "done"
    process = _context().Process(target=hold_and_fork, args=(str(folder), str(done)))
    process.start()
    while not (done.exists() and done.read_text()):
        time.sleep(0.005)
    process.kill()
    process.join()
    try:
        assert len(lock_here(folder)) == 1
    finally:
        os.kill(int(done.read_text()), 9)


# Disk


def test_a_disk_without_room_is_known_before_the_first_step(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of a full disk that is found only at the first save."""
    free = shutil.disk_usage(tmp_path).free
    settings = tiny(
        model_folder("llama"), tmp_path, checkpoint={"keep_latest": 2 * free // 10**6}, train={"max_steps": 10**9}
    )
    settings["checkpoint"]["every_steps"] = 1
    assert fault_runs.run(settings, 2) == [7, 7]
    message = fault_runs.read_status(Path(settings["output_dir"]))["message"]
    assert message.startswith("The disk has no room for what this run will write.")
    assert "more checkpoints of" in message
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()


def expected_and_real_bytes(settings: dict[str, Any]) -> tuple[int, int, int]:
    from fsdp_trainer.checkpoint import checkpoint_bytes

    run = runs.build(settings)
    before = checkpoint_bytes(run.model, run.optimizer)
    runs.take_steps(run, 0, 1)
    path = runs.save(run, 1).wait()
    return before, checkpoint_bytes(run.model, run.optimizer), sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_expected_size_is_the_real_one(kind: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = training_runs.settings(model_folder(kind), "unused.jsonl", tmp_path)
    before, after, real = run_ranks(expected_and_real_bytes, 1, settings)[0]
    assert before == pytest.approx(real, rel=0.15)  # 1.5 MB: names and headers count here
    assert after == pytest.approx(real, rel=0.15)


def test_number_of_saves_to_come() -> None:
    cases = [(every, background) for every in (1, 2, 3, 7, 20) for background in (False, True)]
    for (every, background), (due, to_come) in zip(cases, run_ranks(saves_of, 1, cases)[0], strict=True):
        assert {step for step in range(1, LONGEST) if step % every == 0} <= set(due), "every interval ends with one"
        for (step, total), found in to_come.items():
            assert found == len({s for s in range(step + 1, total + 1) if s in due or s == total}), (every, step, total)
        # Never more than two of them between a step begun and the newest published one, see [Note: one interval].
        back = 1 if not background or every == 1 else 2
        assert all(later - first <= every for first, later in zip([0, *due], [0, *due][back:], strict=False))


LONGEST = 42


def saves_of(cases: list[tuple[int, bool]]) -> list[tuple[list[int], dict[tuple[int, int], int]]]:
    from fsdp_trainer.saving import is_save_due, saves_to_come

    answers = []
    for every, background in cases:
        rule: dict[str, Any] = {"every_steps": every, "async_save": background}
        due = [step for step in range(1, LONGEST) if is_save_due(step, **rule)]
        runs_to_go = [(step, total) for total in range(1, LONGEST) for step in range(total + 1)]
        to_come = {(step, total): saves_to_come(step=step, total_steps=total, **rule) for step, total in runs_to_go}
        answers.append((due, to_come))
    return answers


# The best one


def losses(folder: Path) -> dict[int, float]:
    rows = training_runs.read_metrics(folder)
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


def kept_and_best(folder: Path) -> tuple[list[int], dict[str, Any]]:
    names = fault_runs.checkpoints(folder)
    state = json.loads((folder / "checkpoints" / names[-1] / "state.json").read_text())
    return [int(name.removeprefix("step-")) for name in names], state["best"]


def test_best_checkpoint_is_kept_beside_the_latest_and_over_a_resume(model_folder: ModelFolder, tmp_path: Path) -> None:
    # A learning rate that overshoots: the loss has its minimum inside the run.
    sections: dict[str, Any] = {"optim": {"lr": 0.3}, "schedule": {"name": "constant", "warmup_steps": 2}}
    settings = tiny(model_folder("llama"), tmp_path, checkpoint={"keep_best": True}, **sections)
    settings["schedule"].pop("min_lr_ratio")
    quiet = {**settings, "output_dir": str(tmp_path / "quiet")}
    assert fault_runs.run(quiet, 2) == [0, 0]
    measured = losses(tmp_path / "quiet")
    best = min(measured, key=lambda step: measured[step])
    assert best < 7, f"nothing to keep beside the latest: {measured}"
    assert kept_and_best(tmp_path / "quiet") == ([best, 8], {"step": best, "eval_loss": measured[best]})

    fault = fault_runs.Fault(fault_runs.signal.SIGKILL, (0, 1), call=6, share=0.5)
    assert fault_runs.run_killed(settings, 2, fault)
    assert fault_runs.run(settings, 2) == [0, 0]
    assert kept_and_best(tmp_path / "run") == kept_and_best(tmp_path / "quiet")


def test_an_evaluation_that_a_signal_delayed_still_counts(model_folder: ModelFolder, tmp_path: Path) -> None:
    learnt = {"eval": str(tmp_path / "train.jsonl")}  # its loss falls from the first step on
    settings = tiny(model_folder("llama"), tmp_path, checkpoint={"keep_best": True}, data=learnt)
    fault = fault_runs.Fault(fault_runs.signal.SIGTERM, (0,), call=3)
    assert fault_runs.run(settings, 2, fault) == [75, 75]
    assert kept_and_best(tmp_path / "run")[1]["step"] < 3
    first, path = losses(tmp_path / "run"), tmp_path / "run"
    stopped = {**settings, "train": {**settings["train"], "max_steps": 3}}
    assert 3 not in first
    assert fault_runs.run(stopped, 2) == [0, 0]
    assert kept_and_best(path)[1] == {"step": 3, "eval_loss": losses(path)[3]}
