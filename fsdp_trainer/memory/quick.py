"""`simulate --quick`: the closed form of a whole configuration, with the keys of the full simulation, without torch.

What has no closed form is null: what the allocator reserves and the smallest capacity it survives in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import check_learned_positions
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.estimate import ADAMW_8BIT_STATE, GIB, Recipe
from fsdp_trainer.memory.estimate_model import (
    FAMILIES,
    Attention,
    ModelShape,
    count_layer_parameters,
    count_matrices,
    count_parameters,
    read_model_shape,
)
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_step import Timeline, estimate_step, find_peak, phase_peaks, state_bytes
from fsdp_trainer.memory.estimate_time import estimate_step_time
from fsdp_trainer.memory.hardware import Hardware, read_overheads
from fsdp_trainer.memory.host import ProcessParts, estimate_process, host_memory
from fsdp_trainer.memory.recording import PHASES
from fsdp_trainer.memory.simulation import check_precision
from fsdp_trainer.memory.simulation_text import format_step_time
from fsdp_trainer.memory.timing import time_json
from fsdp_trainer.units import format_bytes, format_count

_CODES = 2  # bytes a parameter of an 8-bit state, its scales apart
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16_pure": 2}
# A run needs at least what is allocated and, in the published cases that were replayed, up to 16 % more capacity for
# what the allocator cannot use. Between the two the closed form does not decide.
ALLOCATOR_MARGIN = 1.16


def simulate_quick(config: Config, hardware: Hardware, *, shape: ModelShape | None = None) -> dict[str, Any]:
    """Return the memory of a run by the keys of the full simulation, sizes in GiB of a GPU and its process.

    On top of those keys: `estimate`, `gpus`, `parameters`, `peak_phase`, and `host_node_gib`, a node's RAM by phase.
    `shape` is the model's, where it has been read already.

    `fits` is true or false where that is sure, null where only the full simulation can tell. Raises ConfigError for
    what the closed form does not know and for settings that do not divide over the GPUs.
    """
    shape, settings = _read(config, hardware, shape=shape)
    timeline = estimate_step(shape, settings)
    _, phase, alive = find_peak(timeline)
    allocated, peaks = sum(alive.values()), phase_peaks(timeline)
    limit = hardware.usable_bytes - hardware.outside_bytes
    parts = estimate_parts(config, hardware, shape, settings, peaks=peaks)
    ranks = hardware.gpus_per_node
    node = host_memory(parts, processes=ranks, data_workers=config.data.workers)
    needed, available = (node.peak, ranks * limit) if hardware.is_cpu else (allocated, limit)
    fits = False if needed > available else True if needed * ALLOCATOR_MARGIN <= available else None
    time = estimate_step_time(shape, settings, hardware)
    return {
        "allocated_gib": _gib(allocated),
        "reserved_gib": None,
        "min_capacity_gib": None,
        "host_gib": _gib(host_memory(parts).peak),
        "phases": {name: _gib(peaks[name]) if name in peaks else None for name in PHASES},
        "breakdown": {name: _gib(size) for name, size in alive.items()},
        **time_json(time, tokens_a_rank=settings.tokens * settings.micro_batches),
        "fits": fits,
        "limit": _gib(limit),
        "config": config.to_dict(),
        "estimate": True,
        "gpus": str(hardware),
        "parameters": count_parameters(shape),
        "peak_phase": phase,
        "host_node_gib": {name: _gib(size) for name, size in asdict(node).items()},
    }


def quick_timeline(config: Config, hardware: Hardware) -> Timeline:
    """Return (index, phase, bytes by category) over a run, for the picture; raises as `simulate_quick`."""
    return estimate_step(*_read(config, hardware))


def format_quick(result: dict[str, Any]) -> str:
    """Return the answer as a person reads it."""
    verdict = {True: "fits", False: "does not fit", None: "too close for the closed form: leave out --quick"}
    least = 0.0005 * result["allocated_gib"]  # less is no part of a picture of it
    parts = [(name.replace("_", " "), size) for name, size in result["breakdown"].items() if size > least]
    lines = [
        f"{result['config']['model']['path']}: {format_count(result['parameters'])} parameters on {result['gpus']} "
        "(closed form, an estimate)",
        f"allocated {format_bytes(result['allocated_gib'] * GIB)} a rank at the peak, in {result['peak_phase']}; "
        f"{format_bytes(result['limit'] * GIB)} can be: {verdict[result['fits']]}",
        f"phases: {_listed(entry for entry in result['phases'].items() if entry[1] is not None)}",
        f"at the peak: {_listed(parts)}",
        f"host, a node: {_listed(result['host_node_gib'].items())}",
        *format_step_time(result),
    ]
    return "\n".join(lines)


def _listed(sizes: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {format_bytes(gib * GIB)}" for name, gib in sizes)


def step_settings(config: Config, shape: ModelShape, *, ranks: int, capability: float | None) -> StepSettings:
    """Return what a step's memory depends on of `config` on `ranks` GPUs of one compute capability; None: on CPU."""
    sharding, checkpointing = config.sharding, config.activation_checkpointing
    masked_layers, masks = _masks(config, shape, capability=capability)
    return StepSettings(
        ranks=ranks,
        seq_len=config.data.seq_len,
        micro_batch_size=config.batch.micro_batch_size,
        micro_batches=config.check_world(ranks),
        zero_stage=sharding.zero_stage,
        replicate=sharding.replicate,
        reshard_after_forward=sharding.reshard_after_forward,
        offload_params=sharding.offload == "params",
        offload_optimizer=sharding.offload == "optimizer",
        recipe=_on_device(config),
        state_when_built=not config.steps_with_torch,
        piece_bytes=_piece_bytes(config),
        compute_bytes=_BYTES[config.precision],
        reduce_bytes=_BYTES[sharding.reduce_dtype or "fp32"],
        checkpointing=checkpointing.mode,
        every_n=checkpointing.every_n,
        loss=config.loss.kind,
        chunk_tokens=config.loss.chunk_tokens,
        attention=_attention(config, shape, capability=capability),
        # With a mask Transformers repeats keys and values, so fewer of them than queries are no obstacle.
        masked_attention="scores" if _is_eager(config, shape) else "efficient",
        masked_layers=masked_layers,
        masks=masks,
        mask_rows=config.batch.micro_batch_size if config.data.packing else 1,
        documents=2 if config.data.packing and config.data.seq_len >= 4 else 1,  # as the simulation's rows have
        stepped=recipe_of(config),
        steps_on_device=config.sharding.offload != "params" and config.optim.offload_step == "device",
        evaluates=config.data.eval is not None,
        exports=config.export.at_end,
        export_bytes=_BYTES[config.export.dtype],
    )


