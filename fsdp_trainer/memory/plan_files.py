"""The files of a plan: the settings, the Accelerate profile, and what was predicted; read back when the run starts.

`run.yaml` holds what differs from the defaults and what the planner chose. A run that is started from it leaves
`plan.json` in its own folder, as long as it is the run that was planned.
"""

import json
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.launch_profile import write_profile
from fsdp_trainer.memory.candidates import SEARCHED
from fsdp_trainer.memory.plan import GIB, Candidate, Plan
from fsdp_trainer.run_folder import PREDICTION, parse_json, write_text_atomically
from fsdp_trainer.units import format_bytes

SETTINGS_FILE, PROFILE_FILE = "run.yaml", "accelerate.yaml"
# Written even where they are the defaults: they are what the plan is.
PLANNED = (*SEARCHED, "batch.global_batch_size", "data.seq_len")
# What a prediction is of; what else may change between the plan and the run changes neither memory nor a step's time.
_OF_THE_PREDICTION = (
    *("model", "sharding", "precision", "activation_checkpointing", "loss", "batch", "compile"),
    *("data.seq_len", "data.packing", "optim.name", "optim.implementation", "optim.state_dtype", "optim.offload_step"),
)


def write_plan(plan: Plan, folder: Path) -> list[str]:
    """Leave run.yaml, accelerate.yaml and plan.json in `folder`; return the commands that start the run.

    One command, or one for each machine. ConfigError where nothing fits, and where a file of one of these names is
    there with other content: nothing is written then.
    """
    chosen = plan.chosen
    if chosen is None:
        raise refuse_unfit(plan)
    texts = {
        SETTINGS_FILE: _settings_text(chosen, plan),
        PROFILE_FILE: _profile_text(chosen.config, plan),
        PREDICTION: json.dumps(prediction_of(plan), indent=2) + "\n",
    }
    different = [name for name, text in texts.items() if (folder / name).exists() and _read(folder / name) != text]
    if different:
        raise ConfigError(
            "The folder has other files of these names, which stay as they are.",
            values=f"{folder}: {', '.join(different)}",
            fix="give a new folder to --write, or move these away",
        )
    try:
        for name, text in texts.items():
            write_text_atomically(folder / name, text)
    except OSError as error:
        raise OutputError(
            "The plan cannot be written.",
            values=f"{folder}: {error.strerror or error}",
            fix="give --write a folder that can be made and written",
        ) from error
    return _commands(plan, folder)


def refuse_unfit(plan: Plan) -> ConfigError:
    """Return the error for a plan of which nothing fits: the nearest miss, and what would make it fit."""
    near = plan.nearest
    lacks = " and ".join(near.lacks) if near is not None else ""
    return ConfigError(
        "No combination of settings fits.",
        values=f"{plan.hardware}: {plan.considered:,} combinations; the nearest lacks {lacks or 'memory'}",
        fix=" or ".join(plan.remedies) or "hold fewer settings fixed, or name more or larger GPUs",
    )


def prediction_of(plan: Plan) -> dict[str, Any]:
    """Return what plan.json holds: the plan, without the time it took, so that the same plan is the same file."""
    found = plan.to_json()
    del found["seconds"]
    return found


def _settings_text(chosen: Candidate, plan: Plan) -> str:
    memory = chosen.prediction["allocated_gib"]
    head = f"# Planned by fsdp-trainer for {plan.hardware}: {format_bytes(memory * GIB)} allocated on each"
    if (seconds := chosen.step_seconds) is not None:
        head += f", {seconds:.2f} s a step"
    text = f"{head} ({chosen.source}).\n" + chosen.config.to_yaml(names={*PLANNED, *plan.fixed})
    assert Config.from_dict(_parsed(text)) == chosen.config
    return text


def _parsed(text: str) -> Any:
    from fsdp_trainer.config_reading import parse_settings

    return parse_settings(text, source=SETTINGS_FILE)


def _profile_text(config: Config, plan: Plan) -> str:
    hardware = plan.hardware
    with tempfile.TemporaryDirectory() as folder:
        path = write_profile(
            Path(folder) / PROFILE_FILE,
            config,
            processes=hardware.count,
            use_cpu=hardware.is_cpu,
            machines=hardware.nodes,
        )
        return path.read_text(encoding="utf-8")


def _commands(plan: Plan, folder: Path) -> list[str]:
    settings, profile = shlex.quote(str(folder / SETTINGS_FILE)), shlex.quote(str(folder / PROFILE_FILE))
    if plan.hardware.nodes == 1:
        return [f"fsdp-trainer train --config {settings} --profile {profile}"]
    script = Path(__file__).resolve().parents[1] / "train.py"
    return [
        f"accelerate launch --config_file {profile} --machine_rank {node} --main_process_ip $FIRST_MACHINE "
        f"--main_process_port 29500 {shlex.quote(str(script))} --config {settings}"
        for node in range(plan.hardware.nodes)
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


# --- when the run starts ---------------------------------------------------------------------------------------------


def find_prediction(settings_file: str | Path | None, config: Config, *, processes: int) -> dict[str, Any] | None:
    """Return the plan that lies beside a settings file, where it is of the run that is about to start; else None."""
    text = _read(Path(settings_file).with_name(PREDICTION)) if settings_file is not None else None
    if text is None:
        return None
    try:
        found = parse_json(text)
        chosen = found["candidates"][found["chosen"]]
        same = found["hardware"]["count"] == processes and not differing(chosen["config"], config)
    except (ValueError, KeyError, IndexError, TypeError):  # a plan.json of something else
        return None
    return found if same else None


def differing(planned: Mapping[str, Any], config: Config) -> list[str]:
    """Return the names of settings that change a prediction and are not those of the plan."""
    settings = config.to_dict()
    return [name for name in _OF_THE_PREDICTION if _at(planned, name) != _at(settings, name)]


def _at(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value[part]
    return value
