"""Kinds C, E and L of the public failures when loading: ties, vocabularies, merged experts, hostile folders.

Elsewhere: 92 and 93 (what each rank really holds) and 96 in test_loading.py, 97 in test_simulate.py. 98 cannot arise:
each rank reads its own part, whatever Accelerate's switches for loading say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import CheckpointError, ConfigError, FsdpTrainerError
from fsdp_trainer.loading import describe_mixed
from fsdp_trainer.weight_files import open_weights
from tests import architectures, models, reference, step_runs, training_runs
from tests.distributed.test_loading import check, loaded, plain, settings_for
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

Folder = Callable[[str], str]
Tensors = dict[str, torch.Tensor]


def copy_of(source: str, target: Path, **config: Any) -> Path:
    """Copy a model folder, with some entries of config.json changed."""
    target.mkdir()
    for file in Path(source).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(settings))
    return target


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, tmp_path: Path, *said: str, error: type[FsdpTrainerError] = CheckpointError) -> None:
    """Both ranks must refuse the folder, and what they say must name what is wrong."""
    with pytest.raises(error) as caught:
        run_on_kept_ranks(loaded, 2, settings_for(str(folder), tmp_path))
    for words in said:
        assert words in str(caught.value), str(caught.value)


# C: tied embeddings


def test_c24_two_different_tensors_under_a_tied_config(model_folder: Folder, tmp_path: Path) -> None:
    """Only the last row differs, which one rank alone reads: both refuse, naming the flag and the keys."""
    folder = copy_of(model_folder("llama_tied"), tmp_path / "model")

    def add_head(tensors: Tensors) -> Tensors:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        return tensors | {"lm_head.weight": head}

    rewrite(folder, add_head)
    refused(folder, tmp_path, "tie_word_embeddings", "model.embed_tokens.weight", "lm_head.weight")


def test_c_only_the_head_is_stored_under_a_tied_config(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama_tied"), tmp_path / "model")
    rewrite(folder, lambda tensors: {"lm_head.weight": tensors.pop("model.embed_tokens.weight"), **tensors})
    expected = run_plainly(plain, model_folder("llama_tied"))[0]
    for rank in run_on_kept_ranks(loaded, 2, settings_for(str(folder), tmp_path)):
        assert all(tensor.equal(expected[name]) for name, tensor in rank.items())


def test_c_head_is_lacking_under_an_untied_config(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama_tied"), tmp_path / "model", tie_word_embeddings=False)
    refused(folder, tmp_path, "lm_head.weight", "tie_word_embeddings")


# E: vocabularies


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_e_table_padded_beyond_the_tokenizer(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    """Rows that no token has are loaded and trained like any other; three ranks share 168 rows unevenly."""
    folder = copy_of(model_folder(kind), tmp_path / "model", vocab_size=168)

    def pad(tensors: Tensors) -> Tensors:
        return {
            name: torch.cat([tensor, torch.zeros(8, tensor.shape[1])]) if tensor.shape[0] == 160 else tensor
            for name, tensor in tensors.items()
        }

    rewrite(folder, pad)
    check(folder, tmp_path, world=3)
    documents = models.make_records(6, seed=2)[1]
    settings = training_runs.settings(str(folder), "x", tmp_path, optim={"max_grad_norm": None})
    settings["batch"] = {"global_batch_size": 6, "micro_batch_size": 1}
    got = run_on_kept_ranks(step_runs.one_step, 2, settings, [[document] for document in documents])[0]
    loss, gradients = run_plainly(reference.gradient_snapshot, str(folder), documents)[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert max(reference.relative_errors(got["gradients"], gradients).values()) < 1e-4


def test_e32_config_was_not_updated_with_the_table(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model", vocab_size=161)
    refused(folder, tmp_path, "model.embed_tokens.weight", "[160, 48] stored, [161, 48]", "vocab_size: 160")


def start(settings: dict[str, Any]) -> None:
    from fsdp_trainer import Config, finetune

    finetune(Config.from_dict(settings))


@pytest.mark.parametrize("used", [True, False])
def test_e34_tokens_were_added_and_the_table_was_not_grown(used: bool, model_folder: Folder, tmp_path: Path) -> None:
    """What the data use is what counts: a token of no row is no reason to refuse, and one of a row is named."""
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    run_ranks(add_token, 1, str(folder))
    records = models.make_records(8, seed=3)[0]
    if used:
        records[5]["completion"] += " <new>"
    settings = training_runs.settings(str(folder), models.write_jsonl(records, tmp_path / "data.jsonl"), tmp_path)
    settings |= {"train": {"max_steps": 1}, "batch": {"global_batch_size": 8, "micro_batch_size": 2}}
    settings["schedule"]["warmup_steps"] = 0
    if not used:
        run_ranks(start, 2, settings)
        return
    with pytest.raises(FsdpTrainerError) as caught:
        run_ranks(start, 2, settings)
    for words in ("id 160", "table of 160 rows"):
        assert words in caught.value.values, str(caught.value)


def add_token(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 160 and tokenizer.add_tokens(["<new>"]) == 1
    tokenizer.save_pretrained(folder)


# L: names, merges, files


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_l_experts_are_merged_from_pieces(name: str, world: int, tmp_path: Path) -> None:
    """Four experts over three ranks: a shard begins in the middle of what one file's tensor becomes."""
    model = run_plainly(architectures.save_architecture, name, str(tmp_path / "model"))[0]
    assert any("experts.3." in key for key in training_runs.read_weights(Path(model)))
    check(model, tmp_path, world=world)


