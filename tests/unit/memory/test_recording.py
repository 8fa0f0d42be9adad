"""The ledger's books: phases, the peak, and what kind of memory an allocation was."""

from __future__ import annotations

from fsdp_trainer.memory.recording import CATEGORIES, Allocation, Recording

# load, forward, backward, forward, step
VISITS = ("load", "forward", "backward", "forward", "step")


def make(*lives: tuple[int, int, int | None, dict[str, object]]) -> Recording:
    """Make a ledger of allocations (bytes, visit of birth, visit of death, further fields), each born in order."""
    moments: list[tuple[int, int, int]] = []
    for index, (_, born, died, _) in enumerate(lives):
        moments.append((born, 0, index))
        if died is not None:
            moments.append((died, 1, index))
    allocations = [
        Allocation(size=size, stream=0, born=0, visit=born, recomputed=False, category=None, died_visit=died, index=i)
        for i, (size, born, died, _) in enumerate(lives)
    ]
    events = []
    for position, (visit, freed, index) in enumerate(sorted(moments)):
        allocation = allocations[index]
        if freed:
            allocation.died = position
        else:
            allocation.born = position
        events.append((index, -allocation.size if freed else allocation.size, visit))
    for allocation, (*_, fields) in zip(allocations, lives, strict=True):
        for name, value in fields.items():
            setattr(allocation, name, value)
    return Recording(tuple(allocations), tuple(events), VISITS)


def test_a_phase_counts_what_is_there_when_it_begins() -> None:
    ledger = make((100, 0, None, {}), (10, 1, 2, {}), (7, 4, None, {}))
    assert ledger.phases == {"load": 100, "forward": 110, "backward": 110, "step": 107}
    assert ledger.peak == (110, 1)


def test_kinds() -> None:
    ledger = make(
        (100, 0, None, {"category": "parameters"}),
        (10, 1, 2, {}),  # outlives the forward: kept for the backward
        (20, 1, 1, {}),
        (30, 2, 2, {}),
        (40, 2, 2, {"recomputed": True}),
        (50, 2, 2, {"recomputed": True, "died_recomputing": True}),
    )
    kinds = [ledger.category(allocation) for allocation in ledger.allocations]
    assert kinds == ["parameters", "activations", "temporaries", "temporaries", "activations", "temporaries"]
    last_alive = max(a.born for a in ledger.allocations)
    assert set(ledger.breakdown()) == set(CATEGORIES)
    assert sum(ledger.breakdown().values()) == ledger.peak[0]
    assert ledger.breakdown(last_alive)["parameters"] == 100


def test_timeline_keeps_the_peak() -> None:
    ledger = make((100, 0, None, {"category": "parameters"}), *((5, 1, 2, {}) for _ in range(3000)), (9, 3, 3, {}))
    timeline = ledger.timeline
    assert 500 < len(timeline) <= 1001
    assert max(sum(kinds.values()) for _, _, kinds in timeline) == ledger.peak[0] == 15100
    assert [event for event, _, _ in timeline] == sorted(event for event, _, _ in timeline)
    assert timeline[-1][2]["parameters"] == 100


def test_outline_is_short_and_keeps_the_peak_of_every_phase() -> None:
    """Also of a phase that only frees, whose peak is what is there as it begins."""
    lives = [(5, 1, 2, {}) for _ in range(3000)]
    ledger = make((100, 0, None, {"category": "parameters"}), *lives, (9, 3, 4, {}))
    outline = ledger.outline
    assert 100 < len(outline) <= 210
    peaks: dict[str, int] = {}
    for _, phase, kinds in outline:
        assert 0 not in kinds.values()
        peaks[phase] = max(peaks.get(phase, 0), sum(kinds.values()))
    assert peaks == ledger.phases == {"load": 100, "forward": 15100, "backward": 15100, "step": 109}


def test_each_visit_to_a_phase_rises_above_what_it_found() -> None:
    ledger = make((100, 0, None, {}), (10, 1, 2, {}), (3, 3, 3, {}), (5, 3, None, {}), (7, 4, 4, {}))
    assert ledger.rises("forward") == [10, 8]
    assert ledger.rises("step") == [7]
    assert ledger.rises("save") == []
