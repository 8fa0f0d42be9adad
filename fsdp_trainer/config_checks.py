"""Rules that look at more than one setting, and the settings whose technique comes later.

A setting that cannot take effect is an error: a user who wrote it believes that it does something. "Written" means
"differs from the default", because the fully resolved file of a run names every setting and must load again.
"""

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fsdp_trainer.config_reading import Problem, format_value
from fsdp_trainer.config_sources import COLUMNS
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.resume_rules import RULES, find_unknown_waivers, refused_names
from fsdp_trainer.units import format_number

if TYPE_CHECKING:
    from fsdp_trainer.config import Config


MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4000  # NAME_MAX of Linux, and its PATH_MAX less the names of a run's files


def find_conflicts(config: "Config") -> list[Problem]:
    """Return everything that is wrong across the settings of a Config whose single values are valid."""
    checks = (
        _later,
        _sharding,
        _precision,
        _checkpointing,
        _optim,
        _schedule,
        _data,
        _sources,
        _streaming,
        _evaluation,
        _batch,
        _folders,
        _resume,
    )
    return [problem for check in checks for problem in check(config)]


def setting(config: "Config", path: str) -> Any:
    """Return the value of a setting by its dotted name."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def is_changed(config: "Config", path: str) -> bool:
    """Tell whether a setting differs from its default."""
    model: BaseModel = config
    *sections, name = path.split(".")
    for part in sections:
        model = getattr(model, part)
    return getattr(model, name) != type(model).model_fields[name].default


def show_settings(config: "Config", *paths: str) -> str:
    """Return the settings by their dotted names, as a message shows them."""
    return ", ".join(f"{path}: {format_value(setting(config, path))}" for path in paths)


def _no_effect(config: "Config", path: str, *, because: str, fix: str, others: tuple[str, ...]) -> Iterator[Problem]:
    if is_changed(config, path):
        yield Problem(f"{path} has no effect {because}", show_settings(config, path, *others), fix, (path, *others))


# Settings of the contract whose technique is not there yet: name, which values, what to set until then.
_LATER: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "activation_checkpointing.mode",
        lambda value: value == "selective",
        "activation_checkpointing.mode: full or every_n_layers",
    ),
    ("activation_checkpointing.offload", lambda value: value, "activation_checkpointing.offload: false"),
    ("compile.enabled", lambda value: value, "compile.enabled: false"),
)


def _later(config: "Config") -> Iterator[Problem]:
    for path, is_later, instead in _LATER:
        if is_later(setting(config, path)):
            shown = format_value(setting(config, path))
            yield Problem(
                f"{path}: {shown} comes later", show_settings(config, path), f"until then set {instead}", (path,)
            )


def _sharding(config: "Config") -> Iterator[Problem]:
    sharding = config.sharding
    needs_stage_3 = {"sharding.replicate": sharding.replicate > 1}
    needs_stage_3["sharding.reshard_after_forward"] = sharding.reshard_after_forward is not None
    for path, is_used in needs_stage_3.items():
        if is_used and sharding.zero_stage != 3:
            yield Problem(
                f"{path} needs stage 3",
                show_settings(config, path, "sharding.zero_stage"),
                f"set sharding.zero_stage: 3, or leave out {path}",
                (path, "sharding.zero_stage"),
            )
    if sharding.offload == "params" and sharding.zero_stage == 0:
        yield Problem(
            "offloading parameters needs sharding: at stage 0 every rank would keep the whole model in host memory",
            show_settings(config, "sharding.offload", "sharding.zero_stage"),
            "set sharding.zero_stage: 3 (or 1 or 2), or sharding.offload: none",
            ("sharding.offload", "sharding.zero_stage"),
        )
    if sharding.offload != "optimizer":
        yield from _no_effect(
            config,
            "optim.offload_step",
            because="where the optimizer is not offloaded on its own",
            fix="set sharding.offload: optimizer, or leave out optim.offload_step",
            others=("sharding.offload",),
        )


def _precision(config: "Config") -> Iterator[Problem]:
    if config.sharding.reduce_dtype == "fp16" and config.precision != "fp16":
        yield Problem(
            "gradients summed in fp16 overflow without the gradient scaler that only precision fp16 has",
            show_settings(config, "sharding.reduce_dtype", "precision"),
            "set sharding.reduce_dtype: bf16 or null, or precision: fp16",
            ("sharding.reduce_dtype", "precision"),
        )
    if config.optim.implementation == "foreach" and config.steps_with_torch:
        # Only the fused kernels take `found_inf` and leave weights and state alone without asking the host.
        for path, value in (("precision", "fp16"), ("train.on_nonfinite", "skip")):
            if setting(config, path) == value:
                yield Problem(
                    f"{path}: {value} skips steps, which only optim.implementation: fused can do",
                    show_settings(config, path, "optim.implementation"),
                    "set optim.implementation: fused",
                    (path, "optim.implementation"),
                )


def _checkpointing(config: "Config") -> Iterator[Problem]:
    mode = "activation_checkpointing.mode"
    if config.activation_checkpointing.mode != "every_n_layers":
        yield from _no_effect(
            config,
            "activation_checkpointing.every_n",
            because="unless every n-th layer is checkpointed",
            fix=f"set {mode}: every_n_layers, or leave out every_n",
            others=(mode,),
        )


def _optim(config: "Config") -> Iterator[Problem]:
    if not config.steps_with_torch:
        causes = ("precision", "optim.name", "optim.state_dtype", "sharding.offload")
        causes = tuple(path for path in causes if is_changed(config, path))
        yield from _no_effect(
            config,
            "optim.implementation",
            because="where the step is not torch's own",
            fix="leave out optim.implementation",
            others=causes,
        )
    if config.optim.name != "adamw":
        yield from _no_effect(
            config,
            "optim.state_dtype",
            because="on averages that are kept in 8 bits",
            fix="set optim.name: adamw, or leave out optim.state_dtype",
            others=("optim.name",),
        )
    if config.optim.name == "paged_adamw_8bit" and config.sharding.offload != "none":
        yield Problem(
            "paged moments would be on the host already, where an offloaded step keeps them",
            show_settings(config, "optim.name", "sharding.offload"),
            "set optim.name: adamw_8bit, or sharding.offload: none",
            ("optim.name", "sharding.offload"),
        )
    if config.optim.weight_decay == 0:
        yield from _no_effect(
            config,
            "optim.no_decay",
            because="without weight decay",
            fix="set optim.weight_decay above 0, or leave out optim.no_decay",
            others=("optim.weight_decay",),
        )
    if config.loss.kind == "plain":
        yield from _no_effect(
            config,
            "loss.chunk_tokens",
            because="with the plain loss, which has no chunks",
            fix="set loss.kind: chunked, or leave out loss.chunk_tokens",
            others=("loss.kind",),
        )


def _schedule(config: "Config") -> Iterator[Problem]:
    if config.schedule.warmup_steps is not None:
        yield from _no_effect(
            config,
            "schedule.warmup_ratio",
            because="where schedule.warmup_steps is set",
            fix="leave out one of the two",
            others=("schedule.warmup_steps",),
        )
    if config.schedule.name == "constant":
        yield from _no_effect(
            config,
            "schedule.min_lr_ratio",
            because="with a constant learning rate",
            fix="set schedule.name: linear or cosine, or leave out schedule.min_lr_ratio",
            others=("schedule.name",),
        )
        if config.schedule.warmup_steps is not None:  # else the ratio follows it
            yield from _no_effect(
                config,
                "schedule.total_steps",
                because="with a constant learning rate and a warm-up of its own length",
                fix="leave out schedule.total_steps",
                others=("schedule.name", "schedule.warmup_steps"),
            )
    if config.schedule.warmup_shape == "log" and config.schedule.convention != "deepspeed":
        yield Problem(
            "a logarithmic warm-up is DeepSpeed's",
            show_settings(config, "schedule.warmup_shape", "schedule.convention"),
            "set schedule.convention: deepspeed, or schedule.warmup_shape: linear",
            ("schedule.warmup_shape", "schedule.convention"),
        )
    no_warmup = config.schedule.warmup_steps == 0 and config.schedule.convention != "deepspeed"
    if no_warmup or (config.schedule.warmup_steps is None and config.schedule.warmup_ratio == 0):
        yield from _no_effect(
            config,
            "schedule.warmup_min_ratio",
            because="without a warm-up",
            fix="set schedule.warmup_steps, or leave out schedule.warmup_min_ratio",
            others=("schedule.warmup_steps", "schedule.warmup_ratio"),
        )
    max_steps, warmup_steps = config.train.max_steps, config.schedule.warmup_steps
    if max_steps is not None and warmup_steps is not None and warmup_steps > max_steps:
        yield Problem(
            "warm-up is longer than the run: the learning rate would never be reached",
            show_settings(config, "schedule.warmup_steps", "train.max_steps"),
            f"set schedule.warmup_steps to at most {max_steps}",
            ("schedule.warmup_steps", "train.max_steps"),
        )
    if config.profile.start is None:
        yield from _no_effect(
            config,
            "profile.steps",
            because="where no trace is asked for",
            fix="leave out profile.steps",
            others=("profile.start",),
        )


def _data(config: "Config") -> Iterator[Problem]:
    if not config.data.packing and config.data.on_too_long == "split":
        yield Problem(
            "splitting long records needs packing",
            show_settings(config, "data.on_too_long", "data.packing"),
            "set data.packing: true, or data.on_too_long: truncate",
            ("data.on_too_long", "data.packing"),
        )
    if config.data.format == "text":
        for path in ("data.train_on", "data.chat_template", "data.sanitize_control_tokens"):
            yield from _no_effect(
                config,
                path,
                because="on plain text, which has no turns",
                fix=f"set data.format: messages, or leave out {path}",
                others=("data.format",),
            )


def _sources(config: "Config") -> Iterator[Problem]:
    weights = [getattr(entry, "weight", None) for entry in _entries(config.data.train)]
    if None in weights and any(weights):
        yield Problem(
            "some sources of data.train have a weight and some have none",
            show_settings(config, "data.train"),
            "give each source a weight, or none",
            ("data.train",),
        )
    if len(weights) == 1 and any(weights):
        yield Problem(
            "a weight has no effect on a single source",
            show_settings(config, "data.train"),
            "leave it out, or mix the source with another",
            ("data.train",),
        )
    if any(getattr(entry, "weight", None) for entry in _entries(config.data.eval)):
        yield Problem(
            "evaluation takes every row once, so weights have no effect on data.eval",
            show_settings(config, "data.eval"),
            "leave the weights out",
            ("data.eval",),
        )
    for name in config.data.columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            yield Problem(
                f"data.columns gives a column the name {name!r}, which no format has",
                show_settings(config, "data.columns"),
                f"did you mean {near[0]}?" if near else f"the left side is one of {', '.join(COLUMNS)}",
                ("data.columns",),
            )


def _entries(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _streaming(config: "Config") -> Iterator[Problem]:
    if not config.data.streaming:
        yield from _no_effect(
            config,
            "data.shuffle_buffer",
            because="without streaming, which shuffles all rows",
            fix="set data.streaming: true, or leave out data.shuffle_buffer",
            others=("data.streaming",),
        )
        return
    if config.train.max_steps is None:
        yield Problem(
            "a stream has no known end, so the number of steps must be said",
            show_settings(config, "data.streaming", "train.max_steps"),
            "set train.max_steps",
            ("data.streaming", "train.max_steps"),
        )
    if isinstance(config.data.eval, float):
        yield Problem(
            "a share cannot be held out of a stream: it is taken from all records at once",
            show_settings(config, "data.eval", "data.streaming"),
            "name a file of its own in data.eval, or set data.streaming: false",
            ("data.eval", "data.streaming"),
        )


def _evaluation(config: "Config") -> Iterator[Problem]:
    if config.data.eval is None:
        yield from _no_effect(
            config,
            "eval.every_steps",
            because="without data to evaluate on",
            fix="set data.eval to a file or to a share such as 0.02, or leave out eval.every_steps",
            others=("data.eval",),
        )
        yield from _no_effect(
            config,
            "checkpoint.keep_best",
            because="without data to evaluate on",
            fix="set data.eval to a file or to a share such as 0.02, or leave out checkpoint.keep_best",
            others=("data.eval",),
        )
    elif config.eval.every_steps is None and not config.eval.at_end:
        yield Problem(
            "data.eval has no effect: nothing says when to evaluate",
            show_settings(config, "data.eval", "eval.every_steps", "eval.at_end"),
            "set eval.at_end: true or eval.every_steps, or leave out data.eval",
            ("data.eval", "eval.every_steps", "eval.at_end"),
        )


def _batch(config: "Config") -> Iterator[Problem]:
    size, micro = config.batch.global_batch_size, config.batch.micro_batch_size
    if size % micro:
        nearest = max(1, round(size / micro)) * micro
        yield Problem(
            "batch.global_batch_size is not a multiple of batch.micro_batch_size",
            f"{format_number(size, 'row')} in a step, {micro} in a micro-batch: {size} / {micro} = {size / micro:g}",
            f"set batch.global_batch_size: {nearest}, or batch.micro_batch_size to a divisor of {size}",
            ("batch.global_batch_size", "batch.micro_batch_size"),
        )


def _folders(config: "Config") -> Iterator[Problem]:
    # os.path: pathlib raises where a name is too long for any file system.
    longest = max(map(os.fsencode, Path(config.output_dir).parts), key=len, default=b"")
    if len(longest) > MAX_NAME_BYTES or len(os.fsencode(config.output_dir)) > MAX_PATH_BYTES:
        yield Problem(
            "output_dir cannot be the name of a folder",
            f"{show_settings(config, 'output_dir')}, with a name of {len(longest)} bytes",
            f"set output_dir to a path whose every name has at most {MAX_NAME_BYTES} bytes",
            ("output_dir",),
        )
    for parent in (Path(config.output_dir), *Path(config.output_dir).parents):
        if os.path.isfile(parent):
            yield Problem(
                "output_dir is not a folder",
                f"{show_settings(config, 'output_dir')}, and {parent} is a file",
                "set output_dir to a folder, which is made when it does not exist",
                ("output_dir",),
            )
    template = config.data.chat_template
    if template is not None and not os.path.isfile(template):
        yield Problem(
            "data.chat_template is not a file",
            show_settings(config, "data.chat_template"),
            "give the path of a file with the Jinja template, or leave it out for the tokenizer's own",
            ("data.chat_template",),
        )


def _resume(config: "Config") -> Iterator[Problem]:
    if not config.checkpoint.enabled:
        for name in ("every_steps", "keep_latest", "keep_best", "async_save"):
            yield from _no_effect(
                config,
                f"checkpoint.{name}",
                because="where nothing is saved",
                fix=f"set checkpoint.enabled: true, or leave out checkpoint.{name}",
                others=("checkpoint.enabled",),
            )
    if unknown := find_unknown_waivers(config.checkpoint.resume_anyway):
        misspelt = [word for word in unknown if word not in RULES]
        near = [name for word in misspelt for name in difflib.get_close_matches(word, list(refused_names()), n=1)]
        yield Problem(
            "checkpoint.resume_anyway names what a resume never refuses",
            ", ".join(unknown),
            f"did you mean {near[0]}?" if near else "leave it out; docs/resuming.md lists what is refused",
            ("checkpoint.resume_anyway",),
        )


def check_model_path(path: str) -> None:
    """Refuse a `model.path` that can only mean a folder and is none, without asking the hub for it."""
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file() or any(folder.glob("*.gguf")):
            return
        names = sorted(entry.name for entry in folder.iterdir())
        what = "The model folder has no config.json."
        values = f"model.path: {path} holds {', '.join(names[:6]) + (', ...' if names[6:] else '') or 'nothing'}"
    elif folder.suffix == ".gguf" and folder.is_file():
        return
    elif folder.exists():
        what, values = "model.path is a file.", f"model.path: {path}"
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        looked = "" if folder.is_absolute() else f" (looked in {Path.cwd()})"
        what, values = "The model folder does not exist.", f"model.path: {path}{looked}"
    else:
        return
    fix = (
        "give a Hugging Face folder with config.json and safetensors, a .gguf file, or a hub id such as Qwen/Qwen2.5-7B"
    )
    if path.startswith("~"):
        fix = "write the path out: only a shell reads ~ as the home folder"
    raise ConfigError(what, values=values, fix=fix)


def check_learned_positions(seq_len: int, *, limit: int) -> None:
    """Raise ConfigError for rows longer than a model's table of `limit` learned positions."""
    if seq_len > limit:
        raise ConfigError(
            "Rows would be longer than the model's table of positions.",
            values=f"data.seq_len: {seq_len}, max_position_embeddings {limit}",
            fix=f"set data.seq_len to at most {limit}",
        )
