"""AdamW moments in 8 bits: which tensors have them, what they are made of, and how one piece of a shard is moved.

A moment keeps a code of one byte an element, which counts in a table of 256 values, and one fp32 scale (absmax) a block
of 256 elements: 2.03125 bytes a parameter for both moments (Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, arXiv 2110.02861). Codes, tables and the update are bitsandbytes'.

[Note: blocks follow the shard] Blocks are counted from the first element of a rank's shard, so no block needs two
ranks. Codes have the parameter's own shape and placement; the scales are one row a shard, [shards, blocks of a whole
shard], of which every rank holds its own. A checkpoint therefore says by itself where the blocks of its codes began.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.optim.adamw import named_kinds
from fsdp_trainer.optim.paged import managed_zeros
from fsdp_trainer.units import format_count, format_number

if TYPE_CHECKING:
    from fsdp_trainer.optim.sharded_adamw import AdamWStep

BLOCK = 256  # what bitsandbytes' 8-bit kernels are compiled for
MIN_NUMEL = 4096  # its own bound, which it applies to whatever tensor it is given: a shard, under FSDP
MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = tuple(f"{moment}_codes" for moment in MOMENTS)
SCALES = tuple(f"{moment}_absmax" for moment in MOMENTS)


@dataclass(frozen=True)
class Tables:
    """The 256 values that codes count in, fp32: `exp_avg` has signed ones, `exp_avg_sq` none below zero."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True)
class EightBit:
    """The parameters of a run whose moments are kept in 8 bits, and the tables they share, where the step computes.

    paged: their codes lie in managed memory, see paged.py.
    """

    parameters: frozenset[torch.Tensor]
    tables: Tables
    paged: bool = False


def choose_8bit(model: nn.Module, *, device: torch.device, paged: bool = False) -> EightBit:
    """Return the trainable parameters whose moments are kept in 8 bits. ConfigError where bitsandbytes is missing.

    Asked of the whole tensor, so the answer is the same at every world size, stage and offload: matrices of at least
    4096 elements. Norms and biases are small and sensitive, and an embedding's rare rows make 8-bit moments unstable
    (arXiv 2110.02861, section 2.3). A head that is tied to the embedding is one.
    """
    chosen = (
        parameter
        for _, parameter, kinds in named_kinds(model)
        if parameter.requires_grad and parameter.numel() >= MIN_NUMEL and kinds == {None}
    )
    return EightBit(frozenset(chosen), build_tables(device), paged)


def describe_8bit(model: nn.Module, chosen: EightBit) -> list[str]:
    """Return the log's lines about what has 8-bit moments, and what they cost where the step runs on a CPU."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in chosen.parameters)
    rest = sum(parameter.numel() for parameter in trained) - numel
    lines = [
        f"moments in 8 bits: {format_count(numel)} parameters in {format_number(len(chosen.parameters), 'tensor')}; "
        f"the other {format_number(len(trained) - len(chosen.parameters), 'tensor')} ({format_count(rest)} parameters: "
        "embeddings, norms, biases and what is small) keep them in fp32"
    ]
    if chosen.paged:
        lines.append("the codes are in managed memory: the driver moves them to the host where the GPU runs full")
    if chosen.tables.exp_avg.device.type == "cpu":
        # Measured on one of two shared cores, 4 M parameters: 55 ns each, torch's fused AdamW 0.5 ns.
        lines.append("bitsandbytes' 8-bit step is slow on CPU: about a hundred times slower than torch's fused AdamW")
    return lines


def build_tables(device: torch.device) -> Tables:
    """Load bitsandbytes and return its dynamic tables. ConfigError where it is missing."""
    load_kernels()
    from bitsandbytes.functional import create_dynamic_map

    # They are made number by number on the host, which a simulated run has no numbers for.
    with unset_fake_temporarily():
        values = [create_dynamic_map(signed=signed) for signed in (True, False)]
    return Tables(*(torch.empty(table.shape, dtype=table.dtype, device=device).copy_(table) for table in values))


def load_kernels() -> None:
    """Import bitsandbytes, which registers its operations with torch; ConfigError where it is missing.

    Takes 2 seconds, which only a run with 8-bit moments pays.
    """
    try:
        with _quiet():
            import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "8-bit AdamW needs bitsandbytes, which cannot be imported here.",
            values=f"optim.name: adamw_8bit; {type(error).__name__}: {error}",
            fix="pip install 'bitsandbytes>=0.50', or set optim.name: adamw",
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what its import warns about 4-bit inference on CPU, which nothing here uses."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def initial_8bit_state(parameter: torch.Tensor, *, paged: bool = False) -> dict[str, torch.Tensor]:
    """Return the moments of a parameter that was never stepped: zeros, see [Note: blocks follow the shard]."""
    state: dict[str, torch.Tensor] = {}
    for codes, scales in zip(CODES, SCALES, strict=True):
        state[codes] = _zero_codes(parameter, paged=paged)
        state[scales] = _zero_scales(parameter)
    return state


def _zero_codes(parameter: torch.Tensor, *, paged: bool) -> torch.Tensor:
    if not paged:
        return torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
    local = local_part(parameter)
    codes = managed_zeros(local.numel(), device=local.device).view(local.shape)
    return _of_the_shards(parameter, codes, shape=parameter.shape)


def _zero_scales(parameter: torch.Tensor) -> torch.Tensor:
    layout = shard_layout(parameter)
    row = torch.zeros(1, layout.blocks, dtype=torch.float32, device=local_part(parameter).device)
    return _of_the_shards(parameter, row, shape=torch.Size((layout.shards, layout.blocks)))


def _of_the_shards(parameter: torch.Tensor, local: torch.Tensor, *, shape: torch.Size) -> torch.Tensor:
    """Return this rank's part `local` of a tensor of `shape` that is placed as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    # `DTensor.from_local` would move a shard that is offloaded to the host onto the mesh's device.
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is cut along its first dimension: `shards` pieces of `numel` elements, the last ones shorter.

    `start` is where this rank's piece begins in the whole tensor, flat; `blocks` are those of a whole piece.
    """

    shards: int
    numel: int
    start: int

    @property
    def blocks(self) -> int:
        """Return the blocks of a shard of full size; a shorter one leaves its last scales unused."""
        return -(-self.numel // BLOCK)


def shard_layout(parameter: torch.Tensor) -> ShardLayout:
    """Return how `parameter`, of any placement that FSDP2 gives, is cut."""
    shards = index = 0
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0 and not shards, "FSDP2 shards the first dimension, once"
                shards, index = parameter.device_mesh.size(dimension), parameter.device_mesh.get_local_rank(dimension)
    return cut(parameter.shape, shards=max(1, shards), index=index)


def cut(shape: torch.Size, *, shards: int, index: int = 0) -> ShardLayout:
    """Return the layout of a tensor of `shape` cut as FSDP2 (torch.chunk) cuts it, seen from shard `index`."""
    rows = -(-shape[0] // shards)
    numel = rows * shape[1:].numel()
    return ShardLayout(shards=shards, numel=numel, start=min(index * numel, shape.numel()))


def is_8bit(state: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a parameter's state has 8-bit moments."""
    return CODES[0] in state