def save_unconverted(source: str, target: str) -> None:
    """Save in the model's own layout: experts in one tensor."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(
        target, save_original_format=False
    )


def test_l_experts_stored_in_one_tensor_already(tmp_path: Path) -> None:
    model = run_plainly(architectures.save_architecture, "mixtral", str(tmp_path / "model"))[0]
    run_plainly(save_unconverted, model, str(tmp_path / "fused"))
    assert any(key.endswith("gate_up_proj") for key in training_runs.read_weights(tmp_path / "fused"))
    check(tmp_path / "fused", tmp_path)


@pytest.mark.parametrize(
    ("dropped", "said"),
    [
        ("experts.1.w1", "gaps"),
        ("experts.3.w1", "another shape"),
        ("w3.weight", "are missing"),
    ],
)
def test_l_expert_that_is_missing(dropped: str, said: str, tmp_path: Path) -> None:
    model = Path(run_plainly(architectures.save_architecture, "mixtral", str(tmp_path / "model"))[0])
    rewrite(model, lambda tensors: {name: tensor for name, tensor in tensors.items() if dropped not in name})
    refused(model, tmp_path, said, "experts")


def save_bin(source: str, target: str, shards: int) -> None:
    """Save a folder's tensors with torch.save, in one file or by index."""
    from safetensors.torch import load_file

    tensors = load_file(Path(source) / "model.safetensors")
    folder = Path(target)
    (folder / "model.safetensors").unlink()
    names = [list(tensors)[index::shards] for index in range(shards)]
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{index}.bin" for index in range(shards)]
    for file, members in zip(files, names, strict=True):
        torch.save({name: tensors[name] for name in members}, folder / file)
    if shards > 1:
        weight_map = {name: file for file, members in zip(files, names, strict=True) for name in members}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
