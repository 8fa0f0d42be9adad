"""Reads a DeepSpeed configuration (ds_config.json) and says what each of its keys becomes.

What a file leaves out has DeepSpeed's defaults, not this program's: those are written into the settings as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.arguments import Arguments, read_arguments
from fsdp_trainer.interop.deepspeed_batch import derive_size, resolve_batch
from fsdp_trainer.interop.deepspeed_facts import SCHEDULES, Facts
from fsdp_trainer.interop.deepspeed_rules import RULES
from fsdp_trainer.interop.key_table import Value, held_values, judge, load_table, read_values
from fsdp_trainer.interop.places import Document, read_json, read_text
from fsdp_trainer.interop.verdicts import Added, Import, Verdict

WHAT = "the DeepSpeed configuration"


def import_deepspeed(
    path: str | Path, *, training_args: str | Path | None = None, world_size: int | None = None
) -> Import:
    """Return what becomes of every key of a ds_config.json.

    `training_args` is a file of Transformers' TrainingArguments, from which "auto" is filled in; `world_size` the
    number of GPUs the run had, where the file does not say it. ConfigError for files that cannot be read.
    """
    document = read_json(read_text(path, what=WHAT), file=str(path), what=WHAT)
    arguments = read_arguments(training_args) if training_args is not None else None
    return judge_deepspeed(document, arguments=arguments, world_size=world_size)


def judge_deepspeed(
    document: Document,
    *,
    arguments: Arguments | None,
    world_size: int | None,
    filled: Mapping[str, tuple[Any, str]] | None = None,
) -> Import:
    """Return what becomes of the keys of a DeepSpeed configuration and of the arguments it is run with.

    `filled` is what a profile has Accelerate fill in for "auto", with its origin, by source: the run starts from there.
    """
    table = load_table("deepspeed_keys")
    given = {key.name: key.value for key in document.keys if key.name in _BATCH_KEYS}
    fill = _Fill(arguments, world_size, given, filled)
    values = read_values(document, table, fill=fill, tool="DeepSpeed")
    held = held_values(values)
    batch = resolve_batch(held, arguments=arguments, world_size=world_size)
    if batch.problem and not _BATCH_KEYS.intersection(key.name.split(".")[0] for key in document.keys):
        fix = "write train_micro_batch_size_per_gpu and gradient_accumulation_steps, and give --world-size N"
        raise ConfigError(f"{WHAT} does not say the batch", values=f"{document.file}: {batch.problem}", fix=fix)
    under_accelerate = arguments is not None or filled is not None
    facts = Facts(held, batch, from_transformers=arguments is not None, under_accelerate=under_accelerate)
    judged = zip(judge(values, RULES, facts), values, strict=True)
    verdicts = [_check_argument(verdict, value, arguments) for verdict, value in judged]
    taken = {name for verdict in verdicts for name in verdict.settings}
    defaults = {name: Added(name, value, why) for name, value, why in _find_defaults(facts, arguments is not None)}
    added = [one for one in defaults.values() if one.name not in taken]
    if arguments is not None:
        taken |= {one.name for one in added}
        beside, more = arguments.beside_deepspeed(taken, batch.world_size)
        verdicts, added = [*verdicts, *beside], [*added, *more]
    return Import(
        source=document.file,
        tool="a DeepSpeed configuration",
        verdicts=tuple(verdicts),
        added=() if any(verdict.blocks for verdict in verdicts) else tuple(added),
        processes=batch.world_size,
        notes=(*document.notes, *_remarks(facts)),
        use_cpu=bool(arguments is not None and arguments.value("use_cpu")),
    )


_BATCH_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


@dataclass(frozen=True)
class _Fill:
    """Where "auto" gets its values: Transformers' arguments, Accelerate's profile, or the other sizes of the batch."""

    arguments: Arguments | None
    world_size: int | None
    sizes: Mapping[str, Any]
    filled: Mapping[str, tuple[Any, str]] | None

    def __call__(self, source: str) -> tuple[Any, str] | str:
        if source == "amp":
            return False, "as Transformers has it"
        if self.arguments is not None:
            found = self.arguments.fill(source, self.world_size)
            return found or "auto is a product with the number of GPUs: give --world-size N"
        if self.filled is not None and source in self.filled:
            return self.filled[source]
        if (size := derive_size(source, self.sizes, self.world_size)) is not None:
            return size, f"which follows from the other sizes and {self.world_size} GPUs"
        if self.filled is not None:
            return "auto is filled in by your script: write the value, or use import-deepspeed with --training-args"
        return "auto is filled in by Transformers: give --training-args, or write the value"


def _check_argument(verdict: Verdict, value: Value, arguments: Arguments | None) -> Verdict:
    """Refuse a value that the arguments contradict, as Transformers does."""
    if arguments is None or value.entry is None or not value.entry.auto or value.key.value == "auto":
        return verdict
    said = arguments.said(value.entry.auto)
    is_batch = value.entry.name in _BATCH_KEYS  # which is refused then in any case, and this is why
    if said is None or said[0] == value.value or (verdict.kind == "refused" and not is_batch):
        return verdict
    text = f"{value.key.value} here, {said[1]}: Transformers refuses that; make both the same"
    return Verdict(verdict.key, "refused", text, verdict.settings, verdict.blocks)


def _find_defaults(facts: Facts, from_transformers: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings that DeepSpeed's own defaults ask for where the file says nothing."""
    yield from _step_defaults(facts)
    yield from _optimizer_defaults(facts)
    yield from _schedule_defaults(facts, from_transformers)
    if not from_transformers:
        why = "DeepSpeed does not switch it on: set full where your script calls gradient_checkpointing_enable()"
        yield "activation_checkpointing.mode", "none", why
        yield "data.packing", False, "one record a row"


