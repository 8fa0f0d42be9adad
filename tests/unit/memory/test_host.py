"""Host memory by phase, against what the code that takes it says and against a real process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters, matrices, read_model_shape
from fsdp_trainer.memory.hardware import read_overheads
from fsdp_trainer.memory.host import (
    EXPORTED_FILE_BYTES,
    GIB,
    LOADING_BYTES,
    WORKER_BYTES,
    HostMemory,
    copied_ahead,
    estimate_process,
    host_memory,
    pinned_bytes,
    pinned_shards,
)

PROCESS_BYTES = read_overheads(9.0)["process"]
# Powers of two throughout, so that pinning adds nothing to its matrices.
SHAPE = read_model_shape(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 131072,
    }
)
PARAMETERS = count_parameters(SHAPE)


def on_host(
    shape: ModelShape = SHAPE, *, processes: int = 8, shards: int = 8, data_workers: int = 2, **settings: Any
) -> HostMemory:
    parts = estimate_process(shape, process_bytes=PROCESS_BYTES, shards=shards, **settings)
    return host_memory(parts, processes=processes, data_workers=data_workers)


def test_offloaded_state_is_sixteen_bytes_over_all_ranks() -> None:
    """On one node of 8: 16 bytes a parameter on the host, 12 more for the copy that a background save keeps."""
    plain, offloaded = (on_host(async_save=False, offload=offload) for offload in ("none", "params"))
    assert offloaded.train - plain.train == pytest.approx(16 * PARAMETERS, rel=1e-6)
    staged = on_host(offload="params")
    assert staged.train - offloaded.train == pytest.approx(12 * PARAMETERS, rel=1e-6)
    assert staged.peak == staged.train == staged.save  # the copy is given back before the export


def test_a_save_from_the_gpu_holds_what_the_writer_copies_ahead() -> None:
    """The one being written, and 10 MB of those after it: of two tables both."""
    assert copied_ahead([]) == 0
    assert copied_ahead([5 * 10**8, 10**3, 5 * 10**8]) == 10**9 + 10**3
    assert copied_ahead([4 * 10**6] * 9) == 4 * 10**6 + 12 * 10**6
    assert copied_ahead([3, 2, 1]) == 6
    table = 4 * SHAPE.vocab * SHAPE.hidden // 8
    waiting = on_host(async_save=False)
    assert waiting.save - waiting.train == 8 * 2 * table


def test_a_run_that_saves_nothing_takes_nothing_for_it() -> None:
    for async_save in (True, False):
        without = on_host(saves=False, async_save=async_save)
        assert without.save == without.train == on_host(async_save=False).train


def test_pinned_shards_take_the_next_power_of_two() -> None:
    """torch's host allocator: weights and gradients of 3 x 2^n rows take a third more, the state does not."""
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    odd = replace(SHAPE, ffn=3 * 4096)
    whole, exact = pinned_shards(odd, shards=8), 4 * count_parameters(odd) // 8
    mlp = 3 * odd.layers * 4 * odd.ffn * odd.hidden // 8
    # gate and up are cut by their 12288 rows; down by its 4096, of 12288 columns: each is a third too small
    assert whole - exact == pytest.approx(mlp / 3, rel=1e-3)
    grown = on_host(odd, offload="params").train - on_host(odd).train
    assert grown == pytest.approx(8 * (2 * whole + 8 * count_parameters(odd) // 8), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral", "qwen3_moe", "gpt2", "gpt_neox", "opt"])
def test_matrices_are_all_but_vectors(family: str) -> None:
    sizes: dict[str, Any] = {"model_type": family, "vocab_size": 1000, "num_hidden_layers": 3}
    sizes |= {"hidden_size": 64, "n_embd": 64, "n_head": 4, "n_layer": 3, "num_attention_heads": 4, "n_positions": 128}
    sizes |= {"intermediate_size": 96, "ffn_dim": 96, "max_position_embeddings": 128, "head_dim": 16}
    if family in ("mixtral", "qwen3_moe"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = read_model_shape(sizes)
    found = sum(rows * columns for rows, columns in matrices(shape))
    assert 0.97 * count_parameters(shape) < found < count_parameters(shape)


def test_nodes_share_what_is_sharded_over_them() -> None:
    one, two = (on_host(shards=shards, offload="params") for shards in (8, 16))
    processes = 8 * PROCESS_BYTES
    assert two.train - processes == pytest.approx((one.train - processes) / 2, rel=1e-6)


def test_random_weights_are_whole_in_every_process() -> None:
    host = on_host(random_init=True)
    assert host.load == 8 * (PROCESS_BYTES + 4 * PARAMETERS) == host.peak
    assert on_host().load == 8 * (PROCESS_BYTES + LOADING_BYTES)


def test_export_holds_one_file() -> None:
    alone = {"processes": 1, "shards": 1, "async_save": False}
    assert on_host(**alone).export - PROCESS_BYTES == EXPORTED_FILE_BYTES
    small = replace(SHAPE, layers=2, dense_layers=2, vocab=4096)
    assert on_host(small, **alone).export - PROCESS_BYTES == 2 * count_parameters(small)
    assert on_host(small, exports=False, **alone).export == PROCESS_BYTES


def test_workers_count_while_data_are_prepared() -> None:
    assert on_host(processes=2, shards=2, data_workers=3).prepare == 2 * PROCESS_BYTES + 3 * WORKER_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="resident sizes differ between systems")
@pytest.mark.slow
def test_process_size_is_what_a_process_takes() -> None:
    """Within a fifth: libraries differ between builds. The sizes are RSS, so shared pages count in every process."""
    code = "import fsdp_trainer.training, psutil; print(psutil.Process().memory_info().rss)"
    measured = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.8 * PROCESS_BYTES < measured < 1.25 * PROCESS_BYTES, f"{measured / GIB:.2f} GiB"
