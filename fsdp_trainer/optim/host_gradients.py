"""Gradients in host memory: each leaves the device as its reduction finishes, and is summed and measured there.

[Note: two units] A copy runs beside the backward of the next unit, so the device holds a unit's gradients until the
next unit's come: never more than two units' at a time, whatever the model. The host waits for copies made one unit
ago, which are done by then where a unit's backward takes longer than its transfer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_trainer.optim.sharded_adamw import flat
from fsdp_trainer.optim.transfers import Arrival, Lane, host_like, pin

_MEASURED_AT_ONCE = 2**22  # elements: fp32 sums of the squares of more lose digits


@dataclass(frozen=True)
class _Copy:
    """A gradient on its way to `landed`, to be put into `total` from there (None: it lands where it stays)."""

    gradient: torch.Tensor
    unit: Any
    arrival: Arrival
    landed: torch.Tensor
    total: torch.Tensor | None
    is_first: bool


def unscale_norm(
    norm: torch.Tensor, scaler: torch.amp.GradScaler, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of gradients on the host without the scale, and the factor that takes it off a gradient.

    Both fp32 scalars on the host. The scaler looks at the norm, on the device, in place of the gradients: it is not
    finite where one of them is not. Given the gradients, it would copy its scale to the host without waiting, and a
    kernel there would read it at once (torch/amp/grad_scaler.py, `_MultiDeviceReplicator`, 2.14).
    """
    on_device = nn.Parameter(torch.zeros((), device=device))
    on_device.grad = norm.to(device, copy=True)
    scale = scaler.scale(torch.ones_like(on_device.grad))
    scaler.unscale_(torch.optim.SGD([on_device], lr=0.0))
    return on_device.grad.to("cpu"), 1 / scale.to("cpu")


class HostGradients:
    """The sum of each parameter's gradients over the micro-batches of one optimizer step.

    `units` says for each parameter with which others its gradient is reduced; `release` is called with a unit whose
    gradients have left. `dtype` is that of the sums. `shards` is the group whose ranks hold different shards (None:
    nothing is sharded).
    """

    def __init__(
        self,
        units: Mapping[nn.Parameter, Any],
        *,
        device: torch.device,
        dtype: torch.dtype,
        shards: dist.ProcessGroup | None,
        release: Callable[[Any], None],
    ) -> None:
        self._units, self._device, self._shards, self._release = units, device, shards, release
        self._lane = Lane(device)
        self._totals = {parameter: flat(host_like(parameter, dtype)) for parameter in units}
        sizes: Counter[int] = Counter()
        for parameter, unit in units.items():
            sizes[id(unit)] += self._totals[parameter].numel()
        self._largest_unit = max(sizes.values(), default=0)
        self._landings: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._arrived: set[nn.Parameter] = set()
        self._flying: list[_Copy] = []
        self._turn = self._landed = 0
        self.factor = torch.ones(())
        self.is_pinned = self._pin(*self._totals.values())
        for parameter in units:
            parameter.register_post_accumulate_grad_hook(self._take)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter has had a gradient in this optimizer step."""
        return parameter in self._arrived

    def __getitem__(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the sum of a parameter's gradients: this rank's part, flat, to be multiplied by `factor`."""
        return self._totals[parameter]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held: the sums, where gradients land that are added to them, and the factor."""
        yield from self._totals.values()
        yield from self._landings.values()
        yield self.factor

    def clear(self) -> None:
        """Begin a new optimizer step."""
        assert not self._flying, "the gradients of a step are measured before they are forgotten"
        self._arrived.clear()

    @torch.no_grad()
    def clip(self, max_norm: float | None, *, scaler: torch.amp.GradScaler | None) -> torch.Tensor:
        """Return the gradients' true global norm, fp32 on the host, and set the `factor` that clips and unscales them.

        Collective where gradients are sharded: one scalar. The sums themselves are left as they are.
        """
        self.settle()
        norm = self._norm()
        factor = torch.ones_like(norm)
        if scaler is not None:
            norm, factor = unscale_norm(norm, scaler, self._device)
        if max_norm:
            factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_
        self.factor = factor
        return norm

    def _norm(self) -> torch.Tensor:
        parts = [
            torch.linalg.vector_norm(piece, dtype=torch.float32)
            for parameter in self._units
            if parameter in self._arrived
            for piece in self._totals[parameter].split(_MEASURED_AT_ONCE)
        ]
        squares = torch.zeros((), dtype=torch.float64)
        if parts:
            squares = torch.stack(parts).double().square().sum()
        if self._shards is not None:
            dist.all_reduce(squares, group=self._shards)  # through the group's CPU backend
        return squares.sqrt().float()

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Send a gradient that is ready on its way; called on the stream that it was reduced on."""
        assert parameter.grad is not None
        gradient, unit, total = flat(parameter.grad), self._units[parameter], self._totals[parameter]
        parameter.grad = None
        is_first = parameter not in self._arrived
        self._arrived.add(parameter)
        if not self._flying or self._flying[-1].unit is not unit:
            self._turn, self._landed = 1 - self._turn, 0
        stays = is_first and total.dtype == gradient.dtype
        landed = total if stays else self._land(gradient)
        arrival = self._lane.copy(landed, gradient)
        earlier = [copy for copy in self._flying if copy.unit is not unit]
        self._flying.append(_Copy(gradient, unit, arrival, landed, None if stays else total, is_first))
        del gradient
        self.settle(earlier)

    def _land(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return room for a gradient on the host: two units' take turns."""
        key = self._turn, gradient.dtype
        if key not in self._landings:
            self._landings[key] = torch.empty(self._largest_unit, dtype=gradient.dtype)
            self._pin(self._landings[key])
        start, self._landed = self._landed, self._landed + gradient.numel()
        return self._landings[key][start : self._landed]

    @torch.no_grad()
    def settle(self, copies: list[_Copy] | None = None) -> None:
        """Wait for copies (default: all), add them up, and let their gradients on the device go."""
        copies = self._flying if copies is None else copies
        for copy in copies:
            copy.arrival.synchronize()
            if copy.total is not None and copy.is_first:
                copy.total.copy_(copy.landed)
            elif copy.total is not None:
                copy.total.add_(copy.landed)
            self._release(copy.unit)
        done = {id(copy) for copy in copies}
        self._flying = [copy for copy in self._flying if id(copy) not in done]

    def _pin(self, *tensors: torch.Tensor) -> bool:
        return self._device.type != "cuda" or pin(tensors)
