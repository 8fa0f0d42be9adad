"""benchmarks/PLANNER.md: every published row is predicted or named with a reason, and the figures are today's."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from benchmarks.planner import HERE, RESULTS, TABLE, Row, _read_yaml, format_table, predict_closed_form, read_rows


def test_every_published_row_is_accounted_for_once() -> None:
    with (HERE / "points.csv").open(encoding="utf-8", newline="") as file:
        published = [row["id"] for row in csv.DictReader(file)]
    data = _read_yaml()
    named = [
        *data["expressed"],
        *data["closed_form_only"],
        *(id for ids in data["not_expressed"].values() for id in ids),
    ]
    assert Counter(named) == Counter(published) and len(named) == 134


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row.id)
def test_closed_form_is_as_recorded(row: Row) -> None:
    assert predict_closed_form(row) == json.loads(RESULTS.read_text(encoding="utf-8"))[row.id]["closed_form"]


@pytest.mark.parametrize("row", [row for row in read_rows() if row.kind in ("fits", "OOM")], ids=lambda row: row.id)
def test_no_row_is_on_the_wrong_side_of_its_limit(row: Row) -> None:
    """What ran is not called too big, what ran out of memory is not said to fit."""
    assert predict_closed_form(row)["fits"] is not (row.kind == "OOM")


def test_table_is_what_the_results_say() -> None:
    assert TABLE.read_text(encoding="utf-8") == format_table(json.loads(RESULTS.read_text(encoding="utf-8")))
