"""benchmarks/planner_programs.py: what each change to a simulation adds or takes, by the model's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planner_programs import closed_form_of
from fsdp_trainer.memory.estimate_model import layer_activation_bytes, read_model_shape
from tests.ranks import run_ranks
from tests.simulation_runs import SMALL, settings, simulate_all

VOCABULARY, HIDDEN, LAYERS, TOKENS = 16_384, SMALL["hidden_size"], SMALL["num_hidden_layers"], 512
WIDE = {"vocab_size": VOCABULARY}


def simulated(cases: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, dict[str, int]]:
    """Return each case's peak by phase, simulated as its words say."""
    from benchmarks.planner_programs import simulated_as

    found = {}
    for name, (values, words) in cases.items():
        with simulated_as(words):
            found[name] = simulate_all({name: values}, "8xA100-80GB")[name]["phases"]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("models")
    plain = settings(folder, model=WIDE, loss={"kind": "plain"})
    chunked, small = settings(folder, model=WIDE), settings(folder)
    recomputed = settings(folder, activation_checkpointing={"mode": "full"})
    cases = {
        "plain": (plain, {}),
        "fp32": (plain, {"kept_logits": "fp32"}),
        "bf16": (plain, {"kept_logits": "bf16"}),
        "chunked": (chunked, {}),
        "cut": (chunked, {"cut_loss": True}),
        "kept": (small, {}),
        "norms": (small, {"fused_norms": True}),
        "fused": (small, {"fused_norms": True, "fused_mlp": True}),
        "layers": (recomputed, {}),
        "parts": (recomputed, {"checkpointed_parts": True}),
        "after": (small, {}),
    }
    return run_ranks(simulated, 1, cases, timeout=300)[0]


def test_kept_logits_lie_beside_the_loss(runs: dict[str, Any]) -> None:
    logits = TOKENS * VOCABULARY
    assert runs["fp32"]["backward"] - runs["plain"]["backward"] == 4 * logits
    assert runs["bf16"]["backward"] - runs["plain"]["backward"] == 2 * logits


def test_fused_kernels_keep_what_the_closed_form_says(runs: dict[str, Any]) -> None:
    shape = read_model_shape(SMALL)
    for name, words in {"norms": {"fused_norms": True}, "fused": {"fused_norms": True, "fused_mlp": True}}.items():
        whole = layer_activation_bytes(shape, seq_len=TOKENS)
        with closed_form_of(words):
            fused = layer_activation_bytes(shape, seq_len=TOKENS)
        final_norm = 4 * HIDDEN  # counted apart: its fp32 copy, and one of two in compute dtype
        saved = runs["kept"]["forward"] - runs[name]["forward"]
        assert fused < whole and saved == pytest.approx(TOKENS * (LAYERS * (whole - fused) + final_norm), rel=0.02)


def test_cut_loss_makes_no_logits_and_copies_the_table(runs: dict[str, Any]) -> None:
    """Its gradients come in the backward; the chunked one sums the head's in fp32 in the forward."""
    table = VOCABULARY * HIDDEN
    assert runs["chunked"]["forward"] - runs["cut"]["forward"] > 4 * table - 2 * table


def test_parts_keep_four_hidden_states_a_layer(runs: dict[str, Any]) -> None:
    hidden_states = 2 * TOKENS * HIDDEN
    more = runs["parts"]["forward"] - runs["layers"]["forward"]
    assert more == pytest.approx(3 * LAYERS * hidden_states, rel=0.05)


def test_nothing_of_it_stays(runs: dict[str, Any]) -> None:
    assert runs["after"] == runs["kept"]