def piece_of(state: Mapping[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
    """Return the codes and scales of a stretch of a shard, from flat ones of the whole; it starts at a block."""
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    return {name: state[name][part] for name in CODES} | {name: state[name][blocks] for name in SCALES}


def update_8bit(weight: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], step: "AdamWStep") -> None:
    """Move one piece of a shard in place: `weight`, codes and scales, unless `step.skipped` is 1.

    `weight` and `grad`: fp32 [n]. `state`: the piece's own codes (uint8 [n]) and scales (fp32 [blocks]). The kernel
    takes no verdict from the device, so a copy of the piece is kept meanwhile: 6 bytes an element of the piece.
    """
    tables = step.tables
    assert tables is not None, "a run with 8-bit moments has tables"
    moved = (weight, *(state[name] for name in (*CODES, *SCALES)))
    before = [tensor.clone() for tensor in moved]
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        "adam",  # with the decay apart from the gradient, which is AdamW
        grad,
        weight,
        state[CODES[0]],
        state[CODES[1]],
        step.beta1,
        step.beta2,
        0.0,
        0.0,
        step.eps,
        step.number,
        step.lr,
        tables.exp_avg,
        tables.exp_avg_sq,
        state[SCALES[0]],
        state[SCALES[1]],
        step.weight_decay,
        1.0,
        False,
    )
    for now, old in zip(moved, before, strict=True):
        torch.where(step.skipped > 0, old, now, out=now)


# Another layout


_REGROUP_PIECE = 2**20  # elements; a multiple of BLOCK. An index of int64 for each lies beside the values


def regroup(state: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], tables: Tables) -> None:
    """Make moments that were saved from other shards this rank's own, in place; local work.

    `state` has the codes of this rank's elements, as they were saved. `stored` has the scales of the shards they were
    saved from, [shards, blocks] as plain tensors.
    """
    for moment, codes_name, scales_name in zip(MOMENTS, CODES, SCALES, strict=True):
        codes, scales, old = state[codes_name], local_part(state[scales_name]).view(-1), stored[scales_name]
        regroup_moment(
            local_part(codes).view(-1),
            scales,
            old.to(scales.device),
            then=cut(codes.shape, shards=old.shape[0]),
            start=shard_layout(codes).start,
            table=getattr(tables, moment),
        )


def regroup_moment(
    codes: torch.Tensor, scales: torch.Tensor, old: torch.Tensor, *, then: ShardLayout, start: int, table: torch.Tensor
) -> None:
    """Give `codes` (uint8 [n], from element `start` of the tensor on) blocks of their own, in place.

    `old`: the scales of the layout `then`, [shards, blocks]. Where both layouts have their borders between the same
    blocks, codes stay as they are and scales only change places, so nothing is lost; else each value is looked up and
    quantised anew.
    """
    scales.zero_()
    used = -(-codes.numel() // BLOCK)
    if then.numel % BLOCK == 0 and start % BLOCK == 0:
        scales[:used] = _scales_at(old, then, torch.arange(used, device=scales.device) * BLOCK + start)
        return
    for begin in range(0, codes.numel(), _REGROUP_PIECE):
        piece = codes[begin : begin + _REGROUP_PIECE]
        where = torch.arange(piece.numel(), device=codes.device) + (start + begin)
        values = table[piece.long()] * _scales_at(old, then, where)
        new_codes, new_scales = torch.ops.bitsandbytes.quantize_blockwise(values, table, BLOCK)
        piece.copy_(new_codes)
        scales[begin // BLOCK :][: new_scales.numel()] = new_scales


def _scales_at(old: torch.Tensor, then: ShardLayout, where: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element `where` (its place in the whole tensor, flat) in the layout `then`."""
    shard = where // then.numel
    return old[shard, (where - shard * then.numel) // BLOCK]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's own part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
