"""Build a run: the one place that knows the order in which its parts are made.

Training, planning and the tests all call `build_run`; on a simulated runtime the same lines run on fake tensors.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn

from fsdp_trainer.activation_checkpointing import apply_activation_checkpointing
from fsdp_trainer.attention import describe_fallback
from fsdp_trainer.causality import prove
from fsdp_trainer.config import Config
from fsdp_trainer.decoder_probe import check_decoder, find_fakes
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch_profile import check_layer_class
from fsdp_trainer.loading import initialize_randomly, load_weights, plan_loading
from fsdp_trainer.loss import attach_loss, find_logit_transform
from fsdp_trainer.model import (
    ModelParts,
    apply_dtype,
    apply_freezing,
    build_meta_model,
    check_positions,
    find_parts,
    load_hf_config,
    materialize_parameters,
    place_buffers,
)
from fsdp_trainer.optim.adamw import build_adamw, build_parameter_groups
from fsdp_trainer.optim.eight_bit import choose_8bit, describe_8bit, load_kernels
from fsdp_trainer.optim.host_gradients import HostGradients
from fsdp_trainer.optim.masters import send_masters, trained_weights
from fsdp_trainer.optim.offloaded_adamw import OffloadedAdamW
from fsdp_trainer.optim.sharded_adamw import ShardedAdamW
from fsdp_trainer.optim.transfers import can_pin
from fsdp_trainer.patches import skip_padding_warning
from fsdp_trainer.progress import log_line
from fsdp_trainer.router_loss import find_router_loss
from fsdp_trainer.runtime import Runtime, check_precision
from fsdp_trainer.sharding import (
    COMPUTE_DTYPES,
    Sharding,
    apply_sharding,
    build_mesh,
    reduction_units,
    release_reduced,
    strategy_name,
    widen_gradients,
)
from fsdp_trainer.units import format_bytes, format_count, format_number
from fsdp_trainer.weight_files import find_folder


@dataclass(frozen=True)
class Run:
    """A sharded model with its optimizer, ready for `train_step`.

    `model` is the Hugging Face model itself, its parameters are DTensors under their own names. `hf_config` is the
    source's config, untouched, for the export. `facts` has one line per applied technique, for the log.
    """

    config: Config
    runtime: Runtime
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    sharding: Sharding
    hf_config: Any
    facts: tuple[str, ...]

    @property
    def host_gradients(self) -> HostGradients | None:
        """The gradients, where they are on the host; else each parameter has its own."""
        return self.optimizer.gradients if isinstance(self.optimizer, OffloadedAdamW) else None


def build_run(config: Config, runtime: Runtime, *, load: bool = True) -> Run:
    """Build the run that `config` describes on `runtime`, weights loaded unless `load` is False (a resume follows).

    Raises ConfigError or CheckpointError for a model that cannot be trained, before any memory is taken on the device.
    """
    # 1. Refuse what the hardware or the model cannot do while nothing is allocated.
    _check_machine(config, runtime)
    # 2. Parameters on meta: no rank ever holds the whole model. They rest in fp32 unless the masters are elsewhere.
    hf_config, model, parts = _build_meta(config)
    check_decoder(model, parts, packing=config.data.packing, seq_len=config.data.seq_len)
    check_layer_class(runtime.launched_with, _layer_classes(parts))
    # 3. The loss replaces the head's forward before FSDP hooks the modules, so that the weight is whole around it.
    attach_loss(
        model,
        decoder=parts.decoder,
        head=parts.head,
        transform=find_logit_transform(model, decoder=parts.decoder, head=parts.head, hf_config=model.config),
        router_loss=find_router_loss(model),
        **config.loss.model_dump(),
    )
    # 4. Freezing before sharding: FSDP plans gradients, and the optimizer its state, by what asks for them.
    apply_freezing(model, config.model.freeze)
    # 5. Checkpointing before sharding: FSDP outside, so a layer is gathered once for recomputation and backward.
    recomputed = apply_activation_checkpointing(
        parts.layers, mode=config.activation_checkpointing.mode, every_n=config.activation_checkpointing.every_n
    )
    with runtime.tensors():
        # 6. Buffers are whole on every rank; FSDP expects them where it computes.
        place_buffers(model, runtime.place)
        # 7. Shard while on meta, then give only the shards memory.
        sharding = _shard(model, parts, config, runtime)
        runtime.limit_waiting()
        materialize_parameters(model, torch.device("cpu") if sharding.offload_params else runtime.device)
        widen_gradients(model, parts, COMPUTE_DTYPES[config.sharding.reduce_dtype or "fp32"])
        assert not parts.tied or parts.embedding.weight is parts.head.weight, "the tie was lost"
        # 8. The optimizer: made before sharding it would hold parameters that are no longer the model's.
        optimizer = _build_optimizer(model, config, sharding, runtime)
        _prepare(runtime, model, optimizer)
        if isinstance(optimizer, OffloadedAdamW):
            # The largest tensors of a step are made at the head: nothing that could have left is to be there.
            parts.head.register_forward_pre_hook(lambda *_: optimizer.gradients.settle())
        scaler = torch.amp.GradScaler(runtime.device.type) if config.precision == "fp16" else None
        facts = _facts(config, runtime, model, len(parts.layers), recomputed, optimizer)
        run = Run(config, runtime, model, optimizer, scaler, sharding, hf_config, facts)
        # 9. Values and random numbers last: a simulated run has none, a resumed one reads its checkpoint instead.
        start_values(run, load=load and not runtime.simulated)
    assert runtime.simulated or not (left := find_fakes(model)), f"fake tensors would train: {left[:3]}"
    return run


def start_values(run: Run, *, load: bool) -> None:
    """Give weights (with `load`) and masters their first values, and every random number its seed.

    `build_run` does it; a run that has been rehearsed begins with it again.
    """
    if load:
        _fill(run.model, run.optimizer, run.hf_config, run.config)
    # Dropout differs between ranks and is the same in every rerun; so is whatever else draws numbers.
    set_seed((run.config.train.seed * 1_000_003 + run.runtime.rank) % 2**32)


def _build_meta(config: Config) -> tuple[Any, Any, ModelParts]:
    """Return the source's config untouched, the model without weights, and its parts."""
    section = config.model
    hf_config = load_hf_config(section.path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    model = build_meta_model(
        copy.deepcopy(hf_config),
        attention=section.attention,
        dtype=torch.float32,
        trust_remote_code=section.trust_remote_code,
    )
    if config.precision == "bf16_pure" or config.sharding.offload == "optimizer":
        apply_dtype(model, COMPUTE_DTYPES[config.precision])
    parts = find_parts(model)
    check_positions(model.config, parts, seq_len=config.data.seq_len)
    skip_padding_warning(parts.decoder)
    return hf_config, model, parts


def _layer_classes(parts: ModelParts) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in parts.layers[0].modules()))


