"""The comparison of recipes: its settings are ones that a user could write, and its table says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.recipes import RECIPES, format_table, refusal, settings


def test_recipes_are_accepted_or_refused_with_a_reason(tmp_path: Path) -> None:
    refused = {recipe: refusal(settings("model", tmp_path, recipe, steps=40)) for recipe in RECIPES}
    for recipe in ("fp32", "bf16", "bf16_pure", "bf16_pure, gradients and averages bf16", "bf16, params offload"):
        assert refused[recipe] == ""
    assert all("settings are wrong" not in reason for reason in refused.values())


def test_held_out_text_is_not_trained_on(tmp_path: Path) -> None:
    data = settings("model", tmp_path, "bf16", steps=40)["data"]
    trained, held_out = (
        {json.loads(line)["text"][:2000] for line in Path(data[name]).read_text(encoding="utf-8").splitlines()}
        for name in ("train", "eval")
    )
    assert len(trained) > 5 * len(held_out) > 50
    assert not trained & held_out


def test_table_compares_with_bf16() -> None:
    rows = {
        "bf16": {"final": 2.0, "held_out": 3.0, "bytes": 16.0, "seconds": 1.0},
        "bf16_pure": {"final": 2.01, "held_out": 2.97, "bytes": 14.0, "seconds": 1.5},
        "bf16, adamw_8bit": {"refused": "no"},
    }
    table = format_table(rows, steps=40)
    assert "| bf16_pure | 2.0100 | 2.9700 | +0.50%, -1.00% | 14.00 | 1.50 s |" in table
    assert "| bf16, adamw_8bit | refused: no |" in table
