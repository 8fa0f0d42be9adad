"""ZeRO stages as FSDP2: which modules form a unit, on which mesh, and when a unit's weights and gradients are whole.

[Note: stages] Every stage uses `fully_shard`; stages differ in the mesh, in reshard_after_forward and in what happens
between the micro-batches of one optimizer step. Counted collectives per step define them (tests/distributed/
test_stages.py): stage 3 gathers in every forward and backward (the head's unit once for both), stages 1 and 2 gather
once a step, stages 0 and 1 reduce once a step, stages 2 and 3 reduce every micro-batch and so keep gradients sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_trainer.gloo_reduce_scatter import GlooReduceScatter
from fsdp_trainer.model import ModelParts, modules_in_fp32
from fsdp_trainer.patches import keep_reduced_gradients
from fsdp_trainer.runtime import Runtime

STRATEGIES = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")  # by ZeRO stage
COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_pure": torch.bfloat16,
}


@dataclass(frozen=True)
class Sharding:
    """The sharded units of one model and what their stage does between micro-batches.

    shard: which shard this rank holds, from 0; ranks that hold equal copies have the same.
    """

    root: FSDPModule
    units: tuple[FSDPModule, ...]
    zero_stage: int
    replicate: int
    shard: int
    offload_params: bool
    host_gradients: bool
    mesh: DeviceMesh

    @property
    def reduce_every_micro_batch(self) -> bool:
        """True where gradients stay sharded between micro-batches; an offloaded one must leave the device anyway."""
        return self.zero_stage >= 2 or self.offload_params or self.host_gradients

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the shards of one copy between them; None where every rank holds a whole one."""
        last = self.mesh.ndim - 1
        return self.mesh.get_group(last) if self.mesh.size(last) > 1 else None

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Set what the next forward and backward gather, keep and reduce; see [Note: stages]."""
        if self.zero_stage < 3:
            self.root.set_reshard_after_backward(is_last)
        if not self.reduce_every_micro_batch:
            self.root.set_requires_gradient_sync(is_last)
        elif self.replicate > 1 and not self.host_gradients:
            # Shards are summed inside a group every micro-batch; only the last sum crosses the groups.
            self.root.set_requires_all_reduce(is_last)

    def reshard_all(self) -> None:
        """Free every gathered weight. An evaluation forward leaves them gathered where reshard_after_forward is off,
        and the next weight change would then be ignored in silence."""
        for unit in self.units:
            unit.reshard()

    def groups(self) -> list[Any]:
        """Return FSDP2's own objects for the units, which know parameters and dtypes."""
        states = {id(state): state for state in (unit._get_fsdp_state() for unit in self.units)}
        found = (state._fsdp_param_group for state in states.values())
        return [group for group in found if group is not None]


def strategy_name(zero_stage: int, replicate: int) -> str:
    """Return the strategy's usual name, such as FULL_SHARD for stage 3."""
    return "HYBRID_SHARD" if replicate > 1 else STRATEGIES[zero_stage]