def _step_defaults(facts: Facts) -> Iterator[tuple[str, Any, str]]:
    yield "batch.global_batch_size", facts.batch.global_batch_size, facts.batch.equation
    yield "batch.micro_batch_size", facts.batch.micro_batch_size, facts.batch.equation
    yield "sharding.zero_stage", 0, "without a stage DeepSpeed shards nothing"
    yield "precision", "fp32", "neither bf16 nor fp16 is enabled"
    yield "optim.max_grad_norm", 1.0, "DeepSpeed's default since 0.19; before it was off"


def _optimizer_defaults(facts: Facts) -> Iterator[tuple[str, Any, str]]:
    if "optimizer.type" not in facts.values:
        return
    why = "DeepSpeed's default"
    yield "optim.lr", 1e-3, why
    yield "optim.betas", [0.9, 0.999], why
    yield "optim.eps", 1e-8, why
    decay = 0.01 if facts.values.get("optimizer.params.torch_adam") else 0.0
    yield "optim.weight_decay", decay, "torch's default" if decay else why
    if decay and "optimizer.params.weight_decay" not in facts.values:
        yield "optim.no_decay", [], "DeepSpeed decays every parameter that it is given"


def _schedule_defaults(facts: Facts, from_transformers: bool) -> Iterator[tuple[str, Any, str]]:
    kind = facts.values.get("scheduler.type")
    if kind is None:
        if from_transformers:
            return  # its lr_scheduler_type then
        yield "schedule.name", "constant", "without a scheduler DeepSpeed keeps the learning rate"
        yield "schedule.warmup_steps", 0, "without a scheduler DeepSpeed keeps the learning rate"
        return
    if kind not in SCHEDULES:
        return
    why = f"{kind}'s default"
    yield "schedule.warmup_steps", 1000, why
    yield "schedule.warmup_shape", "log", why
    if kind == "WarmupDecayLR":
        yield "schedule.min_lr_ratio", 0.0, why
        if "scheduler.params.warmup_max_lr" not in facts.values:
            yield "optim.lr", 1e-3, why
    if kind == "WarmupCosineLR":
        yield "schedule.min_lr_ratio", 1e-4, why


def _remarks(facts: Facts) -> Iterator[str]:
    if facts.precision in ("bf16", "fp16") and not facts.values.get("communication_data_type"):
        yield (
            f"gradients are summed over ranks in fp32; DeepSpeed sums them in {facts.precision} "
            "(sharding.reduce_dtype says otherwise)"
        )
    if "optimizer.type" not in facts.values and not facts.from_transformers:
        yield "the file names no optimizer, so your script made one: set optim.lr and the rest as it has them"
    yield "the loss is the mean over all supervised tokens of a step, over all ranks and micro-batches"
