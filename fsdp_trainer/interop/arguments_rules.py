"""The verdicts on training arguments that depend on the value or on other arguments."""

import difflib
import math
from collections.abc import Iterator
from typing import Any, get_args

from fsdp_trainer.config_types import Tracker
from fsdp_trainer.interop.arguments_facts import DEFAULTS, ArgumentFacts
from fsdp_trainer.interop.arguments_schedule_rules import SCHEDULE_RULES, SCHEDULES
from fsdp_trainer.interop.arguments_sharding_rules import SHARDING_RULES
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, differs, mapped, not_needed, refused
from fsdp_trainer.interop.verdicts import Added

_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw"}
_OPTIMIZERS |= {"adamw_bnb_8bit": "adamw_8bit", "adamw_8bit": "adamw_8bit"}


def find_added(facts: ArgumentFacts) -> Iterator[Added]:
    """Yield the settings that Transformers' defaults ask for where an argument is not given."""
    for name, setting in (
        ("learning_rate", "optim.lr"),
        ("weight_decay", "optim.weight_decay"),
        ("adam_epsilon", "optim.eps"),
        ("max_grad_norm", "optim.max_grad_norm"),
        ("seed", "train.seed"),
        ("logging_steps", "log.every_steps"),
        ("save_steps", "checkpoint.every_steps"),
    ):
        yield Added(setting, DEFAULTS[name], f"Transformers' default {name}")
    yield Added("optim.betas", [0.9, 0.999], "Transformers' default adam_beta1 and adam_beta2")
    if facts.value("max_steps") < 1:
        yield Added("train.epochs", 3, "Transformers' default num_train_epochs")
    yield Added("schedule.name", "linear", "Transformers' default lr_scheduler_type")
    yield Added("schedule.convention", "transformers", "its step arithmetic")
    if facts.value("lr_scheduler_type") != "constant":
        yield Added("schedule.warmup_steps", 0, "Transformers' default")
    if SCHEDULES.get(facts.value("lr_scheduler_type")) in ("linear", "cosine"):
        yield Added("schedule.min_lr_ratio", 0.0, "Transformers' schedules end at 0")
    if (
        "validation_file" in facts.held
        and facts.value("eval_strategy") == "steps"
        and facts.value("logging_steps") >= 1
    ):
        yield Added("eval.every_steps", int(facts.value("logging_steps")), "Transformers takes logging_steps")
    yield Added("precision", "fp32", "neither bf16 nor fp16 is on")
    yield Added("activation_checkpointing.mode", "none", "gradient_checkpointing is not on")
    yield Added("data.packing", False, "Transformers takes one record a row")
    if facts.rows is not None:
        why = "per_device_train_batch_size x gradient_accumulation_steps x GPUs, with Transformers' defaults"
        yield Added("batch.global_batch_size", facts.rows, why)
        yield Added("batch.micro_batch_size", facts.value("per_device_train_batch_size"), why)
    if not facts.is_fsdp:
        yield Added("sharding.zero_stage", 0, "without fsdp or deepspeed every GPU holds everything (DDP)")


# Batch, length, optimizer


def _per_device(value: int, facts: ArgumentFacts) -> Outcome:
    if value < 1:
        return blocked("takes 1 or more")
    if facts.rows is None:
        return blocked("the rows of a step depend on the number of GPUs: give --world-size N")
    parts = f"{value} x {facts.value('gradient_accumulation_steps')} accumulation x {facts.world_size} GPUs"
    text = f"{facts.rows} = {parts}"
    return mapped(text, batch__micro_batch_size=value, batch__global_batch_size=facts.rows)


def _accumulation(value: int, facts: ArgumentFacts) -> Outcome:
    if value < 1:
        return blocked("takes 1 or more")
    if facts.rows is None:
        return blocked("the rows of a step depend on the number of GPUs: give --world-size N")
    return mapped("follows from the two batch sizes", batch__global_batch_size=facts.rows)


def _learning_rate(value: float, facts: ArgumentFacts) -> Outcome:
    return mapped(optim__lr=value) if value > 0 else blocked("takes a rate above 0")


def _weight_decay(value: float, facts: ArgumentFacts) -> Outcome:
    if value < 0:
        return blocked("takes 0 or more")
    if not value:
        return mapped(optim__weight_decay=value)
    return mapped("on all but biases and norms", optim__weight_decay=value, optim__no_decay=["norm", "bias"])


