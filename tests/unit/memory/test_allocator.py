"""The model of the caching allocator, against the rules that torch's own source and documentation state."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdp_trainer.memory.allocator import (
    LARGE_BUFFER,
    MIB,
    SMALL_BUFFER,
    Allocator,
    OutOfMemory,
    replay,
    smallest_capacity,
    survives,
)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (19 * MIB + 1, 20 * MIB, 20 * MIB),  # what is left over is at most 1 MiB: not split
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_sizes(size: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(40 * MIB, stream=1))
    allocator.allocate(40 * MIB, stream=2)
    assert allocator.reserved == 80 * MIB
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


def test_best_fit_and_merging() -> None:
    allocator = Allocator()
    whole = allocator.allocate(100 * MIB)
    allocator.release(whole)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(40 * MIB)  # both out of the same segment
    assert allocator.reserved == 100 * MIB
    allocator.release(first)
    allocator.release(second)
    allocator.allocate(100 * MIB)  # only a merged block is this long
    assert allocator.reserved == 100 * MIB


def test_fragmentation_costs_a_segment_and_expandable_segments_do_not() -> None:
    events = [(0, 40 * MIB, 0), (0, -40 * MIB, 0), (1, 60 * MIB, 0)]
    assert replay(events).reserved == 100 * MIB
    assert replay(events, expandable=True).reserved == 60 * MIB


def test_expandable_maps_whole_pages() -> None:
    assert replay([(0, 41 * MIB, 0)], expandable=True).reserved == 3 * LARGE_BUFFER
    assert replay([(0, 3 * SMALL_BUFFER // 6, 0)], expandable=True).reserved == SMALL_BUFFER


def test_expandable_prefers_the_block_that_cannot_grow() -> None:
    allocator = Allocator(expandable=True)
    hole, wall, tail = (allocator.allocate(20 * MIB) for _ in range(3))
    allocator.release(hole)
    allocator.release(tail)
    taken = allocator.allocate(20 * MIB)
    assert taken.address == hole.address == 0
    assert wall.address == 20 * MIB


def test_cached_blocks_are_given_back_before_running_out() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.flushes) == (80 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.allocate(40 * MIB)


def test_expandable_gives_back_free_pages_in_the_middle() -> None:
    allocator = Allocator(expandable=True, capacity=100 * MIB)
    low, wall = allocator.allocate(60 * MIB), allocator.allocate(20 * MIB)
    allocator.release(low)
    allocator.allocate(70 * MIB, stream=1)  # 80 MiB of pages: only the 60 freed ones make room
    assert (allocator.reserved, allocator.flushes) == (100 * MIB, 1)
    allocator.release(wall)
    assert allocator.allocate(20 * MIB).address == 60 * MIB


def test_smallest_capacity_lies_between_use_and_reservation() -> None:
    events = [(0, 40 * MIB, 0), (0, -40 * MIB, 0), (1, 60 * MIB, 0)]
    least = smallest_capacity(events, unlimited=replay(events), step=MIB)
    assert least == pytest.approx(60 * MIB, abs=MIB)
    assert survives(events, capacity=least)
    assert not survives(events, capacity=least - 2 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_books_balance_over_random_events(expandable: bool) -> None:
    source = random.Random(7)
    allocator = Allocator(expandable=expandable, capacity=3000 * MIB)
    live = []
    for _ in range(3000):
        if live and (len(live) > 40 or source.random() < 0.5):
            allocator.release(live.pop(source.randrange(len(live))))
        else:
            size = int(2 ** source.uniform(6, 27))
            live.append(allocator.allocate(size, stream=source.randrange(3)))
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.allocated <= allocator.reserved <= 3000 * MIB
        spans = sorted((block.pool.page, id(block.pool), block.segment, block.address, block.size) for block in live)
        for one, other in itertools.pairwise(spans):
            assert one[:3] != other[:3] or one[3] + one[4] <= other[3]
    for block in live:
        allocator.release(block)
    allocator._give_back()
    assert allocator.allocated == allocator.reserved == 0
