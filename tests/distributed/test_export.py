"""The exported folder is a model that Transformers loads as it is, with the trained values and nothing left behind."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests.export_runs import export, load_plainly, train_and_export
from tests.models import CHAT_TEMPLATE
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks
from tests.training_runs import read_weights, settings

ModelFolder = Callable[[str], str]


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return settings(model, "unused.jsonl", folder, **sections)


@pytest.mark.parametrize(
    ("kind", "sharding", "dtype"),
    [
        ("llama", {}, "bf16"),
        ("llama_tied", {"zero_stage": 2}, "fp32"),
        ("qwen3_tied", {"offload": "params"}, "fp16"),
        ("gemma3", {"zero_stage": 0}, "bf16"),
        ("gpt2", {}, "auto"),
    ],
)
def test_export_loads_plainly_and_equals_the_trained_model(
    kind: str, sharding: dict[str, Any], dtype: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    import torch

    source, target, again = model_folder(kind), tmp_path / "model", tmp_path / "again"
    config = tiny(source, tmp_path, sharding=sharding, activation_checkpointing={"mode": "full"})
    trained = run_on_kept_ranks(train_and_export, 2, config, str(target), {"dtype": dtype})[0]
    loaded = run_plainly(load_plainly, str(target), str(again))[0]
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)  # the sources are fp32
    assert loaded["info"] == {}, "no missing, unexpected or mismatched tensor"
    assert trained["dtype"] == loaded["dtype"] == expected
    assert torch.equal(loaded["logits"], trained["logits"])
    assert loaded["chat_template"] == CHAT_TEMPLATE
    assert loaded["ids"] == [6, 7]
    written, original, resaved = read_weights(target), read_weights(Path(source)), read_weights(again)
    assert written.keys() == original.keys() == resaved.keys()
    assert {name: tensor.shape for name, tensor in written.items()} == {n: t.shape for n, t in original.items()}
    assert all(tensor.dtype == expected for tensor in written.values())
    assert all(torch.equal(written[name], resaved[name]) for name in written)
    assert ("lm_head.weight" in written) == (not loaded["tied"])
    assert sum(tensor.nbytes for tensor in written.values()) == trained["bytes"]
    configs = {folder: json.loads((Path(folder) / "config.json").read_text()) for folder in (source, target, again)}
    assert configs[target] == configs[again], "saved again by Transformers, the config is equal"
    assert configs[target] == configs[source] | {"dtype": str(expected).removeprefix("torch.")}
    generation = [
        json.loads((folder / "generation_config.json").read_text()) for folder in (Path(source), target, again)
    ]
    assert generation[0] == generation[1] == generation[2]
    assert not list(tmp_path.glob(".model*"))


def test_use_cache_is_what_the_source_says(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of `use_cache: false`, right for training, that stays in the export and makes generation slow."""
    for value in (True, False):
        source = tmp_path / f"source-{value}"
        source.mkdir()
        for file in Path(model_folder("llama")).iterdir():
            (source / file.name).write_bytes(file.read_bytes())
        config = json.loads((source / "config.json").read_text()) | {"use_cache": value}
        (source / "config.json").write_text(json.dumps(config))
        target = tmp_path / f"model-{value}"
        run_on_kept_ranks(train_and_export, 1, tiny(str(source), tmp_path), str(target), {})
        assert json.loads((target / "config.json").read_text())["use_cache"] is value


def test_large_model_is_split_with_an_index(model_folder: ModelFolder, tmp_path: Path) -> None:
    import torch

    target, again = tmp_path / "model", tmp_path / "again"
    options = {"max_file_bytes": 40_000, "dtype": "fp32"}
    trained = run_on_kept_ranks(train_and_export, 2, tiny(model_folder("llama"), tmp_path), str(target), options)[0]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 3
    assert files == list(trained["files"]) == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((target / file).stat().st_size < 42_000 for file in files)
    weights = read_weights(target)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in weights.values())
    loaded = run_plainly(load_plainly, str(target), str(again))[0]
    assert loaded["info"] == {}
    assert torch.equal(loaded["logits"], trained["logits"])


def part_and_export(settings: dict[str, Any], folder: str) -> None:
    """Give the head of a tied model weights of its own, as a run that trained them apart would have, and export."""
    import torch

    run = runs.build(settings)
    head: Any = run.model.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        head.weight = torch.nn.Parameter(head.weight.detach() * 2)
    export(run, Path(folder), dtype="fp32")


def test_head_that_came_apart_is_written_whatever_the_config_says(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of a saver that trusts `tie_word_embeddings` and drops a head that is no longer the embedding."""
    import torch

    target = tmp_path / "model"
    run_ranks(part_and_export, 2, tiny(model_folder("llama_tied"), tmp_path), str(target))
    weights = read_weights(target)
    assert torch.equal(weights["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = run_plainly(load_plainly, str(target), str(tmp_path / "again"))[0]
    assert loaded["info"] == {}
    assert loaded["tied"] is False


def export_with_buffers(settings: dict[str, Any], folder: str) -> None:
    import torch

    run = runs.build(settings)
    run.model.register_buffer("scale", torch.full((3,), 0.5))
    run.model.register_buffer("count", torch.tensor(4))
    run.model.register_buffer("table", torch.ones(2), persistent=False)
    export(run, Path(folder), dtype="bf16")


def test_persistent_buffers_are_in_the_export(model_folder: ModelFolder, tmp_path: Path) -> None:
    import torch

    run_ranks(export_with_buffers, 1, tiny(model_folder("llama"), tmp_path), str(tmp_path / "model"))
    weights = read_weights(tmp_path / "model")
    assert weights["scale"].tolist() == [0.5] * 3
    assert weights["scale"].dtype == torch.bfloat16
    assert weights["count"].item() == 4
    assert weights["count"].dtype == torch.int64
    assert not any("table" in name or "inv_freq" in name for name in weights)


def export_twice(settings: dict[str, Any], folder: str) -> str:
    """Export, then export again where rank 0 cannot write more than 64 KiB to a file."""
    from fsdp_trainer.errors import CheckpointError

    run = runs.build(settings)
    export(run, Path(folder), dtype="fp32")
    runs.take_steps(run, 0, 1)
    if run.runtime.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        export(run, Path(folder), dtype="fp32")
    except CheckpointError as error:
        return str(error)
    return "exported"


def test_failing_export_is_known_to_all_and_leaves_the_earlier_one(model_folder: ModelFolder, tmp_path: Path) -> None:
    import torch

    target = tmp_path / "model"
    messages = run_ranks(export_twice, 2, tiny(model_folder("llama"), tmp_path), str(target))
    assert messages[0] == messages[1]
    assert messages[0].startswith("The trained model could not be written")
    assert "File too large" in messages[0]
    assert not list(tmp_path.glob(".model*"))
    before, source = read_weights(target), read_weights(Path(model_folder("llama")))
    assert all(torch.equal(before[name], source[name]) for name in source)


def export_over(settings: dict[str, Any], folder: str) -> None:
    run = runs.build(settings)
    target = Path(folder)
    if run.runtime.is_main:
        target.mkdir()
        (target / "model-00001-of-00009.safetensors").write_text("from an earlier, larger model")
    export(run, target)


def test_earlier_folder_is_replaced_whole(model_folder: ModelFolder, tmp_path: Path) -> None:
    run_ranks(export_over, 2, tiny(model_folder("llama"), tmp_path), str(tmp_path / "model"))
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors")] == ["model.safetensors"]
