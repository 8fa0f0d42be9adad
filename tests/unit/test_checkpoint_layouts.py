"""Which scales of a checkpoint are another layout's, and which no layout explains, so that nothing is made for them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from fsdp_trainer.checkpoint_layouts import scales_of_other_layouts

SCALES, CODES = "optim.w.exp_avg_absmax", "optim.w.exp_avg_codes"
TENSORS = {  # one rank holds all of a 96 x 48 matrix, 18 blocks
    CODES: torch.zeros(96, 48, dtype=torch.uint8),
    SCALES: torch.zeros(1, 18),
    "optim.v.exp_avg": torch.zeros(48),
}


def entry(shape: tuple[int, ...], *, rows: int = 1, dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    """Return what a table says of a tensor that was saved in parts of `rows` rows."""
    parts = [
        ChunkStorageMetadata(torch.Size((first, *(0 for _ in shape[1:]))), torch.Size((rows, *shape[1:])))
        for first in range(0, shape[0], rows)
    ]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), parts)


@pytest.mark.parametrize("shape", [(2, 9), (3, 6), (4, 5), (96, 1), (200, 1)])
def test_scales_of_any_number_of_shards_are_taken(shape: tuple[int, int]) -> None:
    assert scales_of_other_layouts(TENSORS, {SCALES: entry(shape)}) == {SCALES: torch.Size(shape)}


def test_scales_of_this_layout_are_read_as_they_are() -> None:
    assert scales_of_other_layouts(TENSORS, {SCALES: entry((1, 18))}) == {}


def parts_missing() -> TensorStorageMetadata:
    """A table that claims a huge tensor and names the two parts that there are."""
    whole, some = entry((2, 9)), entry((2, 9))
    return TensorStorageMetadata(whole.properties, torch.Size((2**40, 9)), some.chunks)


@pytest.mark.parametrize(
    "stored",
    [
        entry((2, 10)),
        entry((4, 4)),
        entry((18,)),
        entry((2, 9, 1)),
        entry((2, 9), rows=2),
        entry((2, 9), dtype=torch.float64),
        parts_missing(),
    ],
    ids=["too_wide", "too_narrow", "flat", "third_dimension", "one_part", "dtype", "huge"],
)
def test_what_no_layout_explains_counts_as_not_fitting(stored: TensorStorageMetadata) -> None:
    assert scales_of_other_layouts(TENSORS, {SCALES: stored}) == {}


def test_other_tensors_are_never_excused() -> None:
    stored = {CODES: entry((2, 9), dtype=torch.uint8), "optim.v.exp_avg": entry((2, 9))}
    assert scales_of_other_layouts(TENSORS, stored) == {}
