"""The collectives of FSDP2 between two or more ranks, each a process of its own: `fsdp-trainer doctor` starts them.

python -m fsdp_trainer.self_test        (one rank, with RANK and WORLD_SIZE set)
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

SECONDS = 120  # to import torch on a slow disk, join and compare; a group that never forms ends with this


def run_self_test(environ: Mapping[str, str] = os.environ) -> str:
    """Start a rank for each GPU (two on CPU) and return what they did; RuntimeError with a rank's last words."""
    import torch

    gpus = torch.cuda.device_count()
    ranks, backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        place = f"file://{folder}/meeting"  # a file, so that no port can be taken in between
        processes = [_start(rank, ranks, backend, place, log=log, environ=environ) for rank, log in enumerate(logs)]
        try:
            _wait(processes, logs)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return f"{ranks} ranks over {backend} in {time.perf_counter() - started:.0f} s"


def _start(
    rank: int, ranks: int, backend: str, place: str, *, log: Path, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    own = {**environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "SELF_TEST": f"{backend} {place}"}
    if backend == "gloo":
        own |= {"CUDA_VISIBLE_DEVICES": ""}
        if "lo" in (name for _, name in socket.if_nameindex()):  # a host name that resolves to nothing would stop gloo
            own.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "fsdp_trainer.self_test"], env=own, stdout=file, stderr=subprocess.STDOUT
        )


def _wait(processes: "list[subprocess.Popen[bytes]]", logs: list[Path]) -> None:
    end = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        if process.poll():
            words = log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank} ended with {process.returncode}: {words[-1] if words else 'no message'}")
    waiting = [rank for rank, process in enumerate(processes) if process.poll() is None]
    if waiting:
        raise RuntimeError(f"ranks {waiting} did not answer within {SECONDS} s")


def main() -> None:
    """Join as the rank that the environment names, and compare each collective with what it must give."""
    import torch
    import torch.distributed as dist

    backend, place = os.environ["SELF_TEST"].split(" ", 1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=ranks)
    total = ranks * (ranks + 1) // 2
    own = torch.full((1024,), float(rank + 1), device=device)
    gathered = torch.empty(ranks * 1024, device=device)
    dist.all_gather_into_tensor(gathered, own)
    assert gathered.view(ranks, 1024)[:, 0].tolist() == [i + 1.0 for i in range(ranks)], "all_gather is wrong"
    part = torch.empty(1024, device=device)
    dist.reduce_scatter_tensor(part, own.repeat(ranks))
    assert part.eq(total).all(), "reduce_scatter is wrong"
    dist.all_reduce(own)
    assert own.eq(total).all(), "all_reduce is wrong"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
