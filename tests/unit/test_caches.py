"""What is remembered on a machine is asked once, and costs no run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from fsdp_trainer import decoder_probe
from fsdp_trainer.attention import SDPA
from fsdp_trainer.caches import remembered
from fsdp_trainer.model import find_parts
from tests import models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSDP_TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_answer_is_kept_under_its_key(cache: Path) -> None:
    asked: list[str] = []

    def ask(*key: str) -> list:
        return remembered("kind", key, ["caches"], lambda: asked.append("".join(key)) or [key[0], (1, None)])

    assert ask("a", "b") == ask("a", "b") == ["a", [1, None]]
    assert ask("ab") == ["ab", [1, None]]
    assert asked == ["ab", "ab"] and len(list((cache / "kind").iterdir())) == 2


@pytest.mark.parametrize("content", ["", "[1", "3", "null", "\0"])
def test_a_damaged_answer_is_made_anew(content: str, cache: Path) -> None:
    assert remembered("kind", ["a"], (), lambda: [1]) == [1]
    (file,) = (cache / "kind").iterdir()
    file.write_text(content)
    assert remembered("kind", ["a"], (), lambda: [2]) == remembered("kind", ["a"], (), lambda: [3]) == [2]


def test_a_place_that_cannot_be_written_costs_no_run(cache: Path) -> None:
    cache.write_text("in the way")
    assert remembered("kind", ["a"], (), lambda: [1]) == [1]
    assert remembered("kind", ["a"], (), lambda: [2]) == [2]


def test_a_decoder_is_looked_at_once_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    def windows(path: str, **changes: int) -> dict[int, list[int | None]]:
        config = models.model_config("gemma3")
        config.update({"_name_or_path": path, "use_cache": False, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=SDPA)
        return decoder_probe._attention_windows(model, find_parts(model))

    found = windows("one place")
    assert found == {0: [models.model_config("gemma3").sliding_window], 1: [None]}
    monkeypatch.setattr(decoder_probe, "_find_windows", lambda *_: {})
    assert windows("another place") == found
    assert windows("one place", sliding_window=16) == {}
