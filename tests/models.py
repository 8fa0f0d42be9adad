"""Tiny real models and a tokenizer made in code, saved as Hugging Face folders, and text of known tokens.

Every word is one token, so a test can write down the tokens of a document without asking the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Transformers is imported inside the functions: they run on forked ranks that have it, and the test process need not.

VOCAB_SIZE = 160
PAD, EOS, USER, ASSISTANT, END = 0, 1, 2, 3, 4
SPECIAL_TOKENS = ("<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>")
FIRST_WORD = len(SPECIAL_TOKENS)
N_WORDS = VOCAB_SIZE - FIRST_WORD
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TIED = {
    "llama": False,
    "llama_tied": True,
    "qwen3": False,
    "qwen3_tied": True,
    "gemma2": True,
    "gemma3": True,
    "gpt2": True,
    "gpt2_dropout": True,
}
KINDS = tuple(TIED)
N_LAYERS = 2  # most of a tiny run's time goes with them; "llama_deep" has twice as many


def model_config(kind: str) -> Any:
    """Return the Transformers config of a tiny model of the named kind."""
    from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

    kind, deep = kind.removesuffix("_deep"), kind.endswith("_deep")
    # An initializer range of 0.1: at hidden size 48 the default, 0.02, leaves logits and gradients near zero.
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": 0.1,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    shared |= {"bos_token_id": None}
    decoder = shared | {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2 * N_LAYERS if deep else N_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": TIED[kind],
    }
    match kind:
        case "llama" | "llama_tied":
            return LlamaConfig(**decoder)
        case "qwen3" | "qwen3_tied":
            return Qwen3Config(**decoder)
        # Windows shorter than the rows, and soft-capped logits: both must survive packing and our loss. Gemma 2 also
        # soft-caps attention scores, which only eager attention can.
        case "gemma2":
            capped = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0}
            return Gemma2Config(**decoder, **capped, sliding_window=8, query_pre_attn_scalar=12)
        case "gemma3":
            layer_types = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)
            return Gemma3TextConfig(**decoder, sliding_window=8, query_pre_attn_scalar=12, layer_types=layer_types)
        case "gpt2" | "gpt2_dropout":
            dropout = 0.1 if kind == "gpt2_dropout" else 0.0
            return GPT2Config(
                **shared,
                n_embd=48,
                n_layer=N_LAYERS,
                n_head=4,
                n_positions=128,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
    raise ValueError(kind)


def build_tokenizer() -> Any:
    """Return a word-level tokenizer: `w0 w1 ...` are words, pad and eos differ, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(N_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # type: ignore[assignment]  # joins words with a space
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=128,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(kind: str, folder: str, seed: int = 1234) -> str:
    """Save a randomly initialised fp32 model of the named kind and its tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start at exactly 1 and biases at 0: move them, so that a lost one shows
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            assert torch.isfinite(parameter).all(), name
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


# Documents whose tokens are known beforehand


@dataclass(frozen=True)
class Document:
    """The tokens of one document, and which of them are targets."""

    tokens: tuple[int, ...]
    supervised: tuple[bool, ...]


def make_records(
    n: int, *, seed: int, shortest: int = 6, longest: int = 24
) -> tuple[list[dict[str, str]], list[Document]]:
    """Return `n` prompt/completion records of words and the documents they must become (the eos is supervised).

    Lengths are uneven. The text has structure (each word is followed by one of three), so that a loss can fall.
    """
    import random

    source = random.Random(seed)
    records, documents = [], []
    for _ in range(n):
        length = source.randint(shortest, longest) - 1
        words = [source.randrange(N_WORDS)]
        while len(words) < length:
            words.append((words[-1] * 7 + source.choice((1, 2, 5))) % N_WORDS)
        prompt = source.randint(1, max(1, length // 2))
        # The space between them belongs to the completion, as tokenizers with byte-level words want it.
        text = [f"w{word}" for word in words]
        records.append({"prompt": " ".join(text[:prompt]), "completion": " " + " ".join(text[prompt:])})
        tokens = (*(FIRST_WORD + word for word in words), EOS)
        documents.append(Document(tokens, tuple(index >= prompt for index in range(len(tokens)))))
    return records, documents


def write_jsonl(records: Sequence[dict[str, Any]], path: str | Path) -> str:
    """Write records to a JSONL file and return its path."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)
