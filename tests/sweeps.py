"""Tables of which CI runs a share: what is in no share is marked `sweep`, and `./launch.sh test -m sweep` runs it.

The last result of all of it stands in benchmarks/RESULTS.md, beside the sweeps that are programs (benchmarks/sweeps/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def every_value(cases: Sequence[Any]) -> list[Any]:
    """Return few cases, those with few ranks first, in which each value of each setting occurs; each is a NamedTuple.

    Each way of sharding occurs on several ranks, where it ever does: on one there is little to it.
    """

    def covered(case: Any) -> set[Any]:
        return set(case._asdict().items()) | ({(case.sharding, "on several ranks")} if case.world > 1 else set())

    missing, kept = set().union(*map(covered, cases)), []
    while missing:
        kept.append(max(cases, key=lambda case: len(missing & covered(case)) / (case.world + 1)))
        missing -= covered(kept[-1])
    return kept


def share(cases: Iterable[Any], kept: Iterable[Any], *, ids: Callable[[Any], str] = str) -> list[ParameterSet]:
    """Return all cases as a test's parameters, those that are not `kept` marked as part of a sweep.

    A plain tuple is the values of several parameters.
    """
    cases, kept = list(cases), list(kept)
    assert all(case in cases for case in kept), [case for case in kept if case not in cases]
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)), id=ids(case), marks=() if case in kept else pytest.mark.sweep
        )
        for case in cases
    ]


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `sweep`, unless `-m` speaks of it or a test is named by itself."""
    named = any("::" in str(word) for word in config.args)
    if "sweep" in (config.option.markexpr or "") or named:
        return
    left_out = [item for item in items if item.get_closest_marker("sweep")]
    items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    config.hook.pytest_deselected(items=left_out)


def wanted_cases(request: pytest.FixtureRequest) -> list[Any]:
    """Return the values of the parameter `case` with which tests of the fixture's file will run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params["case"] for call in calls if call is not None and "case" in call.params]
