"""A second signal while the first one's save is written: SIGTERM waits for it, Ctrl-C does not, and nothing breaks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny_run import SAVE_EVERY, assert_same_run, tiny
from tests.fault_runs import Fault, Watched, checkpoints, read_status, run, train
from tests.ranks import run_ranks

Folder = Callable[[str], str]
STRUCK_IN = 6  # between the saves of steps 4 and 8, so that the stop has a state to save


def train_struck_twice(settings: dict[str, Any], number: int) -> int:
    """Train; on this rank the signal comes within a step, and again within the save that follows."""
    saving = Watched("saving.save_checkpoint")

    def strike_again() -> None:
        while not (saving.inside and saving.calls == 2):  # the first save is that of step 4
            time.sleep(0.0002)
        os.kill(os.getpid(), number)

    threading.Thread(target=strike_again, daemon=True).start()
    return train(settings, Fault(signal.Signals(number), (0, 1), call=STRUCK_IN))


@pytest.fixture(scope="module")
def quiet(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a finished run."""
    foreground = {"async_save": False}  # so that the second save is the one that the signal asks for
    settings = tiny(model_folder("gpt2_dropout"), tmp_path_factory.mktemp("twice"), "quiet", checkpoint=foreground)
    assert run(settings, 2) == [0, 0]
    return settings


def test_a_second_sigterm_does_not_break_the_save(quiet: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = {**quiet, "output_dir": str(output)}
    assert run_ranks(train_struck_twice, 2, settings, signal.SIGTERM) == [75, 75]
    status = read_status(output)
    assert (status["state"], status["exit_code"]) == ("interrupted", 75)
    assert SAVE_EVERY < status["step"] < 2 * SAVE_EVERY
    assert checkpoints(output)[-1] == f"step-{status['step']:08d}"
    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)


def test_ctrl_c_twice_leaves_the_checkpoints_whole(quiet: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    settings = {**quiet, "output_dir": str(output)}
    with pytest.raises(KeyboardInterrupt):
        run_ranks(train_struck_twice, 2, settings, signal.SIGINT)
    assert f"step-{SAVE_EVERY:08d}" in checkpoints(output)
    assert run(settings, 2) == [0, 0]
    assert_same_run(quiet, settings)
