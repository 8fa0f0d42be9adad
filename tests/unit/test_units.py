"""Bytes, counts and durations as text."""

import pytest

from fsdp_trainer.units import format_age, format_bytes, format_count, format_duration, format_number


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (1.94 * 2**30, "1.9 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "now"),
        (0.4, "now"),
        (42.3, "42 s ago"),
        (59.6, "1 min 00 s ago"),
        (245, "4 min 05 s ago"),
        (7620, "2 h 07 min ago"),
        (3.2 * 86400, "3 days ago"),
    ],
)
def test_format_age(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1234, "1,234"), (999_999, "999,999"), (134_515_008, "135M"), (7_615_616_512, "7.62B"), (15e12, "15T")],
)
def test_format_count(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.417, "0.42 s"),
        (9.999, "10.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1000, "1,000 ranks")])
def test_format_number(number: int, text: str) -> None:
    assert format_number(number, "rank") == text
