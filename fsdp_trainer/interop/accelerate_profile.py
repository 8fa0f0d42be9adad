"""Reads an Accelerate profile (FSDP1, FSDP2, DEEPSPEED or DDP) and says what each of its keys becomes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.accelerate_rules import RULES, ProfileFacts
from fsdp_trainer.interop.deepspeed import WHAT as DEEPSPEED
from fsdp_trainer.interop.deepspeed import judge_deepspeed
from fsdp_trainer.interop.key_table import held_values, judge, load_table, read_values
from fsdp_trainer.interop.places import Document, Key, read_json, read_text, read_yaml
from fsdp_trainer.interop.verdicts import Added, Import, Verdict

WHAT = "the Accelerate profile"
_KEPT = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")

# What deepspeed_config's keys are called in a ds_config.json.
_DEEPSPEED_NAMES = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "deepspeed_moe_layer_cls_names": "zero_optimization.transformer_moe_cls_names",
}


def import_accelerate(
    path: str | Path, *, model: str | Path | None = None, micro_batch_size: int | None = None
) -> Import:
    """Return what becomes of every key of a profile.

    `model` is a folder with a config.json, whose decoder layer the classes to wrap are then compared with;
    `micro_batch_size` is needed where a DEEPSPEED profile gives accumulation steps only (1 otherwise). ConfigError for
    files that cannot be read.
    """
    document = read_yaml(read_text(path, what=WHAT), file=str(path), what=WHAT)
    values = read_values(document, load_table("accelerate_keys"), fill=lambda source: "", tool="Accelerate")
    facts = ProfileFacts(held_values(values), _model_type(model))
    if not any(key.name == "distributed_type" for key in document.keys):
        fix = "give a file that `accelerate config` wrote"
        raise ConfigError(f"{WHAT} has no distributed_type", values=str(path), fix=fix)
    verdicts = judge(values, RULES, facts)
    added: list[Added] = []
    notes: list[str] = []
    if facts.engine == "DEEPSPEED":
        inner = _read_deepspeed(document, facts, micro_batch_size)
        verdicts = list(_put_in(verdicts, inner, facts))
        added, notes = list(inner.added), list(inner.notes)
    taken = {name for verdict in verdicts for name in verdict.settings}
    defaults = [one for one in _find_defaults(facts) if one.name not in taken]
    return Import(
        source=document.file,
        tool="an Accelerate profile",
        verdicts=tuple(verdicts),
        added=() if any(verdict.blocks for verdict in verdicts) else (*defaults, *added),
        processes=facts.processes,
        notes=(*notes, *_remarks(facts)),
        profile={name: facts.values[name] for name in _KEPT if name in facts.values},
        use_cpu=bool(facts.values.get("use_cpu")),
    )


def _model_type(model: str | Path | None) -> str | None:
    """Return the model_type of a local folder's config.json; None where there is none to read."""
    file = Path(model) / "config.json" if model is not None else None
    if file is None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None  # loading the model says what is wrong with it
    return found if isinstance(found, str) else None


def _read_deepspeed(document: Document, facts: ProfileFacts, micro_batch_size: int | None) -> Import:
    """Judge deepspeed_config as the DeepSpeed file that it stands for, or the file that it names."""
    named = facts.values.get("deepspeed_config.deepspeed_config_file")
    filled = _filled(facts, micro_batch_size)
    if named:
        path = Path(document.file).parent / named
        inner = read_json(read_text(path, what=DEEPSPEED), file=str(path), what=DEEPSPEED)
        inner = replace(inner, keys=(*inner.keys, *_precision_keys(document, facts, inner)))
        return judge_deepspeed(inner, arguments=None, world_size=facts.processes, filled=filled)
    keys = [
        replace(key, name=_DEEPSPEED_NAMES[leaf])
        for key in document.keys
        if key.name.startswith("deepspeed_config.") and (leaf := key.name.partition(".")[2]) in _DEEPSPEED_NAMES
    ]
    micro = Key("train_micro_batch_size_per_gpu", micro_batch_size or 1, document.file, 0, 0)
    keys += _precision_keys(document, facts, replace(document, keys=()))
    given = replace(document, keys=(*keys, micro))
    judged = judge_deepspeed(given, arguments=None, world_size=facts.processes, filled=filled)
    verdicts = judged.verdicts[:-1]  # the micro-batch is not the profile's
    why = "a profile does not say it" if micro_batch_size is None else "as given"
    rows = judged.verdicts[-1].settings.get("batch.global_batch_size", facts.processes)
    steps = f"x gradient_accumulation_steps x {facts.processes} processes; {why}"
    wanted = [one for one in judged.added if one.name in ("sharding.zero_stage", "optim.max_grad_norm")]
    added = [
        *(
            replace(one, value=2, why="Accelerate's default") if one.name == "sharding.zero_stage" else one
            for one in wanted
        ),
        Added("batch.micro_batch_size", micro.value, why),
        Added("batch.global_batch_size", rows, f"{micro.value} {steps}"),
    ]
    return replace(judged, verdicts=verdicts, added=tuple(added), notes=())


