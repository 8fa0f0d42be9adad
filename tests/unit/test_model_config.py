"""A config.json that cannot be meant is refused as text, before anything is built or fetched because of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch import launch
from fsdp_trainer.model_config import refuse_hostile_config
from tests.unit.test_launch import run_config

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512, "head_dim": 16}


def write(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers: 100000; no model has more than 10,000"),
        ({"text_config": {"n_layer": 2**60}}, f"n_layer: {2**60}"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"hidden_size": 2**62}, "hidden_size"),
        ({"num_experts": 1e300}, "num_experts"),
        ({"attn_implementation": "org/kernel"}, "attn_implementation: org/kernel"),
        ({"_attn_implementation": "org/kernel@v1:f"}, "org/kernel"),
        ({"attn_implementation": {"text_config": "org/kernel"}}, "org/kernel"),
        ({"text_config": {"_experts_implementation": "org/kernel"}}, "org/kernel"),
    ],
)
def test_what_cannot_be_meant(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(LLAMA | changes))
    with pytest.raises(ConfigError) as caught:
        refuse_hostile_config(path)
    assert said in caught.value.values and path in caught.value.values


def test_brackets_without_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        refuse_hostile_config(write(tmp_path, '{"a": ' + 100_000 * "[" + 100_000 * "]" + "}"))


def test_what_models_have(tmp_path: Path) -> None:
    refuse_hostile_config(write(tmp_path, json.dumps(LLAMA | {"attn_implementation": "sdpa", "seed": 2**70})))
    refuse_hostile_config(
        write(tmp_path, json.dumps(LLAMA | {"_attn_implementation": "org/kernel"})), trust_remote_code=True
    )
    refuse_hostile_config(str(tmp_path / "nowhere"))


def test_no_process_is_started_for_it(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run")
    write(Path(config.model.path), json.dumps(LLAMA | {"attn_implementation": "org/kernel"}))
    with pytest.raises(ConfigError, match="names a kernel of the hub"):
        launch(config, arguments=[], processes=1)
    assert not (tmp_path / "run").exists()
