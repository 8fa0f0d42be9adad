"""Writing checkpoints and exports (reports F): plain names, whole shapes, the dtype asked for, all that a model needs.

Entries 38, 39, 41, 43, 46, 49 and 50, and 40 as far as names go (`compile.enabled` is refused). Elsewhere: 42 in
test_offline_export.py, 48 in test_run_folder.py and test_disk_full.py, the planner's row of 46 in test_simulate.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests import fault_runs, models, training_runs
from tests.export_runs import load_plainly
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

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
    straight = run_on_kept_ranks(runs.train_and_save, 2, modes[saved_with], 4, 2, False)
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
    loaded = run_plainly(load_plainly, str(tmp_path / "run" / "model"), str(tmp_path / "again"))[0]
    assert loaded["info"] == {}
    assert loaded["chat_template"] == models.CHAT_TEMPLATE
    assert loaded["ids"] == run_plainly(load_plainly, str(source), str(tmp_path / "twice"))[0]["ids"]


def test_the_card_says_how_the_model_was_measured(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, held_out = (models.write_jsonl(models.make_records(16, seed=n)[0], tmp_path / f"{n}.jsonl") for n in (3, 4))
    settings = training_runs.settings(
        model_folder("llama"),
        data,
        tmp_path / "run",
        train={"max_steps": 2},
        schedule={"warmup_steps": 1},
        data={"eval": held_out},
        eval={"at_end": True},
    )
    assert fault_runs.run(settings, 2) == [0, 0]
    (row,) = [row for row in training_runs.read_metrics(tmp_path / "run") if "eval_loss" in row]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| evaluation loss | {row['eval_loss']:.4f} after step 2 |" in card
    assert f"| evaluation data | {held_out} |" in card
    assert '"role": "user"' in card, "the tokenizer has a chat template"


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


FILE_BYTES = 4 * 2**20


def save_deep(folder: str) -> str:
    """Save a random model of 30M parameters in 28 layers, of which no tensor has more than a fiftieth."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 28}
    config = LlamaConfig(**shape, num_attention_heads=8, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def give_memory_back_at_once() -> None:
    """Let glibc map every block above 64 KiB by itself: what is freed is gone from RSS, so RSS is what is held."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD


def peaks_of_writing(small: dict[str, Any], deep: dict[str, Any]) -> tuple[list[int], int]:
    """Return this rank's peaks of anonymous bytes above its base in a save and in an export, and its model's bytes."""
    from benchmarks.loading import Peaks
    from fsdp_trainer.checkpoint import _create_optimizer_state
    from fsdp_trainer.export import export_model

    give_memory_back_at_once()
    for run_settings in (small, deep):  # first uses of DCP and of safetensors take memory of their own
        run = runs.build(run_settings)
        output_dir = Path(run.config.output_dir)
        _create_optimizer_state(run.optimizer)
        with Peaks() as saving:
            runs.save(run, 1).wait()
        with Peaks() as exporting:
            export_model(
                output_dir / "model",
                model=run.model,
                hf_config=run.hf_config,
                dtype="bf16",
                max_file_bytes=FILE_BYTES,
            )
        if run.runtime.is_main:
            run.config.save(output_dir / "config.yaml")
    whole = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    return [peaks.peak[0] - peaks.base[0] for peaks in (saving, exporting)], whole


def peak_of_offline_export(checkpoints: list[str], out: str) -> int:
    from benchmarks.loading import Peaks
    from fsdp_trainer.offline_export import export_checkpoint

    give_memory_back_at_once()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    found = []
    for number, checkpoint in enumerate(checkpoints):
        with Peaks() as peaks:
            # Not bf16, which is compared with the source in blocks as large as this model.
            export_checkpoint(Path(checkpoint), Path(f"{out}-{number}"), dtype="fp32", max_file_bytes=FILE_BYTES)
        found.append(peaks.peak[0] - peaks.base[0])
    return found[-1]


def test_46_nobody_gathers_the_model_to_write_it(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A save holds nothing beside the shards, an export one file and one tensor, and so does the command.

    The public case gathers all of it on one GPU. One copy would be `whole`, or half of it in bf16.
    """
    tokenizer = model_folder("llama")
    source = run_ranks(save_deep, 1, str(tmp_path / "source"))[0]
    small, deep = (
        training_runs.settings(model, "unused.jsonl", tmp_path / name, precision="bf16", model={"tokenizer": tokenizer})
        for name, model in (("small", tokenizer), ("deep", source))
    )
    for (saving, exporting), whole in run_ranks(peaks_of_writing, 2, small, deep):
        assert saving < 0.2 * whole, (saving, whole)
        assert exporting < 0.2 * whole, (exporting, whole)
    both = [str(tmp_path / name / "checkpoints" / "step-00000001") for name in ("small", "deep")]
    offline = run_ranks(peak_of_offline_export, 1, both, str(tmp_path / "out"))[0]
    assert offline < 0.2 * whole, (offline, whole)
