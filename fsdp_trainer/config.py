"""The whole configuration of a run: read from a file and flags, checked, frozen, and written back in full.

The settings file is the contract; each section is a model in config_sections.py, rules across sections in
config_checks.py.
"""

import io
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator
from ruamel.yaml import YAML
from typing_extensions import Self

from fsdp_trainer.config_checks import find_conflicts
from fsdp_trainer.config_origins import Origins
from fsdp_trainer.config_reading import (
    Overrides,
    apply_overrides,
    find_unknown_keys,
    merge_settings,
    parse_settings,
    raise_problems,
    read_settings_text,
    translate_errors,
)
from fsdp_trainer.config_sections import (
    ActivationCheckpointingConfig,
    BatchConfig,
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    EvalConfig,
    ExportConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ProfileConfig,
    ScheduleConfig,
    ShardingConfig,
    SourceConfig,
    TrainConfig,
)
from fsdp_trainer.config_sources import COLUMNS
from fsdp_trainer.config_types import Section, Text
from fsdp_trainer.config_world_checks import check_world_problems

__all__ = [
    "COLUMNS",
    "ActivationCheckpointingConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "ExportConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ProfileConfig",
    "ScheduleConfig",
    "Section",
    "ShardingConfig",
    "SourceConfig",
    "TrainConfig",
    "dump_settings",
]


class Config(Section):
    """All settings of one run. Frozen: a changed run is a new Config."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sharding: ShardingConfig = ShardingConfig()
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = Field(
        default="bf16",
        description="Number format of the compute. bf16: fp32 master weights, bf16 compute, fp32 gradient sums and "
        "loss, 16 bytes a parameter with AdamW. fp16: the same with a gradient scaler, for GPUs without bf16. fp32: "
        "exact and slow, for comparing. bf16_pure: weights rest in bf16 without an fp32 copy and updates are rounded "
        "stochastically, so that small ones arrive on average; noisier than masters. 14 bytes a parameter, 8 with "
        "sharding.reduce_dtype: bf16 and optim.state_dtype: bf16.",
    )
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    batch: BatchConfig = BatchConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    log: LogConfig = LogConfig()
    compile: CompileConfig = CompileConfig()
    rehearse: Literal["auto"] | bool = Field(
        default="auto",
        description="Before the first step take two over the longest rows, an evaluation and the copies of a save, and "
        "drop all of it: what runs out of memory then does so at once. Costs about three steps; the run stays the same "
        "to the last bit. auto does it on GPUs.",
    )
    profile: ProfileConfig = ProfileConfig()
    output_dir: Text = Field(
        default="runs/qwen2.5-7b",
        description="The run folder: settings, metrics, checkpoints, exported model. The same folder goes on with the "
        "same run.",
    )
    _origins: Origins = PrivateAttr(default_factory=Origins)

    @model_validator(mode="wrap")
    @classmethod
    def _report_all_problems(cls, data: Any, handler: ModelWrapValidatorHandler["Config"]) -> "Config":
        """Collect unknown keys, wrong values and conflicts into one ConfigError in the user's words."""
        if not isinstance(data, Mapping):
            return handler(data)
        settings, origins = _as_settings(data)
        problems = find_unknown_keys(settings, root=cls)
        try:
            config = handler(settings)
        except ValidationError as error:
            problems += translate_errors(error, settings=settings, root=cls)
            wrong = {path for problem in problems for path in problem.paths}
            # Defaults stand in for the wrong values, so that conflicts among the rest are shown in the same message.
            config = _validate_rest(settings, wrong, handler)
            conflicts = find_conflicts(config) if config is not None else []
            problems += [problem for problem in conflicts if wrong.isdisjoint(problem.paths)]
        else:
            problems += find_conflicts(config)
        raise_problems(problems, origins=origins)
        assert config is not None
        config._origins = origins
        return config

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """Read a settings file and put flags over it; what neither names keeps its default.

        `overrides` are words such as "--optim.lr=1e-5" (the dashes are optional), or a nested or dotted mapping.
        """
        text = read_settings_text(path) if path is not None else ""
        settings = parse_settings(text, source=str(path))
        flags = apply_overrides(settings, overrides, root=cls)
        origins = Origins(str(path) if path is not None else "", text, flags)
        return cls.model_validate({_ORIGINS: origins, **settings})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a Config from nested dictionaries (dotted keys are taken apart)."""
        return cls.model_validate(merge_settings({}, settings))

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as nested dictionaries of plain values, as a settings file holds them."""
        return self.model_dump(mode="json")

    def to_yaml(self, *, names: Collection[str] | None = None) -> str:
        """Return all settings as a settings file that loads back to an equal Config.

        With `names` (dotted) only these and those that differ from the defaults: it loads back to the same.
        """
        settings = self.to_dict()
        return dump_settings(settings if names is None else _needed(settings, Config().to_dict(), names=names))

    def save(self, path: str | Path) -> None:
        """Write all settings to a file that `Config.load` reads."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @property
    def given(self) -> tuple[str, ...]:
        """The dotted names of the settings that were written: in a file, as a flag or in Python."""
        return tuple(_given(self))

    @property
    def origins(self) -> Origins:
        """Where each setting was written, for messages."""
        return self._origins

    @property
    def steps_with_torch(self) -> bool:
        """True where torch's own AdamW does the step, on weights and averages in fp32; else it is ShardedAdamW."""
        optim = self.optim
        plain = optim.name == "adamw" and optim.state_dtype == "fp32" and self.precision != "bf16_pure"
        return plain and self.sharding.offload != "optimizer"

    def check_world(self, world_size: int) -> int:
        """Check the settings that depend on the number of ranks and return the gradient accumulation steps.

        Raises ConfigError with the equation where the global batch, the copies or the groups do not divide exactly.
        """
        raise_problems(check_world_problems(self, world_size), origins=self._origins)
        return self.batch.global_batch_size // (self.batch.micro_batch_size * world_size)


