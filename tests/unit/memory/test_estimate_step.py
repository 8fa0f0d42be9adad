"""The sequence of a step: nothing is lost or freed twice, and each phase holds what its stage says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_trainer.memory.estimate import GIB, RECIPES
from fsdp_trainer.memory.estimate_model import ModelShape, count_layers, count_parameters, read_model_shape
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_step import estimate_step, find_peak, phase_peaks
from fsdp_trainer.memory.recording import CATEGORIES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
SHAPES = {
    "untied": read_model_shape(LLAMA),
    "tied": read_model_shape({**LLAMA, "tie_word_embeddings": True}),
    "positions": read_model_shape(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 3, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    ),
    "experts": read_model_shape(
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8}
    ),
    "one_layer": read_model_shape({**LLAMA, "num_hidden_layers": 1}),
}
RESTING = ("parameters", "optimizer_state")


@st.composite
def settings(draw: st.DrawFn) -> StepSettings:
    ranks, stage = draw(st.sampled_from([1, 2, 4, 64])), draw(st.integers(0, 3))
    grouped = stage == 3 and ranks >= 4
    return StepSettings(
        ranks=ranks,
        seq_len=draw(st.sampled_from([2, 3, 512, 65536])),
        micro_batch_size=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 4)),
        zero_stage=stage,
        replicate=draw(st.sampled_from([1, 2])) if grouped else 1,
        reshard_after_forward=draw(st.sampled_from([None, 2])) if grouped else None,
        offload_params=stage > 0 and draw(st.booleans()),
        recipe=draw(st.sampled_from(list(RECIPES.values()))),
        compute_bytes=draw(st.sampled_from([2, 4])),
        reduce_bytes=draw(st.sampled_from([2, 4])),
        checkpointing=draw(st.sampled_from(["none", "full", "every_n_layers"])),
        every_n=draw(st.sampled_from([1, 2, 100])),
        loss=draw(st.sampled_from(["plain", "chunked"])),
        chunk_tokens=draw(st.sampled_from([None, 1, 100, 10**9])),
        bytes_per_logit=draw(st.sampled_from([None, 2, 8, 14])),
        attention=draw(st.sampled_from(["flash", "efficient", "scores"])),
        masked_attention=draw(st.sampled_from(["efficient", "scores"])),
        masked_layers=draw(st.sampled_from([0, 1, 100])),
        masks=draw(st.sampled_from([0, 1, 2])),
        mask_rows=draw(st.integers(1, 3)),
        evaluates=draw(st.booleans()),
        exports=draw(st.booleans()),
    )


@given(shape=st.sampled_from(list(SHAPES.values())), how=settings())
def test_everything_made_is_freed_once(shape: ModelShape, how: StepSettings) -> None:
    """No kind is ever negative (asserted inside), and after the run only masters and state are left."""
    timeline = estimate_step(shape, how)
    left = timeline[-1][2]
    assert all(abs(left[category]) < 100 for category in CATEGORIES if category not in RESTING), left  # rounding
    resident = 0 if how.offload_params else count_parameters(shape) / how.shards
    assert left["parameters"] == pytest.approx(resident * how.recipe.weights, abs=2)
    assert left["optimizer_state"] == pytest.approx(resident * how.recipe.optimizer_state, abs=2)
    assert [index for index, _, _ in timeline] == list(range(len(timeline)))


def peaks(shape: ModelShape, **changes: Any) -> dict[str, int]:
    how = replace(StepSettings(ranks=8, seq_len=4096), **changes)
    return phase_peaks(estimate_step(shape, how))


def test_resting_is_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    shape = SHAPES["untied"]
    for stage in (1, 2, 3):
        assert peaks(shape, zero_stage=stage)["clip"] == pytest.approx(16 * count_parameters(shape) / 8, rel=1e-6)
    assert peaks(shape, zero_stage=0)["clip"] == pytest.approx(16 * count_parameters(shape), rel=1e-6)


def test_stage_2_keeps_whole_weights_and_stage_1_whole_gradients() -> None:
    """More layers: 2 bytes more a parameter at stage 2, 4 more for fp32 gradients between micro-batches at stage 1."""
    shape, deeper = SHAPES["untied"], replace(SHAPES["untied"], layers=12, dense_layers=12)
    added = count_parameters(deeper) - count_parameters(shape)
    rest = 12 * added / 8  # masters and state; gradients are not there yet, or whole

    def growth(**changes: Any) -> float:
        changes = {"seq_len": 128, "checkpointing": "full", **changes}
        return peaks(deeper, **changes)["forward"] - peaks(shape, **changes)["forward"] - rest

    checkpoints = 8 * 128 * 4096 * 2
    assert growth(zero_stage=2) == pytest.approx(2 * added + checkpoints, rel=0.01)
    assert growth(zero_stage=1, micro_batches=2) == pytest.approx((2 + 4) * added + checkpoints, rel=0.01)
    # at stage 3 gradients stay as shards between micro-batches
    assert growth(zero_stage=3, micro_batches=2) == pytest.approx(4 * added / 8 + checkpoints, rel=0.01)


def test_foreach_adds_a_copy_of_the_largest_group_in_the_step() -> None:
    shape = SHAPES["untied"]
    plain, foreach = (peaks(shape, recipe=RECIPES[name])["step"] for name in ("bf16", "bf16_foreach"))
    matrices = count_parameters(shape) - shape.vocab * shape.hidden
    assert foreach - plain == pytest.approx(4 * matrices / 8, rel=1e-6)


def test_tied_tables_wait_whole_for_their_second_gradient() -> None:
    """One unit for both: the head's gradient is there until the embedding's comes, which needs two more tables."""
    timeline = estimate_step(replace(SHAPES["tied"], vocab=256000), StepSettings(ranks=8, seq_len=2048))
    table = 256000 * 4096 * 2
    *_, alive = find_peak([moment for moment in timeline if moment[1] == "backward"])
    assert alive["unsharded_gradients"] == pytest.approx(table, rel=0.01)
    assert alive["temporaries"] == pytest.approx(2 * table, rel=0.05)


def test_plain_logits_are_the_peak_of_a_large_vocabulary() -> None:
    shape = replace(SHAPES["untied"], vocab=151936)
    plain, chunked = (peaks(shape, loss=kind, seq_len=32768)["backward"] for kind in ("plain", "chunked"))
    assert plain - chunked > 0.8 * 12 * 32768 * 151936
    assert chunked / GIB < 30


def test_every_second_layer_keeps_half_of_the_activations() -> None:
    shape = replace(SHAPES["untied"], layers=16, dense_layers=16)
    none, half, full = (
        peaks(shape, checkpointing=mode, every_n=2)["forward"] for mode in ("none", "every_n_layers", "full")
    )
    assert (half - full) / (none - full) == pytest.approx(0.5, abs=0.01)
    assert len(count_layers(shape)) == 16
