"""Where the time of a profiled step goes: interval arithmetic against hand-made and random traces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.profile_summary import Operation, divide_time, format_summary, union

SECOND = 1_000_000_000


def operation(kind: str, start: float, end: float) -> Operation:
    return Operation(kind, round(start * SECOND), round(end * SECOND))  # type: ignore[arg-type]


def test_a_known_step_is_divided_as_it_was_made() -> None:
    operations = [
        operation("compute", 0.0, 4.0),
        operation("compute", 3.0, 5.0),  # two streams
        operation("communication", 2.0, 7.0),  # 3 s beside compute, 2 s alone
        operation("copy", 6.5, 8.0),  # half a second beside communication, 1 s alone
        operation("compute", 9.0, 12.0),  # 1 s of it inside the window
    ]
    found = divide_time(operations, window=(0, 10 * SECOND), steps=2)
    expected = {
        "compute": 6.0,
        "communication_exposed": 2.0,
        "communication_hidden": 3.0,
        "copies_exposed": 1.0,
        "copies_hidden": 0.5,
        "idle": 1.0,
        "step": 10.0,
    }
    assert found == {name: seconds / 2 for name, seconds in expected.items()}


INTERVALS = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)
OPERATIONS = st.lists(
    st.builds(
        lambda kind, ends: Operation(kind, ends[0], ends[1]),
        st.sampled_from(["compute", "communication", "copy"]),
        INTERVALS,
    ),
    max_size=12,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_every_nanosecond_counts_once(operations: list[Operation]) -> None:
    """Against a step looked at nanosecond by nanosecond."""
    found = divide_time(operations, window=(10, 90), steps=1)
    kinds = [{o.kind for o in operations if o.start <= moment < o.end} for moment in range(10, 90)]
    expected = {
        "compute": sum("compute" in kind for kind in kinds),
        "communication_exposed": sum("communication" in kind and "compute" not in kind for kind in kinds),
        "communication_hidden": sum("communication" in kind and "compute" in kind for kind in kinds),
        "copies_exposed": sum(kind == {"copy"} for kind in kinds),
        "copies_hidden": sum("copy" in kind and len(kind) > 1 for kind in kinds),
        "idle": sum(not kind for kind in kinds),
        "step": 80,
    }
    assert {name: round(seconds * 1e9) for name, seconds in found.items()} == expected


def test_union_merges_what_touches_and_drops_what_is_empty() -> None:
    assert union([(5, 6), (1, 3), (3, 4), (8, 8)]) == [(1, 4), (5, 6)]


def test_the_summary_names_the_rank_that_waits_most() -> None:
    seconds = divide_time([operation("compute", 0, 0.5)], window=(0, SECOND), steps=1)
    waits = divide_time([operation("communication", 0, 0.5)], window=(0, SECOND), steps=1)
    ranks = [{"seconds": seconds, "top": [{"name": "aten::mm", "calls": 3.0, "seconds": 0.25}]}, {"seconds": waits}]
    text = format_summary({"first_step": 3, "steps": 2, "ranks": ranks})
    assert text[0].startswith("profile of steps 3 to 4: a step of 1.00 s: compute 500 ms (50%), idle 500 ms (50%)")
    assert "most on rank 1" in text[1]
    assert text[2] == "top operations a step: aten::mm 250 ms (3 calls)"
