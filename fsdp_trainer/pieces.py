"""A tensor of the model as pieces of stored ones: stacked, joined, cut or transposed, and read only where asked for.

Each piece knows its shape and copies any part of itself into a target, so a rank reads of many expert files no more
than its shard needs, and nothing whole is ever in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fsdp_trainer.weight_files import Ranges


class Piece(Protocol):
    """A tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        ...

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """Copy the part given by start and stop of each dimension into a target of just that shape."""
        ...


@dataclass(frozen=True)
class Stacked:
    """Equal tensors along a new dimension."""

    parts: Sequence[Piece]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Piece`."""
        inner = self.parts[0].shape
        return (*inner[: self.dim], len(self.parts), *inner[self.dim :])

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """See `Piece`."""
        first, last = ranges[self.dim]
        inner = (*ranges[: self.dim], *ranges[self.dim + 1 :])
        for index in range(first, last):
            self.parts[index].copy_into(target.select(self.dim, index - first), inner)


@dataclass(frozen=True)
class Joined:
    """Tensors one after the other along a dimension they have."""

    parts: Sequence[Piece]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Piece`."""
        inner = self.parts[0].shape
        length = sum(part.shape[self.dim] for part in self.parts)
        return (*inner[: self.dim], length, *inner[self.dim + 1 :])

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """See `Piece`."""
        first, last = ranges[self.dim]
        offset = 0
        for part in self.parts:
            length = part.shape[self.dim]
            start, stop = max(first, offset), min(last, offset + length)
            if start < stop:
                inner = (*ranges[: self.dim], (start - offset, stop - offset), *ranges[self.dim + 1 :])
                part.copy_into(target.narrow(self.dim, start - first, stop - start), inner)
            offset += length


@dataclass(frozen=True)
class Cut:
    """A stretch of a tensor along one dimension."""

    whole: Piece
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Piece`."""
        inner = self.whole.shape
        return (*inner[: self.dim], self.length, *inner[self.dim + 1 :])

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """See `Piece`."""
        first, last = ranges[self.dim]
        moved = (*ranges[: self.dim], (first + self.start, last + self.start), *ranges[self.dim + 1 :])
        self.whole.copy_into(target, moved)


@dataclass(frozen=True)
class Transposed:
    """A tensor with two dimensions exchanged."""

    whole: Piece
    dims: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Piece`."""
        return _exchange(self.whole.shape, self.dims)

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        """See `Piece`."""
        self.whole.copy_into(target.transpose(*self.dims), _exchange(ranges, self.dims))


def _exchange(values: tuple, dims: tuple[int, int]) -> tuple:
    order = list(values)
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return tuple(order)
