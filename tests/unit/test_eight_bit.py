"""8-bit moments on one process: bitsandbytes' own numbers, piece by piece, and what another layout makes of them."""

from __future__ import annotations

import sys

import bitsandbytes
import pytest
import torch
from torch import nn

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.optim import eight_bit
from fsdp_trainer.optim.eight_bit import BLOCK, CODES, MOMENTS, SCALES
from fsdp_trainer.optim.sharded_adamw import AdamWStep

PIECE = 4 * BLOCK


@pytest.fixture(scope="module")
def tables() -> eight_bit.Tables:
    return eight_bit.build_tables(torch.device("cpu"))


def adamw_step(number: int, tables: eight_bit.Tables, *, skipped: float = 0.0) -> AdamWStep:
    return AdamWStep(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        number=number,
        skipped=torch.tensor(skipped, device=tables.exp_avg.device),
        tables=tables,
    )


def gradients(numel: int, count: int) -> list[torch.Tensor]:
    """Return gradients whose scale falls by a factor of three a step: what the tables must follow."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) * 3.0**-index for index in range(count)]


def step_in_pieces(weight: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], step: AdamWStep) -> None:
    whole = {name: value.view(-1) for name, value in state.items()}
    for begin in range(0, weight.numel(), PIECE):
        part = slice(begin, min(begin + PIECE, weight.numel()))
        eight_bit.update_8bit(weight[part], grad[part], eight_bit.piece_of(whole, part), step)


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_pieces_are_bitwise_what_bitsandbytes_makes_of_the_whole_tensor(device: str) -> None:
    tables = eight_bit.build_tables(torch.device(device))
    numel = 10_077  # the last piece and the last block are short
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    theirs = nn.Parameter(start.clone())
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    ours, state = start.clone(), eight_bit.initial_8bit_state(start)
    for index, grad in enumerate(grad.to(device) for grad in gradients(numel, 10)):
        theirs.grad = grad.clone()
        optimizer.step()
        step_in_pieces(ours, grad, state, adamw_step(index + 1, tables))
        their_state = optimizer.state[theirs]
        assert torch.equal(ours, theirs)
        for moment, number in zip(MOMENTS, "12", strict=True):
            assert torch.equal(state[f"{moment}_codes"], their_state[f"state{number}"])
            assert torch.equal(state[f"{moment}_absmax"].view(-1), their_state[f"absmax{number}"])
    assert not torch.equal(ours, start)


def test_skipped_step_leaves_every_bit(tables: eight_bit.Tables) -> None:
    weight = torch.randn(5000)
    state = eight_bit.initial_8bit_state(weight)
    step_in_pieces(weight, torch.randn(5000), state, adamw_step(1, tables))
    before = {name: value.clone() for name, value in (state | {"weight": weight}).items()}
    bad = torch.randn(5000)
    bad[3], bad[4000] = float("inf"), float("nan")
    step_in_pieces(weight, bad, state, adamw_step(2, tables, skipped=1.0))
    assert all(torch.equal(value, before[name]) for name, value in (state | {"weight": weight}).items())
    step_in_pieces(weight, torch.randn(5000), state, adamw_step(2, tables))
    assert not torch.equal(weight, before["weight"])


def test_empty_shard_is_stepped(tables: eight_bit.Tables) -> None:
    weight = torch.empty(0, 48)
    state = {name: torch.empty(0, dtype=torch.uint8) for name in CODES} | {name: torch.zeros(0) for name in SCALES}
    eight_bit.update_8bit(weight.view(-1), weight.view(-1), state, adamw_step(1, tables))


class _Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.matrix = nn.Linear(64, 64)  # 4096 elements: the least
        self.small = nn.Linear(64, 63)
        self.wide = nn.Linear(1, 8192)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.LayerNorm(8192)
        self.head = nn.Linear(64, 100, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_rule_takes_large_matrices_and_no_embedding() -> None:
    matrices = ["matrix.weight", "wide.weight"]
    found = {}
    for tied in (False, True):
        model = _Model(tied=tied)
        chosen = eight_bit.choose_8bit(model, device=torch.device("cpu")).parameters
        found[tied] = [name for name, parameter in model.named_parameters() if parameter in chosen]
    assert found == {False: [*matrices, "head.weight"], True: matrices}


def make_shards(shape: tuple[int, int], shards: int, tables: eight_bit.Tables) -> tuple[dict[str, torch.Tensor], ...]:
    """Return whole codes, the scales of every shard, and the values they stand for, as `shards` ranks have them."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(4)).view(-1)
    layout = eight_bit.cut(torch.Size(shape), shards=shards)
    codes, scales, exact = {}, {}, {}
    for moment, codes_name, scales_name in zip(MOMENTS, CODES, SCALES, strict=True):
        table, rows, parts = getattr(tables, moment), torch.zeros(shards, layout.blocks), []
        of_moment = values if moment == "exp_avg" else values.square()
        for index in range(shards):
            part = of_moment[index * layout.numel : (index + 1) * layout.numel]
            if part.numel():
                part_codes, part_scales = torch.ops.bitsandbytes.quantize_blockwise(part, table, BLOCK)
                parts.append(part_codes)
                rows[index, : part_scales.numel()] = part_scales
        codes[codes_name], scales[scales_name] = torch.cat(parts), rows
        exact[moment] = torch.cat(
            [
                torch.ops.bitsandbytes.dequantize_blockwise(part, rows[index], table, BLOCK, torch.float32)
                for index, part in enumerate(parts)
            ]
        )
    return codes, scales, exact


