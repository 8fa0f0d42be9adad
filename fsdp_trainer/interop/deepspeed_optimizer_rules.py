"""The verdicts on the optimizer and scheduler sections of a DeepSpeed configuration."""

import difflib
from typing import Any

from fsdp_trainer.interop.deepspeed_facts import SCHEDULES, Facts
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, differs, mapped, not_needed, refused

_OTHER_SCHEDULES = ("OneCycle", "LRRangeTest")
_OPTIMIZERS = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "sgd", "onebitadam", "zerooneadam", "onebitlamb")
_OPTIMIZERS += ("muadam", "muadamw", "musgd")


# Optimizer


def _optimizer(value: str, facts: Facts) -> Outcome:
    name = value.strip().lower()
    l2 = name == "adam" and facts.get("optimizer.params.adam_w_mode", default=True) is False
    if name in ("adam", "adamw") and not (l2 and facts.get("optimizer.params.weight_decay", default=0)):
        text = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if name == "adam" and not l2 else ""
        text = "without weight decay Adam and AdamW are the same" if l2 else text
        return mapped(text, optim__name="adamw")
    if l2:
        return refused(
            "adam_w_mode: false adds the weight decay to the gradient, which AdamW does not", optim__name="adamw"
        )
    near = difflib.get_close_matches(name, _OPTIMIZERS, n=1, cutoff=0.75) if name not in _OPTIMIZERS else []
    known = f"; did you mean {near[0]}?" if near else ""
    return refused(f"the optimizers here are adamw and adamw_8bit{known}", optim__name="adamw")


def _other_optimizer(value: Any, facts: Facts) -> Outcome:
    kind = str(facts.get("optimizer.type", default="")).lower()
    if kind in ("adam", "adamw", ""):
        return refused("AdamW takes no such key, and DeepSpeed fails on it")
    return not_needed(f"{facts.values['optimizer.type']}'s own")


def _of_optimizer(rule: Any) -> Any:
    """Make a rule of the optimizer's keys that says so where DeepSpeed makes no optimizer."""

    def checked(value: Any, facts: Facts) -> Outcome:
        if "optimizer.type" in facts.values:
            return rule(value, facts)
        return not_needed("there is no optimizer.type, so DeepSpeed makes no optimizer and your script does")

    return checked


def _lr(value: float, facts: Facts) -> Outcome:
    if value <= 0:
        return blocked("takes a rate above 0")
    peak = facts.peak
    if peak is not None and peak != value:
        return not_needed(f"CONFLICT: the scheduler's warmup_max_lr {peak} is what DeepSpeed trains with, not this")
    return mapped(optim__lr=value)


def _betas(value: list[float], facts: Facts) -> Outcome:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        return blocked("takes two numbers from 0 to below 1")
    return mapped(optim__betas=[float(beta) for beta in value])


def _eps(value: float, facts: Facts) -> Outcome:
    return mapped(optim__eps=value) if value > 0 else blocked("takes a number above 0")


def _weight_decay(value: float, facts: Facts) -> Outcome:
    if value < 0:
        return blocked("takes 0 or more")
    if not value:
        return mapped(optim__weight_decay=value)
    if facts.from_transformers:
        text = "as Transformers, on all but biases and norms"
        return mapped(text, optim__weight_decay=value, optim__no_decay=["norm", "bias"])
    text = "on every parameter, as DeepSpeed does with all that it is given; your script may have made groups"
    return mapped(text, optim__weight_decay=value, optim__no_decay=[])


# Schedule


def _scheduler(value: str, facts: Facts) -> Outcome:
    if value in SCHEDULES:
        return mapped("rate by rate", schedule__name=SCHEDULES[value], schedule__convention="deepspeed")
    near = difflib.get_close_matches(value, (*SCHEDULES, *_OTHER_SCHEDULES), n=1)
    text = "the schedules here are constant, linear and cosine"
    if near and near[0] != value:
        text += f"; did you mean {near[0]}?"
    return refused(text, schedule__name="constant", schedule__warmup_steps=0)


