"""Fixtures every test can use: tiny models and what a plain loop makes of them, once a session on a forked rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import models, reference, twenty_steps
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the folder of a tiny model of a kind (see `models.KINDS`), made on first use."""
    made: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in made:
            made[kind] = run_ranks(models.save_model, 1, kind, str(tmp_path_factory.mktemp(kind)))[0]
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def twenty_reference_steps(model_folder: Callable[[str], str]) -> Callable[[str, bool], reference.Result]:
    """Return a function of (model, whether a layer is frozen) that trains the reference of tests/twenty_steps.py."""
    found: dict[tuple[str, bool], reference.Result] = {}

    def get(kind: str, frozen: bool) -> reference.Result:
        if (kind, frozen) not in found:
            names = twenty_steps.frozen_part(kind, frozen)
            found[kind, frozen] = run_ranks(twenty_steps.train_reference, 1, model_folder(kind), names, timeout=300)[0]
        return found[kind, frozen]

    return get
