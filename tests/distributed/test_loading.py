"""Every rank reads its own slices: the values are those of plain from_pretrained, whatever the folder looks like.

Reports L 92, 95 (in test_kind_i_precision.py and test_kind_l_loading.py) and 96.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import CheckpointError, ConfigError, FsdpTrainerError
from tests import models, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

Folder = Callable[[str], str]


def settings_for(model: str, tmp_path: Path, **sections: Any) -> dict[str, Any]:
    batch = {"global_batch_size": 12, "micro_batch_size": 1}
    return training_runs.settings(model, "unused.jsonl", tmp_path, batch=batch, **sections)


def loaded(run_settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    return step_runs.parameters(step_runs.build(run_settings))


def plain(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check(folder: str | Path, tmp_path: Path, *, world: int = 2, **sections: Any) -> None:
    expected = run_plainly(plain, str(folder))[0]
    for rank in run_on_kept_ranks(loaded, world, settings_for(str(folder), tmp_path, **sections)):
        assert rank.keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in rank.items())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_one_file(kind: str, world: int, model_folder: Folder, tmp_path: Path) -> None:
    check(model_folder(kind), tmp_path, world=world)


@pytest.mark.parametrize(
    ("world", "sharding"),
    [(2, {"zero_stage": 0}), (4, {"zero_stage": 3, "replicate": 2}), (2, {"zero_stage": 3, "offload": "params"})],
)
def test_other_meshes(world: int, sharding: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    check(model_folder("qwen3_tied"), tmp_path, world=world, sharding=sharding)


def resave(source: str, target: Path, change: str) -> str:
    """Save a copy of a model folder with one thing changed."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    if change in ("several files", "bf16"):
        dtype = torch.bfloat16 if change == "bf16" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        model.save_pretrained(target, max_shard_size="60KB" if change == "several files" else "1GB")
        return str(target)
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    match change:
        case "tied head stored too":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        case "bare decoder":
            tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        case "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "unexpected":
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
        case "shape":
            tensors["model.norm.weight"] = torch.ones(47)
        case "no safetensors":
            file.unlink()
            return str(target)
        case "outside":
            file.rename(target.parent / "elsewhere.safetensors")
            weight_map = dict.fromkeys(tensors, "../elsewhere.safetensors")
            (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            return str(target)
        case "no config":
            (target / "config.json").unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", "several files"),
        ("llama", "bf16"),
        ("llama_tied", "tied head stored too"),
        ("gpt2", "bare decoder"),
    ],
)
def test_other_folders(kind: str, change: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = run_plainly(resave, model_folder(kind), tmp_path / "model", change)[0]
    assert change != "several files" or len(list(Path(folder).glob("*.safetensors"))) > 3
    check(folder, tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ("missing", CheckpointError, "model.layers.1.mlp.up_proj.weight"),
        ("unexpected", CheckpointError, "model.layers.9.mlp.up_proj.weight"),
        ("shape", CheckpointError, "model.norm.weight"),
        ("no safetensors", CheckpointError, "model.safetensors"),
        ("outside", CheckpointError, "elsewhere"),
        ("no config", ConfigError, "model.path"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: str, error: type[FsdpTrainerError], named: str, model_folder: Folder, tmp_path: Path
) -> None:
    """Report 96: a tensor that is missing or of another shape must never be left as it is in memory."""
    folder = run_plainly(resave, model_folder("llama"), tmp_path / "model", change)[0]
    with pytest.raises(error) as caught:
        run_on_kept_ranks(loaded, 2, settings_for(folder, tmp_path))
    assert named in caught.value.values


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_random_weights_are_the_same_on_any_number_of_ranks(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    results = []
    for world in (1, 2, 3):
        settings = settings_for(model_folder(kind), tmp_path)
        settings["model"]["init"] = "random"
        results.append(run_on_kept_ranks(loaded, world, settings)[0])
    stored = run_plainly(plain, model_folder(kind))[0]
    for other in results[1:]:
        assert all(tensor.equal(results[0][name]) for name, tensor in other.items())
    matrices = [name for name, tensor in stored.items() if tensor.ndim == 2]
    assert all(not results[0][name].equal(stored[name]) for name in matrices)
    assert all(results[0][name].std().item() == pytest.approx(0.1, rel=0.1) for name in matrices)
    assert models.TIED[kind] == ("lm_head.weight" not in results[0])


def save_large(folder: str) -> str:
    """Save a random model of 58M parameters, two thirds of them in the two tables."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {"vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    config = LlamaConfig(**shape, num_attention_heads=8, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def loading_peak(small: dict[str, Any], large: dict[str, Any]) -> tuple[int, int, int]:
    """Return this rank's peak of anonymous bytes above its base while building, its shard's bytes and the model's."""
    from benchmarks.loading import Peaks

    step_runs.build(small)  # first uses of gloo, FSDP and Transformers take memory of their own
    with Peaks() as peaks:
        run = step_runs.build(large)
    parameters: list[Any] = list(run.model.parameters())
    local, whole = sum(p.to_local().nbytes for p in parameters), sum(p.numel() * 4 for p in parameters)
    return peaks.peak[0] - peaks.base[0], local, whole


def test_l92_no_rank_holds_more_than_its_shard(model_folder: Folder, tmp_path: Path) -> None:
    """Report 92: a fifth of the model above the shard is the limit; a second copy of anything would pass it."""
    large = run_plainly(save_large, str(tmp_path / "large"))[0]
    small, settings = settings_for(model_folder("llama"), tmp_path), settings_for(large, tmp_path)
    for peak, local, whole in run_ranks(loading_peak, 2, small, settings):
        assert 0.45 * whole < local < 0.55 * whole
        assert local * 0.9 < peak < local + 0.2 * whole, (peak, local, whole)
