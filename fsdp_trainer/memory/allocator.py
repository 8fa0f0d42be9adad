"""A small model of torch's CUDA caching allocator: what a ledger would make it reserve, and where it would run out.

Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.14) with its default settings, without garbage collection: sizes in
512 B steps, a small and a large pool a stream, best fit, splitting and merging, segments of a fixed size or expandable.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

KIB, MIB = 2**10, 2**20
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 * MIB  # kSmallSize: up to here the small pool
SMALL_BUFFER = 2 * MIB  # kSmallBuffer: a segment, or a page of an expandable one, of the small pool
LARGE_BUFFER = 20 * MIB  # kLargeBuffer: the same of the large pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here a segment of its own size,
ROUND_LARGE = 2 * MIB  # kRoundLarge: in these steps
_ENDLESS = 2**60  # the address space an expandable segment may grow into


class OutOfMemory(Exception):
    """Nothing is left even after every cached block was given back."""


@dataclass(frozen=True)
class Replay:
    """Peak bytes in use (as torch counts blocks) and reserved, and how often cached blocks had to be given back."""

    allocated: int
    reserved: int
    flushes: int


class _Block:
    """A stretch of a segment, in use or free; `mapped` is False for address space without memory behind it."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "segment", "size")

    def __init__(self, pool: "_Pool", segment: int, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.segment, self.address, self.size, self.mapped = pool, segment, address, size, mapped
        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.address


class _Pool:
    """The blocks of one stream and one class of sizes: the free ones by size, the unmapped ones by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.free: list[tuple[tuple[int, int, int], _Block]] = []
        self.unmapped: list[tuple[tuple[int, int], _Block]] = []

    def add(self, block: _Block) -> None:
        block.free = True
        if block.mapped:
            bisect.insort(self.free, (block.key, block), key=lambda entry: entry[0])
        else:
            bisect.insort(self.unmapped, ((block.segment, block.address), block), key=lambda entry: entry[0])

    def remove(self, block: _Block) -> None:
        entries, key = (self.free, block.key) if block.mapped else (self.unmapped, (block.segment, block.address))
        index = bisect.bisect_left(entries, key, key=lambda entry: entry[0])  # type: ignore[arg-type]
        assert entries[index][1] is block
        entries.pop(index)
        block.free = False

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block that holds `size`; a block that could grow counts with what it could grow to."""
        index = bisect.bisect_left(self.free, (size, -1, -1), key=lambda entry: entry[0])
        if index == len(self.free):
            return None
        block = self.free[index][1]
        while index + 1 < len(self.free) and _could_grow_to(self.free[index + 1][1]) < _could_grow_to(block):
            index += 1
            block = self.free[index][1]
        return block


def _could_grow_to(block: _Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class Allocator:
    """One device's allocator with `capacity` bytes to reserve from (None: endless)."""

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.flushes = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._segments = 0

    def allocate(self, size: int, *, stream: int = 0) -> _Block:
        """Take a block of at least `size` bytes on a stream; raises OutOfMemory."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = self._pools.setdefault((stream, size <= SMALL_SIZE), _Pool(small=size <= SMALL_SIZE))
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grow(pool, size) if self.expandable else self._new_segment(pool, size)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small or self.expandable else rest > SMALL_SIZE:
            pool.add(_split(block, size))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        self.allocated -= block.size
        block.pool.add(_merge(block))

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool.small:
            length = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            length = LARGE_BUFFER
        else:
            length = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(length)
        self._segments += 1
        block = _Block(pool, self._segments, 0, length)
        block.free = False
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Map pages behind (and in) free address space until `size` fits; the lowest place that can take it."""
        block = self._expandable_place(pool, size)
        pool.remove(block)
        while not block.mapped or block.size < size:
            if not block.mapped:
                block = self._map(block, size)
                continue
            after = block.next
            assert after is not None and after.free
            pool.remove(after)
            if not after.mapped:
                after = self._map(after, size - block.size)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        return block

    def _expandable_place(self, pool: _Pool, size: int) -> _Block:
        for _, block in pool.unmapped:
            start = block.previous if block.previous is not None and block.previous.free else block
            found, at = 0, start
            while found < size and at is not None and at.free:
                found += at.size
                at = at.next
            if found >= size:
                return start
        self._segments += 1
        block = _Block(pool, self._segments, 0, _ENDLESS, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Put memory behind the first pages of an unmapped block, already taken from its pool."""
        length = min(block.size, -(-size // block.pool.page) * block.pool.page)
        try:
            self._reserve(length)
        except OutOfMemory:
            block.pool.add(block)
            raise
        if length < block.size:
            block.pool.add(_split(block, length))
        block.mapped = True
        return block

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.flushes += 1
            self._give_back()
            if self.reserved + size > self.capacity:
                raise OutOfMemory
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Release every cached segment, or page of an expandable one, that is wholly free."""
        for pool in self._pools.values():
            for _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        page = block.pool.page
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        if start > block.address:
            middle = _split(block, start - block.address)
            pool.add(block)
            block = middle
        if block.address + block.size > end:
            pool.add(_split(block, end - block.address))
        self.reserved -= block.size
        block.mapped = False
        pool.add(_merge(block))


def _split(block: _Block, size: int) -> _Block:
    """Cut a block after `size` bytes and return the rest, which is in no pool yet."""
    rest = _Block(block.pool, block.segment, block.address + size, block.size - size, mapped=block.mapped)
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next, block.size = rest, size
    rest.free = False
    return rest


def _merge(block: _Block) -> _Block:
    """Join a block that is in no pool with free neighbours of its kind, which leave their pool."""
    for neighbour in (block.previous, block.next):
        if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
            continue
        neighbour.pool.remove(neighbour)
        low, high = (neighbour, block) if neighbour.address < block.address else (block, neighbour)
        low.size += high.size
        low.next = high.next
        if high.next is not None:
            high.next.previous = low
        block = low
    return block


def replay(events: Iterable[tuple[int, int, int]], *, expandable: bool = False, capacity: int | None = None) -> Replay:
    """Run (allocation, bytes, stream) events, negative bytes for a release; raises OutOfMemory under a capacity."""
    allocator = Allocator(expandable=expandable, capacity=capacity)
    blocks: dict[int, _Block] = {}
    for index, size, stream in events:
        if size > 0:
            blocks[index] = allocator.allocate(size, stream=stream)
        else:
            allocator.release(blocks.pop(index))
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.flushes)


def survives(events: Iterable[tuple[int, int, int]], *, capacity: int, expandable: bool = False) -> bool:
    """Return whether the run gets through with this much to reserve, cached blocks being given back in need."""
    try:
        replay(events, expandable=expandable, capacity=capacity)
    except OutOfMemory:
        return False
    return True


def smallest_capacity(
    events: list[tuple[int, int, int]], *, unlimited: Replay, expandable: bool = False, step: int = 32 * MIB
) -> int:
    """Return the least capacity, to within `step`, with which the run gets through; `unlimited` is its free replay."""
    low, high = unlimited.allocated - 1, unlimited.reserved  # never enough, always enough
    while high - low > step:
        middle = (low + high) // 2
        if survives(events, capacity=middle, expandable=expandable):
            high = middle
        else:
            low = middle
    return high
