"""The verdicts on fsdp and fsdp_config of training arguments."""

import difflib
from typing import Any

from fsdp_trainer.interop.arguments_facts import ArgumentFacts
from fsdp_trainer.interop.fsdp_values import find_stage, judge_layer_classes, judge_state_dict_type, judge_wrap_policy
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, differs, mapped, not_needed, refused


def _fsdp(value: Any, facts: ArgumentFacts) -> Outcome:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if value in (False, "", None) or value == [] or words == ["false"]:
        return not_needed("off")
    reshard = facts.held.get("fsdp_config.reshard_after_forward", True)
    if value is True or words in (["true"], ["True"]):
        stage = 3 if find_stage(reshard) in (None, 3) else 2
        return mapped("what fsdp_config says", sharding__zero_stage=stage)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return blocked("takes true, or words such as full_shard auto_wrap")
    words = [word.lower() for word in words]
    unknown = [word for word in words if find_stage(word) is None and word not in ("auto_wrap", "offload")]
    if unknown:
        known = [
            "full_shard",
            "shard_grad_op",
            "no_shard",
            "hybrid_shard",
            "hybrid_shard_zero2",
            "offload",
            "auto_wrap",
        ]
        near = difflib.get_close_matches(unknown[0], known, n=1)
        return blocked(f"{unknown[0]} is no word of fsdp" + (f"; did you mean {near[0]}?" if near else ""))
    stages = [word for word in words if find_stage(word) is not None]
    settings: dict[str, Any] = {"sharding__zero_stage": find_stage(stages[0]) if stages else 3}
    if "offload" in words:
        settings["sharding__offload"] = "params"
    if any(word.startswith("hybrid") for word in stages):
        text = "HYBRID_SHARD copies the model once a machine: set sharding.replicate to the number of machines"
        return differs(text, **{**settings, "sharding__zero_stage": 3})
    return mapped(**settings)


def _without_fsdp(facts: ArgumentFacts) -> Outcome | None:
    return None if facts.is_fsdp else not_needed("fsdp is off")


def _fsdp_version(value: int, facts: ArgumentFacts) -> Outcome:
    return not_needed("FSDP2") if value == 2 else _without_fsdp(facts) or differs("FSDP2 in place of FSDP1")


def _reshard(value: Any, facts: ArgumentFacts) -> Outcome:
    stage = find_stage(value)
    if stage is None:
        return blocked("takes true or false")
    words = facts.value("fsdp")
    if isinstance(words, str | list) and words not in ("true", "True"):
        return _without_fsdp(facts) or not_needed("the words of fsdp say the strategy")
    return _without_fsdp(facts) or mapped(sharding__zero_stage=stage)


def _cpu_offload(value: bool, facts: ArgumentFacts) -> Outcome:
    if not value:
        return not_needed("off")
    return _without_fsdp(facts) or mapped(sharding__offload="params")


def _unread_offload(value: bool, facts: ArgumentFacts) -> Outcome:
    if not value:
        return not_needed("off")
    return refused(
        "Transformers does not read this name (it is cpu_offload), so nothing was offloaded: write what you mean"
    )


def _layer_class(value: Any, facts: ArgumentFacts) -> Outcome:
    return judge_layer_classes(value)


def _other_file(value: Any, facts: ArgumentFacts) -> Outcome:
    if value in ("", {}, [], None):
        return not_needed("off")
    return blocked("takes a section or the path of a JSON file")


SHARDING_RULES: Rules = {
    "fsdp": _fsdp,
    "fsdp_version": _fsdp_version,
    "reshard": _reshard,
    "cpu_offload": _cpu_offload,
    "unread_offload": _unread_offload,
    "layer_class": _layer_class,
    "other_file": _other_file,
    "wrap_policy": lambda value, facts: judge_wrap_policy(value),
    "state_dict_type": lambda value, facts: judge_state_dict_type(value),
}
