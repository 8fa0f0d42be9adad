"""Host memory phase by phase, of one process or of a node: what processes, loading, offloading, saving and data take.

Sizes follow this package's own reading and writing (weight_files.py, checkpoint.py, export.py, data/workers.py). The
closed form and the full simulation give their own sizes to the one rule here. No torch.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters, matrices

MIB, GIB = 2**20, 2**30
# Resident size of a process that tokenises, measured on Linux with Transformers 5.24.
WORKER_BYTES = 541 * MIB
# weight_files.py: a block is read at once, and mapped pages stay resident until the file is opened anew.
LOADING_BYTES = 64 * MIB + 128 * MIB
EXPORTED_FILE_BYTES = 5 * 10**9  # export.py: one file's tensors are held at once, by rank 0


def pinned_bytes(size: int) -> int:
    """Return what torch takes to pin `size` bytes: the next power of two, and freed blocks are kept for the next.

    ATen/core/CachingHostAllocator.h, `allocate`: PowerOf2Ceil up to pinned_max_round_threshold, which is unlimited by
    default (c10/core/AllocatorConfig.h). So are the offloaded weights, which FSDP2 pins, and their gradients, which it
    copies without blocking (_fsdp_param.py, _fsdp_collectives.py). The copy that a background save keeps is not: its
    pages are registered where they are (torch/distributed/checkpoint/_state_dict_stager.py).
    """
    return 1 << (size - 1).bit_length() if size else 0


def copied_ahead(sizes: Iterable[int], *, ahead: int = 10_000_000) -> int:
    """Return the most bytes that DCP's writer holds of tensors that it copies from a GPU while it writes them.

    It takes them from the smallest to the largest, always `ahead` bytes before the one being written: mostly the two
    largest (torch 2.14, distributed/checkpoint/filesystem.py, _OverlappingCpuLoader; per_thread_copy_ahead).
    """
    waiting, current = deque(sorted(sizes)), deque[int]()
    in_flight = most = 0
    while waiting:
        writing = 0
        while in_flight >= ahead:
            writing += current[0]
            in_flight -= current.popleft()
        while waiting and in_flight < ahead:
            in_flight += waiting[0]
            current.append(waiting.popleft())
        most = max(most, writing + in_flight)
    return most


@dataclass(frozen=True)
class HostMemory:
    """Bytes by phase, of one process or a node; the first, which rank 0 makes the fullest."""

    prepare: int
    load: int
    train: int
    save: int
    export: int

    @property
    def peak(self) -> int:
        """The most any phase takes."""
        return max(self.prepare, self.load, self.train, self.save, self.export)


@dataclass(frozen=True)
class ProcessParts:
    """What one training process holds on the host, in bytes.

    process: with everything imported. loading: while weights are read or drawn. masters: offloaded weights as loaded,
    and paged state. resident: the most of offloaded weights, gradients and optimizer state while training, pinned
    blocks as torch rounds them. staged: the copy that a save makes, kept from the first one on where `keeps_staged`.
    exported: one file, and what a group of its tensors takes in two layouts.
    """

    process: int
    loading: int
    masters: int
    resident: int
    staged: int
    keeps_staged: bool
    exported: int


def host_memory(parts: ProcessParts, *, processes: int = 1, data_workers: int = 0) -> HostMemory:
    """Return what `processes` on one machine take; rank 0 alone holds the exported file, after the staged copy."""
    kept = parts.staged if parts.keeps_staged else 0
    return HostMemory(
        prepare=processes * parts.process + data_workers * WORKER_BYTES,
        load=processes * (parts.process + parts.loading + parts.masters),
        train=processes * (parts.process + parts.resident + kept),
        save=processes * (parts.process + parts.resident + parts.staged),
        export=processes * (parts.process + parts.resident) + parts.exported,
    )


def loading_bytes(parameters: int, *, random_init: bool) -> int:
    """Return what reading takes, or drawing: `random_init` builds the whole model in fp32 in every process."""
    return 4 * parameters if random_init else LOADING_BYTES


def estimate_process(
    shape: ModelShape,
    *,
    process_bytes: int,
    shards: int,
    offload: Literal["none", "optimizer", "params"] = "none",
    landing_bytes: int = 0,
    paged_bytes: int = 0,
    random_init: bool = False,
    saves: bool = True,
    async_save: bool = True,
    exports: bool = True,
    export_bytes: int = 2,
    weights_bytes: float = 4.0,
    gradients_bytes: float = 4.0,
    optimizer_bytes: float = 8.0,
) -> ProcessParts:
    """Return the parts in closed form; `shards` is the number of ranks one copy of the weights is spread over.

    Offloaded weights and gradients are pinned: with `offload: params` in torch's blocks, with `optimizer` at their own
    size, and `landing_bytes` more in which gradients arrive. `paged_bytes` are what the driver may move here.
    """
    parameters = count_parameters(shape)
    weights = round(weights_bytes * parameters) // shards
    gradients = round(gradients_bytes * parameters) // shards
    state = round(optimizer_bytes * parameters) // shards
    masters, arriving = 0, 0
    if offload == "params":
        masters, arriving = (pinned_shards(shape, shards=shards, itemsize=i) for i in (weights_bytes, gradients_bytes))
    elif offload == "optimizer":
        masters, arriving = weights, gradients + landing_bytes
    return ProcessParts(
        process=process_bytes,
        loading=loading_bytes(parameters, random_init=random_init),
        masters=masters + paged_bytes,
        resident=paged_bytes if offload == "none" else masters + arriving + state,
        staged=_staged(shape, weights + state, shards=shards, async_save=async_save) if saves else 0,
        keeps_staged=async_save,
        exported=min(EXPORTED_FILE_BYTES, export_bytes * parameters) if exports else 0,
    )


def _staged(shape: ModelShape, checkpoint_bytes: int, *, shards: int, async_save: bool) -> int:
    # Written while training waits, the two largest are copied ahead: tables, or their averages.
    return checkpoint_bytes if async_save else copied_ahead([4 * shape.vocab * shape.hidden // shards] * 2)


def pinned_shards(shape: ModelShape, *, shards: int, itemsize: float = 4) -> int:
    """Return the bytes that a rank's shards take in torch's pinned blocks; of what is no matrix, as it is."""
    found, rest = 0, count_parameters(shape)
    for rows, columns in matrices(shape):
        found += pinned_bytes(round(itemsize * -(-rows // shards) * columns))
        rest -= rows * columns
    return found + round(itemsize * rest) // shards
