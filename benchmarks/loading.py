"""Host memory of each rank while a model is loaded on two ranks: ours, beside the two usual ways, in one run.

`python -m benchmarks.loading` builds a random 0.5B model, loads it in every way in fresh processes, and prints a table.
Anonymous bytes are what the process must hold; resident ones also count pages of mapped files, which the system can
drop. Both are peaks above the process's own size after its imports and its process group.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WAYS = ("ours", "from_pretrained everywhere", "cpu_ram_efficient_loading")
RANKS = 2


def build_model(folder: str, dtype: str) -> int:
    """Save a random model of Qwen2.5-0.5B's shape and return its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Peaks:
    """Follows this process's anonymous and resident bytes from a thread, every two milliseconds."""

    def __init__(self) -> None:
        self.base = self.peak = _status()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = tuple(map(max, self.peak, _status()))  # type: ignore[assignment]


def _status() -> tuple[int, int]:
    """Return (anonymous, resident) bytes."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(found["RssAnon"].split()[0]) * 1024, int(found["VmRSS"].split()[0]) * 1024


def load(way: str, folder: str) -> Any:
    """Load the model as one rank does in the given way, after the base was measured; return what must stay alive."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.run import build_run
    from fsdp_trainer.runtime import build_runtime

    if way == "ours":
        settings = {"model": {"path": folder}, "batch": {"global_batch_size": RANKS}, "output_dir": "unused"}
        config, runtime = Config.from_dict(settings), build_runtime()
        return measured(lambda: build_run(config, runtime))
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from transformers import AutoModelForCausalLM

    from fsdp_trainer.patches import promote_cpu_ranks_to_fsdp

    efficient = way == "cpu_ram_efficient_loading"
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING=str(efficient).lower())
    torch.distributed.init_process_group("gloo")
    PartialState(cpu=True)
    promote_cpu_ranks_to_fsdp()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
        cpu_ram_efficient_loading=efficient,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(mixed_precision="no", fsdp_plugin=plugin)

    def build() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    return measured(build)


def measured(build: Any) -> dict[str, float]:
    """Run `build` and return its peaks above the base, what is held afterwards, and seconds."""
    with Peaks() as peaks:
        started = time.perf_counter()
        kept = build()
        seconds = time.perf_counter() - started
        time.sleep(0.01)
    after = _status()
    del kept
    base, peak = peaks.base, peaks.peak
    names = ("anonymous", "resident")
    found: dict[str, float] = {f"base {name}": value for name, value in zip(names, base, strict=True)}
    found |= {f"peak {name}": top - low for name, top, low in zip(names, peak, base, strict=True)}
    found |= {f"after {name}": top - low for name, top, low in zip(names, after, base, strict=True)}
    return found | {"seconds": seconds}


def run_way(way: str, folder: str) -> list[dict[str, float]]:
    """Load in fresh processes and return each rank's figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "FSDP_VERSION": "2", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.loading", "--rank-of", way, "--model", folder]
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    answers = [rank.communicate()[0] for rank in ranks]
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def main() -> None:
    """Build the model, measure every way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the stored model")
    parser.add_argument("--model", help="a folder to load instead of a random model")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank_of:
        print(json.dumps(load(words.rank_of, words.model)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        parameters = build_model(scratch, words.dtype) if not words.model else 0
        print(
            f"{parameters:,} parameters stored in {words.dtype}, fp32 shards of {parameters * 4 / RANKS / 1e9:.2f} GB"
        )
        print("| way | rank | base | peak anonymous | peak resident | anonymous after | seconds |")
        print("|---|---|---|---|---|---|---|")
        for way in WAYS:
            for rank, got in enumerate(run_way(way, words.model or scratch)):
                cells = [
                    got[key] / 1e9 for key in ("base resident", "peak anonymous", "peak resident", "after anonymous")
                ]
                numbers = " | ".join(f"{cell:.2f} GB" for cell in cells)
                print(f"| {way} | {rank} | {numbers} | {got['seconds']:.1f} |")


if __name__ == "__main__":
    main()
