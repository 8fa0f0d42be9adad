"""AdamW whose gradients, averages and master weights lie on the host; the device keeps the weights it computes in.

The step runs on the host; or on the device, which host memory then streams through in pieces of bounded size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_trainer.optim.eight_bit import BLOCK, SCALES, EightBit
from fsdp_trainer.optim.host_gradients import HostGradients
from fsdp_trainer.optim.masters import MASTER
from fsdp_trainer.optim.sharded_adamw import PIECE, AdamWStep, create_averages, flat, pieces, step_of, update
from fsdp_trainer.optim.stochastic_rounding import seeded_generator
from fsdp_trainer.optim.transfers import Arrival, Lane, host_like, pin

State = Mapping[str, torch.Tensor]


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW over what `gradients` holds; `state[parameter]` has the master weight and the averages, on the host.

    An Optimizer because Accelerate asks for one. `step` reads `found_inf` and `optimizer_step`, as ShardedAdamW does.
    `on_device` streams pieces through the device instead of computing on the host. `master_dtype` None is that of each
    weight, whose updates are then rounded stochastically. A `frozen` parameter that rests narrower than `master_dtype`
    has a master too, in `frozen_masters`: what is saved and exported of it is what was loaded, to the bit.
    """

    found_inf: torch.Tensor
    optimizer_step: int

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        frozen: Sequence[nn.Parameter] = (),
        lr: float,
        betas: tuple[float, float],
        eps: float,
        gradients: HostGradients,
        master_dtype: torch.dtype | None,
        state_dtype: torch.dtype,
        seed: int,
        shard: int,
        eight_bit: EightBit | None,
        device: torch.device,
        on_device: bool,
    ) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.gradients = gradients
        self._master_dtype, self._state_dtype, self.eight_bit = master_dtype, state_dtype, eight_bit
        self._seed, self._shard, self._device, self._frozen = seed, shard, device, tuple(frozen)
        self.frozen_masters: dict[torch.Tensor, torch.Tensor] = {}
        self._mover = _DeviceStep(device) if on_device else _HostStep(device)
        # By its plain name: a CPU rank's device has an index, and a tensor that is "moved" to cpu:0 is copied.
        self._where = device if on_device and device.type != "cpu" else torch.device("cpu")
        self.is_pinned = gradients.is_pinned

    def create_state(self) -> None:
        """Make every parameter's state, masters without values; after Accelerate's `prepare`, which would copy it."""
        for parameter in self._parameters():
            master = host_like(parameter, self._master_dtype or parameter.dtype)
            in_8bit = self.eight_bit is not None and parameter in self.eight_bit.parameters
            averages = create_averages(master, self._state_dtype, in_8bit=in_8bit)
            self.state[parameter] = {MASTER: master, **averages}
            if self._where.type == "cuda":
                self.is_pinned &= pin(flat(value) for value in self.state[parameter].values())
        if (dtype := self._master_dtype) is not None:
            narrow = (parameter for parameter in self._frozen if parameter.dtype != dtype)
            self.frozen_masters = {parameter: host_like(parameter, dtype) for parameter in narrow}

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of all that is kept on the host."""
        for parameter in self._parameters():
            yield self.gradients[parameter]
            yield from (flat(value) for value in self.state[parameter].values())
        yield from map(flat, self.frozen_masters.values())

    def rooms(self) -> Iterator[torch.Tensor]:
        """Yield the pieces that the step works in, as far as they are kept for the next one."""
        yield from self._mover.rooms.values()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; their host memory stays."""
        self.gradients.clear()
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move every parameter that has had a gradient, and send its new weight to the device."""
        assert closure is None
        generator = seeded_generator(self._where, seed=self._seed, step=self.optimizer_step, shard=self._shard)
        skipped, factor = self.found_inf.to(self._where), self.gradients.factor.to(self._where)
        for group in self.param_groups:
            step = step_of(group, number=self.optimizer_step + 1, skipped=skipped, eight_bit=self.eight_bit)
            for parameter in group["params"]:
                if parameter in self.gradients:
                    state = {key: flat(value) for key, value in self.state[parameter].items()}
                    gradient = self.gradients[parameter], factor
                    self._mover.move(flat(parameter), state.pop(MASTER), gradient, state, step, generator)
        self._mover.finish()


class _HostStep:
    """Computes on the host; one piece of the new weights travels while the next is rounded."""

    def __init__(self, device: torch.device) -> None:
        self._lane, self._pins = Lane(device), device.type == "cuda"
        self._turn = 0
        self.rooms: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._arrivals: dict[tuple[int, torch.dtype], Arrival] = {}

    def move(
        self,
        weight: torch.Tensor,
        master: torch.Tensor,
        gradient: tuple[torch.Tensor, torch.Tensor],
        state: State,
        step: AdamWStep,
        generator: torch.Generator | None,
    ) -> None:
        """Move a parameter's master and send it to `weight`; `gradient` is a sum and the factor on it."""
        total, factor = gradient
        update(master, total.mul_(factor), state, step, generator)
        for part in pieces(weight.numel()):
            self._turn = 1 - self._turn
            key = self._turn, weight.dtype
            room = self._room(key)[: part.stop - part.start]
            room.copy_(master[part])
            self._arrivals[key] = self._lane.copy(weight[part], room)

    def _room(self, key: tuple[int, torch.dtype]) -> torch.Tensor:
        if key in self._arrivals:
            self._arrivals[key].synchronize()
        elif key not in self.rooms:
            self.rooms[key] = torch.empty(PIECE, dtype=key[1])
            if self._pins:
                pin([self.rooms[key]])
        return self.rooms[key]

    def finish(self) -> None:
        """Let what the device computes next wait for its weights."""
        self._lane.join()


