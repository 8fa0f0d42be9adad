"""The combinations that a plan chooses from: everything the settings allow once what the user fixed is held.

What cannot be combined is left out by the settings' own checks (config_checks.py), so there is one list of rules. No
torch.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import find_conflicts, setting
from fsdp_trainer.config_reading import raise_problems
from fsdp_trainer.config_world_checks import check_world_problems
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import Hardware

Option = Mapping[str, Any]

# What a plan decides; every other setting stays as it is.
SEARCHED = (
    *("precision", "optim.name", "optim.state_dtype", "optim.offload_step"),
    *("sharding.zero_stage", "sharding.replicate", "sharding.reshard_after_forward"),
    *("sharding.offload", "sharding.reduce_dtype"),
    *("activation_checkpointing.mode", "activation_checkpointing.every_n", "batch.micro_batch_size"),
    "checkpoint.async_save",
)
EVERY_N = (8, 4, 2)  # of the decoder layers one in so many is recomputed


def enumerate_candidates(config: Config, hardware: Hardware, *, fixed: Collection[str] = ()) -> Iterator[Config]:
    """Yield every valid combination, those that hold more and do less first; `fixed` names what stays as it is.

    Raises ConfigError where the settings divide over the GPUs in no way, whatever the micro-batch, and where what is
    fixed contradicts itself or the GPUs, so that no combination is left.
    """
    sizes = micro_batch_sizes(config, hardware, fixed=fixed)
    groups = (
        _qualities(config, hardware, fixed=fixed),
        _offloads(config, hardware, fixed=fixed),
        _shardings(config, hardware, fixed=fixed),
        _checkpointings(config, fixed=fixed),
    )
    held = {name: setting(config, name) for name in fixed if name in SEARCHED}
    kept = [[option for option in options if _agrees(option, held)] for options in groups]
    made_any, reasons = False, None
    for options in itertools.product(*kept):
        if _is_double(options[1], options[2]) and "sharding.zero_stage" not in held:
            continue
        made = with_settings(config, {name: value for option in options for name, value in option.items()})
        # Checked with one size: all of them divide the global batch.
        tried = with_settings(made, {"batch.micro_batch_size": sizes[-1]})
        if problems := [*find_conflicts(tried), *check_world_problems(tried, hardware.count)]:
            reasons = problems if reasons is None or len(problems) < len(reasons) else reasons
            continue
        made_any = True
        for size in sizes:
            yield with_settings(made, {"batch.micro_batch_size": size})
    if not made_any and reasons is not None:  # of the combination that lacks least
        raise_problems(reasons, origins=config.origins)


def with_settings(config: Config, changes: Option) -> Config:
    """Return a copy with other values under dotted names, unchecked: the caller asks for the checks once."""
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[key] = value
    made = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=top | made)


def micro_batch_sizes(config: Config, hardware: Hardware, *, fixed: Collection[str] = ()) -> list[int]:
    """Return the micro-batches to try, largest first: all rows of a rank, and the powers of two that divide them."""
    if "batch.micro_batch_size" in fixed:
        _check_batch(config, hardware)
        return [config.batch.micro_batch_size]
    _check_batch(with_settings(config, {"batch.micro_batch_size": 1}), hardware)
    rows = config.batch.global_batch_size // hardware.count
    powers = (2**n for n in range(rows.bit_length()))
    return sorted({rows, *(size for size in powers if rows % size == 0)}, reverse=True)


def _check_batch(config: Config, hardware: Hardware) -> None:
    """Raise ConfigError where the rows do not divide; what else is wrong, another combination may not be."""
    found = check_world_problems(config, hardware.count)
    rows = [problem for problem in found if "batch.global_batch_size" in problem.paths]
    raise_problems(rows, origins=config.origins)


def _is_double(offload: Option, sharding: Option) -> bool:
    """With an offload gradients are reduced in every micro-batch, so stage 1 is stage 2."""
    return offload["sharding.offload"] != "none" and sharding["sharding.zero_stage"] == 1


def _agrees(option: Option, held: Option) -> bool:
    return all(option[name] == value for name, value in held.items() if name in option)


def _qualities(config: Config, hardware: Hardware, *, fixed: Collection[str]) -> list[Option]:
    """The forms of plan.QUALITIES, best first; a reduction that the user fixed is kept in each."""
    if "precision" in fixed and config.precision != "bf16_pure":
        precisions = [config.precision]
    elif hardware.is_cpu:  # which computes in both
        precisions = ["bf16", "fp32"]
    else:
        precisions = ["bf16" if hardware.bf16_flops else "fp16"]
    # Paged moments are 8-bit ones that the driver may move to the host: never better, so tried only where asked for.
    paged = "optim.name" in fixed and config.optim.name == "paged_adamw_8bit"
    in_8_bits = config.optim.name if paged else "adamw_8bit"
    found = [
        _quality(precision, name, state_dtype, reduce_dtype)
        for precision in precisions
        for name, state_dtype, reduce_dtype in (
            ("adamw", "fp32", None),
            ("adamw", "bf16", None),
            (in_8_bits, "fp32", None),
        )
    ]
    if hardware.bf16_flops or hardware.is_cpu:
        found += [
            _quality("bf16_pure", "adamw", "fp32", None),
            _quality("bf16_pure", "adamw", "bf16", "bf16"),
            _quality("bf16_pure", in_8_bits, "fp32", "bf16"),
        ]
    soft = {"sharding.reduce_dtype"} & set(fixed)
    return [{name: value for name, value in option.items() if name not in soft} for option in found]


def _quality(precision: str, name: str, state_dtype: str, reduce_dtype: str | None) -> Option:
    return {
        "precision": precision,
        "optim.name": name,
        "optim.state_dtype": state_dtype,
        "sharding.reduce_dtype": reduce_dtype,
    }


def _offloads(config: Config, hardware: Hardware, *, fixed: Collection[str]) -> list[Option]:
    where = [("none", "host"), ("optimizer", "host"), ("optimizer", "device"), ("params", "host")]
    if hardware.is_cpu and "sharding.offload" not in fixed:
        where = where[:1]  # all of it is host memory
    return [{"sharding.offload": offload, "optim.offload_step": step} for offload, step in where]


def _shardings(config: Config, hardware: Hardware, *, fixed: Collection[str]) -> list[Option]:
    """The stages, copies over nodes (HYBRID), and gathers of the backward within a node."""
    stages = [(stage, 1, None) for stage in ((0, 1, 2, 3) if hardware.count > 1 else (0, 3))]
    if hardware.nodes > 1 and hardware.gpus_per_node > 1:
        stages += [(3, hardware.nodes, None), (3, 1, hardware.gpus_per_node)]
    names = ("sharding.zero_stage", "sharding.replicate", "sharding.reshard_after_forward")
    given = tuple(setting(config, name) for name in names)
    if given not in stages and set(names) & set(fixed):
        stages.append(given)
    return [dict(zip(names, values, strict=True)) for values in stages]


def _checkpointings(config: Config, *, fixed: Collection[str]) -> list[Option]:
    section = config.activation_checkpointing
    modes = [("none", 1), *(("every_n_layers", n) for n in EVERY_N), ("full", 1)]
    given = (section.mode, section.every_n)
    names = ("activation_checkpointing.mode", "activation_checkpointing.every_n")
    if given not in modes and set(names) & set(fixed):
        modes.append(given)
    return [dict(zip(names, values, strict=True)) for values in modes]


def combination(config: Config) -> tuple[Any, ...]:
    """Return all that a plan decides but the micro-batch and how checkpoints are saved."""
    left_out = ("batch.micro_batch_size", "checkpoint.async_save")
    return tuple(setting(config, name) for name in SEARCHED if name not in left_out)


def refuse_unsearchable(config: Config) -> None:
    """Raise ConfigError for settings whose memory the closed form, which prunes, does not know."""
    if config.model.freeze:
        raise ConfigError(
            "A plan does not know yet which parameters are frozen.",
            values=f"model.freeze: {list(config.model.freeze)}",
            fix="leave out model.freeze, or ask `fsdp-trainer simulate` about settings of your own",
        )