def recipe_of(config: Config) -> Recipe:
    """Return the bytes a parameter that the settings cost."""
    weights = 2 if config.precision == "bf16_pure" else 4
    compute = _BYTES[config.precision]
    averages = 2 * _BYTES[config.optim.state_dtype]
    return Recipe(
        weights=weights,
        gradients=max(weights, _BYTES[config.sharding.reduce_dtype or "fp32"]),
        optimizer_state=ADAMW_8BIT_STATE if _is_8bit(config) else averages,
        vector_state=averages,
        step=4 if config.optim.implementation == "foreach" else 0,
        compute=0 if compute == weights else compute,
    )


def _on_device(config: Config) -> Recipe:
    """Return the part of the recipe that GPUs hold."""
    recipe = recipe_of(config)
    if config.optim.name == "paged_adamw_8bit":
        return replace(recipe, optimizer_state=ADAMW_8BIT_STATE - _CODES)
    if config.sharding.offload != "optimizer":
        return recipe
    compute = _BYTES[config.precision]
    reduced = max(compute, _BYTES[config.sharding.reduce_dtype or "fp32"])
    return Recipe(weights=compute, gradients=reduced, optimizer_state=0, step=0, compute=0)


def _is_8bit(config: Config) -> bool:
    return "8bit" in config.optim.name


def _piece_bytes(config: Config) -> int:
    """Return the bytes an element of optim/sharded_adamw.py's piece: what is widened, and what rounding takes."""
    recipe = recipe_of(config)
    averages = 8 if config.optim.state_dtype == "bf16" else 0
    gradient = 4 if (averages or _is_8bit(config)) and recipe.gradients < 4 else 0
    widened = (4 if recipe.weights < 4 else 0) + averages + gradient
    if _is_8bit(config):  # a copy of weight and codes, gone before the rounding
        widened += 10 if recipe.weights < 4 else 6
    elif widened:
        widened += 10  # noise and absolute values in four bytes each, two masks
    if config.sharding.offload != "optimizer":
        return widened
    # On the device two pieces of everything are there at once: optim/offloaded_adamw.py.
    passing = recipe.weights + recipe.gradients + recipe.optimizer_state
    return widened + 2 * int(passing) if config.optim.offload_step == "device" else 0


