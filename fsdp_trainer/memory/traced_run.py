"""Build a run and take its steps on fake tensors while a trace watches: the whole of training, as far as memory goes.

`build_run`, `train_step` and `eval_step` are the ones a real run calls; only the rows are made up.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_trainer.checkpoint import training_tensors
from fsdp_trainer.checkpoint_copy import local_part, plan_copy
from fsdp_trainer.config import Config
from fsdp_trainer.data.loader import MicroBatch, Window
from fsdp_trainer.decoder_probe import UNKNOWN_ON_FAKES
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.export import gather_as_exported
from fsdp_trainer.memory.cuda_kernels import cuda_attention, find_overheads, keep_operations_fused
from fsdp_trainer.memory.host import copied_ahead, pinned_bytes
from fsdp_trainer.memory.recording import Recording
from fsdp_trainer.memory.trace import MemoryTrace
from fsdp_trainer.memory.traced_time import StepWork
from fsdp_trainer.run import Run, build_run, prove_small_copy
from fsdp_trainer.simulated import DEVICE, simulated_runtime
from fsdp_trainer.step import eval_step, train_step
from fsdp_trainer.trace_marks import mark_run, mark_window, marking, tensors_of

# First, middle and last differ (what is gathered, summed and kept); further ones in the middle hold what one holds.
MOST_MICRO_BATCHES = 3


@dataclass(frozen=True)
class Trace:
    """What one rank held on the device and the host, and the work of a whole optimizer step (None on CPU).

    `staged` and `exported` are the most that a save (all of it in the background, else a few tensors at a time) and an
    export (a file, and one group of it in both layouts) add on the host.
    """

    device: Recording
    host: Recording
    work: StepWork | None
    parameters: int
    staged: int
    exported: int


def trace_run(
    config: Config,
    *,
    world_size: int,
    compute_capability: float | None,
    windows: Sequence[Window] | None = None,
    rank: int = 0,
) -> Trace:
    """Trace one rank of a run: load, two steps, evaluation (where there are data for it), save.

    `compute_capability` is the GPU's; None simulates a gloo rank on CPU, whose tensors are all on the device's ledger.
    `windows` replaces the made-up rows, one for each step. Raises ConfigError as `build_run` does.
    """
    prove_small_copy(config)  # a run that would not start has no memory to speak of
    on_gpu = compute_capability is not None
    workspace = find_overheads(compute_capability).cublas_workspace if on_gpu else None
    device = DEVICE if on_gpu else "cpu"
    pretended = simulated_runtime(
        world_size=world_size, rank=rank, device=device, capability=compute_capability if on_gpu else 8.0
    )
    with warnings.catch_warnings(), pretended as runtime:
        trace = MemoryTrace(runtime.device, workspace=workspace)
        # Accelerate's prepare looks at data pointers; `_prepare` in run.py does not let it act on them.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with _kernels_of(compute_capability), trace:
            run = build_run(config, runtime)
            mark_run(run, trace.mark)
            with runtime.tensors(), marking(run, trace.mark):
                given = windows is not None
                windows = [_on_fakes(w) for w in windows] if windows else made_windows(config, world_size)
                waiting = [] if given else _not_traced(windows[-1], of=config.check_world(world_size))
                trace.mark(waiting, "buffers")
                for window in windows:
                    mark_window(window, trace.mark)
                with _explaining(run):
                    for step, window in enumerate(windows):
                        train_step(run, window, learning_rate=config.optim.lr, optimizer_step=step)
                if config.data.eval is not None:
                    _evaluate(run, windows[-1])
                _save(run, trace)
        device_ledger, host_ledger = trace.ledgers()
        staged, exported = (host_ledger if on_gpu else device_ledger).rises("save")
        if on_gpu and config.sharding.offload == "params":  # what FSDP2 pins
            host_ledger = host_ledger.rounded(("parameters", "gradients"), pinned_bytes)
        work = None if compute_capability is None else _work_of_step(trace, config, world_size=world_size)
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        return Trace(device_ledger, host_ledger, work, parameters, staged, exported)


@contextlib.contextmanager
def _explaining(run: Run) -> Iterator[None]:
    """Say of a model that cannot take its steps on fake tensors why that is, in an error of ours."""
    name = type(run.model).__name__.removeprefix("FSDP")
    try:
        yield
    except UNKNOWN_ON_FAKES as error:
        raise ConfigError(
            f"{name} looks at values in its forward, which a simulation does not have.",
            values=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="train it, and see in memory.json what it took: its memory cannot be told before",
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"The forward or backward of {name} cannot run so.",
            values=f"precision: {run.config.precision}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="set another precision, or name another GPU",
        ) from error


def _on_fakes(window: Window) -> Window:
    def fake(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    made = (MicroBatch(**{name: fake(value) for name, value in vars(m).items()}) for m in window.micro_batches)
    return replace(window, micro_batches=tuple(made))


@contextlib.contextmanager
def _kernels_of(compute_capability: float | None) -> Iterator[None]:
    if compute_capability is None:
        yield
        return
    keep_operations_fused()
    with cuda_attention(compute_capability):
        yield


def made_windows(config: Config, world_size: int) -> list[Window]:
    """Make the windows of two steps: the optimizer's state exists from the second on, which is the one that counts.

    The first has one micro-batch, enough for gradients: further ones hold no more than the second step's, which has
    the state beside them, and a third of the time is saved where a window has many.
    """
    full = full_window(config, world_size)
    return [replace(full, micro_batches=full.micro_batches[:1]), full]


def _not_traced(window: Window, *, of: int) -> list[torch.Tensor]:
    """Make the rows of the micro-batches that a real window of `of` has besides the one that is there in all of them.

    They lie in memory together, whether a step over them is traced or not.
    """
    one = tensors_of(replace(window, micro_batches=window.micro_batches[:1]))
    return [torch.empty_like(tensor) for _ in range(of - 1) for tensor in one]


def full_window(config: Config, world_size: int) -> Window:
    """Make the largest window of a rank: every row of seq_len tokens, every token supervised.

    A packed row holds two documents: how many there are changes nothing that a GPU keeps.
    """
    rows, width = config.batch.micro_batch_size, config.data.seq_len
    accumulation = min(config.check_world(world_size), MOST_MICRO_BATCHES)
    documents = 2 if config.data.packing and width >= 4 else 1
    supervised = rows * (width - documents)
    half = width // 2
    micro_batch = MicroBatch(
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        position_ids=torch.zeros(rows, width, dtype=torch.int64),
        document_ids=torch.zeros(rows, width, dtype=torch.int32) if documents > 1 else None,
        supervised_positions=torch.zeros(supervised, dtype=torch.int64),
        targets=torch.zeros(supervised, dtype=torch.int64),
        lengths=torch.zeros(rows, dtype=torch.int64),
        document_lengths=((half, width - half),) * rows if documents > 1 else None,
    )
    return Window(
        micro_batches=(micro_batch,) * accumulation,
        supervised_tokens=supervised * accumulation * world_size,
        tokens=rows * width * accumulation * world_size,
        epoch=0,
        row_indices=(),
    )


def _work_of_step(trace: MemoryTrace, config: Config, *, world_size: int) -> StepWork:
    """Take the last step's visits apart: its micro-batches, the middle one as often as the whole window has one."""
    accumulation = config.check_world(world_size)
    traced = min(accumulation, MOST_MICRO_BATCHES)
    end = len(trace.visits) - 1 - trace.visits[::-1].index("step")
    begin = end - (1 + 2 * traced)  # clip, and a forward and a backward each
    middle = 1 if accumulation > MOST_MICRO_BATCHES else None
    micro_batches = [
        (
            trace.work[begin + 2 * number],
            trace.work[begin + 2 * number + 1],
            1 + accumulation - MOST_MICRO_BATCHES if number == middle else 1,
        )
        for number in range(traced)
    ]
    sharding = config.sharding
    return StepWork(
        micro_batches=micro_batches,
        update=[*trace.work[end - 1], *trace.work[end]],
        shards=1 if sharding.zero_stage == 0 else world_size // sharding.replicate,
        tokens=config.data.seq_len * config.batch.micro_batch_size * accumulation,
    )