def _betas(value: float, facts: ArgumentFacts) -> Outcome:
    if not 0 <= value < 1:
        return blocked("takes 0 to below 1")
    return mapped(optim__betas=[float(facts.value("adam_beta1")), float(facts.value("adam_beta2"))])


def _epsilon(value: float, facts: ArgumentFacts) -> Outcome:
    return mapped(optim__eps=value) if value > 0 else blocked("takes a number above 0")


def _max_grad_norm(value: float, facts: ArgumentFacts) -> Outcome:
    if value < 0:
        return blocked("a norm is not below 0")
    return mapped("" if value else "0 is no clipping", optim__max_grad_norm=value or None)


def _epochs(value: float, facts: ArgumentFacts) -> Outcome:
    if facts.value("max_steps") > 0:
        return not_needed("max_steps goes before it")
    if value <= 0:
        return blocked("takes a number above 0")
    if value != int(value):
        text = f"epochs are whole here: give max_steps for {value} of them"
        return refused(text, train__epochs=math.ceil(value))
    return mapped(train__epochs=int(value))


def _max_steps(value: int, facts: ArgumentFacts) -> Outcome:
    return mapped(train__max_steps=value) if value > 0 else not_needed("num_train_epochs says the length")


def _seed(value: int, facts: ArgumentFacts) -> Outcome:
    if not 0 <= value < 2**32:
        return blocked("takes 0 to 2**32 - 1")
    return differs("other random numbers: rows come in another order", train__seed=value)


