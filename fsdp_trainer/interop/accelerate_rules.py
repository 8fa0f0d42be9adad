"""The verdicts on keys of an Accelerate profile that depend on the value, or on what the profile says elsewhere."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.interop.fsdp_values import (
    STRATEGY_STAGES,
    find_stage,
    judge_layer_classes,
    judge_state_dict_type,
    judge_wrap_policy,
    read_strategy,
)
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, differs, mapped, not_needed, refused

_ENGINES = {"FSDP": "FSDP", "DEEPSPEED": "DEEPSPEED", "NO": "DDP", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP"}
_ENGINES |= {"MULTI_XPU": "DDP", "MULTI_NPU": "DDP", "MULTI_HPU": "DDP", "MULTI_MLU": "DDP", "MULTI_SDAA": "DDP"}


@dataclass(frozen=True)
class ProfileFacts:
    """What the rules may look at: every readable value by its name, and the model's type where it is known."""

    values: Mapping[str, Any]
    model_type: str | None = None

    @property
    def engine(self) -> str:
        """FSDP, DEEPSPEED or DDP; "" for one that is not run here."""
        return _ENGINES.get(str(self.values.get("distributed_type", "")).upper(), "")

    @property
    def processes(self) -> int:
        """Processes over all machines."""
        return max(1, self.values.get("num_processes", 1))

    @property
    def machines(self) -> int:
        """Number of machines."""
        return max(1, self.values.get("num_machines", 1))

    @property
    def dtype(self) -> str:
        """What DeepSpeed computes in by mixed_precision: bf16 (also below fp8), fp16, or "" where it is off."""
        word = str(self.values.get("mixed_precision", "no")).strip().lower()
        return {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(word, "")

    @property
    def version(self) -> int:
        """The FSDP version: 1 where none is said."""
        return self.values.get("fsdp_config.fsdp_version", 1)

    def strategy(self) -> str | None:
        """The sharding strategy by name, wherever it is written; None where nothing readable is."""
        for name in ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"):
            found = read_strategy(self.values[name]) if name in self.values else None
            if found in STRATEGY_STAGES:
                return found
        return None

    @property
    def copies(self) -> int | None:
        """Copies of the model between the processes, where parallelism_config says it."""
        return self.values.get("parallelism_config.parallelism_config_dp_replicate_size")


def _engine(value: str, facts: ProfileFacts) -> Outcome:
    name = value.strip().upper()
    if name == "FSDP":
        return mapped("FSDP2")
    if name == "DEEPSPEED":
        return mapped("the ZeRO stage as FSDP2 runs it")
    if name in _ENGINES:
        return mapped("DDP: every process holds everything, which is stage 0", sharding__zero_stage=0)
    near = difflib.get_close_matches(name, list(_ENGINES), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return blocked(f"{value} is not run here: FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU and NO are{hint}")


def _mixed_precision(value: Any, facts: ProfileFacts) -> Outcome:
    word = "no" if value is False else str(value).strip().lower()
    if word == "no":
        text = "fp32; where the script loads a bf16 model, all of it is bf16: set precision: bf16_pure then"
        return mapped(text, precision="fp32")
    if word in ("bf16", "fp16"):
        return mapped("masters, sums of gradients and the loss are fp32", precision=word)
    if word == "fp8":
        return refused("there is no fp8 here", precision="bf16")
    near = difflib.get_close_matches(word, ["no", "bf16", "fp16", "fp8"], n=1)
    return blocked(f"takes 'no', bf16 or fp16{f'; did you mean {near[0]}?' if near else ''}")


def _old_fp16(value: bool, facts: ProfileFacts) -> Outcome:
    if not value or "mixed_precision" in facts.values:
        return not_needed("mixed_precision says it" if value else "off")
    return mapped("the old name of mixed_precision: fp16", precision="fp16")


def _processes(value: int, facts: ProfileFacts) -> Outcome:
    if value < 1:
        return blocked("takes 1 or more")
    if value % facts.machines:
        return blocked(f"{value} processes are not the same number on each of {facts.machines} machines")
    return mapped("in accelerate.yaml")


def _machines(value: int, facts: ProfileFacts) -> Outcome:
    return mapped("in accelerate.yaml") if value >= 1 else blocked("takes 1 or more")


def _in_profile(value: Any, facts: ProfileFacts) -> Outcome:
    return mapped("in accelerate.yaml")


def _dynamo(value: Any, facts: ProfileFacts) -> Outcome:
    if value is False or str(value).strip().lower() == "no":
        return not_needed("off")
    return refused("compiling comes later")


# fsdp_config


def _of_fsdp(facts: ProfileFacts) -> Outcome | None:
    return None if facts.engine == "FSDP" else not_needed("distributed_type is not FSDP")


def _version(value: int, facts: ProfileFacts) -> Outcome:
    if value not in (1, 2):
        return blocked("takes 1 or 2")
    return _of_fsdp(facts) or (not_needed("FSDP2") if value == 2 else differs("FSDP2 in place of FSDP1"))


def _sharded(name: str, facts: ProfileFacts) -> tuple[str, dict[str, Any]]:
    """Return what a strategy becomes: a remark and settings. HYBRID_SHARD keeps one copy a machine."""
    if not name.startswith("HYBRID") or facts.copies is not None:
        return "", {"sharding__zero_stage": 3 if name.startswith("HYBRID") else STRATEGY_STAGES[name]}
    if facts.machines == 1:
        return "one machine holds one copy, which is FULL_SHARD", {"sharding__zero_stage": 3}
    text = f"one copy a machine: a mesh of {facts.machines} x {facts.processes // facts.machines}"
    return text, {"sharding__zero_stage": 3, "sharding__replicate": facts.machines}


def _strategy(value: Any, facts: ProfileFacts) -> Outcome:
    name = read_strategy(value)
    if name not in STRATEGY_STAGES:
        near = difflib.get_close_matches(name, list(STRATEGY_STAGES), n=1, cutoff=0.5)
        return blocked(f"{value} is no strategy" + (f"; did you mean {near[0]}?" if near else ""))
    other = _of_fsdp(facts)
    if other is not None:
        return other
    text, settings = _sharded(name, facts)
    reshard = facts.values.get("fsdp_config.fsdp_reshard_after_forward")
    if facts.version == 2 and reshard is not None:
        if find_stage(reshard) == settings["sharding__zero_stage"]:
            return not_needed("fsdp_reshard_after_forward says the same, and FSDP2 reads that")
        text = f"FSDP2 reads fsdp_reshard_after_forward, which says otherwise ({reshard}): keep one of them"
        return refused(text)
    if facts.version == 2:
        remark = "Accelerate does not read it with fsdp_version: 2, where it is fsdp_reshard_after_forward"
        return differs(f"{remark}; {text}".removesuffix("; "), **settings)
    if name == "HYBRID_SHARD_ZERO2":
        remark = "as HYBRID_SHARD, which also frees the weights after the forward pass"
        return differs(f"{remark}; {text}".removesuffix("; "), **settings)
    return mapped(text, **settings)


def _reshard(value: Any, facts: ProfileFacts) -> Outcome:
    stage = find_stage(value)
    if stage is None:
        return blocked("takes true or false; groups are sharding.reshard_after_forward in the settings")
    other = _of_fsdp(facts)
    if other is not None:
        return other
    name = read_strategy(value)
    text, settings = _sharded(name, facts) if name in STRATEGY_STAGES else ("", {"sharding__zero_stage": stage})
    if facts.version == 2:
        if name in STRATEGY_STAGES:
            remark = "true or false with fsdp_version: 2, where Accelerate fails on this"
            return differs(f"{remark}; {text}".removesuffix("; "), **settings)
        return mapped("gathered weights are freed after the forward pass" if stage == 3 else "", **settings)
    if "fsdp_config.fsdp_sharding_strategy" in facts.values:
        return not_needed("fsdp_sharding_strategy says it, and FSDP1 reads that")
    remark = "Accelerate does not read it with FSDP1 and took FULL_SHARD; here it has effect"
    return differs(f"{remark}; {text}".removesuffix("; "), **settings)


def _offload(value: bool, facts: ProfileFacts) -> Outcome:
    if not value:
        return not_needed("off")
    return _of_fsdp(facts) or mapped("weights, gradients and optimizer state", sharding__offload="params")


def _checkpointing(value: bool, facts: ProfileFacts) -> Outcome:
    if not value:
        return not_needed("off")
    text = "every decoder layer; the random state is kept, which Accelerate's does not with FSDP2"
    return _of_fsdp(facts) or mapped(text, activation_checkpointing__mode="full")


def _layer_class(value: Any, facts: ProfileFacts) -> Outcome:
    return _of_fsdp(facts) or judge_layer_classes(value, model_type=facts.model_type)


def _wrong_mesh(copies: int, shards: int, facts: ProfileFacts) -> str:
    """Say what the sizes of parallelism_config make together where that is not the number of processes, or ""."""
    parts, product = f"{copies} copies x {shards} shards", copies * shards
    for name in ("tp", "cp", "sp"):
        size = facts.values.get(f"parallelism_config.parallelism_config_{name}_size", 1)
        product *= size
        parts += f" x {size} {name}" if size != 1 else ""
    return "" if product == facts.processes else f"{parts} = {product} are not {facts.processes} processes"


def _replicate(value: int, facts: ProfileFacts) -> Outcome:
    shard = facts.values.get("parallelism_config.parallelism_config_dp_shard_size", 1)
    if wrong := _wrong_mesh(value, shard, facts):
        return blocked(wrong)
    if value == 1:
        return not_needed("one copy")
    if shard == 1:
        return mapped("whole copies: nothing is sharded", sharding__zero_stage=0)
    return mapped(f"a mesh of {value} x {shard} (HYBRID_SHARD)", sharding__zero_stage=3, sharding__replicate=value)


def _shard(value: int, facts: ProfileFacts) -> Outcome:
    if wrong := _wrong_mesh(facts.copies or 1, value, facts):
        return blocked(wrong)
    return mapped("follows from the number of processes and of copies")


def _deepspeed(value: Any, facts: ProfileFacts) -> Outcome:
    return not_needed("distributed_type is not DEEPSPEED")  # else it was read as a DeepSpeed key


RULES: Rules = {
    "engine": _engine,
    "mixed_precision": _mixed_precision,
    "old_fp16": _old_fp16,
    "processes": _processes,
    "machines": _machines,
    "in_profile": _in_profile,
    "dynamo": _dynamo,
    "version": _version,
    "strategy": _strategy,
    "reshard": _reshard,
    "offload": _offload,
    "checkpointing": _checkpointing,
    "wrap_policy": lambda value, facts: _of_fsdp(facts) or judge_wrap_policy(value),
    "layer_class": _layer_class,
    "state_dict_type": lambda value, facts: _of_fsdp(facts) or judge_state_dict_type(str(value)),
    "replicate": _replicate,
    "shard": _shard,
    "deepspeed": _deepspeed,
    "deepspeed_file": _deepspeed,
}