def _evaluate(run: Run, window: Window) -> None:
    """Two micro-batches as `training.evaluate` takes them: the second begins with what the first leaves gathered."""
    run.model.eval()
    total = torch.zeros((), dtype=torch.float64, device=run.runtime.device)
    for _ in range(2):
        total += eval_step(run, window.micro_batches[0])
    run.model.train()
    run.sharding.reshard_all()


def _save(run: Run, trace: MemoryTrace) -> None:
    """Copy what a checkpoint holds to the host, and gather what the exported folder holds, a file at a time.

    Each is a visit of its own to the phase `save`.
    """
    trace.enter("save")
    config, on_cpu = run.config, run.runtime.device.type == "cpu"
    tensors = training_tensors(run.model, run.optimizer)
    if not config.checkpoint.enabled:
        pass
    elif config.checkpoint.async_save:
        copy = plan_copy(tensors, model=run.model, optimizer=run.optimizer, device=run.runtime.device)
        copy.make()
        copy.release()
        del copy
    else:
        _write_from_training(tensors, on_cpu=on_cpu)
    trace.enter("save")
    if not config.export.at_end:
        return
    gather_as_exported(
        run.model, run.optimizer, dtype=config.export.dtype, hf_config=run.hf_config, keep=run.runtime.is_main
    )


def _write_from_training(tensors: Mapping[str, torch.Tensor], *, on_cpu: bool) -> None:
    """Take what DCP's writer takes of tensors that it writes while training waits (torch 2.14, filesystem.py)."""
    parts = [local_part(tensor) for tensor in tensors.values()]
    if not on_cpu:
        torch.empty(copied_ahead([part.nbytes for part in parts]), dtype=torch.uint8)
        return
    for part in parts:  # written where they are, but for those with padding behind them
        if part.untyped_storage().nbytes() != part.nbytes:
            part.clone()
