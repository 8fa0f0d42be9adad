"""The schedule against numbers worked out by hand."""

import itertools
import math

import pytest

from fsdp_trainer.config import ScheduleConfig
from fsdp_trainer.optim.schedule import learning_rate, scheduled_rate, warmup_length


def rates(name: str, *, total: int, warmup: int, floor: float = 0.1) -> list[float]:
    return [
        learning_rate(step, name=name, peak=2.0, total_steps=total, warmup=warmup, min_lr_ratio=floor)
        for step in range(total)
    ]


def test_warmup_starts_above_zero_and_reaches_the_peak() -> None:
    assert rates("constant", total=6, warmup=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(("name", "middle"), [("linear", 1.1), ("cosine", 1.1)])
def test_falls_from_the_peak_to_the_floor_in_the_last_step(name: str, middle: float) -> None:
    got = rates(name, total=13, warmup=2)
    assert got[1] == got[2] == 2.0
    assert got[7] == pytest.approx(middle)
    assert got[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(got[2:]))


def test_cosine_quarter() -> None:
    got = rates("cosine", total=9, warmup=0, floor=0.0)
    assert got[2] == pytest.approx(1.0 + math.sqrt(0.5))
    assert got[6] == pytest.approx(1.0 - math.sqrt(0.5))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3), (5, 4)])
def test_short_runs_have_finite_positive_rates(name: str, total: int, warmup: int) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(name, total=total, warmup=warmup))


def test_a_rise_from_a_share_of_the_rate() -> None:
    got = [
        learning_rate(step, name="constant", peak=2.0, total_steps=6, warmup=4, min_lr_ratio=0.1, warmup_min_ratio=0.5)
        for step in range(6)
    ]
    assert got == pytest.approx([1.25, 1.5, 1.75, 2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.0, 1.0, 2.0, 1.5, 1.0, 0.5]),
        ("cosine", [0.0, 1.0, 2.0, 1.0 + math.sqrt(0.5), 1.0, 1.0 - math.sqrt(0.5)]),
    ],
)
def test_transformers_convention(name: str, expected: list[float]) -> None:
    """As get_scheduler of Transformers gives them: step 0 stands still, and the floor lies one step after the end."""
    got = [
        learning_rate(step, name=name, peak=2.0, total_steps=6, warmup=2, min_lr_ratio=0.0, convention="transformers")
        for step in range(6)
    ]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("constant", "log", [0.0, 0.0, 1.0, math.log2(3), 2.0, 2.0, 2.0]),
        ("constant", "linear", [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.0]),
        ("linear", "linear", [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 1.5]),
        ("cosine", "log", [0.0, 0.0, 1.0, math.log2(3), 2.0, 1.0 + math.sqrt(0.5), 1.0]),
    ],
)
def test_deepspeed_convention(name: str, shape: str, expected: list[float]) -> None:
    """By hand; tests/unit/interop/test_deepspeed.py has DeepSpeed's formulas over 40 steps."""
    got = [
        learning_rate(
            step,
            name=name,
            peak=2.0,
            total_steps=8,
            warmup=4,
            min_lr_ratio=0.0,
            warmup_shape=shape,
            convention="deepspeed",
        )
        for step in range(7)
    ]
    assert got == pytest.approx(expected)


def test_a_schedule_shorter_than_the_run() -> None:
    schedule = ScheduleConfig(name="linear", warmup_ratio=0.5, min_lr_ratio=0.5, total_steps=4)
    got = [scheduled_rate(step, schedule=schedule, peak=2.0, total_steps=100) for step in range(6)]
    assert got == pytest.approx([1.0, 2.0, 2.0, 1.0, 1.0, 1.0])


def test_warmup_length() -> None:
    assert warmup_length(100, warmup_ratio=0.03, warmup_steps=None) == 3
    assert warmup_length(101, warmup_ratio=0.03, warmup_steps=None) == 4
    assert warmup_length(100, warmup_ratio=0.03, warmup_steps=0) == 0
    assert warmup_length(100, warmup_ratio=0.0, warmup_steps=7) == 7


@pytest.mark.parametrize("total", [10, 100, 1000, 30_000])
@pytest.mark.parametrize("ratio", [0.01, 0.03, 0.07, 0.1, 0.29])
def test_a_whole_share_is_not_rounded_up_by_float_noise(total: int, ratio: float) -> None:
    """0.07 * 100 is 7.000000000000001 in floating point."""
    exact = total * round(ratio * 100) / 100
    expected = math.ceil(round(exact, 6))
    assert warmup_length(total, warmup_ratio=ratio, warmup_steps=None) == expected
