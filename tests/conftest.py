"""Fixtures every test can use: tiny models and what a plain loop makes of them, once a session on a forked rank."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from filelock import FileLock

from tests import schedule

schedule.stand_back()
schedule.keep_to_own_cores()  # before torch is imported: its threads are as many as the cores that it sees then

from tests import models, reference, sweeps, twenty_steps, warm  # noqa: E402
from tests.e2e.commands import environment  # noqa: E402
from tests.ranks import end_kept_ranks, run_plainly  # noqa: E402

warm.install()
gc.disable()  # until the tests are collected: thousands of modules and items stay, and looking at them takes a second


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what every test needs."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests as schedule.py says; those of a file stay together, in their order. Sweeps are asked for."""
    sweeps.deselect(config, items)
    items.sort(key=lambda item: schedule.place(item.nodeid))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Give a test that runs as if alone all cores."""
    if schedule.file_of(nodeid) in schedule.SERIAL:
        schedule.use_all_cores()
    else:
        schedule.keep_to_own_cores()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> schedule.Scheduling:
    """Deal out whole files to the workers."""
    return schedule.make_scheduler(config, log)


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_a_file() -> Iterator[None]:
    yield
    end_kept_ranks()


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the code under test starts from this very process begin warm (tests/warm.py)."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the folder of a tiny model of a kind (see `models.KINDS`), made on first use."""
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            made[kind] = run_plainly(models.save_model, kind, str(tmp_path_factory.mktemp(kind)))[0]
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def twenty_reference_steps(
    model_folder: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], reference.Result]:
    """Return a function of (model, whether a layer is frozen) that trains the reference of tests/twenty_steps.py.

    It takes 8 s each, so the workers of pytest-xdist leave it to one another.
    """
    found: dict[tuple[str, bool], reference.Result] = {}
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def get(kind: str, frozen: bool) -> reference.Result:
        if (kind, frozen) not in found:
            path = folder / f"twenty-steps-{kind}-{frozen}.pickle"
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    path.write_bytes(pickle.dumps(train(kind, frozen)))
            found[kind, frozen] = pickle.loads(path.read_bytes())
        return found[kind, frozen]

    def train(kind: str, frozen: bool) -> reference.Result:
        names = twenty_steps.frozen_part(kind, frozen)
        return run_plainly(twenty_steps.train_reference, model_folder(kind), names, timeout=300)[0]

    return get
