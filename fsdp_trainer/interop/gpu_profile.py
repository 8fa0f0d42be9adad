"""An Accelerate profile for GPUs named as `--gpus` takes them: for configs/accelerate and `fsdp-trainer profile`.

Only keys that Accelerate reads are written. Environment, which a profile cannot carry, is set by every way of starting
(cuda_allocator.py); NCCL_P2P_DISABLE, for RTX 40 cards with drivers below 550.40.07, by Accelerate's own launcher.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp_trainer.memory.hardware import Hardware

GIB = 2**30
_HEAD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
"""
_TAIL = """\
mixed_precision: 'no'           # `precision` in run.yaml decides; autocast on top of it would change the loss
fsdp_config:
  fsdp_version: 2
  # fsdp_trainer shards, loads and checkpoints by itself: set sharding.* and activation_checkpointing.* in run.yaml.
  # Accelerate's own loading would hold the whole model in host memory on every rank.
  fsdp_cpu_ram_efficient_loading: false
"""
_ONE_MACHINE = """\
num_machines: 1
machine_rank: 0
num_processes: {count}
main_process_port: 0            # a free port, so that two runs on one machine do not collide
"""
_MACHINES = """\
num_machines: {nodes}
num_processes: {count}               # of all machines together
main_process_port: 29500        # the same on every machine; give each `--machine_rank` and `--main_process_ip`
"""
_ON_CPU = """\
use_cpu: true                   # on a machine with GPUs also set CUDA_VISIBLE_DEVICES= : Accelerate keeps this back
"""


@dataclass(frozen=True)
class Profile:
    """One profile of configs/accelerate: its file's name without the ending, and the GPUs as `--gpus` takes them."""

    name: str
    gpus: str


def format_profile(hardware: Hardware) -> str:
    """Return the YAML text of a profile for `accelerate launch --config_file`, one process a GPU."""
    machines = _MACHINES if hardware.nodes > 1 else _ONE_MACHINE
    on_cpu = _ON_CPU if hardware.name == "CPU" else ""
    return _title(hardware) + _HEAD + on_cpu + machines.format(count=hardware.count, nodes=hardware.nodes) + _TAIL


def _title(hardware: Hardware) -> str:
    if hardware.name == "CPU":
        ranks = "rank" if hardware.count == 1 else "ranks"
        return (
            f"# {hardware.count} {ranks} on CPU over gloo: for the demo, for tests, and to try a run.yaml before "
            "renting GPUs.\n"
        )
    places = "one machine" if hardware.nodes == 1 else f"on each of {hardware.nodes} machines"
    memory = "" if "GB" in hardware.name else f" ({hardware.memory_bytes / GIB:.0f} GB each)"
    lines = [f"# {hardware.gpus_per_node} x {hardware.name}{memory}, {places}."]
    if not hardware.bf16_flops:
        lines.append("# No bf16 arithmetic on this GPU: set `precision: fp16` in run.yaml (bf16 is refused).")
    return "\n".join(lines) + "\n"


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    """Return the profiles of configs/accelerate, from profiles.csv: cards, and the numbers they are sold in."""
    with Path(__file__).with_name("profiles.csv").open(encoding="utf-8", newline="") as file:
        return tuple(profile for row in csv.DictReader(file) for profile in _of_card(row))


def _of_card(row: Mapping[str, str]) -> Iterator[Profile]:
    for count in row["counts"].split():
        yield Profile(f"{row['file']}-x{count}", f"{count}x{row['gpu']}")
    if each := row["two_nodes"]:
        yield Profile(f"{row['file']}-2x{each}", f"2x{each}x{row['gpu']}")