@pytest.mark.parametrize(
    ("shape", "saved", "now", "lossless"),
    [
        ((96, 48), 1, 2, True),  # 2304 elements a shard: nine blocks
        ((96, 48), 2, 1, True),
        ((96, 48), 2, 3, True),
        ((96, 48), 2, 4, False),  # 1152 elements a shard: the last block is half one
        ((96, 48), 4, 2, False),
        ((160, 48), 2, 3, False),
        ((5, 1000), 4, 3, False),  # the last of four shards has one row, of three two; 1000 is no multiple of 256
        ((3, 2000), 4, 2, False),  # the last of four shards is empty
        ((1100, 1024), 2, 1, True),  # more than one piece
        ((1100, 1001), 3, 2, False),
    ],
)
def test_regrouped_moments_are_those_that_were_saved(
    shape: tuple[int, int],
    saved: int,
    now: int,
    lossless: bool,
    tables: eight_bit.Tables,
) -> None:
    codes, scales, exact = make_shards(shape, saved, tables)
    changed, then = 0, eight_bit.cut(torch.Size(shape), shards=saved)
    for index in range(now):
        here = eight_bit.cut(torch.Size(shape), shards=now, index=index)
        for moment, codes_name, scales_name in zip(MOMENTS, CODES, SCALES, strict=True):
            table, wanted = getattr(tables, moment), exact[moment][here.start : here.start + here.numel]
            mine = codes[codes_name][here.start : here.start + here.numel].clone()
            own = torch.full((here.blocks,), -1.0)
            eight_bit.regroup_moment(mine, own, scales[scales_name], then=then, start=here.start, table=table)
            used = -(-wanted.numel() // BLOCK)
            assert own[used:].count_nonzero() == 0
            if not wanted.numel():
                continue
            found = torch.ops.bitsandbytes.dequantize_blockwise(mine, own, table, BLOCK, torch.float32)
            changed += int(not torch.equal(found, wanted))
            # One more rounding and no other value: half the widest gap of the signed table, times a block's scale.
            assert (found - wanted).abs().max() <= 0.008 * wanted.abs().max()
    assert (changed == 0) is lossless


def test_without_bitsandbytes_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="pip install 'bitsandbytes"):
        eight_bit.build_tables(torch.device("cpu"))
