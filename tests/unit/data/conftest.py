"""The handed input files, prepared with a small real tokenizer and shown as text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_trainer.config import DataConfig
from fsdp_trainer.data.describe import format_sample
from fsdp_trainer.data.prepare import prepare_rows
from tests.unit.data.toy_tokenizer import INPUTS, build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    """Return a function that prepares a handed file or records: `prepared("d10_multi_turn_chat", seq_len=64)`."""

    def prepare(name: str | Path, *, split="train", seed=0, vocab_size=None, tokenizer=tokenizer, **settings):
        path = name if isinstance(name, Path) else INPUTS / "data" / f"{name}.jsonl"
        if template := settings.get("chat_template"):
            settings["chat_template"] = str(INPUTS / "templates" / template)
        defaults = {"seq_len": 256, "packing": False, "workers": 0, "cache_dir": str(tmp_path / "cache")}
        data = DataConfig(**(defaults | {"train": str(path)} | settings))
        return prepare_rows(path, data=data, tokenizer=tokenizer, seed=seed, split=split, vocab_size=vocab_size)

    return prepare


@pytest.fixture
def shown(tokenizer: PreTrainedTokenizerFast):
    """Return a function that gives every document as text with ⟦targets⟧ marked."""

    def show(rows, *, tokenizer=tokenizer) -> list[str]:
        return [
            format_sample(rows, index, tokenizer=tokenizer, colour=False, max_tokens=100_000).plain
            for index in range(rows.n_rows)
        ]

    return show


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes records (or raw lines) to a file."""

    def write(*records: dict | str, name: str = "records.jsonl") -> Path:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_bytes("\n".join(lines).encode())
        return path

    return write