def dump_settings(settings: Mapping[str, Any]) -> str:
    """Return nested settings of plain values as the text of a settings file."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 10_000  # a folded path is hard to search for
    # "1e-05" is text to a YAML 1.1 reader; with a point it is a number to both.
    yaml.representer.add_representer(float, _represent_float)
    # Without this a null is written as nothing at all, which reads like a forgotten value.
    yaml.representer.add_representer(type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null"))
    text = io.StringIO()
    yaml.dump(dict(settings), text)
    return text.getvalue()


_ORIGINS = "\0origins"  # carries them to the error message; no YAML key can hold this character


def _needed(settings: Mapping[str, Any], defaults: Mapping[str, Any], *, names: Collection[str]) -> dict[str, Any]:
    """Return the settings that `names` has or that differ from their defaults, by section."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, Mapping) or not isinstance(defaults[name], Mapping):
            kept = {name: value} if name in names or value != defaults[name] else {}
        else:
            inner = {key: v for key, v in value.items() if f"{name}.{key}" in names or v != defaults[name].get(key)}
            kept = {name: inner} if inner else {}
        found |= kept
    return found


def _given(section: Section, prefix: str = "") -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name not in section.model_fields_set:
            continue
        if isinstance(value, Section) and not prefix:
            yield from _given(value, f"{name}.")
        else:
            yield f"{prefix}{name}"


def _represent_float(representer: Any, value: float) -> Any:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _as_settings(data: Any) -> tuple[dict[Any, Any], Origins]:
    settings = dict(data)
    origins = settings.pop(_ORIGINS, Origins())
    # `data:` with every line under it commented out is null to YAML and means the defaults.
    sections = {name for name, field in Config.model_fields.items() if _is_section(field.annotation)}
    return {key: {} if value is None and key in sections else value for key, value in settings.items()}, origins


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _validate_rest(
    settings: dict[Any, Any], wrong: set[str], handler: ModelWrapValidatorHandler[Config]
) -> "Config | None":
    rest = {}
    for key, value in settings.items():
        if key in wrong:
            continue
        if isinstance(value, Mapping):
            value = {inner: v for inner, v in value.items() if f"{key}.{inner}" not in wrong}
        rest[key] = value
    try:
        return handler(rest)
    except ValidationError:
        return None
