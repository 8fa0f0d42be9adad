"""Makes a chat model of a million random weights to try things with: a config and a tokenizer, no download, no torch.

The weights are made when a run starts (`model.init: random`). The tokenizer is trained on the records that are given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS, SYSTEM, USER, ASSISTANT, END = "<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, EOS, SYSTEM, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(folder: str | Path, *, records: str | Path, vocab_size: int = 512) -> Path:
    """Write a Llama of 4 layers and its tokenizer to `folder` and return it; `records` is a JSONL file of chats."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # else a byte that the records lack would vanish
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Path(records)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "extra_special_tokens": list(SPECIAL_TOKENS[2:]),
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", described)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "eos_token_id": tokenizer.token_to_id(END),
    }
    _write(folder / "config.json", config)
    return folder


def _texts(records: Path) -> Iterator[str]:
    for line in filter(str.strip, records.read_text(encoding="utf-8").split("\n")):  # splitlines also cuts at U+2028
        for message in json.loads(line)["messages"]:
            yield message["content"]


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/tiny_model.py FOLDER RECORDS.jsonl")
    print(f"model.path: {make_tiny_model(sys.argv[1], records=sys.argv[2])}, model.init: random")
