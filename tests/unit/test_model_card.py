"""The card of an exported model: what it is, how it is used, what it was trained on and how it was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from fsdp_trainer.checkpoint_manifest import Progress
from fsdp_trainer.config import Config
from fsdp_trainer.model_card import format_model_card
from fsdp_trainer.run_folder import last_evaluation


def card(settings: dict[str, Any], **given: Any) -> tuple[dict[str, Any], str]:
    """Return the front matter and the rest."""
    config = Config.from_dict({"model": {"path": "Qwen/Qwen2.5-7B"}, "data": {"train": "a.jsonl"}} | settings)
    progress = Progress(step=40, optimizer_steps=40, tokens_seen=9000, supervised_tokens_seen=4000)
    text = format_model_card(config, progress=progress, versions={"torch": "2.15"}, dtype="bf16", **given)
    _, front, rest = text.split("---\n", 2)
    return YAML(typ="safe", pure=True).load(front), rest


def test_first_sentence_and_usage() -> None:
    front, text = card({}, chat=True)
    sentence = "A causal language model: `Qwen/Qwen2.5-7B`, fine-tuned with fsdp_trainer (all parameters were trained)."
    assert sentence in text.splitlines()
    assert front["base_model"] == "Qwen/Qwen2.5-7B" and "datasets" not in front
    assert '"role": "user"' in text and "role" not in card({}, chat=False)[1]
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    frozen = card({"model": {"path": "a/b", "freeze": ["*norm*"]}})[1]
    assert "(all parameters but the frozen ones were trained)" in frozen
    assert "from random weights" in card({"model": {"path": "a/b", "init": "random"}})[1]


def test_data_sets_of_the_hub_are_named_and_files_are_not(tmp_path: Path) -> None:
    sources = ["HuggingFaceTB/smoltalk2", "data/train.jsonl", str(tmp_path), {"path": "some/more"}]
    assert card({"data": {"train": sources}})[0]["datasets"] == ["HuggingFaceTB/smoltalk2", "some/more"]


def test_the_last_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 10, "eval_loss": 2.5}, {"step": 20, "loss": 1.0}, {"step": 40, "eval_loss": 1.25}]
    assert last_evaluation(tmp_path, step=40) is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_evaluation(tmp_path, step=40) == (40, 1.25)
    assert last_evaluation(tmp_path, step=39) == (10, 2.5)
    text = card({"data": {"train": "a.jsonl", "eval": 0.02}}, evaluation=(40, 1.25))[1]
    assert "| evaluation loss | 1.2500 after step 40 |" in text
    assert "| evaluation data | 0.02 of the training data, held out |" in text
    assert "nothing here says how good it is" not in text and "nothing here says" in card({})[1]
    text = card({"data": {"train": "a.jsonl", "eval": "held/out.jsonl"}}, evaluation=(40, 1.25))[1]
    assert "| evaluation data | held/out.jsonl |" in text
