"""The proof on a small copy: models made to cheat are refused, and what a config switches on survives its shrinking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdp_trainer.attention import Documents
from fsdp_trainer.causality import prove
from fsdp_trainer.decoder_probe import find_fakes
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.small_copy import shrink
from tests.architectures import ARCHITECTURES, DECODER


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSDP_TRAINER_CACHE", str(tmp_path))
    return tmp_path / "causality"


class NoMask(LlamaForCausalLM):
    """Attention of its own, which waits for a mask that only Transformers would make."""

    @staticmethod
    def attend(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
        length = hidden_states.shape[1]
        scores = torch.zeros(1, length, length) if attention_mask is None else attention_mask[:, 0]
        return scores.softmax(-1) @ hidden_states, None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            vars(layer.self_attn)["forward"] = self.attend


class Mean(LlamaForCausalLM):
    """Attention that never had a mask."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            vars(layer.self_attn)["forward"] = lambda hidden_states, **_: (hidden_states.mean(1, keepdim=True), None)


class OneDocument(LlamaForCausalLM):
    """A mask that forgets where documents end."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        decode = self.model.forward
        vars(self.model)["forward"] = lambda **words: decode(**{**words, "documents": Documents(None)})


class Mixing(LlamaForCausalLM):
    """A module that mixes neighbouring positions, which only looks back."""

    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.pad(x, (0, 0, 1, -1))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        norm = self.model.layers[0].input_layernorm
        self.model.layers[0].input_layernorm = nn.Sequential(norm, self.Shift())


@pytest.fixture
def toy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the config of a model class, known to Transformers meanwhile."""
    kind = request.param
    name = f"toy_{kind.__name__.lower()}"
    config_class = type(f"Toy{kind.__name__}Config", (LlamaConfig,), {"model_type": name})
    AutoConfig.register(name, config_class)
    model_class = type(f"Toy{kind.__name__}", (kind,), {"config_class": config_class})
    AutoModelForCausalLM.register(config_class, model_class)
    yield config_class(**DECODER)
    transformers.CONFIG_MAPPING._extra_content.pop(name)
    AutoModelForCausalLM._model_mapping._extra_content.pop(config_class)


@pytest.mark.parametrize(
    ("toy", "words"),
    [
        (NoMask, "see those that come after"),
        (Mean, "see those that come after"),
        (OneDocument, "into another"),
        (Mixing, "into another"),
    ],
    indirect=["toy"],
)
def test_a_model_that_cheats_is_refused(toy: Any, words: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        prove(toy, attention="eager", packing=True, seq_len=64)
    assert "on a small copy" in caught.value.values and not cache.exists()


@pytest.mark.parametrize("toy", [OneDocument, Mixing], indirect=True)
def test_rows_of_one_document_have_nothing_to_leak(toy: Any) -> None:
    assert prove(toy, attention="auto", packing=False, seq_len=64) == ()


@pytest.mark.parametrize("name", ["qwen2_window", "phi3_longrope", "gpt_oss", "deepseek_v3", "mixtral", "gemma"])
def test_what_trains_right_is_proven_and_kept(name: str, cache: Path) -> None:
    class_name, changes = ARCHITECTURES[name]
    config = getattr(transformers, class_name)(**{**DECODER, **changes})
    before = time.process_time()
    assert prove(config, attention="auto", packing=True, seq_len=64) == ()
    assert time.process_time() - before < 3
    assert len(list(cache.iterdir())) == 1
    assert prove(config, attention="auto", packing=True, seq_len=64) == ()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("kind", ["bloom", "xglm", "gpt_neox_japanese"])
@pytest.mark.parametrize("packing", [True, False])
def test_attention_of_its_own_gets_no_mask(kind: str, packing: bool) -> None:
    with pytest.raises(ConfigError, match="see those that come after"):
        prove(AutoConfig.for_model(kind), attention="eager", packing=packing, seq_len=64)


def test_a_small_copy_has_the_switches_of_the_model_and_one_layer_of_each_kind() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=12, layer_types=kinds * 2, hidden_size=2048, attn_logit_softcapping=30.0, sliding_window=512
    )
    small = shrink(config)
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2
    assert (small.hidden_size, small.sliding_window, small.attn_logit_softcapping) == (64, 8, 30.0)


def test_fakes_are_found_wherever_a_module_holds_them() -> None:
    """As a parameter, a buffer and a plain attribute, in which longrope keeps its tables."""
    with FakeTensorMode():
        fake = torch.empty(2)
    for hold in ("one", "several", "named", "buffer"):
        inner = nn.Linear(2, 2)
        if hold == "buffer":
            inner.register_buffer(hold, fake)
        else:
            setattr(inner, hold, {"one": fake, "several": [fake], "named": {"a": fake}}[hold])
        assert f"0.{hold}" in find_fakes(nn.Sequential(inner))
    assert find_fakes(nn.Linear(2, 2)) == []


def test_a_small_copy_has_room_for_the_rows_that_try_it(cache: Path) -> None:
    """Tables of the model itself may be smaller: 40 words, 20 learned positions."""
    config = transformers.GPT2Config(vocab_size=40, n_positions=20, n_embd=48, n_layer=2, n_head=4)
    assert prove(config, attention="auto", packing=True, seq_len=16) == () and len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_used_costs_seconds_and_no_run(tmp_path: Path, cache: Path) -> None:
    """A file where the folder should be, and an answer that is none."""
    config = LlamaConfig(**DECODER)
    cache.write_text("in the way")
    assert prove(config, attention="auto", packing=True, seq_len=16) == ()
    cache.unlink()
    assert prove(config, attention="auto", packing=True, seq_len=16) == ()
    (kept,) = cache.iterdir()
    kept.write_text("{")
    assert prove(config, attention="auto", packing=True, seq_len=16) == ()
    assert kept.read_text() == "[]"


def test_a_refusal_of_our_attention_keeps_its_reason() -> None:
    class_name, changes = ARCHITECTURES["doge"]
    config = getattr(transformers, class_name)(**{**DECODER, **changes})
    with pytest.raises(ConfigError, match="mask of its own"):
        prove(config, attention="auto", packing=True, seq_len=64)
