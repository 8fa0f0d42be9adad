"""A hub that cannot be reached is said within seconds, by whoever starts first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from fsdp_trainer.config import ModelConfig
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.hub import refuse_unreachable, refuse_unreachable_model
from fsdp_trainer.memory.estimate_model import read_model_shape
from fsdp_trainer.memory.planner import find_shape
from tests.e2e.commands import environment, executable


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def cache(tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put_in_cache(cache: Path, repository: str, name: str, *, revision: str = "main", text: str = "{}") -> None:
    folder, commit = cache / f"models--{repository.replace('/', '--')}", revision.encode().hex().ljust(40, "0")
    for path, content in ((folder / "refs" / revision, commit), (folder / "snapshots" / commit / name, text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_a_hub_that_does_not_answer_is_named(cache: Path, nobody: str) -> None:
    for path in ("some-owner/some-model", "gpt2"):
        with pytest.raises(ConfigError, match="the hub cannot be asked") as refused:
            refuse_unreachable(path)
        assert path in str(refused.value) and nobody in str(refused.value) and str(cache) in str(refused.value)


def test_what_is_here_or_in_the_cache_needs_no_hub(cache: Path, tmp_path: Path) -> None:
    put_in_cache(cache, "some-owner/some-model", "config.json")
    refuse_unreachable("some-owner/some-model")
    refuse_unreachable(str(tmp_path))
    with pytest.raises(ConfigError):
        refuse_unreachable("some-owner/some-model", revision="other")
    with pytest.raises(ConfigError, match=r"model\.path: some-owner/some-model"):
        refuse_unreachable("some-owner/some-model", files=["model.safetensors"])
    with pytest.raises(ConfigError, match=r"The tokenizer is no folder.*\n.*model\.tokenizer: a/b"):
        refuse_unreachable_model("some-owner/some-model", tokenizer="a/b", revision=None)


def test_the_closed_form_reads_the_revision_that_is_asked_for(cache: Path) -> None:
    sizes = {"vocab_size": 90, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    for revision, hidden in (("main", 48), ("wide", 96)):
        text = json.dumps({"model_type": "llama", **sizes, "hidden_size": hidden})
        put_in_cache(cache, "some-owner/some-model", "config.json", revision=revision, text=text)
    assert read_model_shape("some-owner/some-model").hidden == 48
    assert read_model_shape("some-owner/some-model", revision="wide").hidden == 96
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_shape("some-owner/some-model", revision="none")


def test_a_plan_without_a_hub_is_refused_at_once(cache: Path) -> None:
    with pytest.raises(ConfigError, match="the hub cannot be asked for it"):
        find_shape(ModelConfig(path="some-owner/some-model"))


def test_a_start_without_a_hub_is_refused_in_seconds(tmp_path: Path, nobody: str) -> None:
    """Transformers alone waits 1, 2, 4, 8 and 8 seconds between its questions, and says so each time."""
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    words = ["--model.path=some-owner/some-model", f"--data.train={tmp_path}/data.jsonl", "--processes=1"]
    began = time.monotonic()
    ended = subprocess.run(
        [executable("fsdp-trainer"), "train", *words, f"--output_dir={tmp_path}/run"],
        env={**environment(), "HF_ENDPOINT": nobody, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert time.monotonic() - began < 8
    assert ended.returncode == 2
    assert "the hub cannot be asked for it" in ended.stderr and "etrying" not in ended.stderr
    assert not os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else True