def prove_small_copy(config: Config, hf_config: Any = None) -> tuple[str, ...]:
    """Refuse a model of which a small copy computes wrongly or not at all; return what the log should say."""
    section = config.model
    words = {"trust_remote_code": section.trust_remote_code}
    return prove(
        hf_config or load_hf_config(section.path, revision=section.revision, **words),
        attention=section.attention,
        packing=config.data.packing,
        seq_len=config.data.seq_len,
        dtype=COMPUTE_DTYPES[config.precision],
        **words,
    )


def check_model(config: Config, runtime: Runtime) -> None:
    """Refuse a model that `build_run` would refuse, from its config and file headers alone; seconds, and no weights.

    For before the data are prepared, which may take hours.
    """
    _check_machine(config, runtime)
    hf_config, model, parts = _build_meta(config)
    check_decoder(model, parts, packing=config.data.packing, seq_len=config.data.seq_len)
    for note in prove_small_copy(config, hf_config):
        log_line(note, is_main=runtime.rank == 0)
    if remark := check_layer_class(runtime.launched_with, _layer_classes(parts)):
        log_line(remark, is_main=runtime.rank == 0)
    find_logit_transform(model, decoder=parts.decoder, head=parts.head, hf_config=model.config)
    apply_freezing(model, config.model.freeze)
    if config.model.init == "pretrained":
        plan_loading(model, find_folder(config.model.path, revision=config.model.revision))