def _optim(value: str, facts: ArgumentFacts) -> Outcome:
    name = value.strip().lower().removeprefix("optimizernames.")
    if name in _OPTIMIZERS:
        return mapped(optim__name=_OPTIMIZERS[name])
    if name in ("paged_adamw", "paged_adamw_32bit"):
        return differs("not paged: sharding.offload: optimizer keeps the state on the host", optim__name="adamw")
    if name == "paged_adamw_8bit":
        return differs("not paged: 8-bit state is a quarter the size and sharded", optim__name="adamw_8bit")
    near = difflib.get_close_matches(name, [*_OPTIMIZERS, "paged_adamw_8bit"], n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else ""
    return refused(f"the optimizers here are adamw and adamw_8bit{hint}", optim__name="adamw")


# Precision, checkpointing, sharding


def _precision(name: str) -> Any:
    def rule(value: bool, facts: ArgumentFacts) -> Outcome:
        if not value:
            return not_needed("off")
        if facts.value("bf16") and facts.value("fp16"):
            return blocked("bf16 and fp16 are both switched on: keep one")
        return mapped(precision=name)

    return rule


def _checkpointing(value: bool, facts: ArgumentFacts) -> Outcome:
    if not value:
        return not_needed("off")
    n = facts.held.get("gradient_checkpointing_kwargs.every_n_layers", 1)
    if n > 1:
        return mapped(activation_checkpointing__mode="every_n_layers", activation_checkpointing__every_n=n)
    return mapped("every decoder layer", activation_checkpointing__mode="full")


def _every_n_layers(value: int, facts: ArgumentFacts) -> Outcome:
    return mapped("read with gradient_checkpointing") if value >= 1 else blocked("takes 1 or more")


# Logging, saving, evaluating


def _steps_of(setting: str, strategy: str) -> Any:
    def rule(value: float, facts: ArgumentFacts) -> Outcome:
        kind = str(facts.value(strategy) or "steps").lower()
        if kind != "steps" and (strategy != "eval_strategy" or kind == "epoch"):
            return not_needed(f"{strategy} is {kind}")
        if strategy == "eval_strategy" and "eval_strategy" not in facts.held:
            return not_needed("eval_strategy is no")
        length, text = facts.value("max_steps"), ""
        if 0 < value < 1 and length > 0:
            text = f"{value:g} of max_steps {length}"
            value = math.ceil(length * value)
        if setting == "eval.every_steps" and "validation_file" not in facts.held:
            said = f"{setting}: {value:g}" if value >= 1 else f"{setting} in steps (a share needs max_steps)"
            return differs(f"there is no data to evaluate on yet: set data.eval, and {said} with it")
        if 0 < value < 1:
            return refused("a share of a run whose length is not known here: give max_steps, or write it in steps")
        if value < 1:
            return blocked("takes 1 or more")
        return Outcome("mapped", text, {setting: int(value)})

    return rule


def _strategy(what: str) -> Any:
    def rule(value: str, facts: ArgumentFacts) -> Outcome:
        kind = value.strip().lower()
        if kind == "steps":
            return mapped(f"see {what}_steps")
        if kind == "epoch":
            return differs(_BY_EPOCH[what])
        if kind == "best" and what == "save":
            return differs("set data.eval and checkpoint.keep_best: true, which keeps it beside the latest")
        if kind == "no":
            return _NEVER[what]
        return blocked("takes no, steps or epoch")

    return rule


_BY_EPOCH = {
    "save": "by steps here, as a crash may come at any: checkpoint.every_steps",
    "logging": "by steps here: log.every_steps",
    "eval": "by steps here: set data.eval and eval.every_steps; eval.at_end measures the last epoch",
}
_NEVER = {
    "save": differs("a run always saves: it is what a crash costs"),
    "logging": differs("a run always logs"),
    "eval": not_needed("data.eval is not set"),
}


def _save_total_limit(value: int, facts: ArgumentFacts) -> Outcome:
    return mapped(checkpoint__keep_latest=value) if value >= 1 else blocked("takes 1 or more")


def _report_to(value: list[Any], facts: ArgumentFacts) -> Outcome:
    names = [str(name).lower() for name in value]
    if names in ([], ["none"]):
        return mapped("metrics.jsonl is always written", log__trackers=[])
    known = get_args(Tracker)
    unknown = [name for name in names if name not in known]
    if unknown:
        return refused(f"{', '.join(unknown)}: name the trackers, of {', '.join(known)}", log__trackers=[])
    return mapped(log__trackers=names)


def _sampling(value: str, facts: ArgumentFacts) -> Outcome:
    if value == "random":
        return mapped(data__shuffle=True)
    if value == "sequential":
        return mapped(data__shuffle=False)
    return differs("rows are drawn in any order; data.packing saves the padding", data__shuffle=True)


def _timeout(value: int, facts: ArgumentFacts) -> Outcome:
    return mapped(train__timeout_minutes=value / 60) if value > 0 else blocked("takes seconds above 0")


def _use_cpu(value: bool, facts: ArgumentFacts) -> Outcome:
    return mapped("use_cpu in the profile") if value else not_needed("off")


def _plain(setting: str, text: str = "") -> Any:
    def rule(value: Any, facts: ArgumentFacts) -> Outcome:
        return mapped(text, **{setting: value})

    return rule


RULES: Rules = {
    **SCHEDULE_RULES,
    **SHARDING_RULES,
    "output_dir": _plain("output_dir"),
    "use_cpu": _use_cpu,
    "per_device": _per_device,
    "accumulation": _accumulation,
    "learning_rate": _learning_rate,
    "weight_decay": _weight_decay,
    "betas": _betas,
    "epsilon": _epsilon,
    "max_grad_norm": _max_grad_norm,
    "epochs": _epochs,
    "max_steps": _max_steps,
    "optim": _optim,
    "seed": _seed,
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "checkpointing": _checkpointing,
    "every_n_layers": _every_n_layers,
    "logging_steps": _steps_of("log.every_steps", "logging_strategy"),
    "logging_strategy": _strategy("logging"),
    "save_steps": _steps_of("checkpoint.every_steps", "save_strategy"),
    "save_strategy": _strategy("save"),
    "save_total_limit": _save_total_limit,
    "eval_steps": _steps_of("eval.every_steps", "eval_strategy"),
    "eval_strategy": _strategy("eval"),
    "report_to": _report_to,
    "sampling": _sampling,
    "timeout": _timeout,
    "model_path": _plain("model__path"),
    "model_revision": _plain("model__revision"),
    "tokenizer": _plain("model__tokenizer"),
    "trust_remote_code": _plain("model__trust_remote_code"),
    "attention": _plain("model__attention"),
    "train_data": _plain("data__train"),
    "eval_data": _plain("data__eval"),
    "seq_len": _plain("data__seq_len"),
    "packing": _plain("data__packing"),
}
