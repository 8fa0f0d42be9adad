"""`fsdp-trainer doctor`: what this machine has, what that means for a run, and what would break one.

Each check returns findings and changes nothing; the collectives are tried in processes of their own (self_test.py).
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from fsdp_trainer.cuda_allocator import NAMES
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import GIB, card_name
from fsdp_trainer.memory.machine import machine_bytes, may_have_gpus
from fsdp_trainer.self_test import run_self_test
from fsdp_trainer.units import format_bytes

Level = Literal["good", "note", "broken"]
# Weights, optimizer state and an export of the smallest useful run; a run itself checks for what it needs.
LITTLE_DISK = 20 * GIB
# NCCL puts its rings between GPUs without peer access in /dev/shm; docker's default is 64 MiB.
LITTLE_SHARED_MEMORY = 512 * 2**20
_MATTERS = ("torch", "transformers", "accelerate", "safetensors", "datasets", "bitsandbytes")


@dataclass(frozen=True)
class Finding:
    """One fact: what was looked at, what was found, what it means, and where it would break a run, how to mend it."""

    name: str
    found: str
    means: str = ""
    fix: str = ""
    level: Level = "good"


def examine(folder: Path, *, self_test: bool = True, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Look at this machine for a run in `folder`; the collectives are tried too where `self_test` says so.

    `say` hears what is looked at next: importing torch and trying the collectives take seconds each.
    """
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("installed versions", check_versions),
        ("8-bit kernels (imports torch)", check_bitsandbytes),
        ("GPUs", check_gpus),
        ("host RAM and shared memory", check_memory),
        ("disk", lambda: check_disk(folder)),
        ("environment variables", lambda: check_variables(os.environ)),
        ("Accelerate's default file", lambda: check_accelerate_file(os.environ)),
        *([("collectives (starts two or more ranks)", check_collectives)] if self_test else []),
    ]
    findings = []
    for name, check in checks:
        say(f"looking at {name} ...")
        findings += check()
    return findings


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """Return plain values: `ok`, and each finding by its fields."""
    return {"ok": not any_broken(findings), "findings": [asdict(finding) for finding in findings]}


def any_broken(findings: list[Finding]) -> bool:
    """Return whether something here would break a run."""
    return any(finding.level == "broken" for finding in findings)


# --- software --------------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """Compare what is installed with the lower bounds of this package."""
    wanted = {r.name: r.specifier for r in map(Requirement, requires("fsdp_trainer") or []) if r.name in _MATTERS}
    for name in _MATTERS:
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "not installed", fix=f"install {name}{wanted.get(name, '')}", level="broken")
            continue
        bound = wanted.get(name)
        if bound and not bound.contains(found, prereleases=True):
            yield Finding(name, found, f"older than {bound}", f"install {name}{bound}", "broken")
        else:
            yield Finding(name, found)


def check_bitsandbytes() -> Iterator[Finding]:
    """Quantise and restore a few numbers, as adamw_8bit does."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    from fsdp_trainer.optim.eight_bit import load_kernels

    try:
        load_kernels()
        from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

        given = torch.linspace(-1, 1, 512, device=device)
        codes, state = quantize_blockwise(given, blocksize=256)
        off = (dequantize_blockwise(codes, state) - given).abs().max().item()
    except Exception as error:  # whatever its kernels raise: a driver, a missing library, a card they do not know
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        fix = "install a bitsandbytes for this CUDA version, or leave out optim.name: adamw_8bit"
        yield Finding("8-bit kernels", f"fail on {device}: {said}", "adamw_8bit cannot run", fix, "broken")
        return
    if off < 0.05:  # the 8-bit code's steps are at most 0.04 of the block's largest value
        yield Finding("8-bit kernels", f"work on {device}", "optim.name: adamw_8bit can be used")
    else:
        fix = "install another version of bitsandbytes, or leave out optim.name: adamw_8bit"
        yield Finding("8-bit kernels", f"wrong by {off:.2f} on {device}", "adamw_8bit would go astray", fix, "broken")


# --- the machine -----------------------------------------------------------------------------------------------------


def check_gpus() -> Iterator[Finding]:
    """Say of each GPU how much memory torch may use, whether it has bf16, and how the GPUs reach each other."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        if may_have_gpus() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            fix = "install a driver for this torch's CUDA (nvidia-smi, torch.version.cuda), or a torch for the driver"
            yield Finding("GPUs", f"a driver is here, but torch {torch.__version__} sees none", "", fix, "broken")
        else:
            yield Finding("GPUs", "none", "runs train on CPU over gloo: for trying things out", level="note")
        return
    for index in range(count):
        yield from _check_gpu(index)
    if count > 1:
        yield _check_peers(count)


