"""benchmarks/SPEED.md: every published speed is predicted or named with a reason, and the table is today's."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from benchmarks.speed import NEAR, TABLE, Row, format_table, pairs, read_data, read_points, read_rows, tokens_per_second


@pytest.fixture(scope="module")
def predicted() -> dict[str, tuple[Row, float]]:
    return {row.id: (row, tokens_per_second(row)) for row in read_rows()}


def test_every_published_speed_is_accounted_for_once() -> None:
    data = read_data()
    named = [*data["expressed"], *(id for ids in data["not_expressed"].values() for id in ids)]
    assert Counter(named) == Counter(list(read_points())) and len(named) == 89


def test_the_order_of_two_rows_of_a_table(predicted: dict[str, tuple[Row, float]]) -> None:
    ordered = pairs([row for row, _ in predicted.values()])
    right = [(predicted[a.id][1] > predicted[b.id][1]) is (a.published > b.published) for a, b in ordered]
    assert len(right) > 300 and sum(right) >= 0.95 * len(right)


def test_how_near_predictions_come(predicted: dict[str, tuple[Row, float]]) -> None:
    errors = [abs(speed / row.published - 1) for row, speed in predicted.values()]
    assert statistics.median(errors) < 0.15 and sum(error <= NEAR for error in errors) >= 40


def test_table_is_what_the_code_writes() -> None:
    assert TABLE.read_text(encoding="utf-8") == format_table()
