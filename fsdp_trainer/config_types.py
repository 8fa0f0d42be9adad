"""What the sections of the settings file share: their base, and the kinds of value that several settings take."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fsdp_trainer.config_reading import Takes

STRATEGY_STAGES = {"NO_SHARD": 0, "SHARD_OPT": 1, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}


class Section(BaseModel):
    """What every section shares: frozen, unknown keys refused, and no value converted behind the user's back."""

    # strict: pydantic would otherwise read "false", "off" and 0 as booleans and "3" as a number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


def tuple_from_list(value: Any) -> Any:
    """Lists of the file become tuples, so that a frozen config cannot be changed through one of its values."""
    return tuple(value) if isinstance(value, list) else value


def _stage_from_name(value: Any) -> Any:
    """Turn a strategy name or a stage written as text into its number."""
    if not isinstance(value, str):
        return value
    name = value.strip().upper()
    if name in STRATEGY_STAGES:
        return STRATEGY_STAGES[name]
    if name in {"0", "1", "2", "3"}:
        return int(name)
    return value


def zero_is_off(value: Any) -> Any:
    """Read a clipping norm of 0 as "off", what other tools write; clipping to 0 would stop all learning."""
    return None if not isinstance(value, bool) and value == 0 else value


def _allow_names(schema: dict[str, Any]) -> None:
    """Say in the JSON Schema what the validator accepts, so that an editor does not mark a strategy name as wrong."""
    number = {key: schema.pop(key) for key in ("type", "minimum", "maximum")}
    schema["anyOf"] = [number, {"enum": list(STRATEGY_STAGES)}]


Stage = Annotated[
    int,
    Field(ge=0, le=3, json_schema_extra=_allow_names),
    BeforeValidator(_stage_from_name),
    Takes(f"0, 1, 2 or 3, or one of the names {', '.join(STRATEGY_STAGES)}"),
]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), Takes("non-empty text")]
Texts = Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)]
Steps = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(tuple_from_list)]
Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio"
]  # the names accelerate.utils.LoggerType of Accelerate 1.15 knows, without "all": name what you want
