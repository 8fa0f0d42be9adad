"""Fixtures every test can use: tiny model folders, made once a session on a forked rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import models
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
