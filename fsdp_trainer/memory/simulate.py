"""What a run would take on given GPUs, found by running it on fake tensors: no GPU, no weights, no tokenizer.

A few seconds a layer count of tens; the numbers are those of rank 0, which is the fullest.
"""

from fsdp_trainer.config import Config
from fsdp_trainer.memory.allocator import Replay, replay, smallest_capacity
from fsdp_trainer.memory.hardware import Hardware, read_overheads
from fsdp_trainer.memory.host import WORKER_BYTES, HostMemory, ProcessParts, host_memory, loading_bytes
from fsdp_trainer.memory.recording import Recording
from fsdp_trainer.memory.simulation import Simulation, capability_of, check_known, check_precision
from fsdp_trainer.memory.traced_run import Trace, trace_run
from fsdp_trainer.memory.traced_time import time_traced


def simulate(config: Config, hardware: Hardware, *, expandable_segments: bool = True) -> Simulation:
    """Run rank 0 of `config` on fake tensors and say what it takes on `hardware`.

    `expandable_segments` replays torch's allocator as a run sets it (cuda_allocator.py); False its own default, with
    segments of a fixed size. Rows are full and every token is supervised, which is the most a window can take. Raises
    ConfigError for a model that cannot be trained, and for a technique whose memory is not known here. No run may be
    active in this process, and no backward may have run: `fsdp_trainer.simulate` (simulation_process.py) does this in a
    process of its own.
    """
    check_known(config)
    config.check_world(hardware.count)
    check_precision(config.precision, hardware)
    capability = capability_of(hardware)
    trace = trace_run(config, world_size=hardware.count, compute_capability=capability)
    return summarize(trace, config, hardware, expandable_segments=expandable_segments)


def summarize(trace: Trace, config: Config, hardware: Hardware, *, expandable_segments: bool) -> Simulation:
    """Turn a trace into what a plan rests on."""
    process = read_overheads(hardware.capability)["process"]
    allocated = trace.device.peak[0]
    if hardware.is_cpu:
        host = _memory_on_cpu(trace, config, process=process).peak
        ranks = hardware.gpus_per_node
        together = _memory_on_cpu(
            trace, config, process=process, processes=ranks, data_workers=config.data.workers
        ).peak
        reserved, least = allocated, -(-together // ranks)
    else:
        host = host_memory(_host_parts(trace, config, process=process)).peak
        events = allocator_events(trace.device)
        unlimited = replay(events, expandable=expandable_segments)
        reserved, least = unlimited.reserved, _least(events, unlimited, expandable=expandable_segments)
    time = None if trace.work is None else time_traced(trace.work, hardware)
    return Simulation(
        allocated=allocated,
        reserved=reserved,
        min_capacity=least,
        host=host,
        limit=hardware.usable_bytes - hardware.outside_bytes,
        phases=trace.device.phases,
        breakdown=trace.device.breakdown(),
        step_time=time,
        tokens_per_rank=config.batch.global_batch_size * config.data.seq_len // hardware.count,
        config=config.to_dict(),
        ledger=trace.device,
        timeline=trace.device.outline,
    )


_TRAINING = ("forward", "backward", "clip", "step", "evaluate")


def _host_parts(trace: Trace, config: Config, *, process: int) -> ProcessParts:
    return ProcessParts(
        process=process,
        loading=loading_bytes(trace.parameters, random_init=config.model.init == "random"),
        masters=trace.host.phases["load"],
        resident=max(trace.host.phases.get(phase, 0) for phase in ("load", *_TRAINING)),
        staged=trace.staged,
        keeps_staged=config.checkpoint.async_save,
        exported=trace.exported,
    )


def _memory_on_cpu(
    trace: Trace, config: Config, *, process: int, processes: int = 1, data_workers: int = 0
) -> HostMemory:
    """Return what `processes` CPU ranks of one machine take, tensors and all; rank 0 alone keeps the exported file."""
    held = trace.device.phases
    at_rest = sum(size for _, size, _ in trace.device.events)  # what no event took back
    loading = loading_bytes(trace.parameters, random_init=config.model.init == "random")
    kept = trace.staged if config.checkpoint.async_save else 0
    return HostMemory(
        prepare=processes * process + data_workers * WORKER_BYTES,
        load=processes * (process + loading + held["load"]),
        train=processes * (process + max(held.get(phase, 0) for phase in _TRAINING) + kept),
        save=processes * (process + at_rest + trace.staged),
        export=processes * (process + at_rest) + trace.exported,
    )


def allocator_events(ledger: Recording) -> list[tuple[int, int, int]]:
    """Return the ledger as the allocator's replay takes it: (allocation, bytes, stream)."""
    return [(index, size, ledger.allocations[index].stream) for index, size, _ in ledger.events]


def _least(events: list[tuple[int, int, int]], unlimited: Replay, *, expandable: bool) -> int:
    # To within 0.2 %: about ten replays.
    return smallest_capacity(
        events, unlimited=unlimited, expandable=expandable, step=max(2**21, unlimited.allocated // 512)
    )