def build_mesh(runtime: Runtime, *, zero_stage: int, replicate: int) -> DeviceMesh:
    """Build the mesh: (world, 1) for stage 0, (replicate, world / replicate) for HYBRID, else (world,)."""
    if zero_stage == 0:
        return runtime.mesh(runtime.world_size, 1, names=("dp_replicate", "dp_shard"))
    if replicate > 1:
        return runtime.mesh(replicate, runtime.world_size // replicate, names=("dp_replicate", "dp_shard"))
    return runtime.mesh(runtime.world_size, names=("dp_shard",))


def apply_sharding(
    model: nn.Module,
    parts: ModelParts,
    *,
    mesh: DeviceMesh,
    zero_stage: int,
    replicate: int,
    reshard_after_forward: int | None,
    offload_params: bool,
    host_gradients: bool,
    pin_memory: bool,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Sharding:
    """Shard the model in place, one unit per decoder layer, and return its units.

    Weights rest in the dtype the model was built in; compute casts to `compute_dtype`, gradients are reduced in
    `reduce_dtype` and kept in it or in their weight's dtype, whichever is wider. `reshard_after_forward=k` lets the
    backward gather within k ranks. `offload_params` keeps weights, gradients and optimizer state in host memory; it
    reduces every micro-batch, as a gradient must leave the device. So does `host_gradients`, which leaves weights only.
    """
    if host_gradients and mesh.size() == 1:
        return _leave_whole(model, mesh=mesh, zero_stage=zero_stage)
    reshard: bool | int = zero_stage == 3
    if zero_stage == 3 and reshard_after_forward is not None:
        reshard = reshard_after_forward
    # No cast of a module's inputs: weights in the compute dtype make activations of that dtype, and what a model keeps
    # in fp32 on purpose (rotary tables, a router's input) stays as its own code has it.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pin_memory) if offload_params else OffloadPolicy(),
    }
    in_fp32 = {**options, "mp_policy": replace(policy, param_dtype=None)}
    for module in modules_in_fp32(model, compute_dtype):
        for inner in _parts_to_shard(module):  # a unit takes all that lies below it, and this one is only for its own
            fully_shard(inner, reshard_after_forward=reshard, **options)
        fully_shard(module, reshard_after_forward=reshard, **in_fp32)
    for layer in parts.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    outer = _outer_units(parts)
    for unit in outer:
        # The backward begins where the forward ended, in the unit with the head: freed between, it is gathered again.
        fully_shard(unit, reshard_after_forward=reshard if unit is not outer[-1] else False, **options)
    # What is left (position embeddings, say) is small and used first and last: it stays gathered through the step.
    fully_shard(model, reshard_after_forward=False, **options)
    assert isinstance(model, FSDPModule)
    units = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    if mesh.device_type == "cpu":
        for unit in units:
            unit.set_custom_reduce_scatter(GlooReduceScatter())
    if any(parameter.itemsize < reduce_dtype.itemsize for parameter in model.parameters()):
        for unit in units:
            keep_reduced_gradients(unit, reduce_dtype)
    return Sharding(
        root=model,
        units=units,
        zero_stage=zero_stage,
        replicate=replicate,
        shard=dist.get_rank() % mesh.size(mesh.ndim - 1),  # the mesh's last dimension is the one that shards
        offload_params=offload_params,
        host_gradients=host_gradients,
        mesh=mesh,
    )


def _parts_to_shard(module: nn.Module) -> list[nn.Module]:
    """Return the modules right below one that have parameters and are no units; of a list of modules, its own."""
    found = []
    for child in module.children():
        if isinstance(child, FSDPModule) or all(isinstance(p, DTensor) for p in child.parameters()):
            continue
        found += _parts_to_shard(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _leave_whole(model: nn.Module, *, mesh: DeviceMesh, zero_stage: int) -> Sharding:
    """Make the only rank's model an FSDP module that manages no parameter.

    There is nothing to gather, to reduce or, at rest in the compute dtype, to cast; a unit would only copy its weights
    and its gradients, which for a large vocabulary is gigabytes. Gradients come from autograd one tensor at a time.
    """
    fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()))
    assert isinstance(model, FSDPModule)
    return Sharding(
        root=model,
        units=(model,),
        zero_stage=zero_stage,
        replicate=1,
        shard=0,
        offload_params=False,
        host_gradients=True,
        mesh=mesh,
    )


def widen_gradients(model: nn.Module, parts: ModelParts, reduce_dtype: torch.dtype) -> None:
    """Let weights narrower than `reduce_dtype` take gradients of it; see `patches.keep_reduced_gradients`.

    Of weights that no unit reduces only an untied head: the loss sums its gradient in fp32, a copy of which in the
    weight's dtype would be one more table of the vocabulary.
    """
    alone = None if parts.tied else parts.head.weight
    for parameter in model.parameters():
        narrower = parameter.requires_grad and parameter.dtype.itemsize < reduce_dtype.itemsize
        if narrower and (isinstance(parameter, DTensor) or parameter is alone):
            parameter.grad_dtype = reduce_dtype


def reduction_units(sharding: Sharding) -> dict[nn.Parameter, Any]:
    """Return what each trainable parameter is reduced with: an FSDP unit, or alone where FSDP manages none."""
    found: dict[nn.Parameter, Any] = {
        parameter.sharded_param: unit for unit in sharding.groups() for parameter in unit.fsdp_params
    }
    assert isinstance(sharding.root, nn.Module)
    trained = [parameter for parameter in sharding.root.parameters() if parameter.requires_grad]
    return {parameter: found.get(parameter, parameter) for parameter in trained}


def release_reduced(unit: Any) -> None:
    """Free a unit's reduced gradients, which have been copied elsewhere.

    With replicas FSDP2 keeps them until the backward ends, so that no memory is used again while an all-reduce may
    still write to it (torch PR 180900); a copy that was waited for came after it.
    """
    if getattr(unit, "_all_reduce_state", None) is not None:
        unit._all_reduce_state = None


def _outer_units(parts: ModelParts) -> Sequence[list[nn.Module]]:
    """Return the units around the layers: one for tied weights, which may lie in one group only, else two.

    Untied, embedding and head are apart: one group would need a reduce-scatter buffer for both tables at once.
    """
    norm = [parts.final_norm] if parts.final_norm is not None else []
    norm = [module for module in norm if not isinstance(module, FSDPModule)]  # one that computes in fp32 by itself
    if parts.tied:
        return [[parts.embedding, *norm, parts.head]]
    return [[parts.embedding], [*norm, parts.head]]
