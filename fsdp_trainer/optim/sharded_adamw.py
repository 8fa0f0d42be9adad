"""AdamW on each rank's own shards, in pieces of bounded size: for what torch's AdamW cannot keep or place.

A piece is widened to fp32, moved, and written back; what is kept in bf16 is rounded stochastically. So temporaries are
the same for a model of any size, and one loop serves weights and averages of every number format.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_trainer.memory.estimate import STEP_PIECE
from fsdp_trainer.optim.eight_bit import CODES, EightBit, Tables, initial_8bit_state, is_8bit, piece_of, update_8bit
from fsdp_trainer.optim.paged import fetch
from fsdp_trainer.optim.stochastic_rounding import round_stochastically_, seeded_generator

PIECE = STEP_PIECE


@dataclass(frozen=True)
class AdamWStep:
    """One step's numbers for a group of parameters.

    number: this optimizer step, counted from 1, for the bias correction. skipped: fp32 scalar on the computing device;
    1 leaves weights and averages as they are. tables: what 8-bit averages count in, on the same device.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    number: int
    skipped: torch.Tensor
    tables: Tables | None = None


def step_of(group: Mapping[str, Any], *, number: int, skipped: torch.Tensor, eight_bit: EightBit | None) -> AdamWStep:
    """Return the numbers of an optimizer's parameter group for step `number`."""
    beta1, beta2 = group["betas"]
    return AdamWStep(
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        number=number,
        skipped=skipped,
        tables=eight_bit.tables if eight_bit else None,
    )


def pieces(numel: int) -> Iterator[slice]:
    """Yield the stretches of a flat tensor that are stepped one after the other."""
    for start in range(0, numel, PIECE):
        yield slice(start, min(start + PIECE, numel))


def update_fp32(
    weight: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: AdamWStep
) -> None:
    """Move one piece in place, everything flat and fp32 on one device, with torch's own kernel.

    It takes `skipped` on the device and then writes nothing, and has no temporaries.
    """
    count = torch.full((), float(step.number), dtype=torch.float32, device=weight.device)
    torch._fused_adamw_(
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        lr=step.lr,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
        found_inf=step.skipped,
    )


def create_averages(
    parameter: torch.Tensor, dtype: torch.dtype, *, in_8bit: bool = False, paged: bool = False
) -> dict[str, torch.Tensor]:
    """Return AdamW's two averages before the first step, sharded as the parameter is: in `dtype`, or in 8 bits."""
    if in_8bit:
        return initial_8bit_state(parameter, paged=paged)
    return {key: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW whose weights and averages may be bf16; the averages lie in `state[parameter]`, as a checkpoint needs.

    An Optimizer because Accelerate and the gradient scaler ask for one. `step` reads `found_inf` and `optimizer_step`
    (how often the weights were moved before), which step.py sets, so nothing is read on the host; the bias correction
    follows the run's count, also for a parameter that had no gradient in some step.
    """

    found_inf: torch.Tensor
    optimizer_step: int

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
        seed: int,
        shard: int,
        eight_bit: EightBit | None = None,
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._state_dtype, self.eight_bit = state_dtype, eight_bit
        self._is_paged = eight_bit is not None and eight_bit.paged
        self._seed, self._shard = seed, shard

    def create_state(self) -> None:
        """Make every parameter's state, once the run is built: no step takes more memory than the next.

        Not in `__init__`: Accelerate's `prepare` copies what state there is to the device.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                in_8bit = self.eight_bit is not None and parameter in self.eight_bit.parameters
                self.state[parameter] = create_averages(
                    parameter, self._state_dtype, in_8bit=in_8bit, paged=self._is_paged
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move every parameter that has a gradient."""
        assert closure is None
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        device = flat(trained[0]).device  # one for all: the ranks', or the host where parameters are offloaded
        generator = seeded_generator(device, seed=self._seed, step=self.optimizer_step, shard=self._shard)
        skipped = self.found_inf.to(device)
        for group in self.param_groups:
            step = step_of(group, number=self.optimizer_step + 1, skipped=skipped, eight_bit=self.eight_bit)
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = {key: flat(value) for key, value in self.state[parameter].items()}
                if self._is_paged:
                    fetch(state[key] for key in CODES if key in state)
                update(flat(parameter), flat(parameter.grad), state, step, generator)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's own part of a tensor, of any size, as one row."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    step: AdamWStep,
    generator: torch.Generator | None,
) -> None:
    """Move one parameter's shard in place, piece by piece; all tensors flat, on one device, of the same length."""
    for part in pieces(weight.numel()):
        wide = weight[part].float()  # the weight itself where it is fp32
        _update_averages(wide, grad[part].float(), state, part, step, generator)
        write_back(weight[part], wide, generator)


def _update_averages(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    part: slice,
    step: AdamWStep,
    generator: torch.Generator | None,
) -> None:
    if is_8bit(state):
        update_8bit(weight, grad, piece_of(state, part), step)
        return
    kept = [state[key][part] for key in ("exp_avg", "exp_avg_sq")]
    wide = [average.float() for average in kept]
    update_fp32(weight, grad, *wide, step=step)
    for average, value in zip(kept, wide, strict=True):
        write_back(average, value, generator)


def write_back(target: torch.Tensor, value: torch.Tensor, generator: torch.Generator | None) -> None:
    """Store an fp32 value where it is kept: nothing to do for fp32, stochastic rounding for bf16.

    A skipped step's value is what bf16 holds already, which rounding leaves as it is.
    """
    if target.dtype == torch.bfloat16:
        round_stochastically_(target, value, generator)
