"""The order in which rows are met, a function of seed and place alone: shuffled, mixed by weight, or as filed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fsdp_trainer.data.rows import Rows


@lru_cache(maxsize=4)  # one permutation serves a whole epoch of windows
def epoch_order(n_rows: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of the rows in an epoch, int64 [n_rows], a function of (seed, epoch) alone; read-only."""
    return permutation(n_rows, seed=seed, epoch=epoch, shuffle=shuffle)


def permutation(count: int, *, seed: int, epoch: int, shuffle: bool, stream: int = 0) -> np.ndarray:
    """Return an order of `count` things, int64 [count]; each `stream` (a source, a block) has shuffles of its own."""
    if shuffle:
        # Sorting raw Philox words instead of Generator.permutation: numpy fixes the stream of a bit generator for ever
        # but may change what a Generator makes of it (NEP 19), and a resume may come with another numpy.
        # Seeds are below 2**32 (train.seed), so the upper half of the word tells streams apart.
        key = np.array([seed + (stream << 32), epoch], dtype=np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
    else:
        order = np.arange(count)
    order.setflags(write=False)
    return order


def rows_of_epoch(rows: Rows, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the rows of an epoch in the order they are met, int64 [n_rows]; of a mix some come twice, some never."""
    if rows.weights is None:
        return epoch_order(rows.n_rows, seed=seed, epoch=epoch, shuffle=shuffle)
    assert rows.source_rows is not None, "rows with weights know their sources"
    borders = tuple(rows.source_rows.tolist())
    return _mixed_order(borders, weights=rows.weights, seed=seed, epoch=epoch, shuffle=shuffle)


def share_rows(total: int, *, weights: Sequence[float]) -> list[int]:
    """Split `total` rows by weight: whole numbers that add up to it, each less than one row from its exact share."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


@lru_cache(maxsize=4)
def _mixed_order(
    borders: tuple[int, ...], *, weights: tuple[float, ...], seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    """Take each source's share of an epoch from its own rows, going on where the epoch before left off.

    So a source is gone through evenly: no row of it comes a third time before each has come twice.
    """
    counts = share_rows(borders[-1], weights=weights)
    taken = [
        start + _next_of_source(stop - start, count, stream=source + 1, seed=seed, epoch=epoch, shuffle=shuffle)
        for source, (start, stop, count) in enumerate(zip(borders, borders[1:], counts, strict=False))
    ]
    together = np.concatenate(taken)
    if shuffle:
        order = together[permutation(len(together), seed=seed, epoch=epoch, shuffle=True)]
    else:  # spread each source evenly over the epoch
        places = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
        order = together[np.argsort(places, kind="stable")]
    order.setflags(write=False)
    return order


def _next_of_source(size: int, count: int, *, stream: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the rows `epoch * count` and on of a source that is gone through again and again, shuffled each time."""
    first, at = divmod(epoch * count, size)
    passes = -(-(at + count) // size)
    whole = [
        permutation(size, seed=seed, epoch=first + index, shuffle=shuffle, stream=stream) for index in range(passes)
    ]
    return np.concatenate([*whole, np.empty(0, np.int64)])[at : at + count]