def _check_machine(config: Config, runtime: Runtime) -> None:
    check_precision(config.precision, runtime.device)
    if config.optim.name == "paged_adamw_8bit" and runtime.device.type != "cuda" and not runtime.simulated:
        raise ConfigError(
            "Paged memory is the CUDA driver's: there is no GPU that it could leave.",
            values=f"optim.name: paged_adamw_8bit on {runtime.device.type}",
            fix="set optim.name: adamw_8bit, whose checkpoints are the same",
        )
    if config.optim.name != "adamw":
        load_kernels()


def _shard(model: nn.Module, parts: ModelParts, config: Config, runtime: Runtime) -> Sharding:
    sharding = config.sharding
    return apply_sharding(
        model,
        parts,
        mesh=build_mesh(runtime, zero_stage=sharding.zero_stage, replicate=sharding.replicate),
        zero_stage=sharding.zero_stage,
        replicate=sharding.replicate,
        reshard_after_forward=sharding.reshard_after_forward,
        offload_params=sharding.offload == "params",
        host_gradients=sharding.offload == "optimizer",
        pin_memory=runtime.device.type == "cuda" and can_pin(),
        compute_dtype=COMPUTE_DTYPES[config.precision],
        reduce_dtype=COMPUTE_DTYPES[sharding.reduce_dtype or "fp32"],
    )


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, hf_config: Any, config: Config) -> None:
    section, targets = config.model, trained_weights(model, optimizer)
    if section.init == "random":
        initialize_randomly(targets, hf_config, seed=config.train.seed, trust_remote_code=section.trust_remote_code)
    else:
        load_weights(model, section.path, revision=section.revision, targets=targets)
    send_masters(optimizer)


def _build_optimizer(model: nn.Module, config: Config, sharding: Sharding, runtime: Runtime) -> torch.optim.Optimizer:
    """Build torch's AdamW where it can do what is asked for, else ours."""
    optim = config.optim
    groups = build_parameter_groups(model, weight_decay=optim.weight_decay, no_decay=optim.no_decay)
    numbers: dict[str, Any] = {"lr": optim.lr, "betas": (optim.betas[0], optim.betas[1]), "eps": optim.eps}
    if config.steps_with_torch:
        return build_adamw(groups, **numbers, implementation=optim.implementation)
    on_host = sharding.offload_params or (sharding.host_gradients and optim.offload_step == "host")
    computes_on = torch.device("cpu") if on_host else runtime.device
    is_paged = optim.name == "paged_adamw_8bit"
    numbers |= {
        "state_dtype": COMPUTE_DTYPES[optim.state_dtype],
        "seed": config.train.seed,
        "shard": sharding.shard,
        "eight_bit": None if optim.name == "adamw" else choose_8bit(model, device=computes_on, paged=is_paged),
    }
    if not sharding.host_gradients:
        return ShardedAdamW(groups, **numbers)
    pure = config.precision == "bf16_pure"
    return OffloadedAdamW(
        groups,
        frozen=[parameter for parameter in model.parameters() if not parameter.requires_grad],
        **numbers,
        gradients=HostGradients(
            reduction_units(sharding),
            device=runtime.device,
            dtype=COMPUTE_DTYPES[config.sharding.reduce_dtype or "fp32"] if pure else torch.float32,
            shards=sharding.shard_group,
            release=release_reduced,
        ),
        master_dtype=None if pure else torch.float32,
        device=runtime.device,
        on_device=not on_host,
    )