def test_l_bin_files(shards: int, model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    run_plainly(save_bin, model_folder("llama"), str(folder), shards)
    expected = run_plainly(plain, model_folder("llama"))[0]
    for rank in run_on_kept_ranks(loaded, 2, settings_for(str(folder), tmp_path)):
        assert all(tensor.equal(expected[name]) for name, tensor in rank.items())


class _Runs:
    """Pickled, it writes a file when it is opened by anything that runs what a pickle says."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_l_bin_that_runs_code_is_not_opened(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Runs(str(tmp_path / "owned"))}, folder / "pytorch_model.bin")
    refused(folder, tmp_path, "pytorch_model.bin")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("change", ["truncated", "longer", "not safetensors", "empty", "header length"])
def test_l_damaged_file(change: str, model_folder: Folder, tmp_path: Path) -> None:
    """Declared sizes are compared with real ones before any tensor is used."""
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    changed = {
        "truncated": content[:-64],
        "longer": content + bytes(64),
        "not safetensors": b"<html>" * 1000,
        "empty": b"",
        "header length": (2**62).to_bytes(8, "little") + content[8:],
    }[change]
    file.write_bytes(changed)
    refused(folder, tmp_path, "model.safetensors")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "name",
    ["../part.safetensors", "{tmp}/part.safetensors", "sub/part.safetensors", "..\\part.safetensors",
     "part\0.safetensors", "", "..", "link.safetensors", "C:part.safetensors", "missing.safetensors", 7, None],
)  # fmt: skip
def test_l_index_that_leaves_its_folder(name: Any, model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    names = list(training_runs.read_weights(folder))
    (folder / "model.safetensors").rename(tmp_path / "part.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "part.safetensors")
    if isinstance(name, str):
        name = name.replace("{tmp}", str(tmp_path))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))
    refused(folder, tmp_path, INDEX)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000])
def test_l_index_that_is_none(text: str, model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(text)
    refused(folder, tmp_path, INDEX)


def test_l_index_that_names_other_tensors(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    names = list(training_runs.read_weights(folder))
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], "part.safetensors")}))
    refused(folder, tmp_path, "do not agree", names[0])


def test_l_links_of_the_hub_cache_are_followed(model_folder: Folder, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in Path(model_folder("llama")).iterdir():
        (blobs / f"blob-of-{file.name}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    check(snapshot, tmp_path)


def found_in_cache(cache: str, name: str, revision: str | None) -> str:
    import huggingface_hub.constants

    from fsdp_trainer.weight_files import find_folder

    huggingface_hub.constants.HF_HUB_CACHE = cache
    return str(find_folder(name, revision=revision))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_l_weights_of_a_hub_id_come_from_the_cache(file: str, tmp_path: Path) -> None:
    """Without a network; a repository that is not in the cache is refused by name."""
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / file).write_bytes(b"")
    for revision in (None, "a" * 40):
        assert run_ranks(found_in_cache, 1, str(tmp_path), "some/model", revision)[0] == str(snapshot)
    for name, revision in (("some/other", None), ("some/model", "b" * 40), ("no folder at all/../x", None)):
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            run_ranks(found_in_cache, 1, str(tmp_path), name, revision)
        assert name in caught.value.values


def test_l_quantised_tensors_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    refused(folder, tmp_path, "quantised", name)


def load_and_export(settings: dict[str, Any], folder: str) -> tuple[Tensors, list[str], dict[str, Any]]:
    """Return the weights, what loading said of the folder, and the config of its export."""
    from fsdp_trainer.export import export_model
    from fsdp_trainer.loading import plan_loading

    run = step_runs.build(settings)
    export_model(Path(folder), model=run.model, hf_config=run.hf_config, dtype="fp32")
    notes = list(plan_loading(run.model, Path(settings["model"]["path"])).notes)
    return step_runs.parameters(run), notes, json.loads((Path(folder) / "config.json").read_text())


_LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"module.module.{name}",
        lambda name: name.replace(_LAYER, f"{_LAYER}_orig_mod._checkpoint_wrapped_module."),
        lambda name: "_fsdp_wrapped_module." + name.replace(_LAYER, f"{_LAYER}_fsdp_wrapped_module."),
    ],
    ids=["compiled", "ddp", "compiled-ddp", "engine", "checkpointed-layer", "fsdp1"],
)
@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_40_names_of_other_trainers_wrappers_are_read(
    kind: str, wrapped: Callable[[str], str], model_folder: Folder, tmp_path: Path
) -> None:
    """What a save below a wrapper leaves: refused before, with the advice to tie the embeddings."""
    folder = copy_of(model_folder(kind), tmp_path / "model")
    rewrite(folder, lambda tensors: {wrapped(name): tensor for name, tensor in tensors.items()})
    expected = run_plainly(plain, model_folder(kind))[0]
    for rank, (weights, notes, _) in enumerate(
        run_on_kept_ranks(load_and_export, 2, settings_for(str(folder), tmp_path), str(tmp_path / "out"))
    ):
        assert all(tensor.equal(expected[name]) for name, tensor in weights.items()), rank
        assert len(notes) == 1 and "another trainer wrapped" in notes[0]


def test_norms_in_fp32_among_bf16_are_named(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    rewrite(folder, lambda tensors: {n: t if "norm" in n else t.to(torch.bfloat16) for n, t in tensors.items()})
    stored = open_weights(folder)
    (line,) = describe_mixed(folder, stored)
    norms = [name for name in stored if "norm" in name]
    assert f"{len(norms)} of {len(stored)} tensors are not stored as BF16 ({norms[0]} F32, " in line
    assert describe_mixed(folder, {name: stored[name] for name in norms}) == []


def test_40_wrapped_names_that_do_not_fit_are_refused_for_what_is_wrong(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model")
    missing = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {f"module.{name}": value for name, value in tensors.items() if name != missing})
    with pytest.raises(CheckpointError) as caught:
        run_on_kept_ranks(loaded, 2, settings_for(str(folder), tmp_path))
    assert f"missing ['{missing}'] (1), unexpected [] (0)" in str(caught.value)
    assert "tie_word_embeddings" not in str(caught.value)


def test_in16_plain_weights_that_are_said_to_be_quantised(model_folder: Folder, tmp_path: Path) -> None:
    """They train, it is said, and the export says what it holds."""
    said = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = copy_of(model_folder("llama"), tmp_path / "model", quantization_config=said)
    for _, notes, exported in run_on_kept_ranks(
        load_and_export, 2, settings_for(str(folder), tmp_path), str(tmp_path / "out")
    ):
        assert "quantization_config" not in exported
        assert len(notes) == 1 and "fp8" in notes[0]


def test_a_quantised_folder_of_other_names_is_not_taken_for_another_model(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_of(model_folder("llama"), tmp_path / "model", quantization_config={"quant_method": "gptq", "bits": 4})

    def pack(tensors: Tensors) -> Tensors:
        return {name.replace("up_proj.weight", "up_proj.qweight"): tensor for name, tensor in tensors.items()}

    rewrite(folder, pack)
    refused(folder, tmp_path, "qweight", "use the unquantised model")


def test_l_remote_code_is_not_run(model_folder: Folder, tmp_path: Path) -> None:
    """A config that brings its own code is refused by name where nobody asked for that code."""
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    folder = copy_of(model_folder("llama"), tmp_path / "model", model_type="mine", auto_map=auto_map)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    refused(folder, tmp_path, "trust_remote_code", error=ConfigError)
    assert not (tmp_path / "owned").exists()


def buffers(settings: dict[str, Any]) -> Tensors:
    return {name: buffer.clone() for name, buffer in step_runs.build(settings).model.named_buffers()}


def fresh_buffers(folder: str) -> Tensors:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3"])
def test_l95_every_buffer_is_that_of_a_fresh_model(kind: str, model_folder: Folder, tmp_path: Path) -> None:
    expected = run_plainly(fresh_buffers, model_folder(kind))[0]
    for rank in run_on_kept_ranks(buffers, 2, settings_for(model_folder(kind), tmp_path)):
        assert rank.keys() == expected.keys()
        assert all(buffer.equal(expected[name]) for name, buffer in rank.items())
