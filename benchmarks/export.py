"""Host memory and time of `fsdp-trainer export`: one process that writes a checkpoint as a Hugging Face folder.

`python -m benchmarks.export` takes one step with the demo's 135M model and one with a random model of Qwen2.5-0.5B's
shape, on two ranks each, and exports both checkpoints in a fresh process. Peaks are above the process's own size after
its imports, as in benchmarks/loading.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.loading import build_model, measured
from fsdp_trainer.demo import REPOSITORY, smollm2_folder


def make_checkpoint(model: str, tokenizer: str, folder: Path) -> Path:
    """Take one optimizer step over short rows and return the run folder."""
    flags = [
        f"--model.path={model}",
        f"--model.tokenizer={tokenizer}",
        f"--data.train={REPOSITORY / 'examples' / 'demo' / 'held_out.jsonl'}",
        "--data.seq_len=64",
        "--data.packing=false",
        "--data.on_too_long=truncate",
        "--batch.global_batch_size=2",
        "--train.max_steps=1",
        "--eval.at_end=false",
        "--export.at_end=false",
        f"--output_dir={folder}",
    ]
    command = [sys.executable, "-m", "fsdp_trainer", "train", "--processes", "2", *flags]
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    return folder


def measure_export(run: str, out: str, max_file_bytes: int) -> dict[str, float]:
    """Export in this process; return the peaks in bytes, seconds, and the bytes written."""
    from fsdp_trainer.offline_export import export_checkpoint

    found = measured(lambda: export_checkpoint(Path(run), Path(out), max_file_bytes=max_file_bytes))
    return found | {"written": sum(file.stat().st_size for file in Path(out).glob("*.safetensors"))}


def main() -> None:
    """Make both checkpoints, export them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", nargs=3, metavar=("RUN", "OUT", "BYTES"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.export:
        print(json.dumps(measure_export(words.export[0], words.export[1], int(words.export[2]))))
        return
    small = str(smollm2_folder())
    with tempfile.TemporaryDirectory() as scratch:
        build_model(f"{scratch}/0.5B", "bfloat16")
        print("| model | largest file | written | peak anonymous | peak resident | seconds |")
        print("|---|---|---|---|---|---|")
        for name, model in (("135M", small), ("0.5B", f"{scratch}/0.5B")):
            run = make_checkpoint(model, small, Path(scratch) / f"run-{name}")
            for limit in (5 * 10**9, 10**8):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.export",
                    "--export",
                    str(run),
                    f"{run}-{limit}",
                    str(limit),
                ]
                answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                got = json.loads(answer.splitlines()[-1])
                cells = [limit, got["written"], got["peak anonymous"], got["peak resident"]]
                numbers = " | ".join(f"{cell / 1e9:.2f} GB" for cell in cells)
                print(f"| {name} | {numbers} | {got['seconds']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
