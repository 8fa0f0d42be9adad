"""Host memory of one node, phase by phase, in closed form: what processes, loading, offloading, saving and data take.

Sizes follow this package's own reading and writing (weight_files.py, checkpoint.py, export.py, data/workers.py). No
torch here.
"""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
# Resident size of a process that tokenises, measured on Linux with Transformers 5.24.
WORKER_BYTES = 541 * MIB
# weight_files.py: a block is read at once, and mapped pages stay resident until the file is opened anew.
LOADING_BYTES = 64 * MIB + 128 * MIB
EXPORTED_FILE_BYTES = 5 * 10**9  # export.py: one file's tensors are held at once, by rank 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one node by phase; the first node's, which rank 0 makes the fullest."""

    prepare: int
    load: int
    train: int
    save: int
    export: int

    @property
    def peak(self) -> int:
        """The most any phase takes."""
        return max(self.prepare, self.load, self.train, self.save, self.export)


def estimate_host(
    parameters: int,
    *,
    process_bytes: int,
    gpus_per_node: int,
    shards: int,
    offload_params: bool = False,
    random_init: bool = False,
    async_save: bool = True,
    data_workers: int = 2,
    exports: bool = True,
    export_bytes: int = 2,
    weights_bytes: float = 4.0,
    gradients_bytes: float = 4.0,
    optimizer_bytes: float = 8.0,
    largest_tensor: int = 0,
) -> HostMemory:
    """Return what a node's RAM must hold; `shards` is the number of ranks one copy of the weights is spread over.

    `process_bytes` is what one process takes with everything imported (overheads.csv, without the driver's part).
    With `offload_params` weights, gradients (both pinned) and optimizer state stand on the host. An asynchronous save
    keeps one pinned copy of weights and state from its first time on; a synchronous one copies a tensor at a time.
    `random_init` builds the whole model in fp32 in every process, for tests.
    """
    processes = gpus_per_node * process_bytes
    weights = round(weights_bytes * parameters) // shards
    gradients = round(gradients_bytes * parameters) // shards
    state = round(optimizer_bytes * parameters) // shards
    offloaded = gpus_per_node * (weights + gradients + state) if offload_params else 0
    loading = 4 * parameters if random_init else LOADING_BYTES
    loaded = gpus_per_node * (loading + (weights if offload_params else 0))
    saved = gpus_per_node * (weights + state) if async_save else gpus_per_node * 4 * largest_tensor // shards
    resident = saved if async_save else 0
    export = min(EXPORTED_FILE_BYTES, export_bytes * parameters) if exports else 0
    return HostMemory(
        prepare=processes + data_workers * WORKER_BYTES,
        load=processes + loaded,
        train=processes + offloaded + resident,
        save=processes + offloaded + saved,
        export=processes + offloaded + resident + export,
    )
