"""Plans made by hand from what the closed form says, for what shows and writes them: no search, no simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.make_planning import LLAMA_8B
from fsdp_trainer.config import Config
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.plan import Candidate, Plan, quality_of
from fsdp_trainer.memory.quick import simulate_quick

# The best first: what a plan for eight 80 GB cards could list.
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"sharding": {"zero_stage": 2}},
    {
        "precision": "bf16_pure",
        "optim": {"name": "adamw_8bit"},
        "sharding": {"zero_stage": 1, "reduce_dtype": "bf16", "offload": "optimizer"},
        "activation_checkpointing": {"mode": "every_n_layers", "every_n": 2},
    },
)


def model_folder(folder: Path) -> str:
    """Write the config.json of an 8B model alone and return its folder."""
    path = folder / "llama-8b"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    return str(path)


def make_candidate(config: Config, hardware: Hardware, *, seconds: float, lacks: tuple[str, ...] = ()) -> Candidate:
    """Return a candidate whose memory the closed form gives, with a step of `seconds`."""
    found = simulate_quick(config, hardware)
    node = found.pop("host_node_gib")
    time = {"compute": seconds, "exposed_communication": 0.0, "exposed_transfer": 0.0, "optimizer": 0.0}
    tokens = config.batch.global_batch_size * config.data.seq_len
    found |= {
        "step_time": {**time, "exposed_data": 0.0, "limited_by": "GPU memory bandwidth"},
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": tokens / seconds / hardware.count,
    }
    return Candidate(
        config=config,
        quality=quality_of(config),
        prediction=found,
        source="closed form",
        host_node_gib=max(node.values()),
        run_seconds=100 * seconds,
        fits=not lacks,
        lacks=lacks,
    )


def make_plan(
    folder: Path, *, gpus: str = "8xH100-80GB", fits: bool = True, fixed: tuple[str, ...] = (), **sections: Any
) -> Plan:
    """Return a plan of three combinations for an 8B model; with `fits` False the nearest is the last."""
    hardware = parse_gpus(gpus)
    base = {
        "model": {"path": model_folder(folder)},
        "data": {"seq_len": 4096},
        "batch": {"global_batch_size": 64, "micro_batch_size": 2},
        **sections,
    }
    lacks = () if fits else ("3.2 GiB of GPU memory", "40.0 GiB of host RAM")
    candidates = tuple(
        make_candidate(Config.from_dict({**base, **choice}), hardware, seconds=10.0 + place, lacks=lacks)
        for place, choice in enumerate(CHOICES)
    )
    return Plan(
        hardware=hardware,
        host_bytes=None if fits else 64 * 2**30,
        fixed=fixed,
        prefer="quality",
        candidates=candidates,
        chosen=candidates[0] if fits else None,
        nearest=None if fits else candidates[-1],
        remedies=() if fits else ("data.seq_len: 2048", "16xH100-80GB"),
        margins={"fragmentation_share": 0.02, "context_gib": 0.5},
        considered=412,
        seconds=3.14,
        calibration={} if fits else {"memory": 1.031, "seconds": 0.95},
    )
