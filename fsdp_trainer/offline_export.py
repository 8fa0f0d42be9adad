"""Write a checkpoint of a run as a Hugging Face folder, long after its processes are gone: one process, on the CPU.

Tensors are read from the checkpoint one at a time, so the host holds one file's worth of the export and one tensor.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from fsdp_trainer.checkpoint_manifest import Progress, read_state
from fsdp_trainer.checkpoint_search import find_checkpoint, refuse_damage
from fsdp_trainer.checkpoint_table import TableReader
from fsdp_trainer.config import Config
from fsdp_trainer.conversions import plan_export
from fsdp_trainer.custom_code import digest_of_code, read_custom_code
from fsdp_trainer.data.template_files import read_chat_template
from fsdp_trainer.errors import CheckpointError, FsdpTrainerError
from fsdp_trainer.export import (
    DTYPES,
    MAX_FILE_BYTES,
    ExportedModel,
    converted,
    exported_config,
    exported_dtypes,
    exported_weights,
    guarded,
    plan_files,
    total_bytes,
    write_file,
    write_index,
    write_own_code,
    write_sides,
)
from fsdp_trainer.export_checksums import refuse_damaged_weights
from fsdp_trainer.export_folder import make_empty, replace_folder, unfinished
from fsdp_trainer.export_source import check_new, find_run
from fsdp_trainer.loading import plan_loading
from fsdp_trainer.model import build_meta_model, load_hf_config
from fsdp_trainer.model_card import format_model_card
from fsdp_trainer.pieces import Piece
from fsdp_trainer.progress import log_line
from fsdp_trainer.resume_rules import CODE
from fsdp_trainer.run_folder import SETTINGS, last_evaluation
from fsdp_trainer.training_data import load_generation_config, load_tokenizer
from fsdp_trainer.units import format_bytes
from fsdp_trainer.weight_files import BLOCK_BYTES, find_folder


def export_checkpoint(
    source: Path, out: Path, *, dtype: str | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> ExportedModel:
    """Write the checkpoint `source` (a run folder: its newest complete one) to the new folder `out`.

    `dtype` is fp32, bf16 or fp16; None takes the run's `export.dtype`. Names, config and tokenizer come from the run's
    own settings and the model it was trained from. CheckpointError or ConfigError for what cannot be read or written.
    """
    checkpoint, config = _find(Path(source))
    check_new(out)
    dtype = dtype or config.export.dtype
    hf_config = load_hf_config(
        config.model.path, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    model = build_meta_model(
        copy.deepcopy(hf_config),
        attention=config.model.attention,
        dtype=torch.float32,
        trust_remote_code=config.model.trust_remote_code,
    )
    state = read_state(checkpoint)
    _check_code(hf_config, config, state["facts"])
    read = _tensor_reader(checkpoint, model)
    weights = exported_weights(model)
    dtypes = exported_dtypes(model, weights, DTYPES[dtype])
    rounding = _Rounding(config, model, dtypes)
    plan = plan_files(plan_export(model, weights, dtypes), max_bytes=max_file_bytes)
    progress = Progress(**state["progress"])
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = read_chat_template(config.data.chat_template, tokenizer=tokenizer)
    card = format_model_card(
        config,
        progress=progress,
        versions=state["facts"].get("versions", {}),
        dtype=dtype,
        evaluation=last_evaluation(checkpoint.parent.parent, step=progress.step),
        chat=bool(tokenizer.chat_template),
    )

    def write() -> None:
        part = unfinished(out)
        make_empty(part)
        for file, groups in plan.items():
            kept = [{name: rounding.cast(name, read(name)) for name in group.names} for group in groups]
            write_file(part / file, converted(model, kept))
        write_index(part, plan)
        generation = load_generation_config(config.model)
        write_sides(part, exported_config(hf_config, model, DTYPES[dtype]), generation, tokenizer, card)
        write_own_code(part, model)
        if out.exists():
            out.rmdir()
        replace_folder(out, part)

    guarded(write, out, then="then export again")
    for line in rounding.describe(dtype):
        log_line(line)
    size = total_bytes(plan)
    log_line(f"model: {out} ({format_bytes(size)}, {dtype}), step {progress.step} of {checkpoint}")
    return ExportedModel(out, DTYPES[dtype], tuple(plan), size)


def _check_code(hf_config: Any, config: Config, facts: Mapping[str, Any]) -> None:
    """Refuse to give the trained weights code that did not train them."""
    now = digest_of_code(read_custom_code(hf_config)) if config.model.trust_remote_code else None
    if (saved := facts.get(CODE, now)) != now:
        raise CheckpointError(
            "The code that comes with the model is not the code that trained it.",
            values=f"{config.model.path}: digest {now} now, {saved} when the checkpoint was saved",
            fix="put back the .py files that were there when the run was started",
        )


def _find(source: Path) -> tuple[Path, Config]:
    """Return the checkpoint and the settings of its run; `source` is either the checkpoint or the run folder."""
    run, is_checkpoint = find_run(source)
    config = Config.load(run / SETTINGS)
    if is_checkpoint:
        refuse_damage(source)
        return source, config
    found = find_checkpoint(run, resume="auto", log=log_line)
    assert found is not None, "there is none that is intact, which it says itself"
    return found, config


class _Reader(TableReader):
    """A checkpoint's reader, reading the table of contents once instead of once a tensor."""

    @cache  # noqa: B019  # lives as long as the export
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return super().read_metadata(*args, **kwargs)


