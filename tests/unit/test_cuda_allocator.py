"""Every way of starting a run turns expandable segments on before torch allocates, unless the user chose otherwise."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from fsdp_trainer.cuda_allocator import NAMES, use_expandable_segments
from fsdp_trainer.launch import launch_environment
from tests.ranks import run_ranks

SET = "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_stands(name: str) -> None:
    environ = {name: "max_split_size_mb:128"}
    use_expandable_segments(environ)
    assert environ == {name: "max_split_size_mb:128"}


def test_launched_processes_have_it() -> None:
    assert launch_environment({}, {}, processes=2)["PYTORCH_ALLOC_CONF"] == SET


def test_a_bare_launch_of_the_script_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch fsdp_trainer/train.py`: before the settings are read, which is before torch is imported."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = runpy.run_path(str(Path(__file__).parents[2] / "fsdp_trainer" / "train.py"), run_name="train")
    assert script["main"](["--config", "no-such-file.yaml"]) != 0
    assert os.environ["PYTORCH_ALLOC_CONF"] == SET


def allocator_of_a_runtime(given: str | None) -> str | None:
    """Build a runtime as a script or a notebook does, and return what the allocator would read."""
    from fsdp_trainer.runtime import build_runtime

    for name in NAMES:
        os.environ.pop(name, None)
    if given is not None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    build_runtime(timeout_minutes=1)
    return os.environ.get("PYTORCH_ALLOC_CONF")


def test_a_script_or_notebook_has_it() -> None:
    assert run_ranks(allocator_of_a_runtime, 1, None) == [SET]
    assert run_ranks(allocator_of_a_runtime, 1, "backend:native") == [None]
