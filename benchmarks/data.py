"""Preparing 20,000 short conversations: ours beside TRL's own preparation.

    .venv/bin/python -m benchmarks.data [--rounds 3] [--peer-python OTHER/bin/python] [--write]

Both sides read the same file with the same tokenizer and template on the same cores, in fresh processes that take
turns: conversations to tokens and an assistant mask, packed into rows of 2048 by best fit. The clock runs from the file
to finished rows, after imports; memory is the peak of the whole process tree, with shared pages counted once (PSS), and
what of it came on top of the imports: importing torch, which both need, is most of the peak.
TRL need not be in our environment: --peer-python names the interpreter of one that has it.
"""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import pydoc_data.topics
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

CONVERSATIONS = 20_000
SEQ_LEN = 2048
PROCESSES = 2
RESULTS = Path(__file__).with_name("RESULTS.md")
TEMPLATE = Path(__file__).parents[1] / "tests" / "inputs" / "templates" / "t02_chatml_with_generation_markers.jinja"


def write_conversations(path: Path, *, count: int = CONVERSATIONS) -> None:
    """Write conversations of one to three turns whose text is English: sentences of Python's own reference manual."""
    text = " ".join(pydoc_data.topics.topics.values())
    sentences = [words for words in re.split(r"(?<=[.:])\s+", text) if 20 < len(words) < 300]
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [{"role": "system", "content": "You answer briefly."}] if number % 3 == 0 else []
            for _ in range(source.choice((1, 1, 1, 2, 3))):
                asked, answered = source.sample(sentences, 1), source.sample(sentences, source.randint(1, 3))
                messages.append({"role": "user", "content": f"{asked[0]} ({number})"})
                messages.append({"role": "assistant", "content": " ".join(answered)})
            file.write(json.dumps({"messages": messages}) + "\n")


def save_tokenizer(folder: Path) -> None:
    """Save SmolLM2's tokenizer (the demo's model) with a template that has generation markers, which TRL needs."""
    from transformers import AutoTokenizer

    from fsdp_trainer.demo import smollm2_folder

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder())
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)


# --- the two sides, each in a process of its own ---------------------------------------------------------------------


def cpu_seconds() -> float:
    """Count the CPU seconds of this process and of the children that have ended: what other load cannot change much."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


def begin() -> tuple[float, float, float]:
    """Return the clock, the CPU seconds and the memory in GiB at which the preparation begins."""
    memory = psutil.Process().memory_full_info().pss / 2**30
    return time.perf_counter(), cpu_seconds(), memory


def spent_since(start: tuple[float, float, float]) -> dict[str, float]:
    """Return what the preparation took since `begin`, and the memory that was there before it."""
    clock, busy, before_gib = start
    return {"seconds": time.perf_counter() - clock, "cpu_seconds": cpu_seconds() - busy, "before_gib": before_gib}


def prepare_ours(file: str, tokenizer_folder: str, scratch: str) -> dict[str, float]:
    """Prepare as a run and `fsdp-trainer data` do, into an empty cache."""
    from transformers import AutoTokenizer

    from fsdp_trainer.config import DataConfig
    from fsdp_trainer.data.prepare import prepare_rows

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    data = DataConfig(train=file, seq_len=SEQ_LEN, workers=PROCESSES, cache_dir=scratch)
    start = begin()
    rows, report = prepare_rows(file, data=data, tokenizer=tokenizer, seed=0)
    spent = spent_since(start)
    return spent | {"tokens": report.tokens, "supervised": report.supervised_tokens, "rows": rows.n_rows}


def prepare_trl(file: str, tokenizer_folder: str, scratch: str) -> dict[str, float]:
    """Prepare by the method with which SFTTrainer prepares its training data, on a trainer made beforehand."""
    os.environ["HF_DATASETS_CACHE"] = scratch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    settings = SFTConfig(
        output_dir=scratch,
        max_length=SEQ_LEN,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=PROCESSES,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    one = Path(scratch) / "one.jsonl"
    one.write_text(Path(file).read_text(encoding="utf-8").split("\n", 1)[0] + "\n", encoding="utf-8")
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)),
        args=settings,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=str(one), split="train").map(lambda record: record),
    )
    start = begin()
    dataset = load_dataset("json", data_files=file, split="train")
    prepared = trainer._prepare_dataset(dataset, tokenizer, settings, True, None, "train")
    spent = spent_since(start)
    lengths = [len(row) for row in prepared["input_ids"]]
    labels = prepared["labels"] if "labels" in prepared.column_names else prepared["assistant_masks"]
    supervised = sum(sum(1 for label in row if label not in (0, -100)) for row in labels)
    return spent | {"tokens": sum(lengths), "supervised": supervised, "rows": len(lengths)}


SIDES = {"ours": prepare_ours, "trl": prepare_trl}


class TreeMemory(threading.Thread):
    """Follow the memory of a process and all below it."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        """Sample until told to end."""
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        total = 0
        try:
            tree = [self.process, *self.process.children(recursive=True)]
        except psutil.Error:
            return 0
        for process in tree:
            try:
                total += process.memory_full_info().pss
            except (psutil.Error, OSError):  # it ended between the two looks
                continue
        return total


def run_side(side: str, *, python: str, file: Path, tokenizer: Path) -> dict[str, float]:
    """Prepare in a fresh process and return its figures with the peak of its tree."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, "-m", "benchmarks.data", "--side", side, str(file), str(tokenizer), scratch]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false" if side == "trl" else "true",
        }
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        memory = TreeMemory(process.pid)
        memory.start()
        answer = process.communicate()[0]
        memory.ended.set()
        memory.join()
    if process.returncode:
        raise SystemExit(f"{side} ended with {process.returncode}")
    figures = json.loads(answer.splitlines()[-1]) | {"peak_gib": memory.peak / 2**30}
    return figures | {"added_gib": figures["peak_gib"] - figures["before_gib"]}


