"""The demo as a person runs it: a real 135M model over two FSDP ranks learns what it could not do before."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_trainer.demo import REPOSITORY, Question, ask, read_questions, smollm2_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base() -> Path:
    return smollm2_folder()


@pytest.fixture(
    scope="module",
    params=[["--train.max_steps=27"], pytest.param([], marks=pytest.mark.sweep)],
    ids=["three quarters", "whole"],
)
def demo(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of a demo, and what it said; that is shown by pytest when something fails."""
    output = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "fsdp_trainer.demo", f"--output_dir={output}", *request.param]
    result = subprocess.run(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=840
    )
    print(result.stdout[-8000:], result.stderr[-4000:])
    assert result.returncode == 0
    return output, result.stdout


@pytest.fixture(scope="module")
def run_folder(demo: tuple[Path, str]) -> Path:
    return demo[0]


def read_metrics(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def plain_held_out_loss(folder: Path) -> float:
    """Mean loss per answer token of the held-out set, one record at a time with nothing of this package."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for question in read_questions():
        prompt = tokenizer.apply_chat_template(list(question.messages), tokenize=False, add_generation_prompt=True)
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        ids = tokenizer(f"{prompt}{question.answer}<|im_end|>", add_special_tokens=False, return_tensors="pt")[
            "input_ids"
        ]
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum").item()
        count += logits.shape[0]
    return total / count


def test_converted_model_is_whole(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    question = Question(messages=({"role": "user", "content": "What is the capital of France?"},), answer="Paris")
    assert "Paris" in ask(base, [question])[0]


@pytest.mark.timeout(900)
def test_demo_learns(demo: tuple[Path, str]) -> None:
    """The export, loaded by Transformers alone, answers what the base model cannot: the demo has asked both."""
    losses = [row["loss"] for row in read_metrics(demo[0]) if "loss" in row]
    assert losses[-1] < losses[0] / 2
    counted = re.search(r"right answers to (\d+) held-out questions: (\d+) before, (\d+) after", demo[1])
    assert counted is not None
    questions, before, after = map(int, counted.groups())
    assert (questions, before) == (len(read_questions()), 0)
    assert after >= 0.9 * questions


@pytest.mark.timeout(900)
def test_held_out_loss_falls(base: Path, run_folder: Path) -> None:
    before, after = plain_held_out_loss(base), plain_held_out_loss(run_folder / "model")
    assert after < before / 2
    reported = [row["eval_loss"] for row in read_metrics(run_folder) if "eval_loss" in row]
    # The export is rounded to bf16, the evaluation ran on fp32 weights in bf16 compute.
    assert reported[-1] == pytest.approx(after, abs=0.02)


@pytest.mark.timeout(900)
def test_run_folder_is_complete(run_folder: Path) -> None:
    steps = [row["step"] for row in read_metrics(run_folder) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "model/model.safetensors",
        "model/config.json",
        "model/generation_config.json",
        "model/tokenizer.json",
        "model/chat_template.jinja",
        f"checkpoints/step-{len(steps):08d}/state.json",
        f"checkpoints/step-{len(steps):08d}/.metadata",
    ):
        assert (run_folder / name).is_file(), name
    status = json.loads((run_folder / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, len(steps))
    assert list(run_folder.rglob("events.out.tfevents.*"))