def _read(config: Config, hardware: Hardware, *, shape: ModelShape | None = None) -> tuple[ModelShape, StepSettings]:
    if config.model.freeze:
        raise ConfigError(
            "The closed form does not know which parameters are frozen.",
            values=f"model.freeze: {list(config.model.freeze)}",
            fix="leave out --quick: the full simulation freezes them as a run does",
        )
    check_precision(config.precision, hardware)
    shape = shape or read_model_shape(config.model.path, revision=config.model.revision)
    if (extra := FAMILIES[shape.family].learned_positions) is not None:
        check_learned_positions(config.data.seq_len, limit=shape.position_rows - extra)
    capability = None if hardware.is_cpu else hardware.capability
    return shape, step_settings(config, shape, ranks=hardware.count, capability=capability)


def estimate_parts(
    config: Config, hardware: Hardware, shape: ModelShape, settings: StepSettings, *, peaks: Mapping[str, int]
) -> ProcessParts:
    """Return what a training process holds on the host; `peaks` are the device's, which on CPU is the same memory."""
    parts = _process(config, hardware, shape, settings)
    if not hardware.is_cpu:
        return parts
    return replace(parts, masters=parts.masters + peaks["load"], resident=parts.resident + max(peaks.values()))


def _process(config: Config, hardware: Hardware, shape: ModelShape, settings: StepSettings) -> ProcessParts:
    recipe = recipe_of(config)
    return estimate_process(
        shape,
        process_bytes=read_overheads(hardware.capability)["process"],
        shards=settings.shards,
        offload=config.sharding.offload,
        landing_bytes=_landing(config, shape, settings),
        paged_bytes=_CODES * count_matrices(shape) if config.optim.name == "paged_adamw_8bit" else 0,
        weights_bytes=recipe.weights,
        gradients_bytes=recipe.gradients,
        optimizer_bytes=state_bytes(shape, recipe) / count_parameters(shape),
        random_init=config.model.init == "random",
        saves=config.checkpoint.enabled,
        async_save=config.checkpoint.async_save,
        exports=config.export.at_end,
        export_bytes=settings.export_bytes,
    )


def _landing(config: Config, shape: ModelShape, settings: StepSettings) -> int:
    """Return the bytes of a rank in which gradients land that are added to others: two of the largest unit's."""
    if config.sharding.offload != "optimizer":
        return 0
    table = shape.vocab * shape.hidden
    if settings.is_alone:
        size = settings.compute_bytes + (4 if settings.micro_batches > 1 and not shape.tied else 0)
        return 2 * table * size if settings.compute_bytes < 4 or settings.micro_batches > 1 else 0
    largest = max(table, max(count_layer_parameters(shape), 0))
    return 2 * largest * settings.reduce_bytes // settings.shards if settings.micro_batches > 1 else 0


def _attention(config: Config, shape: ModelShape, *, capability: float | None) -> Attention:
    """The kernel torch's attention takes: flash on CPU, and on GPUs from Ampere on in half precision, unmasked."""
    if _is_eager(config, shape):
        return "scores"
    if _runs_flash(config, shape, capability=capability):
        return "flash"
    return "efficient" if shape.kv_heads == shape.heads else "scores"


def _is_eager(config: Config, shape: ModelShape) -> bool:
    return config.model.attention == "eager" or shape.softcapped


def _runs_flash(config: Config, shape: ModelShape, *, capability: float | None) -> bool:
    if capability is None:
        return True
    return capability >= 8.0 and config.precision != "fp32" and shape.head_dim <= 256


def _masks(config: Config, shape: ModelShape, *, capability: float | None) -> tuple[int, int]:
    """Return how many layers take a mask, and how many different ones there are.

    Packed documents need none where flash runs: its form for variable lengths knows documents and windows. Rows of one
    document need none but for windows shorter than they are. See attention.py.
    """
    windowed = shape.windowed_layers if shape.window is not None and shape.window < config.data.seq_len else 0
    if not config.data.packing:
        return windowed, min(windowed, 1)
    runs_flash = _runs_flash(config, shape, capability=capability) and (capability is None or shape.head_dim % 8 == 0)
    if runs_flash and not _is_eager(config, shape):
        return 0, 0
    return shape.layers, (windowed > 0) + (windowed < shape.layers)


def _gib(size: float) -> float:
    return round(size / GIB, 4)
