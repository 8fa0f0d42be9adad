"""A small copy of a model's architecture, by its config: the same switches, few and narrow layers."""

import copy
from collections.abc import Mapping
from typing import Any

# Sizes by the names that configs give them; a config's own are lowered to these, never raised but for its tables.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "lru_width", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "n_inner", "d_inner"), 96),
    "mamba_d_ssm": 128,
    "hidden_size_per_layer_input": 16,
    "top_k_experts": 2,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("attention_heads", "encoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "num_key_value_heads", "index_n_heads"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "kv_lora_rank", "index_head_dim", "index_topk"), 16),
    **dict.fromkeys(("kv_channels", "linear_key_head_dim", "linear_value_head_dim", "swa_head_dim", "d_head"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("linear_num_value_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 160),
    "q_lora_rank": 24,
    "mamba_n_groups": 1,
    "n_groups": 1,
}
_TABLES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
_TABLES += ("max_position_embeddings", "n_positions", "max_seq_len")
_DROPOUT = ("dropout", "_pdrop", "dropout_prob", "jitter_noise")


def shrink(hf_config: Any, *, layers: int = 2) -> Any:
    """Return a config of the same architecture with its sizes lowered and its dropout off.

    Of layers that a list of the config tells apart each kind is kept once, at least `layers` in all.
    """
    text = hf_config.get_text_config()
    values = {key: value for key, value in text.to_dict().items() if not key.startswith("_")}
    small = _lowered(values)
    small |= {key: 0.0 for key in values if key.endswith(_DROPOUT) and isinstance(values[key], int | float)}
    small |= {key: index for index, key in enumerate(("pad_token_id", "eos_token_id", "bos_token_id")) if key in values}
    if "qk_rope_head_dim" in values:  # latent attention: the rotated part is what "head" means there
        small |= {key: size for key, size in (("head_dim", 8), ("num_key_value_heads", 4)) if key in values}
    if {"mamba_d_ssm", "mamba_n_heads"} <= small.keys():
        small["mamba_d_head"] = small["mamba_d_ssm"] // small["mamba_n_heads"]
    if {"expand", "num_heads", "head_dim"} <= values.keys():  # Mamba 2
        small["head_dim"] = small["hidden_size"] * values["expand"] // small["num_heads"]
    small |= _layers(values, layers)
    small |= _rotary(values, {**values, **small})
    made = _with_text(hf_config, text, small)
    for name in ("_name_or_path", "_commit_hash"):  # where code of its own is read from
        setattr(made, name, getattr(hf_config, name, None))
    return made


def _lowered(values: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: size for key, size in SIZES.items() if _is_size(values.get(key)) and values[key] > 0}
    small = {key: size if key in _TABLES else min(size, values[key]) for key, size in given.items()}
    if "num_key_value_heads" in small and values["num_key_value_heads"] == values.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layers(values: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Return the lists with one entry a layer, cut to one layer of each kind, and how many that are.

    Where the last layers read keys of earlier ones, each kind is there twice, and the second ones do.
    """
    names = [key for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if _is_size(values.get(key))]
    count = values[names[0]] if names else 0
    by_layer = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count > 1}
    by_index = {int(key): value for key, value in (values.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([[value[index] for value in by_layer.values()], by_index.get(index)]), index)
    kept = sorted(kinds.values())
    kept += [index for index in range(count) if index not in kept][: max(0, least - len(kept))]
    kept.sort()
    shared = {"num_kv_shared_layers": len(kept)} if values.get("num_kv_shared_layers") else {}
    kept = kept * 2 if shared else kept
    small: dict[str, Any] = {key: [value[index] for index in kept] for key, value in by_layer.items()} | shared
    if by_index:
        own = {place: by_index[index] for place, index in enumerate(kept) if index in by_index}
        small["per_layer_config"] = {place: {**given, **_lowered(given)} for place, given in own.items()}
    return small | {name: min(values[name], max(len(kept), 1)) for name in names}


def _rotary(values: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose lists (longrope's factors, one for each pair of a head's dimensions) fit."""
    found = {key: copy.deepcopy(values[key]) for key in ("rope_parameters", "rope_scaling") if values.get(key)}

    def head(sizes: Mapping[str, Any]) -> int:
        size = sizes.get("qk_rope_head_dim") or sizes.get("head_dim")
        return size or sizes.get("hidden_size", 1) // max(1, sizes.get("num_attention_heads") or 1)

    def cut(given: dict[str, Any]) -> None:
        for key, value in given.items():
            if isinstance(value, dict):
                cut(value)
            elif isinstance(value, list) and key.endswith("_factor"):
                given[key] = value[: max(1, len(value) * head(small) // head(values))]
            elif key == "mrope_section" and isinstance(value, list):
                given[key] = [max(1, part * head(small) // head(values)) for part in value]

    for given in found.values():
        if isinstance(given, dict):
            cut(given)
    return found


def _with_text(hf_config: Any, text: Any, small: Mapping[str, Any]) -> Any:
    if text is hf_config:
        return type(hf_config).from_dict({**hf_config.to_dict(), **small})
    part = next(name for name in hf_config.sub_configs if getattr(hf_config, name, None) is text)
    whole = hf_config.to_dict()
    return type(hf_config).from_dict({**whole, part: {**text.to_dict(), **small}})
