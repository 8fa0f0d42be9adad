"""Predicted beside measured peak memory of our step on one CUDA GPU, and tokens per second, for some configurations.

    python -m benchmarks.gpu [--layers 16] [--seq-len 4096] [--steps 4] [--only NAME ...]
    python -m benchmarks.gpu --dry        # the same on CPU with a tiny model: live bytes, which must be equal

The model has the shape of Llama 3.2 1B (1.24 billion parameters at 16 layers) with random weights. Predictions and
measurements run in processes of their own, so that no allocator state is left over; every result is one JSON line, and
a Markdown table ends the output. Compared are loading and training: allocated with allocated, reserved with reserved.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**30
TRAINING = ("load", "forward", "backward", "clip", "step")
# Settings by name; `rows` stretches the length of a row.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stage3-bf16-full": {},
    "stage0-fp32-none": {
        "precision": "fp32",
        "sharding": {"zero_stage": 0},
        "activation_checkpointing": {"mode": "none"},
    },
    "packed-long-rows": {"data": {"packing": True}, "rows": 4},
    "plain-loss-none": {"loss": {"kind": "plain"}, "activation_checkpointing": {"mode": "none"}},
    "params-offload": {"sharding": {"zero_stage": 3, "offload": "params"}},
    "accumulation-every-2-foreach": {
        "activation_checkpointing": {"mode": "every_n_layers", "every_n": 2},
        "optim": {"implementation": "foreach"},
        "batch": {"global_batch_size": 3, "micro_batch_size": 1},
    },
    # Target with the optimizer offloaded: at most 1.3 times the step without.
    "8-micro-batches": {"batch": {"global_batch_size": 8, "micro_batch_size": 1}},
    "8-micro-batches-optimizer-offload": {
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "sharding": {"offload": "optimizer"},
    },
    "8-micro-batches-optimizer-offload-step-on-device": {
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "sharding": {"offload": "optimizer"},
        "optim": {"offload_step": "device"},
    },
}
LLAMA_1B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
TINY = LLAMA_1B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def make_config(name: str, folder: str, options: argparse.Namespace) -> Any:
    """Return the settings of a configuration, its model's config.json written to `folder`."""
    from fsdp_trainer.config import Config

    shape = (TINY if options.dry else LLAMA_1B) | {"num_hidden_layers": options.layers}
    (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    sections = dict(CONFIGURATIONS[name])
    rows = sections.pop("rows", 1)
    values: dict[str, Any] = {
        "model": {"path": folder, "init": "random"},
        "data": {"train": "unused.jsonl", "seq_len": options.seq_len * rows, "packing": False},
        "batch": {"global_batch_size": 1, "micro_batch_size": 1},
        "export": {"at_end": False},
    }
    for section, value in sections.items():
        values[section] = values.get(section, {}) | value if isinstance(value, dict) else value
    return Config.from_dict(values)


def make_windows(config: Any, steps: int) -> list[Any]:
    """Return full windows of random tokens: every token supervised, two documents in a packed row."""
    import numpy as np

    from fsdp_trainer.data.loader import build_window
    from fsdp_trainer.data.rows import Rows

    batch, length = config.batch, config.data.seq_len
    documents = 2 if config.data.packing else 1
    count = batch.global_batch_size * documents
    starts = np.arange(count + 1, dtype=np.int64) * (length // documents)
    tokens = np.random.default_rng(0).integers(0, 500, starts[-1], dtype=np.int32)
    supervised = np.ones(len(tokens), dtype=bool)
    supervised[starts[:-1]] = False
    rows = Rows(tokens, supervised, starts, np.arange(0, count + 1, documents, dtype=np.int64))

    def window() -> Any:
        return build_window(
            rows,
            step=0,
            global_batch_size=batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            rank=0,
            world_size=1,
            seed=0,
            shuffle=False,
            seq_len=length,
            packing=config.data.packing,
        )

    return [window() for _ in range(steps)]


def predict(config: Any, options: argparse.Namespace) -> dict[str, float]:
    """Return what the simulator says of loading and training, in GiB."""
    from fsdp_trainer.memory.allocator import replay
    from fsdp_trainer.memory.simulate import allocator_events
    from fsdp_trainer.memory.traced_run import trace_run

    windows = make_windows(config, 2) if options.dry else None
    trace = trace_run(config, world_size=1, compute_capability=options.capability, windows=windows).device
    found = {"predicted_allocated_gib": max(trace.phases[phase] for phase in TRAINING) / GIB}
    if options.capability is not None:
        expandable = "expandable_segments:True" in _allocator_settings()
        found["predicted_reserved_gib"] = replay(allocator_events(trace), expandable=expandable).reserved / GIB
    return found


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def measure(config: Any, options: argparse.Namespace) -> dict[str, float]:
    """Take the steps and return median seconds and peaks; on CPU the peak is that of live tensors."""
    from benchmarks.live_bytes import LiveBytes
    from fsdp_trainer.memory.measure import measure_memory
    from fsdp_trainer.memory.traced_run import tensors_of
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime
    from fsdp_trainer.step import train_step

    runtime = build_runtime()
    run = build_run(config, runtime)
    windows = make_windows(config, options.steps)
    seconds, losses = [], []

    def step(window: Any) -> None:
        started = time.perf_counter()
        losses.append(train_step(run, window, learning_rate=1e-5, optimizer_step=len(seconds)).loss.item())
        seconds.append(time.perf_counter() - started)

    if options.dry:
        live = LiveBytes()
        for tensor in [*run.model.parameters(), *run.model.buffers(), *(t for w in windows[:2] for t in tensors_of(w))]:
            live.count(tensor)
        with live:
            for window in windows[:2]:
                step(window)
        memory = {"max_allocated_gib": live.peak / GIB}
    else:
        for window in windows:
            step(window)
        memory = {name: value for name, value in measure_memory(runtime.device).items() if value is not None}
    median = statistics.median(seconds[1:])
    tokens = config.batch.global_batch_size * config.data.seq_len
    return {"step_seconds": median, "tokens_per_second": tokens / median, "last_loss": losses[-1], **memory}


def _in_a_process(name: str, part: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one part (predict | measure) of one configuration in a fresh process; {} where it failed, which is shown."""
    sizes = ["--layers", str(options.layers), "--seq-len", str(options.seq_len), "--steps", str(options.steps)]
    sizes += ["--dry"] if options.dry else ["--capability", str(options.capability)]
    # A prediction needs no GPU, and shall not take memory of one.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if part == "predict" or options.dry else {}
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--only", name, *sizes]
    environment = {**os.environ, **hidden}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment, check=False
    )
    found = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        print(f"FAILED {part} {name}\n{done.stderr[-2000:]}", flush=True)
    return json.loads(found[0]) if found else {}


def _row(name: str, found: dict[str, float]) -> str:
    cells = [name]
    for kind in ("allocated", "reserved"):
        predicted, measured = found.get(f"predicted_{kind}_gib"), found.get(f"max_{kind}_gib")
        cells += [f"{value:.3f}" if value is not None else "-" for value in (predicted, measured)]
        known = predicted is not None and measured
        cells.append(f"{predicted / measured - 1:+.1%}" if known else "-")  # type: ignore[operator]
    speed = ("step_seconds", ".3f"), ("tokens_per_second", ",.0f")
    cells += [f"{found[key]:{shape}}" if key in found else "-" for key, shape in speed]
    return "| " + " | ".join(cells) + " |"


HEAD = """
GiB. Predicted on fake tensors, measured by torch{where}.

| configuration | allocated: predicted | measured | error | reserved: predicted | measured | error | step s | tokens/s |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def main() -> None:
    """Predict and measure every configuration, print the table; exit code 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--dry", action="store_true", help="on CPU, with a tiny model")
    parser.add_argument("--capability", type=float, help="CUDA compute capability; default this machine's")
    parser.add_argument("--part", choices=["predict", "measure"], help="one part of one configuration, in this process")
    options = parser.parse_args()
    options.layers = options.layers or (3 if options.dry else 16)
    options.seq_len = options.seq_len or (32 if options.dry else 4096)
    options.steps = options.steps or (2 if options.dry else 4)
    if options.part:
        if options.dry:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        with tempfile.TemporaryDirectory() as folder:
            config = make_config(options.only[0], folder, options)
            found = (predict if options.part == "predict" else measure)(config, options)
        print("RESULT " + json.dumps(found), flush=True)
        return
    where = " on CPU: live tensors of a tiny model"
    if not options.dry:
        import torch

        options.capability = options.capability or float("{}.{}".format(*torch.cuda.get_device_capability()))
        where = f" on {torch.cuda.get_device_name()}"
    rows, failed = [], False
    for name in options.only:
        found = _in_a_process(name, "predict", options) | _in_a_process(name, "measure", options)
        print(json.dumps({"name": name, **found}), flush=True)
        failed = failed or "max_allocated_gib" not in found or "predicted_allocated_gib" not in found
        rows.append(_row(name, found))
    print(HEAD.format(where=where), *rows, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