class _DeviceStep:
    """Computes on the device: one piece of everything comes while the last one goes back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._incoming, self._outgoing = device, Lane(device), Lane(device)
        self._turn = 0
        self.rooms: dict[tuple[int, str, torch.dtype], torch.Tensor] = {}
        self._leaving: dict[int, list[Arrival]] = {0: [], 1: []}

    def move(
        self,
        weight: torch.Tensor,
        master: torch.Tensor,
        gradient: tuple[torch.Tensor, torch.Tensor],
        state: State,
        step: AdamWStep,
        generator: torch.Generator | None,
    ) -> None:
        """Move a parameter's master and its device `weight`; `gradient` is a sum on the host and the factor on it."""
        total, factor = gradient
        for part in pieces(weight.numel()):
            self._turn = 1 - self._turn
            self._wait()
            homes = {key: value[_blocks(part) if key in SCALES else part] for key, value in state.items()}
            homes[MASTER] = master[part]
            here = {key: self._bring(key, home) for key, home in homes.items()}
            grad = self._bring("gradient", total[part])
            self._incoming.join()
            moved = here.pop(MASTER)
            update(moved, grad.mul_(factor), here, step, generator)
            weight[part].copy_(moved)
            here[MASTER] = moved
            self._leaving[self._turn] = [self._outgoing.copy(home, here[key]) for key, home in homes.items()]

    def _bring(self, key: str, home: torch.Tensor) -> torch.Tensor:
        name = self._turn, key, home.dtype
        if name not in self.rooms:
            size = PIECE // BLOCK if key in SCALES else PIECE
            self.rooms[name] = torch.empty(size, dtype=home.dtype, device=self._device)
        room = self.rooms[name][: home.numel()]
        self._incoming.copy(room, home)
        return room

    def _wait(self) -> None:
        """Wait until what last used this turn's rooms has left them."""
        for arrival in self._leaving[self._turn]:
            arrival.synchronize()
        self._leaving[self._turn] = []

    def finish(self) -> None:
        """Wait until everything is back on the host, and give the device its memory back."""
        for self._turn in (0, 1):
            self._wait()
        self.rooms.clear()


def _blocks(part: slice) -> slice:
    """Return which scales belong to a piece, which begins with a block."""
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
