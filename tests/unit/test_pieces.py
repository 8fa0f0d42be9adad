"""Pieces copy the part asked for, whatever it is, and converters on pieces give what Transformers' own give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import core_model_loading as core

from fsdp_trainer.errors import CheckpointError
from fsdp_trainer.loading import _apply_operations
from fsdp_trainer.pieces import Cut, Joined, Piece, Stacked, Transposed
from fsdp_trainer.weight_files import Ranges


@dataclass(frozen=True)
class InMemory:
    """A tensor as a piece."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def copy_into(self, target: torch.Tensor, ranges: Ranges) -> None:
        target.copy_(self.tensor[tuple(slice(*limits) for limits in ranges)])


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


PARTS = [numbered(4, 6, start=100 * index) for index in range(3)]
PIECES = [InMemory(part) for part in PARTS]
CASES: list[tuple[Piece, torch.Tensor]] = [
    (Stacked(PIECES, 0), torch.stack(PARTS)),
    (Stacked(PIECES, 1), torch.stack(PARTS, 1)),
    (Joined(PIECES, 0), torch.cat(PARTS)),
    (Joined(PIECES, 1), torch.cat(PARTS, 1)),
    (Cut(PIECES[0], 1, 2, 3), PARTS[0][:, 2:5]),
    (Transposed(PIECES[1], (0, 1)), PARTS[1].T),
    (Joined([Stacked(PIECES, 0), Stacked(PIECES, 0)], 1), torch.cat([torch.stack(PARTS), torch.stack(PARTS)], 1)),
    (Transposed(Cut(Joined(PIECES, 0), 0, 3, 5), (0, 1)), torch.cat(PARTS)[3:8].T),
]


@given(st.sampled_from(CASES), st.data())
def test_any_part_is_what_indexing_gives(case: tuple[Piece, torch.Tensor], data: st.DataObject) -> None:
    piece, whole = case
    assert piece.shape == tuple(whole.shape)
    ranges = []
    for size in piece.shape:
        start = data.draw(st.integers(0, size))
        ranges.append((start, data.draw(st.integers(start, size))))
    part = whole[tuple(slice(*limits) for limits in ranges)]
    target = torch.full_like(part, -1.0)
    piece.copy_into(target, tuple(ranges))
    assert target.equal(part)


CONVERTERS = [
    ([core.MergeModulelist(0), core.Concatenate(1)], ["e.*.a", "e.*.b"], ["e.ab"], 3),
    ([core.MergeModulelist(0)], ["e.*.a"], ["e.a"], 3),
    ([core.Concatenate(0)], ["q", "k", "v"], ["qkv"], 1),
    ([core.Concatenate(-1)], ["q", "k"], ["qk"], 1),
    ([core.Chunk(0)], ["gate_up"], ["gate", "up"], 1),
    ([core.Chunk(1)], ["qkv"], ["q", "k", "v"], 1),
    ([core.Transpose(0, 1)], ["w"], ["w_t"], 1),
    ([core.MergeModulelist(0), core.Transpose(1, 2)], ["e.*.a"], ["e.a"], 2),
]


@pytest.mark.parametrize(("operations", "sources", "targets", "count"), CONVERTERS)
def test_converters_give_what_transformers_gives(
    operations: list[Any], sources: list[str], targets: list[str], count: int
) -> None:
    converter = core.WeightConverter(list(sources), list(targets), operations=operations)
    tensors = {
        pattern: [numbered(4, 6, start=1000 * row + 100 * column) for column in range(count)]
        for row, pattern in enumerate(converter.source_patterns)
    }
    lists: dict[str, list[Piece]] = {pattern: [InMemory(t) for t in found] for pattern, found in tensors.items()}
    made = _apply_operations(f"model.{targets[0]}", converter, lists, {}, ["key"], Path("folder"))
    for pattern, found in tensors.items():
        for tensor in found:
            converter.add_tensor(f"model.{targets[0]}", "key", pattern, tensor)  # type: ignore[arg-type]
    expected = converter.convert(f"model.{targets[0]}")
    assert made.keys() == expected.keys() == {f"model.{name}" for name in targets}
    for name, piece in made.items():
        theirs = expected[name][0] if isinstance(expected[name], list) else expected[name]
        ours = torch.empty(piece.shape)
        piece.copy_into(ours, tuple((0, size) for size in piece.shape))
        assert ours.equal(theirs)


@pytest.mark.parametrize(
    "operations", [[core.Interleave(0)], [core.Chunk(0), core.Interleave(0)], [core.MergeModulelist(0)]]
)
def test_an_operation_that_is_not_known_is_refused_by_name(operations: list[Any]) -> None:
    """The last one is known and leaves two tensors for one name, which nothing says how to join."""
    sources = ["e.*.a", "e.*.b"] if len(operations) == 1 and isinstance(operations[0], core.MergeModulelist) else ["a"]
    targets = ["one"] if len(operations) == 1 else ["one", "two"]
    converter = core.WeightConverter(sources, targets, operations=operations)
    lists: dict[str, list[Piece]] = {pattern: list(PIECES[:1]) for pattern in converter.source_patterns}
    with pytest.raises(CheckpointError, match="not known here") as caught:
        _apply_operations("one", converter, lists, {}, ["key of it"], Path("folder"))
    assert type(operations[-1]).__name__ in caught.value.values and "key of it" in caught.value.values
