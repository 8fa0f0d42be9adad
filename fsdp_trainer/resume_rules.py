"""What may differ between the settings a checkpoint was saved with and those of the run that goes on from it.

One rule for every setting, with its reason; docs/resuming.md is written from this table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_trainer.config_reading import format_value
from fsdp_trainer.errors import CheckpointError

Verdict = Literal["free", "allowed", "refused"]

# Facts beside the settings that a checkpoint carries and that are compared with the run's own in the same way.
ROWS, VERSIONS, CODE = "data.rows", "versions", "model.code"


@dataclass(frozen=True)
class Rule:
    """What happens when a setting differs: goes on silently, goes on with a line in the log, or is refused."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Change:
    """One setting that differs, with the value in the checkpoint and the one of this run."""

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {format_value(self.saved)} saved, {format_value(self.now)} now"


def _rules(verdict: Verdict, reason: str, *names: str) -> dict[str, Rule]:
    return {name: Rule(verdict, reason) for name in names}


RULES: Mapping[str, Rule] = {
    # free
    **_rules(
        "free",
        "only what is shown and written down",
        "log.every_steps",
        "log.trackers",
        "log.samples",
        "log.report",
        "log.trace_step",
        "profile.start",
        "profile.steps",
    ),
    **_rules("free", "where the run is kept; its folder may be moved", "output_dir"),
    **_rules("free", "says how to resume, which is no part of what resumes", "checkpoint.resume"),
    **_rules("free", "says how to resume, which is no part of what resumes", "checkpoint.resume_anyway"),
    **_rules("free", "only what happens before the first step", "rehearse"),
    **_rules("free", "only how long a missing rank is waited for", "train.timeout_minutes"),
    # allowed
    **_rules(
        "allowed",
        "how the same step is laid out: equal up to rounding",
        "batch.micro_batch_size",
        "sharding.zero_stage",
        "sharding.replicate",
        "sharding.reshard_after_forward",
        "sharding.offload",
    ),
    **_rules(
        "allowed",
        "what is computed again instead of kept: equal up to rounding",
        "activation_checkpointing.mode",
        "activation_checkpointing.every_n",
        "activation_checkpointing.offload",
    ),
    **_rules(
        "allowed",
        "another way to the same numbers: equal up to rounding",
        "model.attention",
        "loss.kind",
        "loss.chunk_tokens",
        "optim.implementation",
        "optim.offload_step",
        "compile.enabled",
    ),
    **_rules(
        "allowed",
        "the length of the run; linear and cosine schedules and warmup_ratio follow it, so the learning rates of the "
        "remaining steps are those of the new length",
        "train.max_steps",
        "train.epochs",
    ),
    **_rules("allowed", "what to do about a step that is not finite", "train.on_nonfinite"),
    **_rules(
        "allowed",
        f"only the rows made of it count; `{ROWS}` compares those",
        "data.train",
        "data.format",
        "data.columns",
        "data.on_bad_record",
        "data.max_record_mib",
    ),
    **_rules(
        "allowed",
        f"evaluation losses before and after are of different records; a share of the training data changes `{ROWS}`",
        "data.eval",
    ),
    **_rules("allowed", "only how fast and where rows are prepared", "data.workers", "data.cache_dir"),
    **_rules("allowed", "only when evaluation losses are measured", "eval.every_steps", "eval.at_end"),
    **_rules(
        "allowed",
        "only what is saved from here on",
        "checkpoint.enabled",
        "checkpoint.every_steps",
        "checkpoint.keep_latest",
        "checkpoint.keep_best",
        "checkpoint.async_save",
    ),
    **_rules("allowed", "only the folder left at the end", "export.at_end", "export.dtype"),
    **_rules("allowed", "other releases may round differently, so the rest is not bitwise the same", VERSIONS),
    # refused
    **_rules(
        "refused",
        "another model, or another origin of the same one",
        "model.path",
        "model.revision",
        "model.init",
        "model.trust_remote_code",
    ),
    **_rules("refused", "the model's own code may compute something else with the same weights", CODE),
    **_rules("refused", "the same words become other tokens", "model.tokenizer"),
    **_rules("refused", "other parameters train, and the optimizer holds no state for them", "model.freeze"),
    **_rules("refused", "the compute rounds elsewhere, visible in the loss", "precision"),
    **_rules("refused", "gradients are summed with other rounding, visible in the loss", "sharding.reduce_dtype"),
    **_rules(
        "refused",
        "rows or what is learnt from them change, so some would be met twice and some never",
        "data.seq_len",
        "data.packing",
        "data.train_on",
        "data.on_too_long",
        "data.sanitize_control_tokens",
    ),
    **_rules("refused", "records are written out differently, also for the exported model", "data.chat_template"),
    **_rules(
        "refused",
        "rows come in another order: some would be met twice and some never",
        "data.shuffle",
        "data.streaming",
        "data.shuffle_buffer",
    ),
    **_rules(
        "refused", "the order of rows and dropout follow from it: some rows would come twice, some never", "train.seed"
    ),
    **_rules(
        "refused",
        "a step takes other rows, so the position in the data and the schedule mean something else",
        "batch.global_batch_size",
    ),
    **_rules(
        "refused", "the training rows themselves differ: the position in them means something else", ROWS
    ),
    **_rules("refused", "another optimizer has other state; 8-bit moments are the same, paged or not", "optim.name"),
    **_rules("refused", "another optimizer has other state", "optim.state_dtype"),
    **_rules(
        "refused",
        "weights move differently from here on",
        "optim.lr",
        "optim.betas",
        "optim.eps",
        "optim.weight_decay",
        "optim.no_decay",
        "optim.max_grad_norm",
        "schedule.name",
        "schedule.warmup_ratio",
        "schedule.warmup_steps",
        "schedule.warmup_shape",
        "schedule.warmup_min_ratio",
        "schedule.min_lr_ratio",
        "schedule.total_steps",
        "schedule.convention",
    ),
}  # fmt: skip


