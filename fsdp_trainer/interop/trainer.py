"""Reads Transformers' TrainingArguments and says what each becomes, with the DeepSpeed configuration that they name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.interop.arguments import WHAT, Arguments, make_arguments, read_arguments_document
from fsdp_trainer.interop.deepspeed import WHAT as DEEPSPEED
from fsdp_trainer.interop.deepspeed import judge_deepspeed
from fsdp_trainer.interop.places import Document, Key, read_json, read_text
from fsdp_trainer.interop.verdicts import Import, Verdict

TOOL = "Transformers' TrainingArguments"


def import_trainer(path: str | Path, *, world_size: int | None = None) -> Import:
    """Return what becomes of every key of a JSON or YAML file of TrainingArguments, such as `to_json_string()` gives.

    `world_size` is the number of GPUs, which they do not say. ConfigError for files that cannot be read.
    """
    document = read_arguments_document(path)
    theirs, own = _split(document)
    arguments = make_arguments(replace(document, keys=own))
    if theirs is not None:
        return _with_deepspeed(document, theirs, arguments, world_size)
    rows = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    if world_size is None and not rows.intersection(arguments.held):
        fix = "give --world-size N"
        raise ConfigError(f"{WHAT} does not say the number of GPUs, so the rows of a step are not known", fix=fix)
    verdicts, added = arguments.judge(world_size)
    return Import(
        source=document.file,
        tool=TOOL,
        verdicts=tuple(verdicts),
        added=() if any(verdict.blocks for verdict in verdicts) else tuple(added),
        processes=world_size,
        notes=(*document.notes, *_remarks(arguments)),
        use_cpu=bool(arguments.value("use_cpu")),
    )


def _split(document: Document) -> tuple[Document | None, tuple[Key, ...]]:
    """Take the DeepSpeed configuration out of the arguments: a section of theirs, or the file that they name."""
    named = next((key for key in document.keys if key.name == "deepspeed"), None)
    if named is not None and isinstance(named.value, str) and named.value:
        path = Path(document.file).parent / named.value
        inner = read_json(read_text(path, what=DEEPSPEED), file=str(path), what=DEEPSPEED)
        return inner, tuple(key for key in document.keys if key is not named)
    inside = [key for key in document.keys if key.name.startswith("deepspeed.")]
    if not inside:
        return None, document.keys
    keys = tuple(replace(key, name=key.name.removeprefix("deepspeed.")) for key in inside)
    return replace(document, keys=keys), tuple(key for key in document.keys if key not in inside)


def _with_deepspeed(document: Document, theirs: Document, arguments: Arguments, world_size: int | None) -> Import:
    found = judge_deepspeed(theirs, arguments=arguments, world_size=world_size)
    named = [key for key in document.keys if key.name == "deepspeed"]
    above = [Verdict(key, "mapped", "its keys are below") for key in named]
    notes = (*document.notes, *(note for note in found.notes if note not in document.notes))
    return replace(found, source=document.file, tool=TOOL, verdicts=(*above, *found.verdicts), notes=notes)


def _remarks(arguments: Arguments) -> Iterator[str]:
    if arguments.held.get("average_tokens_across_devices", True) is False:
        yield "the loss is the mean over all supervised tokens of a step, over all ranks and micro-batches"
    yield "checkpoint.keep_latest is 2 where save_total_limit is not given: Transformers keeps all"
