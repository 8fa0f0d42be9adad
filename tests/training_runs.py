"""Run the trainer as a user would, on the ranks of a test, and hand back numbers.

`settings` gives the settings file of a tiny run as a nested mapping; the other functions run on forked ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.models import Document

SEQ_LEN = 40


def settings(
    model_path: str, train_file: str, output_dir: str | Path, /, **sections: dict[str, Any] | str
) -> dict[str, Any]:
    """Return the settings of a tiny fp32 run, with `sections` merged over them key by key."""
    base: dict[str, Any] = {
        "model": {"path": model_path},
        "data": {
            "train": train_file,
            "format": "prompt_completion",
            "seq_len": SEQ_LEN,
            "packing": False,
            "cache_dir": str(Path(output_dir) / "cache"),
        },
        "sharding": {"zero_stage": 3},
        "precision": "fp32",
        "activation_checkpointing": {"mode": "none"},
        "loss": {"kind": "chunked"},
        # Some gradient entries are nearly zero; at eps 1e-8 AdamW makes full steps of their rounding noise.
        "optim": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "eps": 1e-6},
        "schedule": {"name": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
        "batch": {"global_batch_size": 16, "micro_batch_size": 4},
        "train": {"max_steps": 20, "seed": 7},
        "eval": {"at_end": False},
        "checkpoint": {"every_steps": 100_000, "resume": "never"},
        "export": {"at_end": True, "dtype": "fp32"},
        "log": {"samples": 0, "report": False, "trace_step": False},
        "output_dir": str(output_dir),
    }
    for name, values in sections.items():
        if isinstance(values, dict):
            base[name] = {**base.get(name, {}), **values}
        else:
            base[name] = values
    return base


def train(run_settings: dict[str, Any]) -> dict[str, Any]:
    """Run `finetune`; rank 0 returns the rows of metrics.jsonl and the exported weights, the others nothing."""
    import os

    from fsdp_trainer import Config, finetune

    finetune(Config.from_dict(run_settings))
    if os.environ["RANK"] != "0":
        return {}
    folder = Path(run_settings["output_dir"])
    return {"metrics": read_metrics(folder), "weights": read_weights(folder / "model")}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_weights(folder: Path) -> dict[str, Any]:
    """Return every tensor of the safetensors files in a model folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def documents_by_step(run_settings: dict[str, Any], steps: int) -> list[list[Document]]:
    """Return the documents of each optimizer step as the data package deals them to a single rank."""
    from transformers import AutoTokenizer

    from fsdp_trainer import Config
    from fsdp_trainer.data.loader import build_window
    from fsdp_trainer.data.prepare import prepare_rows

    config = Config.from_dict(run_settings)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows, _ = prepare_rows(config.data.train, data=config.data, tokenizer=tokenizer, seed=config.train.seed)
    plan = []
    for step in range(steps):
        window = build_window(
            rows,
            step=step,
            global_batch_size=config.batch.global_batch_size,
            micro_batch_size=config.batch.global_batch_size,
            rank=0,
            world_size=1,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
            seq_len=config.data.seq_len,
            packing=config.data.packing,
        )
        plan.append([document for index in window.row_indices for document in row_documents(rows, index)])
    return plan


def row_documents(rows: Any, index: int) -> Sequence[Document]:
    """Return the documents of one prepared row."""
    borders = rows.documents_of(index)
    return [
        Document(tuple(rows.tokens[start:stop].tolist()), tuple(rows.supervised[start:stop].tolist()))
        for start, stop in itertools.pairwise(borders)
    ]