def _prepare(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Hand model and optimizer to Accelerate, which takes an FSDP module as it is, and keep our parameter objects.

    Accelerate re-points optimizer parameters by data_ptr; fake tensors and empty shards all have 0, so several
    parameters would collapse into one (accelerator.py, `_prepare_fsdp2`, 1.15.0). Hence save, restore and compare.
    """
    before = [list(group["params"]) for group in optimizer.param_groups]
    runtime.accelerator.prepare(model, optimizer)
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = parameters
    owned = {id(parameter) for parameter in model.parameters()}
    stray = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    assert not stray, f"{len(stray)} optimizer parameters are not parameters of the sharded model"
    if isinstance(optimizer, ShardedAdamW | OffloadedAdamW):
        optimizer.create_state()  # not before: `prepare` would copy it


def _facts(
    config: Config,
    runtime: Runtime,
    model: nn.Module,
    n_layers: int,
    recomputed: list[int],
    optimizer: torch.optim.Optimizer,
) -> tuple[str, ...]:
    total = sum(parameter.numel() for parameter in model.parameters())
    costs = _bytes_a_parameter(optimizer)
    tensors = [(len(group["params"]), group["weight_decay"] > 0) for group in optimizer.param_groups]
    decayed, rest = (sum(count for count, decays in tensors if decays is wanted) for wanted in (True, False))
    where = f"{format_number(decayed, 'tensor')}, none on {rest}"
    decay = f"weight decay {config.optim.weight_decay:g} on {where}" if decayed else "no decay"
    world = format_number(runtime.world_size, "rank")
    weights = {
        "fp32": "fp32 weights",
        "bf16_pure": "bf16 weights without masters, rounded stochastically",
    }.get(config.precision, f"fp32 masters, {config.precision} compute")
    strategy = strategy_name(config.sharding.zero_stage, config.sharding.replicate)
    lines = [
        f"model {config.model.path}: {format_count(total)} parameters, {weights}, "
        f"{config.sharding.reduce_dtype or 'fp32'} reduction, fp32 loss",
        f"sharded {format_number(n_layers, 'decoder layer')} over {world} ({strategy}"
        f"{_OFFLOADED[config.sharding.offload]}): "
        f"{format_bytes(_local_bytes(model.parameters()))} of parameters a rank",
        f"{sum(costs.values()):.4g} bytes a trained parameter: "
        + ", ".join(f"{name} {size:.4g}" for name, size in costs.items()),
        f"activation checkpointing: {len(recomputed)} of {n_layers} decoder layers are recomputed",
        f"AdamW ({config.optim.implementation if config.steps_with_torch else 'on local shards'}): {decay}",
        *_offload_facts(config, runtime, optimizer),
        *describe_fallback(config.model.attention, model.config),
    ]
    if isinstance(optimizer, ShardedAdamW | OffloadedAdamW) and optimizer.eight_bit is not None:
        lines += describe_8bit(model, optimizer.eight_bit)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        numel = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        shown = ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else "")
        lines.append(f"frozen: {format_count(numel)} parameters in {format_number(len(frozen), 'tensor')} ({shown})")
    return tuple(lines)


def _offload_facts(config: Config, runtime: Runtime, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    if isinstance(optimizer, OffloadedAdamW):
        held = list(optimizer.host_tensors())
        yield (
            f"optimizer on the host: {format_bytes(sum(t.numel() * t.itemsize for t in held))} a rank for masters, "
            f"averages and gradients; the step runs on the {config.optim.offload_step}"
        )
    if config.sharding.offload == "none" or runtime.device.type != "cuda":
        return
    if not (optimizer.is_pinned if isinstance(optimizer, OffloadedAdamW) else can_pin()):
        yield "host memory could not be pinned (a driver or memlock limit): transfers do not overlap with computing"


_OFFLOADED = {
    "none": "",
    "optimizer": ", gradients, averages and masters on the host",
    "params": ", parameters offloaded to the host",
}


def _bytes_a_parameter(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what a trained parameter costs at rest, over the ranks, in the order weights, gradients, state."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    states = [state for p in trained for state in optimizer.state.get(p, {}).values()]
    numel = sum(p.numel() for p in trained)
    return {
        "weights": sum(p.numel() * p.itemsize for p in trained) / numel,
        "gradients": sum(p.numel() * _gradient_bytes(p, optimizer) for p in trained) / numel,
        # torch's AdamW makes its two averages in the first step.
        "optimizer state": sum(s.numel() * s.itemsize for s in states) / numel if states else 8.0,
    }


def _gradient_bytes(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.gradients[parameter].itemsize
    return (getattr(parameter, "grad_dtype", None) or parameter.dtype).itemsize


def _local_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in parameters)
