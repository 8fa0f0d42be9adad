"""What a run would take on given GPUs, found by running it on fake tensors: no GPU, no weights, no tokenizer.

A few seconds a layer count of tens; the numbers are those of rank 0, which is the fullest.
"""

from fsdp_trainer.config import Config
from fsdp_trainer.memory.allocator import Replay, replay, smallest_capacity
from fsdp_trainer.memory.cuda_kernels import find_overheads
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.host import ProcessParts, host_memory, loading_bytes
from fsdp_trainer.memory.ledger import Ledger
from fsdp_trainer.memory.simulation import Simulation, capability_of, check_known, check_precision
from fsdp_trainer.memory.traced_run import Trace, trace_run
from fsdp_trainer.memory.traced_time import time_traced


def simulate(config: Config, hardware: Hardware, *, expandable_segments: bool = False) -> Simulation:
    """Run rank 0 of `config` on fake tensors and say what it takes on `hardware`.

    `expandable_segments` replays torch's allocator with PYTORCH_ALLOC_CONF=expandable_segments:True. Rows are full and
    every token is supervised, which is the most a window can take. Raises ConfigError for a model that cannot be
    trained, and for a technique whose memory is not known here. No run may be active in this process, and no backward
    may have run: `fsdp_trainer.simulate` (simulation_process.py) does this in a process of its own.
    """
    check_known(config)
    check_precision(config.precision, hardware)
    capability = capability_of(hardware)
    trace = trace_run(config, world_size=hardware.count, compute_capability=capability)
    return summarize(trace, config, hardware, expandable_segments=expandable_segments)


def summarize(trace: Trace, config: Config, hardware: Hardware, *, expandable_segments: bool) -> Simulation:
    """Turn a trace into what a plan rests on."""
    overheads = find_overheads(capability_of(hardware))
    events = allocator_events(trace.device)
    unlimited = replay(events, expandable=expandable_segments)
    time = None if trace.work is None else time_traced(trace.work, hardware)
    return Simulation(
        allocated=trace.device.peak[0],
        reserved=unlimited.reserved,
        min_capacity=_least(events, unlimited, expandable=expandable_segments),
        host=host_memory(_host_parts(trace, config, process=overheads.process)).peak,
        limit=hardware.usable_bytes - overheads.outside(hardware.count),
        phases=trace.device.phases,
        breakdown=trace.device.breakdown(),
        step_time=time,
        tokens_per_rank=config.batch.global_batch_size * config.data.seq_len // hardware.count,
        config=config.to_dict(),
        ledger=trace.device,
    )


def _host_parts(trace: Trace, config: Config, *, process: int) -> ProcessParts:
    training = [
        trace.host.phases.get(phase, 0) for phase in ("load", "forward", "backward", "clip", "step", "evaluate")
    ]
    return ProcessParts(
        process=process,
        loading=loading_bytes(trace.parameters, random_init=config.model.init == "random"),
        masters=trace.host.phases["load"],
        resident=max(training),
        staged=trace.staged,
        keeps_staged=config.checkpoint.async_save,
        exported=trace.exported,
    )


def allocator_events(ledger: Ledger) -> list[tuple[int, int, int]]:
    """Return the ledger as the allocator's replay takes it: (allocation, bytes, stream)."""
    return [(index, size, ledger.allocations[index].stream) for index, size, _ in ledger.events]


def _least(events: list[tuple[int, int, int]], unlimited: Replay, *, expandable: bool) -> int:
    # To within 0.2 %: about ten replays.
    return smallest_capacity(
        events, unlimited=unlimited, expandable=expandable, step=max(2**21, unlimited.allocated // 512)
    )
