"""A small real tokenizer, made in code: byte-level BPE whose merges cross words and newlines."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

INPUTS = Path(__file__).resolve().parents[2] / "inputs"
CHATML = (INPUTS / "templates" / "t01_chatml_no_generation_markers.jinja").read_text(encoding="utf-8")
_TRAINED_ON = [
    "the quick brown fox jumps over the lazy dog and says hello to you",
    "user\n\n\nassistant\n\n\nsystem\n\nhello 1+1= 2 word word word word Q: no leading spacejoined",
] * 4


def build_tokenizer(
    *, adds_bos: bool = False, prefix_space: bool = False, template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; pad is eos, as in many released models. `prefix_space` works as Llama 2's Metaspace."""
    backend = Tokenizer(models.BPE())
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    if prefix_space:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    else:
        # no regular expression: merges may cross words and newlines, so borders between texts are really at risk
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420,  # type: ignore[call-arg]
        special_tokens=special,  # type: ignore[call-arg]
        initial_alphabet=alphabet,  # type: ignore[call-arg]
        show_progress=False,  # type: ignore[call-arg]
    )
    backend.train_from_iterator(_TRAINED_ON, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
