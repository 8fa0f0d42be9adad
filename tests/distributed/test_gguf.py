"""A GGUF file trains like the folder it was made from, converted once; what is no whole GGUF model is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_trainer.errors import CheckpointError, ConfigError
from tests import models, training_runs
from tests.distributed.test_loading import loaded, plain, settings_for
from tests.ranks import run_plainly, run_ranks

Folder = Callable[[str], str]
HEADS = {"q_proj": 4, "k_proj": 2}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_gguf(folder: str, file: str, change: str = "") -> str:
    """Write the tiny Llama in `folder` as llama.cpp's converter would, with one thing changed."""
    import gguf
    import numpy as np

    config = models.model_config("llama")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    words = [*models.SPECIAL_TOKENS, "w", "1"]
    words += [f"w{index}" for index in range(config.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(models.EOS)
    for name, tensor in training_runs.read_weights(Path(folder)).items():
        values = tensor.numpy()
        for part, heads in HEADS.items():  # llama.cpp pairs the rotated halves of a head side by side
            if part in name:
                halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if change == "a tensor is missing" and "layers.1.mlp.up_proj" in name:
            continue
        if change == "experts" and "layers.1.mlp.up_proj" in name:
            writer.add_tensor("blk.1.ffn_up_exps.weight", values)
            continue
        if change == "f16" and values.ndim == 2:
            values = values.astype(np.float16)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    return {"FSDP_TRAINER_CACHE": str(tmp_path / "cache")}


@pytest.mark.parametrize("change", ["", "f16"])
def test_loads_what_the_folder_held(change: str, model_folder: Folder, tmp_path: Path, cache: dict[str, str]) -> None:
    """Two ranks start at once: one converts, both read, and a second start finds it done."""
    file = run_ranks(write_gguf, 1, model_folder("llama"), str(tmp_path / "tiny.gguf"), change)[0]
    expected = run_plainly(plain, model_folder("llama"))[0]
    for path in (file, str(tmp_path)):  # the file, and the folder that holds nothing else of a model
        for rank in run_ranks(loaded, 2, settings_for(path, tmp_path), environment=cache):
            assert rank.keys() == expected.keys()
            for name, tensor in rank.items():
                rounded = expected[name].half().float() if change and tensor.ndim == 2 else expected[name]
                if not (change and tensor.ndim == 1):
                    assert tensor.equal(rounded), name
    folders = list((tmp_path / "cache").glob("tiny-*[!k]"))
    assert len(folders) == 1 and re.fullmatch(r"tiny-[0-9a-f]{16}", folders[0].name)
    assert (folders[0] / "tokenizer.json").exists()
    (tmp_path / "as others").touch()
    assert {file.stat().st_mode for file in folders[0].iterdir()} == {(tmp_path / "as others").stat().st_mode}


def convert(path: str) -> str:
    from fsdp_trainer.gguf_model import local_model

    return local_model(path)


def count_readings(path: str) -> int:
    import gguf

    from fsdp_trainer.gguf_model import local_model

    made: list[None] = []
    plain_init = gguf.GGUFReader.__init__

    def init(self: gguf.GGUFReader, *args: object) -> None:
        made.append(None)
        plain_init(self, *args)  # type: ignore[arg-type]

    gguf.GGUFReader.__init__ = init  # type: ignore[method-assign]
    local_model(path)
    return len(made)


def test_the_file_is_read_once(model_folder: Folder, tmp_path: Path, cache: dict[str, str]) -> None:
    """Each reading takes seconds where the vocabulary is large."""
    file = run_ranks(write_gguf, 1, model_folder("llama"), str(tmp_path / "tiny.gguf"))[0]
    assert run_ranks(count_readings, 1, file, environment=cache) == [1]


@pytest.mark.parametrize("change", ["magic", "version", "counts", "header", "data", "a tensor is missing", "experts"])
def test_what_is_no_whole_model_is_refused(
    change: str, model_folder: Folder, tmp_path: Path, cache: dict[str, str]
) -> None:
    file = Path(run_ranks(write_gguf, 1, model_folder("llama"), str(tmp_path / "tiny.gguf"), change)[0])
    content = file.read_bytes()
    cut = {
        "magic": b"GGML" + content[4:],
        "version": content[:4] + b"\xff\xff\xff\x7f" + content[8:],
        "counts": content[:8] + b"\xff" * 16 + content[24:],
        "header": content[:300],
        "data": content[:-1000],
    }
    file.write_bytes(cut.get(change, content))
    with pytest.raises(CheckpointError, match="GGUF file cannot be converted") as caught:
        run_ranks(convert, 1, str(file), environment=cache)
    assert str(file) in caught.value.values
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"], "nothing half done is left"


def test_several_files_are_not_guessed_from(tmp_path: Path, cache: dict[str, str]) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"several GGUF files[\s\S]*one.gguf, two.gguf"):
        run_ranks(convert, 1, str(tmp_path), environment=cache)