def _tensor_reader(checkpoint: Path, model: nn.Module) -> Callable[[str], torch.Tensor]:
    """Return what reads a tensor of the model whole; CheckpointError unless the checkpoint holds just this model."""
    reader = _Reader(checkpoint, {name: file["bytes"] for name, file in read_state(checkpoint)["files"].items()})
    entries = reader.read_metadata().state_dict_metadata
    stored = {
        name.removeprefix("model."): entry
        for name, entry in entries.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    expected = {name: tensor.shape for name, tensor in exported_weights(model).items()}
    wrong = sorted(name for name, shape in expected.items() if name not in stored or stored[name].size != shape)
    if wrong:
        raise CheckpointError(
            "The checkpoint is of another model than the settings beside it name.",
            values=f"{checkpoint}: {wrong[:5]} ({len(wrong)}) are missing or of another shape",
            fix="put model.path of the run's config.yaml back to the model that was trained",
        )

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        with warnings.catch_warnings():
            # torch says so of every load without a process group, which is what this is.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_sharded({f"model.{name}": tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return read


class _Rounding:
    """Casts tensors for the export and counts how many changed weights still differ from the source afterwards."""

    def __init__(self, config: Config, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes, self._changed, self._kept = dtypes, 0, 0
        self._source: Mapping[str, Piece] = {}
        self._unread = ""
        if config.model.init == "pretrained" and set(dtypes.values()) != {torch.float32}:
            try:
                folder = find_folder(config.model.path, revision=config.model.revision)
                refuse_damaged_weights(folder)
                self._source = plan_loading(model, folder).pieces
            except FsdpTrainerError as error:  # it is only compared with: nothing that is written depends on it
                self._unread = error.values

    def cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the dtype it is written in."""
        result = tensor.to(self._dtypes[name])
        if name in self._source and tensor.dim() and tensor.numel():
            rows = max(1, BLOCK_BYTES // tensor[0].nbytes)  # a table of tokens whole again would be the largest tensor
            for start in range(0, tensor.shape[0], rows):
                self._compare(name, tensor, result, (start, min(start + rows, tensor.shape[0])))
        return result

    def _compare(self, name: str, tensor: torch.Tensor, result: torch.Tensor, limits: tuple[int, int]) -> None:
        part, written = (whole[slice(*limits)] for whole in (tensor, result))
        source = torch.empty_like(part)
        self._source[name].copy_into(source, (limits, *((0, size) for size in part.shape[1:])))
        changed = source != part
        self._changed += int(changed.sum())
        self._kept += int((changed & (written != source.to(written.dtype))).sum())

    def describe(self, dtype: str) -> list[str]:
        """Return the log line about rounding; none where nothing changed."""
        if self._unread:
            return [f"not compared with the model before training: {self._unread}"]
        if not self._changed:
            return []
        share = self._kept / self._changed
        hint = "; --dtype fp32 keeps all of them" if share < 1 else ""
        return [f"{dtype} keeps {share:.1%} of {self._changed:,} changed weights{hint}"]
