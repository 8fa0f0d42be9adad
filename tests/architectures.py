"""Tiny models of many Transformers architectures, to find the one that computes its attention or logits another way."""

from __future__ import annotations

from typing import Any

from tests.models import EOS, PAD, VOCAB_SIZE, build_tokenizer

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.1,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DECODER: dict[str, Any] = {
    **SHARED,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# One factor for each pair of a head's 12 dimensions. The original length lies among those of the documents of tests.
ORIGINAL = 12
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
}


def rotary(kind: str, **more: Any) -> dict[str, Any]:
    """Return the setting of a rotary type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


# name of the model class: config class and what differs from DECODER
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 48, "dropout": 0.0}),
    "gemma": ("GemmaConfig", {"head_dim": 12, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12},
    ),
    "qwen3_moe_router": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 12,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    # A persistent buffer: each expert's correction of its router score.
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 12,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # Every rotary type, and the longest row around what its table was made for.
    "phi3_longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "llama_dynamic": ("LlamaConfig", {**rotary("dynamic", factor=2.0), "max_position_embeddings": 20}),
    "llama_linear": ("LlamaConfig", rotary("linear", factor=4.0)),
    "llama_yarn": ("LlamaConfig", rotary("yarn", factor=4.0, original_max_position_embeddings=12)),
    "llama3_rope": (
        "LlamaConfig",
        rotary("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=12),
    ),
    "gpt_oss": ("GptOssConfig", {**EXPERTS, "head_dim": 12, "sliding_window": 8, "attention_dropout": 0.0}),
    # The window is in the mask that Transformers makes, and nowhere else.
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    # Rotary tables that stay in fp32.
    "olmo": ("OlmoConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 12}),
    # A router that Transformers keeps in fp32.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
    # Weights kept in fp32 beside, above and within others that are not.
    "afmoe": (
        "AfmoeConfig",
        {
            "head_dim": 12,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Roots of what tokens embed to: the end, which pads here, to zeros.
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "pad_token_id": EOS,
            "head_dim": 12,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "flint": (
        "FlintConfig",
        {"head_dim": 12, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"head_dim": 12, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {}),
    "doge": ("DogeConfig", {"head_dim": 12}),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
}

# Layers that mix tokens otherwise than by attention, so rows of several documents are refused.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    # Attention and a state-space scan side by side in every layer: that attention was called says nothing here.
    "falcon_h1": (
        "FalconH1Config",
        {"head_dim": 12, "mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8},
    ),
}


def save_architecture(name: str, folder: str) -> str:
    """Save a randomly initialised fp32 model of the architecture, its norms and biases moved off 1 and 0."""
    import torch
    import transformers

    class_name, changes = (ARCHITECTURES | HYBRIDS)[name]
    torch.manual_seed(4321)
    config = getattr(transformers, class_name)(**{**DECODER, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
