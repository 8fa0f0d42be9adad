"""The verdicts on the schedule and the warm-up of training arguments."""

import difflib
from typing import Any

from fsdp_trainer.interop.arguments_facts import ArgumentFacts
from fsdp_trainer.interop.key_table import Outcome, Rules, blocked, mapped, not_needed, refused

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "linear",
}
# Transformers' others, which take their own lr_scheduler_kwargs.
_OTHERS = (
    *("cosine_with_restarts", "cosine_warmup_with_min_lr", "inverse_sqrt", "warmup_stable_decay", "greedy"),
    "reduce_lr_on_plateau",
)
_NO_WARMUP = ("constant",)


def _kind(facts: ArgumentFacts) -> str:
    return str(facts.value("lr_scheduler_type")).strip().lower().removeprefix("schedulertype.")


def _of_schedule(*kinds: str) -> Any:
    """Make a rule of a key of lr_scheduler_kwargs that says so where the schedule is none of `kinds`."""

    def decorate(rule: Any) -> Any:
        def checked(value: Any, facts: ArgumentFacts) -> Outcome:
            kind = _kind(facts)
            if kind in _OTHERS:
                return not_needed(f"{kind}'s own")
            if kind in ("constant", "constant_with_warmup"):
                return not_needed(f"Transformers gives {kind} no lr_scheduler_kwargs")
            if kind not in kinds:
                return refused(f"{kind} takes no such key, and Transformers fails on it")
            return rule(value, facts)

        return checked

    return decorate


def _scheduler(value: str, facts: ArgumentFacts) -> Outcome:
    name = value.strip().lower().removeprefix("schedulertype.")
    if name not in SCHEDULES:
        near = [] if name in _OTHERS else difflib.get_close_matches(name, list(SCHEDULES), n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = f"the schedules here are constant, linear and cosine{hint}"
        return refused(text, schedule__name="cosine", schedule__convention="transformers")
    ours = SCHEDULES[name]
    settings: dict[str, Any] = {"schedule__name": ours, "schedule__convention": "transformers"}
    if name == "polynomial":
        settings["schedule__min_lr_ratio"] = 1e-7 / facts.value("learning_rate")
        if "lr_scheduler_kwargs.power" not in facts.held or facts.held["lr_scheduler_kwargs.power"] == 1:
            return mapped("power 1 is a straight line, down to lr_end", **settings)
        return refused("a power other than 1 is no straight line", **settings)
    if name == "constant":
        settings["schedule__warmup_steps"] = 0  # Transformers reads no warm-up with it
    return mapped("rate by rate", **settings)


@_of_schedule("polynomial")
def _lr_end(value: float, facts: ArgumentFacts) -> Outcome:
    lr = facts.value("learning_rate")
    return mapped(schedule__min_lr_ratio=value / lr) if 0 <= value <= lr else blocked(f"takes 0 to {lr}")


@_of_schedule("cosine_with_min_lr")
def _min_lr(value: float, facts: ArgumentFacts) -> Outcome:
    lr = facts.value("learning_rate")
    ratio = facts.held.get("lr_scheduler_kwargs.min_lr_rate")
    ratio = facts.held["lr_scheduler_kwargs.min_lr"] / lr if ratio is None else ratio
    return (
        mapped(schedule__min_lr_ratio=float(ratio))
        if 0 <= ratio <= 1
        else blocked("the lowest rate is 0 to the highest")
    )


@_of_schedule("polynomial")
def _power(value: float, facts: ArgumentFacts) -> Outcome:
    return mapped("a straight line") if value == 1 else refused("a power other than 1 is no straight line")


@_of_schedule("cosine", "cosine_with_min_lr")
def _num_cycles(value: float, facts: ArgumentFacts) -> Outcome:
    return mapped("half a cosine") if value == 0.5 else refused("the cosine here is half of one")


def _warmup(value: float, facts: ArgumentFacts) -> Outcome:
    if _kind(facts) in _NO_WARMUP:
        return not_needed("Transformers reads no warm-up with constant")
    if value < 0:
        return blocked("takes 0 or more")
    found = facts.warmup[0]
    if isinstance(found, float):
        return mapped(f"a share, {facts.warmup[1]}", schedule__warmup_ratio=found, schedule__warmup_steps=None)
    return mapped(schedule__warmup_steps=found)


def _warmup_ratio(value: float, facts: ArgumentFacts) -> Outcome:
    if not 0 <= value < 1:
        return blocked("takes 0 to below 1")
    if facts.value("warmup_steps") and value:
        return not_needed("warmup_steps goes before it")
    return _warmup(value, facts)


SCHEDULE_RULES: Rules = {
    "scheduler": _scheduler,
    "min_lr": _min_lr,
    "lr_end": _lr_end,
    "of_other_schedule": _of_schedule()(None),
    "power": _power,
    "num_cycles": _num_cycles,
    "warmup": _warmup,
    "warmup_ratio": _warmup_ratio,
}
