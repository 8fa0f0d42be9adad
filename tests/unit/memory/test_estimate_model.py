"""Parameter counts from config.json against Transformers' own models on meta, of many families and real sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.estimate_model import (
    FAMILIES,
    ModelShape,
    count_layers,
    count_parameters,
    layer_activation_bytes,
    read_model_shape,
)

BENCHMARK_MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
TINY: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What differs from TINY: one config a family, and what changes counts within one.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 20}),
    "mistral": ("mistral", {"head_dim": 12}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2_moe_mixed": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {"head_dim": 24}),
    "cohere": ("cohere", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2_without_biases": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"n_inner": 70, "tie_word_embeddings": False}),
    "opt": ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
}


def build_on_meta(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(config)
    hf_config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_counts_match_the_model(name: str) -> None:
    family, changes = CASES[name]
    config = {"model_type": family, **TINY, **changes}
    model = build_on_meta(config)
    shape = read_model_shape(config)
    assert count_parameters(shape) == count(model)
    layers = next(
        m for m in model.modules() if type(m).__name__ == "ModuleList" and len(m) == TINY["num_hidden_layers"]
    )
    assert sorted(count_layers(shape)) == sorted(count(layer) for layer in layers)


@pytest.mark.parametrize("path", sorted(BENCHMARK_MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_real_sizes_match_the_model(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    assert count_parameters(read_model_shape(config)) == count(build_on_meta(config))


def test_a_saved_config_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}), encoding="utf-8")
    assert read_model_shape(tmp_path) == read_model_shape({"model_type": "llama", **TINY})
    assert read_model_shape(tmp_path / "config.json").hidden == 48


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, r"does not know[\s\S]*simulate` without --quick"),
        (
            {"model_type": "llama", **TINY, "num_hidden_layers": 0},
            "num_hidden_layers: 0; it is no whole number above 0",
        ),
        (
            {"model_type": "llama", **TINY, "num_hidden_layers": 10**9},
            "num_hidden_layers: 1,000,000,000; no model has more",
        ),
        ({"model_type": "llama", **TINY, "vocab_size": -5}, "vocab_size: -5; it is no"),
        ({"model_type": "llama", **TINY, "hidden_size": 64.5}, r"hidden_size: 64\.5; it is no whole number"),
        ({"model_type": "llama", **TINY, "hidden_size": "48"}, "hidden_size: '48'; it is no whole number"),
        ({"model_type": "llama", **TINY, "intermediate_size": True}, "intermediate_size: True; it is no whole"),
        (
            {"model_type": "llama", **TINY, "num_attention_heads": 5},
            "hidden_size: 48, num_attention_heads: 5; the heads",
        ),
        ({"model_type": "llama", **TINY, "num_key_value_heads": 3}, "num_key_value_heads: 3; query heads share"),
        ({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2.0}, r"n_layer: 2\.0; it is no whole"),
        ({"model_type": "llama", **TINY, "hidden_size": None}, "lacks what its memory depends on"),
        ({"model_type": "llama"}, "lacks what its memory depends on"),
        ({"model_type": "llama", **TINY, "num_attention_heads": 0}, "num_attention_heads: 0; it is no"),
        ({"model_type": "opt", **TINY, "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("nowhere/config.json", "cannot be read"),
        ("nobody/no-such-model", "cannot be read"),
    ],
)
def test_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_model_shape(config)


def test_shape_holds_no_list() -> None:
    assert hash(read_model_shape({"model_type": "llama", **TINY}))
    assert isinstance(read_model_shape({"model_type": "llama", **TINY}), ModelShape)


def saved_bytes(config: dict[str, Any], *, tokens: int, attention: str) -> int:
    """What autograd keeps of a forward of the decoder in bf16, each storage once, without parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(config)
    hf_config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation=attention).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
        assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", [name for name in CASES if "mixed" not in name and name != "qwen3_moe"])
def test_layer_keeps_what_autograd_keeps(name: str) -> None:
    """A layer more, and what it adds per token: real tensors, CPU attention, which saves what CUDA's flash saves."""
    family, changes = CASES[name]
    dropouts = dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "residual_dropout", "embedding_dropout"), 0.0
    )
    config = {"model_type": family, **TINY, **changes, **dropouts, "hidden_size": 64, "num_key_value_heads": 4}
    config = {**config, "word_embed_proj_dim": 64} if family == "opt" else config
    tokens, shape = 64, read_model_shape(config)
    attention = "eager" if shape.softcapped else "sdpa"
    two, three = (saved_bytes({**config, "num_hidden_layers": n}, tokens=tokens, attention=attention) for n in (2, 3))
    expected = layer_activation_bytes(shape, seq_len=tokens)
    # Left out here: one fp32 number a token and norm or so, and the experts' bookkeeping.
    assert (three - two) / tokens == pytest.approx(expected, rel=0.04 if shape.experts is None else 0.1)
