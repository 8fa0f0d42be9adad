"""Measured peak memory and tokens per second of our step on one CUDA GPU, for a few configurations of a 1.7B model.

    python -m benchmarks.gpu [--layers 24] [--seq-len 4096] [--steps 6]

The model is SmolLM2-1.7B's configuration with random weights. Each configuration runs in a process of its own, so that
no allocator state is left over; each result is one JSON line, and a Markdown table ends the output.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGURATIONS: dict[str, dict[str, object]] = {
    "bf16, full checkpointing": {"precision": "bf16"},
    "bf16, no checkpointing": {"precision": "bf16", "activation_checkpointing": {"mode": "none"}},
    "bf16, every 2nd layer": {
        "precision": "bf16",
        "activation_checkpointing": {"mode": "every_n_layers", "every_n": 2},
    },
    "bf16, plain loss": {"precision": "bf16", "loss": {"kind": "plain"}},
    "bf16, params offload": {"precision": "bf16", "sharding": {"zero_stage": 3, "offload": "params"}},
    # Target with the optimizer offloaded: at most 1.3 times the step without.
    "bf16, 8 micro-batches": {"precision": "bf16", "batch": {"global_batch_size": 8}},
    "bf16, 8 micro-batches, optimizer offload": {
        "precision": "bf16",
        "batch": {"global_batch_size": 8},
        "sharding": {"offload": "optimizer"},
    },
    "bf16, 8 micro-batches, optimizer offload, step on the device": {
        "precision": "bf16",
        "batch": {"global_batch_size": 8},
        "sharding": {"offload": "optimizer"},
        "optim": {"offload_step": "device"},
    },
    "fp16, full checkpointing": {"precision": "fp16"},
}


def measure(settings: dict[str, object], *, layers: int, seq_len: int, steps: int) -> dict[str, float]:
    """Take `steps` optimizer steps of one full row each and return medians and peaks."""
    import statistics

    import torch
    from transformers import LlamaConfig

    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import MicroBatch, Window
    from fsdp_trainer.memory.measure import measure_memory
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ).save_pretrained(folder)
        config = Config.from_dict(
            {
                "model": {"path": folder, "init": "random"},
                "data": {"train": "unused.jsonl", "seq_len": seq_len},
                "batch": {"global_batch_size": 1, "micro_batch_size": 1},
                **settings,
            }
        )
        runtime = build_runtime()
        run = build_run(config, runtime)
    positions, accumulation = torch.arange(seq_len - 1), config.check_world(1)
    seconds, losses = [], []
    for step in range(steps):
        ids = torch.randint(0, 49152, (1, seq_len), generator=torch.Generator().manual_seed(step))
        batch = MicroBatch(ids, torch.arange(seq_len)[None], None, positions, ids[0, 1:].contiguous())
        sizes = {"supervised_tokens": accumulation * (seq_len - 1), "tokens": accumulation * seq_len}
        window = Window((batch,) * accumulation, **sizes, epoch=0, row_indices=(0,))
        started = time.perf_counter()
        losses.append(train_step(run, window, learning_rate=1e-5, optimizer_step=step).loss.item())
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[2:])
    return {
        "step_seconds": median,
        "tokens_per_second": accumulation * seq_len / median,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **{name: value for name, value in measure_memory(runtime.device).items() if value is not None},
    }


def main() -> None:
    """Measure every configuration and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", help="a configuration's name: measure it in this process")
    options = parser.parse_args()
    if options.one:
        result = measure(
            CONFIGURATIONS[options.one], layers=options.layers, seq_len=options.seq_len, steps=options.steps
        )
        print("RESULT " + json.dumps({"name": options.one, **result}), flush=True)
        return
    rows = []
    for name in CONFIGURATIONS:
        sizes = ["--layers", str(options.layers), "--seq-len", str(options.seq_len), "--steps", str(options.steps)]
        command = [sys.executable, "-m", "benchmarks.gpu", "--one", name, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
        found = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        print(found[0] if found else f"FAILED {name}\n{done.stderr[-2000:]}", flush=True)
        rows += [json.loads(line) for line in found]
    print("\n| configuration | step | tokens/s | peak allocated | peak reserved |\n|---|---|---|---|---|")
    for row in rows:
        memory = [f"{row[key]:.2f} GiB" if key in row else "-" for key in ("max_allocated_gib", "max_reserved_gib")]
        speed = f"{row['step_seconds']:.3f} s | {row['tokens_per_second']:,.0f}"
        print(f"| {row['name']} | {speed} | {' | '.join(memory)} |")


if __name__ == "__main__":
    main()
