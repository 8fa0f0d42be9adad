"""Try every causal language model that Transformers has, built tiny: one step here against plain Transformers.

`python -m benchmarks.architectures` makes a small config of each model type by lowering the sizes of its default one,
saves a random model, takes one step of packed rows (or, with `--unpacked`, of rows with one document each) on one rank,
exports it, and compares loss and gradients with documents run alone. It prints a line for each type and the counts.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests import models, reference, step_runs, training_runs
from tests.ranks import RankFailed, run_ranks

# Sizes by the names that configs give them; a config takes those that it knows.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "kv_lora_rank", "index_head_dim", "index_topk"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "q_lora_rank": 24,
    "linear_num_key_heads": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_expand": 2,
}
MAX_PARAMETERS = 10**8  # a config whose sizes have other names stays too large


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name: str) -> Any:
    """Return the default config of a model type with its sizes lowered and its dropout off."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[name]
    default = kind()
    text = default.get_text_config()
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if hasattr(text, key)}
    sizes |= {key: 0.0 for key in text.to_dict() if key.endswith(("dropout", "_pdrop", "dropout_prob", "jitter_noise"))}
    if hasattr(text, "qk_rope_head_dim"):  # latent attention: the rotated part is what "head" means there
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    count = getattr(text, "num_hidden_layers", 0)
    for key, value in text.to_dict().items():  # one entry a layer
        if isinstance(value, list) and count > 2 and len(value) == count:
            sizes[key] = [value[0], value[-1]]
    parts = [part for part in default.sub_configs if getattr(default, part, None) is text]
    return kind(**({parts[0]: sizes} if parts else sizes))


def save_tiny(name: str, folder: str) -> str:
    """Save a random model of the type; return "" or why Transformers itself cannot."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            return f"{size} parameters"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.isfinite().all():
                    parameter.normal_(mean=0.5, std=0.05)
        model.save_pretrained(folder)
    except Exception as error:  # whatever it is, it is not the trainer's
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return ""


def try_step(folder: str, packed: bool) -> tuple[str, str]:
    """Return works, differs or refused, with a word on it; anything else is raised."""
    from fsdp_trainer.errors import FsdpTrainerError
    from fsdp_trainer.export import export_model
    from fsdp_trainer.step import train_step

    documents = models.make_records(4, seed=13, longest=20)[1]
    rows = [documents[:2], documents[2:]] if packed else [[document] for document in documents]
    settings = training_runs.settings(
        folder,
        "unused.jsonl",
        f"{folder}-run",
        data={"packing": packed},
        optim={"max_grad_norm": None},
        activation_checkpointing={"mode": "full"},
        batch={"global_batch_size": len(rows), "micro_batch_size": 1},
    )
    try:
        run = step_runs.build(settings)
    except FsdpTrainerError as error:
        return "refused", error.what
    with step_runs.captured_gradients(run) as gradients:
        output = train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    export_model(Path(f"{folder}-out"), model=run.model, hf_config=run.hf_config, dtype="fp32")
    loss, expected = reference.gradient_snapshot(folder, documents)
    # Against the largest gradient: one that is zero but for rounding has no relative error.
    largest = max(tensor.norm() for tensor in expected.values())
    errors = {name: float((gradients[name] - tensor).norm() / largest) for name, tensor in expected.items()}
    worst = max(errors, key=lambda name: errors[name])
    fits = abs(output.loss.item() - loss) < 1e-4 * loss and errors[worst] < 1e-4
    return "works" if fits else "differs", f"loss {output.loss.item():.5f} for {loss:.5f}, {worst} {errors[worst]:.1e}"


def main() -> None:
    """Try all types, or those named, and print what came of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unpacked", action="store_true", help="rows of one document each")
    parser.add_argument("names", nargs="*", help="model types; all by default")
    words = parser.parse_args()
    counts: Counter[str] = Counter()
    for name in words.names or run_ranks(names, 1)[0]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = f"{scratch}/model"
            try:
                unbuilt = run_ranks(save_tiny, 1, name, folder)[0]
                kind, said = (
                    ("not built", unbuilt) if unbuilt else run_ranks(try_step, 1, folder, not words.unpacked)[0]
                )
            except Exception as error:  # a raw traceback is what this looks for
                kind, said = "crashes", f"{type(error).__name__}: {error}"
                if isinstance(error, RankFailed):
                    said = said.splitlines()[-1]
        counts[kind] += 1
        print(f"{name}: {kind} ({' '.join(itertools.islice(said.split(), 40))})", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main()