def compare(*, rounds: int, peer_python: str) -> str:
    """Run both sides in turn and return a table of medians."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        file, tokenizer = Path(folder) / "train.jsonl", Path(folder) / "tokenizer"
        write_conversations(file)
        # In a process of its own: pages of libraries that this one held would be counted as half of ours.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(save_tokenizer, tokenizer).result()
        for number in range(rounds):
            for side in SIDES:
                python = sys.executable if side == "ours" else peer_python
                figures = run_side(side, python=python, file=file, tokenizer=tokenizer)
                found[side].append(figures)
                print(f"round {number + 1}, {side}: {figures}", flush=True)
    lines = [
        "| side | seconds | CPU seconds | tokens a second | peak memory | since the imports | tokens | supervised "
        "| rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    medians = {
        side: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for side, rows in found.items()
    }
    for side, row in medians.items():
        lines.append(
            f"| {side} | {row['seconds']:.2f} | {row['cpu_seconds']:.2f} | {row['tokens'] / row['seconds']:,.0f} | "
            f"{row['peak_gib']:.2f} GiB | {row['added_gib']:.2f} GiB | "
            f"{row['tokens']:,.0f} | {row['supervised']:,.0f} | {row['rows']:,.0f} |"
        )
    faster = medians["trl"]["seconds"] / medians["ours"]["seconds"]
    cheaper = medians["trl"]["cpu_seconds"] / medians["ours"]["cpu_seconds"]
    lighter, grew = (medians["ours"][name] / medians["trl"][name] for name in ("peak_gib", "added_gib"))
    return "\n".join(
        [
            *lines,
            "",
            f"Ours: **{faster:.1f}x** as fast, {cheaper:.1f}x in CPU seconds, with **{lighter:.2f}x** the memory "
            f"({grew:.2f}x of what came on top of the imports).",
        ]
    )


def versions(peer_python: str) -> str:
    """Name what was measured, where and under which load."""
    names = ("tokenizers", "transformers", "numpy")
    ours = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    code = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('trl', 'datasets')), sep=', ')"
    peer = subprocess.run([peer_python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"{ours}, {peer}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end."


def main() -> None:
    """Measure, print, and on request append the table to RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.side:
        side, *arguments = words.side
        print(json.dumps(SIDES[side](*arguments)))
        return
    table = compare(rounds=words.rounds, peer_python=words.peer_python)
    text = (
        f"\n## Preparing data, {datetime.date.today()}\n\n`python -m benchmarks.data`: {CONVERSATIONS:,} "
        f"conversations, {words.rounds} rounds in turn, medians. {versions(words.peer_python)}\n\n{table}\n"
    )
    print(text)
    if words.write:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
