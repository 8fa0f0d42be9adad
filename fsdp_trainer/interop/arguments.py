"""Reads Transformers' TrainingArguments from a file: what each becomes, and what DeepSpeed's "auto" stands for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_trainer.config_reading import format_value
from fsdp_trainer.interop.arguments_facts import DEFAULTS, ArgumentFacts
from fsdp_trainer.interop.arguments_rules import RULES, find_added
from fsdp_trainer.interop.key_table import Value, held_values, judge, load_table, read_values
from fsdp_trainer.interop.places import Document, Key, read_json, read_text, read_yaml
from fsdp_trainer.interop.verdicts import Added, Verdict

WHAT = "the file of training arguments"


@dataclass(frozen=True)
class Arguments:
    """Training arguments of a file: every key with its place, and the readable values by name."""

    document: Document
    values: tuple[Value, ...]
    held: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """Return an argument, or Transformers' default of it."""
        return self.held.get(name, DEFAULTS.get(name))

    def source(self, name: str) -> str:
        """Say where an argument's value comes from."""
        shown = f"{name}: {format_value(self.value(name))}"
        place = next((v.key.place for v in self.values if v.entry is not None and v.entry.name == name), "")
        return f"{shown} of {place}" if place else f"{shown}, Transformers' default"

    def fill(self, source: str, world_size: int | None) -> tuple[Any, str] | None:
        """Return the value and the origin of an "auto"; None where the number of GPUs would have to be known."""
        if source == "train_batch_size":
            if world_size is None:
                return None
            parts = self.value("per_device_train_batch_size"), self.value("gradient_accumulation_steps"), world_size
            return math.prod(parts), f"per_device_train_batch_size x gradient_accumulation_steps x GPUs = {parts}"
        if source == "betas":
            return [self.value("adam_beta1"), self.value("adam_beta2")], "from adam_beta1 and adam_beta2"
        if source == "zero":
            return 0, "as Transformers has it"
        if source == "total_steps":
            steps = self.value("max_steps")
            return (steps if steps > 0 else None), f"from {self.source('max_steps')}"
        if source == "warmup_steps":
            return self.warmup()
        name = _NAMES.get(source, source)
        return self.value(name), f"from {self.source(name)}"

    def warmup(self) -> tuple[Any, str]:
        """Return the warm-up in steps, or as a share of the run below 1, and its origin."""
        steps, name = self.value("warmup_steps"), "warmup_steps"
        if not steps and self.held.get("warmup_ratio"):
            steps, name = self.held["warmup_ratio"], "warmup_ratio"
        length = self.value("max_steps")
        if 0 < steps < 1 and length > 0:
            return math.ceil(length * steps), f"{self.source(name)} of {length} steps"
        return (float(steps) if 0 < steps < 1 else int(steps)), f"from {self.source(name)}"

    def said(self, source: str) -> tuple[Any, str] | None:
        """Return what the file itself says of something that a DeepSpeed file may say too; None where it does not."""
        given = {
            "betas": ("adam_beta1", "adam_beta2"),
            "total_steps": ("max_steps",),
            "warmup_steps": ("warmup_steps", "warmup_ratio"),
        }.get(source, (_NAMES.get(source, source),))
        if source in ("train_batch_size", "zero", "amp") or not any(name in self.held for name in given):
            return None
        found = self.fill(source, None)
        if found is None or found[0] is None or (source == "warmup_steps" and isinstance(found[0], float)):
            return None  # a share of a run whose length is not known here
        return found

    def judge(self, world_size: int | None) -> tuple[list[Verdict], list[Added]]:
        """Return the verdict on every argument, and the settings that Transformers' defaults ask for."""
        facts = ArgumentFacts(self.held, world_size, self.warmup())
        verdicts = judge(self.values, RULES, facts)
        taken = {name for verdict in verdicts for name in verdict.settings}
        return verdicts, [added for added in find_added(facts) if added.name not in taken]

    def beside_deepspeed(self, taken: set[str], world_size: int | None) -> tuple[list[Verdict], list[Added]]:
        """Return the same for arguments that a DeepSpeed file goes before: it has said the settings in `taken`.

        A scheduler or an optimizer of the file is the only one: nothing of the arguments' own goes beside it.
        """
        verdicts, added = self.judge(world_size)
        whole = tuple(prefix for name, prefix in _WHOLE.items() if name in taken)
        kept = [one for one in added if one.name not in taken and not one.name.startswith(whole)]
        return [_yield_to(verdict, taken, whole) for verdict in verdicts], kept


_NAMES = {
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
}


# What a file that says the first has said as a whole, and the arguments that only speak of it.
_WHOLE = {"schedule.name": "schedule.", "optim.name": "optim."}
_SPEAKS = {
    "schedule.": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    "optim.": ("optim", "optim_args", "optim_target_modules", "adafactor"),
}


def _yield_to(verdict: Verdict, taken: set[str], whole: Sequence[str]) -> Verdict:
    if any(verdict.key.name.split(".")[0] in _SPEAKS[prefix] for prefix in whole):
        return Verdict(verdict.key, "not needed", "the DeepSpeed file says it, or took it as its auto")
    if not verdict.settings or not taken.intersection(verdict.settings):
        return verdict
    left = {name: value for name, value in verdict.settings.items() if name not in taken}
    if left:
        return replace(verdict, settings=left)
    return Verdict(verdict.key, "not needed", "the DeepSpeed file says it, or took it as its auto")


def read_arguments(path: str | Path) -> Arguments:
    """Read a JSON or YAML file of training arguments; ConfigError where it cannot be read."""
    return make_arguments(read_arguments_document(path))


def read_arguments_document(path: str | Path) -> Document:
    """Return the keys of a file of training arguments, those of a separate fsdp_config file among them."""
    text = read_text(path, what=WHAT)
    is_json = Path(path).suffix.lower() not in (".yaml", ".yml")
    document = (read_json if is_json else read_yaml)(text, file=str(path), what=WHAT)
    return replace(document, keys=tuple(_spliced(document.keys, Path(path).parent)))


def _spliced(keys: tuple[Key, ...], folder: Path) -> Iterator[Key]:
    for key in keys:
        if key.name == "fsdp_config" and isinstance(key.value, str) and key.value:
            what = "the fsdp_config file"
            path = folder / key.value
            inner = read_json(read_text(path, what=what), file=str(path), what=what)
            yield from (replace(one, name=f"fsdp_config.{one.name}") for one in inner.keys)
        else:
            yield key


def make_arguments(document: Document) -> Arguments:
    """Return the arguments of a document that is read."""
    table = load_table("arguments_keys")
    values = tuple(read_values(document, table, fill=lambda source: "", tool="TrainingArguments"))
    return Arguments(document, values, held_values(values))
