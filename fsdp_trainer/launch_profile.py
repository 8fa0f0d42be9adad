"""Accelerate profiles: written for this machine, and checked against the settings of a run before anything starts.

What a profile says about FSDP is either what the settings say too, or refused by name with both values: Accelerate
itself accepts any key inside `fsdp_config` in silence (accelerate 1.15, commands/launch.py).
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import Problem, describe_excess, format_value, raise_problems
from fsdp_trainer.errors import ConfigError

# accelerate/commands/config/config_args.py, ClusterConfig; every other top-level key ends Accelerate with a traceback.
TOP_LEVEL_KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "downcast_bf16", "fsdp_config"),
    *("deepspeed_config", "megatron_lm_config", "fp8_config", "parallelism_config", "mpirun_config", "dynamo_config"),
    *("dynamo_backend", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
    *("command_file", "commands", "fp16"),
)

# Sections that mean another engine or another way to split the work.
_FOREIGN_SECTIONS = {
    "deepspeed_config": "this trainer runs FSDP2; set sharding.zero_stage in the settings",
    "megatron_lm_config": "this trainer runs FSDP2 alone",
    "parallelism_config": "set sharding.replicate in the settings for HYBRID_SHARD; other splits do not exist here",
    "fp8_config": "set precision: bf16 or fp16 in the settings",
    "mpirun_config": "start the machines one by one with machine_rank",
}

# Accelerate's argument parser has its own default for these, so a profile never wins (commands/launch.py:1278).
_IGNORED_BY_ACCELERATE = {"rdzv_backend": "static", "same_network": None, "enable_cpu_affinity": False}

STRATEGY_NUMBERS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
STRATEGY_NUMBERS["5"] = "HYBRID_SHARD_ZERO2"

_PREFETCH_FIX = (
    "leave it out: FSDP2 prefetches by itself, and Accelerate reads fsdp_backward_prefetch, under FSDP1 only"
)


def write_profile(
    path: str | Path,
    config: Config,
    *,
    processes: int,
    use_cpu: bool,
    machines: int = 1,
    further: Mapping[str, Any] | None = None,
) -> Path:
    """Write an Accelerate profile that agrees with the settings, and return its path.

    `processes` are those of all machines; of several, each is started with its own --machine_rank. `further` holds
    top-level keys to set as well, such as the address of the first machine.
    """
    profile = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "use_cpu": use_cpu,
        "num_machines": machines,
        "machine_rank": 0,
        "num_processes": processes,
        **({"main_process_port": 0} if machines == 1 else {}),
        # `precision` acts through FSDP2's own policy; Accelerate's autocast on top would change the loss.
        "mixed_precision": "no",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": config.sharding.zero_stage == 3,
            "fsdp_offload_params": config.sharding.offload == "params",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        },
    }
    path = Path(path)
    path.write_text(yaml.safe_dump(profile | dict(further or {}), sort_keys=False), encoding="utf-8")
    return path


def read_profile(path: str | Path) -> dict[str, Any]:
    """Read a profile with the reader Accelerate uses (YAML 1.1), so that both see the same values."""
    path = Path(path)
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"the Accelerate profile {wrong}", values=str(path), fix="give the path of a file")
    try:
        profile = yaml.safe_load(path.read_text(encoding="utf-8"))
        if excess := describe_excess(profile):
            raise ValueError(excess)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        found = f"{path}: {' '.join(str(error).split())}"
        raise ConfigError("the Accelerate profile cannot be read", values=found, fix="correct that place") from None
    if not isinstance(profile, dict):
        raise ConfigError(
            "the Accelerate profile is not a list of `name: value` lines",
            values=str(path),
            fix="start from a file of configs/accelerate/, or leave --profile out and one is written",
        )
    if "distributed_type" not in profile and len(Config.model_fields.keys() & profile.keys()) > 1:
        raise ConfigError("this is a settings file, no Accelerate profile", values=str(path), fix="give it as --config")
    return profile


def check_profile(profile: Mapping[str, Any], config: Config, *, source: str = "the Accelerate profile") -> None:
    """Raise one ConfigError that names everything in a profile that contradicts the settings or cannot take effect."""
    section = profile.get("fsdp_config") or {}
    problems = [*_top_level(profile, config)]
    if isinstance(section, Mapping):
        values = {name if name.startswith("fsdp_") else f"fsdp_{name}": v for name, v in _named(section)}
        problems += _version(values) if profile.get("distributed_type") == "FSDP" else []
        problems += check_fsdp_values(values, config)
    else:
        problems.append(Problem("fsdp_config is not a section", f"fsdp_config: {section!r}", "write keys under it"))
    raise_problems(problems, source=source)


def _named(section: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    return ((str(name), value) for name, value in section.items())


def _top_level(profile: Mapping[str, Any], config: Config) -> Iterator[Problem]:
    yield from _unknown_keys(profile)
    yield from _engine(profile)
    yield from _mixed_precision(profile.get("mixed_precision"), config)
    processes = profile.get("num_processes", 1)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        yield _problem("num_processes is not a number of processes", "num_processes", processes, "set it to 1 or more")
    for name, advice in _FOREIGN_SECTIONS.items():
        if profile.get(name):
            yield _problem(f"{name} cannot take effect", name, profile[name], f"leave it out: {advice}")
    dynamo = profile.get("dynamo_config") or {}
    backend = dynamo.get("dynamo_backend", dynamo.get("backend")) if isinstance(dynamo, Mapping) else dynamo
    if str(backend or profile.get("dynamo_backend") or "no").lower() != "no":
        yield _problem("compiling comes later", "dynamo_config", dynamo or backend, "leave it out")
    for name, default in _IGNORED_BY_ACCELERATE.items():
        # `same_network: true` and the like come from Accelerate's wizard and are what happens anyway.
        harmless = {default, True} if name == "same_network" else {default}
        if name in profile and profile[name] not in harmless:
            fix = f"leave it out, and give --{name} to accelerate launch if you need it"
            yield _problem(f"accelerate launch ignores {name} in a profile", name, profile[name], fix)


def _unknown_keys(profile: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in _named(profile):
        if name in TOP_LEVEL_KEYS:
            continue
        near = difflib.get_close_matches(name, [*TOP_LEVEL_KEYS, *_FSDP_RULES], n=1)
        if name in _FSDP_RULES or (near and near[0] in _FSDP_RULES):
            fix = f"write {near[0]} under fsdp_config"
        elif name in {"gradient_accumulation_steps", "max_grad_norm", "gradient_clipping"}:
            fix = "leave it out: the settings file has batch.global_batch_size and optim.max_grad_norm"
        else:
            fix = f"did you mean {near[0]}?" if near else "leave it out"
        yield _problem(f"Accelerate profiles have no {name}", name, value, fix)


def _engine(profile: Mapping[str, Any]) -> Iterator[Problem]:
    engine = str(profile.get("distributed_type", "")).upper()
    if engine == "NO" and profile.get("num_processes", 1) == 1:
        return
    if engine != "FSDP":
        value = profile.get("distributed_type")
        fix = "set distributed_type: FSDP, with fsdp_config: {fsdp_version: 2}"
        yield _problem("the profile does not ask for FSDP", "distributed_type", value, fix)
    elif profile["distributed_type"] != "FSDP":
        yield _problem(
            "Accelerate wants it in capitals",
            "distributed_type",
            profile["distributed_type"],
            "set distributed_type: FSDP",
        )


def _mixed_precision(value: Any, config: Config) -> Iterator[Problem]:
    if value is False:  # YAML 1.1 reads `no` as false, and Accelerate then fails on it
        yield _problem("mixed_precision is a boolean", "mixed_precision", value, "write it in quotes: 'no'")
    elif value is not None and str(value).lower() not in {"no", config.precision.removesuffix("_pure")}:
        yield Problem(
            "the profile's mixed_precision contradicts the settings",
            f"mixed_precision: {value} in the profile, precision: {config.precision} in the settings",
            "make both the same, or set mixed_precision: 'no' in the profile and let the settings decide",
        )


def _version(values: Mapping[str, Any]) -> Iterator[Problem]:
    version = values.get("fsdp_version")
    if version is None:
        fix = "set fsdp_version: 2 under fsdp_config"
        yield _problem("without fsdp_version Accelerate takes FSDP1, which is not run here", "fsdp_version", None, fix)


# One rule a key: takes the value and the settings, returns what is wrong and what to do, or None where both agree.
_Rule = Callable[[Any, Config], tuple[str, str] | None]


def as_bool(value: Any) -> bool | None:
    """Read a flag as Accelerate does (utils/environment.py, str_to_bool); None for anything else."""
    text = str(value).strip().lower()
    if text in {"y", "yes", "t", "true", "on", "1"}:
        return True
    return False if text in {"n", "no", "f", "false", "off", "0"} else None


def _must_equal(expected: Callable[[Config], bool], name: str) -> _Rule:
    def rule(value: Any, config: Config) -> tuple[str, str] | None:
        flag = as_bool(value)
        if flag is None:
            return "is neither true nor false", "write true or false without quotes"
        if flag == expected(config):
            return None
        return f"contradicts {name} in the settings", f"make both the same, or leave it out and let {name} decide"

    return rule


def _only(allowed: set[str], reason: str, fix: str) -> _Rule:
    return lambda value, config: None if str(value).strip().lower() in allowed else (reason, fix)


def _strategy(value: Any, config: Config) -> tuple[str, str] | None:
    name = STRATEGY_NUMBERS.get(str(value).strip(), str(value).strip().upper())
    stage = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}.get(name)
    if stage is None:
        return "is not a strategy FSDP2 can run", "leave it out and set sharding.zero_stage in the settings"
    copies = config.sharding.replicate > 1
    if stage == config.sharding.zero_stage and (stage != 3 or copies == (name == "HYBRID_SHARD")):
        return None
    return "contradicts sharding in the settings", "make both the same, or leave it out: FSDP2 does not read it"


def _reshard(value: Any, config: Config) -> tuple[str, str] | None:
    name = str(value).strip().upper()
    if name in STRATEGY_NUMBERS.values():  # FSDP1 profiles write the strategy here
        return _strategy(name, config)
    if as_bool(value) is None:
        return (
            "is neither true nor false",
            "write true or false; groups are sharding.reshard_after_forward in the settings",
        )
    return _must_equal(lambda c: c.sharding.zero_stage == 3, "sharding.zero_stage")(value, config)


_TRUE, _FALSE = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}
_LEAVE_OUT = "leave it out"
_FSDP_RULES: dict[str, _Rule] = {
    "fsdp_version": _only({"2"}, "is not run here", "set fsdp_version: 2"),
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _must_equal(lambda c: c.sharding.offload == "params", "sharding.offload"),
    "fsdp_activation_checkpointing": _must_equal(
        lambda c: c.activation_checkpointing.mode != "none", "activation_checkpointing.mode"
    ),
    "fsdp_activation_checkpointing_offload": _must_equal(
        lambda c: c.activation_checkpointing.offload, "activation_checkpointing.offload"
    ),
    "fsdp_state_dict_type": _only(
        {"sharded_state_dict", "3"},
        "is not how checkpoints are written here",
        "leave it out or set SHARDED_STATE_DICT; export.at_end writes the whole model as a Hugging Face folder",
    ),
    "fsdp_auto_wrap_policy": _only(
        {"transformer_based_wrap"},
        "is not how models are sharded here",
        "leave it out: decoder layers are found by themselves",
    ),
    # Whether the class is the model's decoder layer is known once the model is: see check_layer_class.
    "fsdp_transformer_layer_cls_to_wrap": lambda value, config: None,
    # Each rank loads its own slices, which is what both values are after.
    "fsdp_cpu_ram_efficient_loading": _only(_TRUE | _FALSE, "is neither true nor false", _LEAVE_OUT),
    "fsdp_ignored_modules": _only(
        {"none", ""}, "would leave modules whose gradients differ from rank to rank", "leave it out"
    ),
    # Keys of FSDP1: only the value that FSDP2 always has is let through.
    "fsdp_use_orig_params": _only(_TRUE, "cannot be off under FSDP2", _LEAVE_OUT),
    "fsdp_sync_module_states": _only(_TRUE, "cannot be off: all ranks start from the same weights", _LEAVE_OUT),
    "fsdp_forward_prefetch": _only(_FALSE, "means nothing under FSDP2", _LEAVE_OUT),
    "fsdp_backward_prefetch": _only({"backward_pre", "1"}, "means nothing under FSDP2", _LEAVE_OUT),
    "fsdp_min_num_params": _only(set(), "means nothing where decoder layers are sharded", _LEAVE_OUT),
}
_FSDP_RULES["fsdp_transformer_cls_to_wrap"] = _FSDP_RULES["fsdp_transformer_layer_cls_to_wrap"]

# What the settings say where a profile says otherwise.
_SAYS: dict[str, tuple[str, ...]] = {
    "fsdp_sharding_strategy": ("sharding.zero_stage", "sharding.replicate"),
    "fsdp_reshard_after_forward": ("sharding.zero_stage",),
    "fsdp_offload_params": ("sharding.offload",),
    "fsdp_activation_checkpointing": ("activation_checkpointing.mode",),
    "fsdp_activation_checkpointing_offload": ("activation_checkpointing.offload",),
}


def check_fsdp_values(values: Mapping[str, Any], config: Config) -> list[Problem]:
    """Return what is wrong with the keys of an `fsdp_config`, all of them with their `fsdp_` prefix."""
    problems = []
    for name, value in values.items():
        if name not in _FSDP_RULES:
            problems.append(_unknown_fsdp_key(name, value))
        elif value is not None and (wrong := _FSDP_RULES[name](value, config)) is not None:
            settings = config.to_dict()
            said = [f"{path}: {format_value(_find(settings, path))}" for path in _SAYS.get(name, ())]
            found = ", ".join([f"{name}: {format_value(value)}", *said])
            problems.append(Problem(f"{name} {wrong[0]}", found, wrong[1]))
    return problems


def _find(settings: Mapping[str, Any], path: str) -> Any:
    section, name = path.split(".")
    return settings[section][name]


def _unknown_fsdp_key(name: str, value: Any) -> Problem:
    if name == "fsdp_backward_prefetch_policy":  # stands in Accelerate's own guide, and nothing reads it
        return _problem(f"nothing reads {name}", name, value, _PREFETCH_FIX)
    near = difflib.get_close_matches(name, list(_FSDP_RULES), n=1)
    fix = f"did you mean {near[0]}?" if near else "leave it out"
    return _problem(f"nothing reads {name}: Accelerate ignores keys it does not know", name, value, fix)


def _problem(what: str, name: str, value: Any, fix: str) -> Problem:
    return Problem(what, f"{name}: {format_value(value)}", fix)


# What `accelerate launch` exports when a profile says nothing (accelerate 1.15, utils/launch.py): nobody's wish.
_LAUNCH_DEFAULTS = {
    "FSDP_VERSION": {"1", "2"},
    "FSDP_SHARDING_STRATEGY": {"full_shard", "1"},
    "FSDP_RESHARD_AFTER_FORWARD": {"true"},
    "FSDP_OFFLOAD_PARAMS": {"false"},
    "FSDP_MIN_NUM_PARAMS": {"100000000"},
    "FSDP_FORWARD_PREFETCH": {"false"},
    "FSDP_USE_ORIG_PARAMS": {"true"},
    "FSDP_CPU_RAM_EFFICIENT_LOADING": {"true", "false"},
    "FSDP_SYNC_MODULE_STATES": {"true"},
    "FSDP_ACTIVATION_CHECKPOINTING": {"false"},
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": {"false"},
}
_OTHER_ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")


def check_environment(config: Config, environ: Mapping[str, str]) -> None:
    """Compare what `accelerate launch` exported with the settings; raises ConfigError with both values.

    Under a bare `accelerate launch` the profile's path and its unknown keys are lost, and defaults look like wishes:
    only values that differ from the defaults are compared.
    """
    problems = [*_mixed_precision(environ.get("ACCELERATE_MIXED_PRECISION"), config)]
    problems += [_other_engine(name, environ) for name in _OTHER_ENGINES if as_bool(environ.get(name, "false"))]
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        problems.append(_problem("compiling comes later", "ACCELERATE_DYNAMO_BACKEND", backend, "leave it out"))
    values = {
        name.lower(): value
        for name, value in environ.items()
        if name.lower() in _FSDP_RULES and value.strip().lower() not in _LAUNCH_DEFAULTS.get(name, set())
    }
    problems += check_fsdp_values(values, config)
    raise_problems(problems, source="from the Accelerate profile or the shell")


def _other_engine(name: str, environ: Mapping[str, str]) -> Problem:
    # A profile names one engine, and `accelerate launch` leaves what the shell had exported beside it.
    if as_bool(environ.get("ACCELERATE_USE_FSDP", "false")) and name != "ACCELERATE_USE_PARALLELISM_CONFIG":
        return _problem(
            "the shell asks for another engine than the profile's FSDP", name, environ[name], f"unset {name}"
        )
    return _problem("this trainer runs FSDP2 alone", name, environ[name], "use a profile for FSDP")


def check_layer_class(environ: Mapping[str, str], classes: Sequence[str]) -> str:
    """Refuse a profile that names no decoder layer of the model; return a remark, or "" where there is nothing to say.

    `classes` holds the class of the decoder layers first, then those of the modules inside it: a profile may name one
    of these too, and it is sharded and checkpointed with its layer.
    """
    named = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    names = [name.strip() for name in named.split(",") if name.strip()]
    layer, *inside = classes
    wrong = [name for name in names if name not in classes]
    if wrong or (names and layer not in names):
        folded = {name.lower(): name for name in classes}
        near = difflib.get_close_matches((wrong or names)[0].lower(), list(folded), n=1)
        hint = f"did you mean {folded[near[0]]}? " if wrong and near else ""
        raise ConfigError(
            "the profile's fsdp_transformer_layer_cls_to_wrap is not this model's decoder layer",
            values=f"{named} in the profile, {layer} in the model",
            fix=f"{hint}leave it out: decoder layers are found by themselves",
        )
    also = ", ".join(name for name in dict.fromkeys(names) if name in inside)
    return (
        f"the profile names {also} inside {layer}: only {layer} is sharded and checkpointed, as a whole" if also else ""
    )
