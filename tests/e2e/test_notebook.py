"""Training from a notebook's kernel: shown while it goes, stopped by its stop button or its end, and brought back."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import training_runs
from tests.e2e.commands import write_settings
from tests.e2e.tiny_run import assert_same_run, tiny
from tests.fault_runs import checkpoints, read_status, run
from tests.jupyter_kernels import Kernel, start_kernel

Folder = Callable[[str], str]
STEPS = 90  # some seconds of steps: a cell is updated every two
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def long_run(model: str, folder: Path, name: str) -> dict[str, Any]:
    return tiny(
        model,
        folder,
        name,
        data={"eval": None},
        eval={"every_steps": None, "at_end": False},
        train={"max_steps": STEPS},
        checkpoint={"every_steps": 40},
    )


def has_steps(output: Path, count: int) -> bool:
    return (output / "metrics.jsonl").is_file() and len(training_runs.read_metrics(output)) >= count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with start_kernel(folder) as started:
        yield started


def test_stopped_twice_the_cell_goes_on_to_the_same_weights(kernel: Kernel, model_folder: Folder, folder: Path) -> None:
    """By the stop button and by SIGTERM, in a kernel that has imported what a rank uses as well."""
    quiet, struck = (long_run(model_folder("gpt2_dropout"), folder, name) for name in ("quiet", "struck"))
    write_settings(struck, folder, "struck.yaml")
    output = folder / "struck"
    assert not kernel.run("import torch, bitsandbytes\nfrom fsdp_trainer import Config, finetune").error
    cell = "finetune(Config.load('struck.yaml'), processes=2)"

    status: dict[str, Any] = {"step": 0}
    for name, strike in (
        ("SIGINT", kernel.manager.interrupt_kernel),
        ("SIGTERM", lambda: os.kill(kernel.pid, signal.SIGTERM)),
    ):
        wanted = status["step"] + 3
        stopped = kernel.run(cell, until=partial(has_steps, output, wanted), strike=strike)
        status = read_status(output)
        assert (status["state"], status["exit_code"]) == ("interrupted", 75)
        assert wanted <= status["step"] == len(training_runs.read_metrics(output)) < STEPS
        assert checkpoints(output)[-1] == f"step-{status['step']:08d}"
        assert stopped.error["ename"] == "Interrupted"
        assert stopped.error["traceback"] == f"Interrupted: {status['message']}".split("\n")
        (last,) = stopped.displays.values()
        assert f"{name} received: stopping at the next safe point" in last
        assert f"step {status['step']} of {STEPS}" in last

    again = kernel.run(cell)
    assert not again.error
    assert len(again.displays) == 1, "one display, updated"
    assert len(again.updates) >= 4
    assert any("<progress" in html and "<svg" in html for html in again.updates)
    assert "shown above" in again.value["text/html"]
    (result,) = again.displays.values()
    assert "finished" in result and "<svg" in result and f"at step {status['step']}" in result
    assert "\x1b" not in "".join(again.updates), "escape codes of a terminal"
    assert not re.search(r'(src|href)="(?!#)', result), "needs something from elsewhere"
    assert run(quiet, 2) == [0, 0]
    assert_same_run(quiet, struck)


def test_one_process_is_the_kernel_itself(kernel: Kernel, model_folder: Folder, folder: Path) -> None:
    settings = long_run(model_folder("gpt2_dropout"), folder, "alone")
    write_settings({**settings, "train": {**settings["train"], "max_steps": 3}}, folder, "alone.yaml")
    shown = kernel.run(
        "from fsdp_trainer import Config, finetune\nresult = finetune(Config.load('alone.yaml'))\nprint(result)\nresult"
    )
    assert not shown.error
    assert f"{folder / 'alone'}: finished, 3 steps, loss " in shown.printed
    assert "<svg" in shown.value["text/html"]


def test_a_kernel_that_is_killed_does_not_cost_the_run(model_folder: Folder, folder: Path) -> None:
    """As by a restart, which sends SIGTERM and soon after SIGKILL, or for want of memory."""
    settings, output = long_run(model_folder("gpt2_dropout"), folder, "orphaned"), folder / "orphaned"
    write_settings(settings, folder, "orphaned.yaml")
    with start_kernel(folder) as kernel:
        kernel.client.execute(
            "from fsdp_trainer import Config, finetune; finetune(Config.load('orphaned.yaml'), processes=2)"
        )
        deadline = time.monotonic() + 120
        while not has_steps(output, 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = psutil.Process(kernel.pid).children(recursive=True)
        os.kill(kernel.pid, signal.SIGKILL)
        assert len(processes) >= 3, "the agent and two ranks"
        assert psutil.wait_procs(processes, timeout=30)[1] == []
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    assert checkpoints(output)[-1] == f"step-{status['step']:08d}"
    assert status["step"] < STEPS
