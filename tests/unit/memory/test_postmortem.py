"""What is read from the words of torch, the driver and the kernel when memory has run out."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_trainer.memory import machine
from fsdp_trainer.memory.postmortem import drop_frames, find_cause, find_limit, find_module, layer_of, read_message

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.55 GiB of which 1.94 MiB is "
    "free. Including non-PyTorch memory, this process has 23.54 GiB memory in use. Of the allocated memory 22.98 GiB "
    "is allocated by PyTorch, and 89.01 MiB is reserved by PyTorch but unallocated."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def test_the_allocators_own_words_are_read() -> None:
    found = read_message(CUDA)
    assert found["requested"] == 20 * 2**20
    assert found["total"] == round(23.55 * 2**30)
    assert found["free"] == round(1.94 * 2**20)
    assert found["allocated"] == round(22.98 * 2**30)
    assert found["unallocated"] == round(89.01 * 2**20)
    assert read_message(CPU) == {"requested": 4 * 10**12}
    assert read_message("something else") == {}


def test_the_limit_is_what_could_not_be_held() -> None:
    assert find_limit({"allocated": 900, "requested": 200, "reserved": 950, "free": 100}) == 1050
    assert find_limit({"allocated": 900, "requested": 120, "reserved": 1000, "free": 50}) == 1020, "in pieces"
    assert find_limit({"requested": 5}) is None


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (torch.OutOfMemoryError(CUDA), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "device"),
        (RuntimeError("NCCL error ... Cuda failure 2 'out of memory'"), "device"),
        (RuntimeError(CPU), "host"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
    ],
)
def test_what_says_that_memory_ran_out_is_found_under_what_it_became(error: Exception, place: str) -> None:
    outer = ValueError("the checkpoint could not be written")
    outer.__cause__ = error
    assert find_cause(outer) == (error, place)
    assert find_cause(RuntimeError("shapes do not match")) is None


def test_torch_itself_says_what_is_looked_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    found = find_cause(caught.value)
    assert found is not None and found[1] == "host"


class _Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = torch.ones(1000)
        self.held = [id(held)]
        raise torch.OutOfMemoryError(CUDA)


def test_the_innermost_module_is_named_and_its_frames_let_go() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), _Layer()))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(1))
    assert find_module(caught.value, model) == "0.1"
    drop_frames(caught.value)
    assert caught.value.__traceback__ is None
    assert layer_of("model.layers.12.mlp") == 12
    assert layer_of("lm_head") is None


def test_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    assert machine.count_kills(root=tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 4\n")
    assert machine.count_kills(root=tmp_path) == 4
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job/memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert machine.count_kills(root=tmp_path) == 2, "its own group's, not the machine's"