def _check_gpu(index: int) -> Iterator[Finding]:
    import torch

    device = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    name = f"GPU {index}"
    found, means = f"{device.name}, {device.total_memory / GIB:.2f} GiB usable", ""
    try:
        card_name(device.name, memory_bytes=device.total_memory)
    except ConfigError:
        means = "not in the catalogue: describe it in a YAML file for `plan` and `simulate`"
    yield Finding(name, found, means, level="note" if means else "good")
    if total - free > 0.05 * total:
        taken = f"{(total - free) / GIB:.1f} GiB are taken by other processes"
        yield Finding(name, taken, "a plan counts on an empty card", "end what runs there (`nvidia-smi`)", "note")
    with torch.cuda.device(index):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Finding(name, "bf16 in hardware") if native else Finding(name, "no bf16", "set precision: fp16", level="note")


def _check_peers(count: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    if reached == len(pairs):
        return Finding("peer access", f"between all {count} GPUs", "gathers go from card to card")
    found = f"between {reached} of {len(pairs)} pairs"
    return Finding("peer access", found, "gathers go through host memory: prefer a larger micro-batch", level="note")


def check_memory() -> Iterator[Finding]:
    """Say how much RAM a run may use, and whether shared memory is large enough."""
    total, free = machine_bytes(), psutil.virtual_memory().available
    yield Finding("host RAM", f"{format_bytes(total)}, {format_bytes(min(free, total))} free", "offload rests here")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < LITTLE_SHARED_MEMORY:
            fix = "start the container with --ipc=host or --shm-size=8g"
            yield Finding("shared memory", format_bytes(size), "NCCL and data workers run out of it", fix, "broken")
        else:
            yield Finding("shared memory", format_bytes(size))


def check_disk(folder: Path) -> Iterator[Finding]:
    """Say how much room there is where runs are written, and whether anything can be written there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("disk", f"{place} cannot be written", "no run can start here", "give another folder", "broken")
        return
    free = shutil.disk_usage(place).free
    enough = free >= LITTLE_DISK
    means = "" if enough else "a checkpoint with fp32 AdamW takes 12 bytes a parameter"
    yield Finding("disk", f"{format_bytes(free)} free in {place}", means, level="good" if enough else "note")


# --- what was set by hand --------------------------------------------------------------------------------------------

# Variable -> (what it means, what to do). A value of 0 or an empty one counts as not set.
_SET_BY_HAND = {
    "NCCL_P2P_DISABLE": ("no direct traffic between GPUs: slow where there is NVLink", "unset it"),
    "NCCL_IB_DISABLE": ("no InfiniBand: machines talk over Ethernet", "unset it"),
    "NCCL_SHM_DISABLE": ("no shared memory between GPUs of one machine: slow", "unset it"),
    "CUDA_LAUNCH_BLOCKING": ("every kernel is waited for: nothing overlaps", "unset it"),
    "TORCH_DISTRIBUTED_DEBUG": ("every collective is checked: slow", "unset it"),
    "NCCL_DEBUG": ("NCCL writes to the log", "unset it once it runs"),
    "TORCHDYNAMO_DISABLE": ("nothing is compiled", "unset it"),
}


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Name the variables, set by hand, that change how a run goes."""
    for name, (means, do) in _SET_BY_HAND.items():
        if environ.get(name, "").upper() not in ("", "0", "OFF"):
            yield Finding(name, environ[name], f"{means}; to change it, {do}", level="note")
    for name in (n for n in NAMES if n in environ):
        expandable = re.search(r"expandable_segments:true", environ[name], re.IGNORECASE)
        means = "" if expandable else "runs set expandable_segments:True unless something is set: plans count on it"
        yield Finding(name, environ[name], means, level="good" if expandable else "note")


def check_accelerate_file(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Name the default file that a bare `accelerate launch` would read."""
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"))
    file = home / "accelerate" / "default_config.yaml"
    if file.exists():
        means = "`accelerate launch` without --config_file reads it; `fsdp-trainer train` does not"
        yield Finding("Accelerate's default", str(file), means, level="note")


def check_collectives(run: Callable[[], str] = run_self_test) -> Iterator[Finding]:
    """Try the collectives of FSDP2 between ranks: on the GPUs where there are two, else two on CPU."""
    try:
        yield Finding("collectives", run(), "gather, reduce-scatter and all-reduce give the right sums")
    except RuntimeError as error:
        fix = "read the message; NCCL_DEBUG=INFO says more"
        yield Finding("collectives", str(error), "a run with several ranks would hang or end", fix, "broken")