def _filled(facts: ProfileFacts, micro_batch_size: int | None) -> dict[str, tuple[Any, str]]:
    """Return what Accelerate fills in for the "auto" of a DeepSpeed file, by the source that its table names."""
    found: dict[str, tuple[Any, str]] = {"max_grad_norm": (1.0, "as Accelerate fills it in")}
    found["accumulation"] = (1, "Accelerate's default; your script may say otherwise")
    if micro_batch_size is not None:
        found["micro_batch"] = (micro_batch_size, "as given")
    found |= {dtype: (facts.dtype == dtype, "from mixed_precision") for dtype in ("bf16", "fp16")}
    return found


def _precision_keys(document: Document, facts: ProfileFacts, inner: Document) -> list[Key]:
    """Return the section that Accelerate adds to a DeepSpeed configuration which has none for mixed_precision."""
    at = next((key for key in document.keys if key.name == "mixed_precision"), None)
    said = {key.name for key in inner.keys if key.value is True} | {key.name.split(".")[0] for key in inner.keys}
    if at is None or not facts.dtype or said.intersection({facts.dtype, "bf16.enabled", "fp16.enabled"}):
        return []
    return [replace(at, name=f"{facts.dtype}.enabled", value=True)]


def _put_in(verdicts: Sequence[Verdict], inner: Import, facts: ProfileFacts) -> Iterator[Verdict]:
    """Yield the profile's verdicts, with those on its DeepSpeed keys in their place and the named file's at the end."""
    is_file = bool(facts.values.get("deepspeed_config.deepspeed_config_file"))
    theirs = [one for one in inner.verdicts if not _is_mixed_precision(one.key, verdicts)]
    found = {} if is_file else {(one.key.line, one.key.column): one for one in theirs}
    for verdict in verdicts:
        name = verdict.key.name
        judged = found.get((verdict.key.line, verdict.key.column))
        if judged is not None and not verdict.key.repeats:
            yield replace(judged, key=verdict.key)
        elif name == "deepspeed_config.deepspeed_config_file" and is_file:
            yield replace(verdict, kind="mapped", text="its keys are below")
        elif name.startswith("deepspeed_config.") and is_file and verdict.kind == "not needed":
            yield replace(verdict, text="the DeepSpeed file says it")
        elif is_file and "precision" in verdict.settings and len(theirs) == len(inner.verdicts):
            yield replace(verdict, kind="not needed", settings={}, text="the DeepSpeed file says the precision")
        else:
            yield verdict
    yield from theirs if is_file else ()


def _is_mixed_precision(key: Key, verdicts: Sequence[Verdict]) -> bool:
    """Tell whether a DeepSpeed key is the profile's mixed_precision, written as DeepSpeed has it."""
    places = {(one.key.file, one.key.line, one.key.column): one.key.name for one in verdicts}
    return places.get((key.file, key.line, key.column)) == "mixed_precision"


def _find_defaults(facts: ProfileFacts) -> Iterator[Added]:
    if facts.engine == "FSDP":
        yield Added("sharding.zero_stage", 3, "FULL_SHARD is Accelerate's default")
    if "deepspeed_config.deepspeed_config_file" not in facts.values:
        yield Added("precision", "fp32", "mixed_precision is not on")
    if facts.engine != "DEEPSPEED":
        size = max(1, round(64 / facts.processes)) * facts.processes
        yield Added("batch.global_batch_size", size, f"a profile does not say it; a multiple of {facts.processes}")
    yield Added("activation_checkpointing.mode", "none", "the profile does not switch it on; the script may")
    yield Added("data.packing", False, "one record a row")


def _remarks(facts: ProfileFacts) -> Iterator[str]:
    if "num_processes" not in facts.values:
        yield "num_processes is not given: 1 is written"
    if facts.engine == "FSDP" and "fsdp_config.fsdp_auto_wrap_policy" not in facts.values:
        yield "without fsdp_auto_wrap_policy Accelerate gathers the whole model at once; here it is a layer at a time"
    if facts.engine == "FSDP" and facts.values.get("mixed_precision") in ("bf16", "fp16"):
        yield "Accelerate sums gradients in the compute type, and FSDP2 returns the loss in it; here both are fp32"
    yield "learning rate, schedule, clipping, batch and data are the script's: a profile does not say them"
