"""Rotary tables by document: the length that each token's document has, and whose table it gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig

from fsdp_trainer.rotary import choose_tables_by_document, document_lengths
from tests.architectures import DECODER, EXPERTS, LONGROPE, ORIGINAL


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_each_token_knows_the_length_of_its_document(rows: list[list[int]]) -> None:
    """What follows a row's documents is padding, whose positions are 0."""
    width = max(map(sum, rows))
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    expected = torch.ones(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        positions[index, : sum(row)] = torch.cat([torch.arange(length) for length in row])
        expected[index, : sum(row)] = torch.tensor([length for length in row for _ in range(length)])
    assert torch.equal(document_lengths(positions), expected)


SCALED = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}  # its routers draw at random, so no loss is compared
MODELS = {
    "phi3": Phi3Config(**{**DECODER, "rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "phimoe": PhimoeConfig(**{**DECODER, **EXPERTS, "rope_parameters": SCALED}),
}


def longrope_model(kind: str = "phi3") -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[kind])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("lengths", [(12,), (13,), (8, 20), (20, 8), (12, 13, 3)])
def test_tables_are_those_of_each_document_alone(lengths: tuple[int, ...], kind: str) -> None:
    plain, ours = longrope_model(kind), longrope_model(kind)
    choose_tables_by_document(ours)
    x = torch.zeros(1, sum(lengths), 48)
    rows = [torch.arange(length)[None] for length in lengths]
    expected = [plain.model.rotary_emb(x, row) for row in rows]
    short, long = (plain.model.rotary_emb(x, torch.arange(length)[None])[0][0, 5] for length in (12, 13))
    assert not torch.equal(short, long), "two lengths, two tables"
    got = ours.model.rotary_emb(x, torch.cat(rows, dim=1))
    for part in range(2):
        assert torch.equal(got[part], torch.cat([tables[part] for tables in expected], dim=1))


def test_nothing_is_read_on_the_host() -> None:
    """On meta tensors a comparison of lengths would raise."""
    model = longrope_model()
    choose_tables_by_document(model)
    rotary = model.model.rotary_emb.to("meta")
    positions = torch.zeros(2, 40, dtype=torch.int64, device="meta")
    assert rotary(torch.zeros(2, 40, 48, device="meta"), positions)[0].is_meta