def describe(
    config: Mapping[str, Any], *, rows: str, versions: Mapping[str, str], code: str | None = None
) -> dict[str, Any]:
    """Return the facts of a run that a checkpoint keeps for `check_resume`.

    `rows` is a digest of the training rows, `code` one of the Python code that came with the model and was run.
    """
    return {"config": config, ROWS: rows, VERSIONS: versions, CODE: code}


def find_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two facts of `describe`, free settings left out, in the order of the table.

    A setting that the checkpoint's version of the program did not have is new and no change.
    """
    changes = []
    for name, rule in RULES.items():
        before, after = (_value(facts, name) for facts in (saved, now))
        if rule.verdict != "free" and before is not _ABSENT and before != after:
            changes.append(Change(name, before, after))
    return changes


def check_resume(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, anyway: Sequence[str] = (), source: str = ""
) -> list[str]:
    """Return the log's lines about what changed since the checkpoint `source`, or raise one CheckpointError.

    `anyway` names changes to go on with that are refused otherwise; each has a line of its own.
    """
    changes = find_changes(saved, now)
    refused = [change for change in changes if RULES[change.name].verdict == "refused" and change.name not in anyway]
    if refused:
        raise CheckpointError(
            "The checkpoint is of another run.",
            values=f"{source}: {'; '.join(_explain(change, changes) for change in refused)}",
            fix="go back to the saved settings, start afresh in another output_dir, or name what may change: "
            f"--resume-anyway={','.join(change.name for change in refused)}",
        )
    return [
        f"changed since the checkpoint{' (as asked)' if change.name in anyway else ''}: {change} "
        f"({RULES[change.name].reason})"
        for change in changes
    ]


def find_unknown_waivers(names: Sequence[str]) -> list[str]:
    """Return those of `names` whose change is never refused, so that naming them could have no effect."""
    return [name for name in names if name not in RULES or RULES[name].verdict != "refused"]


def refused_names() -> Iterator[str]:
    """Yield the names that `--resume-anyway` takes."""
    return (name for name, rule in RULES.items() if rule.verdict == "refused")


_ABSENT = object()


def _value(facts: Mapping[str, Any], name: str) -> Any:
    if name == ROWS:
        return facts.get(ROWS)  # facts without a digest are of unknown rows, which differ from any
    if name in (VERSIONS, CODE):
        return facts.get(name, _ABSENT)
    value: Any = facts.get("config")
    for part in name.split("."):
        value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return "adamw_8bit" if (name, value) == ("optim.name", "paged_adamw_8bit") else value


def _explain(change: Change, changes: Sequence[Change]) -> str:
    """Name the settings that may be why the rows differ: two digests say nothing to a person."""
    likely = [other for other in changes if other.name.startswith("data.") and RULES[other.name].verdict == "allowed"]
    if change.name != ROWS or not likely:
        return str(change)
    return f"{change} (with {', '.join(map(str, likely))})"
