"""The helpers are right: the tokenizer gives the tokens written down, every model loads, the reference learns."""

import math
from collections.abc import Callable

import pytest

from tests import models, reference
from tests.ranks import run_ranks


def _tokens(folder: str, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w3 w4"}])
    chat_tokens = chat if isinstance(chat, list) else chat["input_ids"]
    return [*(tokenizer(text)["input_ids"] for text in texts), chat_tokens]


def test_tokens_are_known_beforehand(model_folder: Callable[[str], str]) -> None:
    records, documents = models.make_records(5, seed=0)
    texts = [record["prompt"] + record["completion"] for record in records]
    *got, chat = run_ranks(_tokens, 1, model_folder("llama"), texts)[0]
    assert got == [list(document.tokens[:-1]) for document in documents]
    assert chat == [models.USER, 5, models.END, models.ASSISTANT, 8, 9, models.END]


@pytest.mark.parametrize("kind", models.KINDS)
def test_reference_learns(model_folder: Callable[[str], str], kind: str) -> None:
    _, documents = models.make_records(8, seed=1)
    recipe = reference.Recipe(total_steps=12, warmup_steps=2, lr=3e-3)
    result = run_ranks(reference.train, 1, model_folder(kind), [documents] * 12, recipe)[0]
    assert result.losses[0] == pytest.approx(math.log(models.VOCAB_SIZE), rel=0.25)
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert ("lm_head.weight" in result.final) == (not models.TIED[kind])


def test_reference_schedule() -> None:
    recipe = reference.Recipe(lr=1.0, warmup_steps=2, total_steps=10, min_lr_ratio=0.1)
    assert [reference.learning_rate(step, recipe) for step in (0, 1, 9)] == pytest.approx([0.5, 1.0, 0.1])
    assert reference.learning_rate(2, recipe) == 1.0
    assert reference.learning_rate(5, recipe) == pytest.approx(0.55 + 0.45 * math.cos(math.pi * 3 / 7))
