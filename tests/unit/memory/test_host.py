"""Host memory by phase, against what the code that takes it says and against a real process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fsdp_trainer.memory.hardware import read_overheads
from fsdp_trainer.memory.host import GIB, WORKER_BYTES, HostMemory
from fsdp_trainer.memory.host import estimate_host as _estimate_host

PARAMETERS = 8 * 10**9
PROCESS_BYTES = read_overheads(9.0)["process"]


def estimate_host(parameters: int, **sizes: Any) -> HostMemory:
    return _estimate_host(parameters, process_bytes=PROCESS_BYTES, **sizes)


def test_offloaded_state_is_sixteen_bytes_over_all_ranks() -> None:
    """8B on one node of 8: 16 bytes a parameter on the host, 12 more for the copy that a background save keeps."""
    plain = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, async_save=False)
    offloaded = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, async_save=False, offloads=True)
    assert offloaded.train - plain.train == 16 * PARAMETERS
    staged = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, offloads=True)
    assert staged.train - offloaded.train == 12 * PARAMETERS
    assert staged.peak == staged.export


def test_nodes_share_what_is_sharded_over_them() -> None:
    one = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, offloads=True)
    two = estimate_host(PARAMETERS, gpus_per_node=8, shards=16, offloads=True)
    copies = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, offloads=True)  # HYBRID: a copy a node
    processes = 8 * PROCESS_BYTES
    assert two.train - processes == (one.train - processes) // 2 and copies == one


def test_random_weights_are_whole_in_every_process() -> None:
    host = estimate_host(PARAMETERS, gpus_per_node=8, shards=8, random_init=True)
    assert host.load == 8 * (PROCESS_BYTES + 4 * PARAMETERS) == host.peak


def test_export_holds_one_file() -> None:
    assert estimate_host(PARAMETERS, gpus_per_node=1, shards=1, async_save=False).export - PROCESS_BYTES == 5 * 10**9
    small = estimate_host(10**9, gpus_per_node=1, shards=1, async_save=False)
    assert small.export - PROCESS_BYTES == 2 * 10**9
    assert estimate_host(10**9, gpus_per_node=1, shards=1, exports=False, async_save=False).export == PROCESS_BYTES


def test_workers_count_while_data_are_prepared() -> None:
    with_workers = estimate_host(10**9, gpus_per_node=2, shards=2, data_workers=3)
    assert with_workers.prepare == 2 * PROCESS_BYTES + 3 * WORKER_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes differ between systems")
@pytest.mark.slow
def test_process_size_is_what_a_process_takes() -> None:
    """Within a fifth: libraries differ between builds. The sizes are RSS, so shared pages count in every process."""
    code = "import fsdp_trainer.training, psutil; print(psutil.Process().memory_info().rss)"
    measured = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.8 * PROCESS_BYTES < measured < 1.25 * PROCESS_BYTES, f"{measured / GIB:.2f} GiB"
