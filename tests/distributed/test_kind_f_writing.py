"""Writing checkpoints and exports (reports F): plain names, whole shapes, the dtype asked for, all that a model needs.

Entries 38, 39, 41, 43, 49 and 50, and 40 as far as names go (`compile.enabled` is refused). Elsewhere: 42 in
test_offline_export.py, 48 in test_run_folder.py and test_disk_full.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests import fault_runs, models, training_runs
from tests.export_runs import load_plainly
from tests.ranks import run_ranks

ModelFolder = Callable[[str], str]


@pytest.mark.parametrize(("saved_with", "resumed_with"), [("full", "none"), ("none", "full")])
def test_39_names_do_not_know_activation_checkpointing(
    saved_with: str, resumed_with: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """A wrapper's prefix in the names would make the checkpoint fit only a run that wraps the same layers."""
    modes = {
        mode: training_runs.settings(
            model_folder("llama_tied"), "unused.jsonl", tmp_path, activation_checkpointing={"mode": mode}
        )
        for mode in (saved_with, resumed_with)
    }
    straight = run_ranks(runs.train_and_save, 2, modes[saved_with], 4, 2, False)
    resumed = run_ranks(runs.resume_and_train, 2, modes[resumed_with], 4)
    for rank in range(2):
        assert runs.differing(straight[rank]["end"], resumed[rank]["end"]) == []
    names = set(straight[0]["whole"])
    assert "model.model.layers.0.mlp.up_proj.weight" in names
    assert "optim.model.layers.0.mlp.up_proj.weight.exp_avg" in names
    assert not [name for name in names if "_checkpoint_wrapped" in name or "_orig_mod" in name or "_fsdp" in name]


def save_in_bf16(model: str, folder: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_38_41_43_50_what_a_run_leaves_is_a_model(dtype: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """From a bf16 source over fp32 masters on two ranks: shapes, dtype, config, tokenizer and template as there."""
    source = Path(run_ranks(save_in_bf16, 1, model_folder("llama"), str(tmp_path / "source"))[0])
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        str(source),
        data,
        tmp_path / "run",
        precision="bf16",
        train={"max_steps": 2},
        schedule={"warmup_steps": 1},
        export={"dtype": dtype},
        activation_checkpointing={"mode": "full"},
    )
    assert fault_runs.run(settings, 2) == [0, 0]
    exported, original = (training_runs.read_weights(folder) for folder in (tmp_path / "run" / "model", source))
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in original.items()
    }
    expected = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[dtype]
    assert {str(tensor.dtype) for tensor in exported.values()} == {expected}

    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "run" / "model", source)]
    assert configs[0].pop("dtype") == expected.removeprefix("torch.")
    configs[1].pop("dtype")
    assert configs[0] == configs[1], "use_cache and all else is as it was"
    loaded = run_ranks(load_plainly, 1, str(tmp_path / "run" / "model"), str(tmp_path / "again"))[0]
    assert loaded["info"] == {}
    assert loaded["chat_template"] == models.CHAT_TEMPLATE
    assert loaded["ids"] == run_ranks(load_plainly, 1, str(source), str(tmp_path / "twice"))[0]["ids"]


# Files as models on the hub have them: the code of the config does not know that of the model.
OWN_CODE = {
    "configuration_mine.py": """
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "mine"
""",
    "modeling_mine.py": """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig
from .parts import NAME

class Mine(LlamaForCausalLM):
    config_class = MineConfig
    name = NAME
""",
    "parts.py": 'NAME = "mine"',
}


def load_with_code(folder: str, modules: str) -> tuple[str, float]:
    """Load a folder that brings its own code, in a process that has never seen that code."""
    import torch
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = modules
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        return model.name, model(torch.tensor([[5, 7, 9]])).logits.abs().sum().item()


def test_44_code_that_a_model_brings_along_is_in_the_export(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model_folder("llama"), tmp_path / "source"))
    for name, code in OWN_CODE.items():
        (source / name).write_text(code)
    config = json.loads((source / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    own = {"model_type": "mine", "architectures": ["Mine"], "auto_map": auto_map}
    (source / "config.json").write_text(json.dumps({**config, **own}))
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        str(source),
        data,
        tmp_path / "run",
        train={"max_steps": 1},
        schedule={"warmup_steps": 1},
        model={"trust_remote_code": True},
        loss={"kind": "plain"},
    )
    assert fault_runs.run(settings, 2) == [0, 0]
    exported = tmp_path / "run" / "model"
    assert OWN_CODE.keys() <= {path.name for path in exported.iterdir()}
    trained = run_ranks(load_with_code, 1, str(exported), str(tmp_path / "modules"))[0]
    source.rename(tmp_path / "gone")
    assert run_ranks(load_with_code, 1, str(exported), str(tmp_path / "other_modules"))[0] == trained
    assert trained[0] == "mine"


def train_and_listen(settings: dict[str, Any]) -> list[str]:
    from fsdp_trainer import saving, training

    lines: list[str] = []
    for module in (saving, training):
        module.log_line = lambda text, **_: lines.append(str(text))  # type: ignore[assignment]
    assert fault_runs.train(settings) == 0
    return lines


def test_49_what_resumes_and_what_loads_are_told_apart(model_folder: ModelFolder, tmp_path: Path) -> None:
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        model_folder("llama"), data, tmp_path, train={"max_steps": 1}, schedule={"warmup_steps": 1}
    )
    lines = run_ranks(train_and_listen, 1, settings)[0]
    assert f"checkpoint: {tmp_path / 'checkpoints' / 'step-00000001'}" in lines
    assert [line for line in lines if line.startswith(f"model: {tmp_path / 'model'} ")]