def _of_schedule(facts: Facts, *kinds: str) -> Outcome | None:
    """Return why a key of other schedules is not read, or None where the schedule is one of `kinds`."""
    kind = facts.get("scheduler.type")
    if kind in kinds:
        return None
    if kind is None:
        return not_needed("there is no scheduler.type, so DeepSpeed makes no schedule")
    return (
        refused(f"{kind} takes no such key, and DeepSpeed fails on it")
        if kind in SCHEDULES
        else not_needed(f"{kind}'s")
    )


def _other_scheduler(value: Any, facts: Facts) -> Outcome:
    return _of_schedule(facts) or not_needed("")


def _warmup_min_lr(value: float, facts: Facts) -> Outcome:
    other = _of_schedule(facts, "WarmupLR", "WarmupDecayLR")
    if other is not None:
        return other
    if facts.peak is None:
        if value:
            return blocked("the highest rate is not in the file: write warmup_max_lr")
        ratio = 0.0
    elif not 0 <= value <= facts.peak:
        return blocked(f"takes a rate from 0 to {facts.peak}, the highest one")
    else:
        ratio = value / facts.peak
    if facts.values["scheduler.type"] == "WarmupDecayLR":
        return mapped(schedule__warmup_min_ratio=ratio, schedule__min_lr_ratio=ratio)
    return mapped(schedule__warmup_min_ratio=ratio)


def _warmup_max_lr(value: float, facts: Facts) -> Outcome:
    other = _of_schedule(facts, "WarmupLR", "WarmupDecayLR")
    if other is not None:
        return other
    if value <= 0:
        return blocked("takes a rate above 0")
    lr = facts.get("optimizer.params.lr", default=value)
    return mapped("" if lr == value else f"CONFLICT: goes before optimizer.params.lr {lr}", optim__lr=value)


def _warmup_steps(value: float, facts: Facts) -> Outcome:
    other = _of_schedule(facts, *SCHEDULES)
    if other is not None:
        return other
    if isinstance(value, float) and 0 < value < 1:  # "auto" from a share
        return mapped(schedule__warmup_ratio=value, schedule__warmup_steps=None)
    if value < 2:
        return mapped("DeepSpeed takes at least 2", schedule__warmup_steps=2)
    return mapped(schedule__warmup_steps=int(value))


def _warmup_type(value: str, facts: Facts) -> Outcome:
    other = _of_schedule(facts, *SCHEDULES)
    if other is not None:
        return other
    if value in ("log", "linear"):
        return mapped(schedule__warmup_shape=value)
    return differs("neither log nor linear: DeepSpeed takes log then", schedule__warmup_shape="log")


def _total_steps(value: int | None, facts: Facts) -> Outcome:
    other = _of_schedule(facts, "WarmupDecayLR", "WarmupCosineLR")
    if other is not None:
        return other
    if value is None:
        return mapped("the length of the run", schedule__total_steps=None)
    return mapped(schedule__total_steps=value) if value >= 1 else blocked("takes 1 or more")


def _warmup_min_ratio(value: float, facts: Facts) -> Outcome:
    other = _of_schedule(facts, "WarmupCosineLR")
    if other is not None:
        return other
    return mapped(schedule__warmup_min_ratio=value) if 0 <= value <= 1 else blocked("takes 0 to 1")


def _cos_min_ratio(value: float, facts: Facts) -> Outcome:
    other = _of_schedule(facts, "WarmupCosineLR")
    if other is not None:
        return other
    return mapped(schedule__min_lr_ratio=value) if 0 <= value <= 1 else blocked("takes 0 to 1")


OPTIMIZER_RULES: Rules = {
    "optimizer": _optimizer,
    "other_optimizer": _other_optimizer,
    "lr": _of_optimizer(_lr),
    "betas": _of_optimizer(_betas),
    "eps": _of_optimizer(_eps),
    "weight_decay": _of_optimizer(_weight_decay),
    "scheduler": _scheduler,
    "other_scheduler": _other_scheduler,
    "warmup_min_lr": _warmup_min_lr,
    "warmup_max_lr": _warmup_max_lr,
    "warmup_steps": _warmup_steps,
    "warmup_type": _warmup_type,
    "total_steps": _total_steps,
    "warmup_min_ratio": _warmup_min_ratio,
    "cos_min_ratio": _cos_min_ratio,
}
