"""Measure the live tensor bytes of a real run on the ranks of a test, phase by phase; the other side of a simulation.

It rests on the tracer of the benchmarks, not on the simulator's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import step_runs


def _holders(tensor: Any) -> int:
    return tensor._use_count()  # of the tensor behind the Python object: gloo's queue is among them


def measure(run_settings: dict[str, Any], steps: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Build the run, take a step over each of `steps` (rows of documents), evaluate, save, gather for an export.

    The same rows twice are one window, as where a simulation makes its own. Return each phase's peak bytes; of save
    and export, what they add. Writing a copy is another thread's and not seen.
    """
    import gc
    import time

    import torch
    from torch.utils._pytree import tree_leaves

    from benchmarks.live_bytes import LiveBytes
    from fsdp_trainer.memory.recording import PHASES
    from fsdp_trainer.memory.traced_run import tensors_of
    from fsdp_trainer.step import eval_step, train_step

    class LivePhases(LiveBytes):
        """Peaks by phase; the phases are the labels that a step gives its parts."""

        def __init__(self) -> None:
            super().__init__()
            self.phase = "load"
            self.peaks: dict[str, int] = {}
            self.sent: list[tuple[torch.Tensor, int]] = []
            self.copies = run_settings.get("checkpoint", {}).get("async_save", True)

        def _resize(self, key: int, size: int) -> None:
            super()._resize(key, size)
            self.note()

        def count(self, tensor: torch.Tensor) -> None:
            # The plans of writing, which ranks pickle and send each other: of as many kB for any size of model.
            if self.phase != "save" or tensor.dtype != torch.uint8 or tensor.dim() > 1 or self.copies:
                super().count(tensor)

        def note(self) -> None:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.current)

        def settle(self, used: Sequence[Any]) -> None:
            """Wait until gloo's threads have let go of what a collective was given: a race, not memory of the run.

            What the next operation uses is counted up by the call itself, so that waits for a later one.
            """
            deadline = time.monotonic() + 0.5
            free = [(t, count) for t, count in self.sent if not any(t is leaf for leaf in used)]
            self.sent = [(t, count) for t, count in self.sent if any(t is leaf for leaf in used)]
            while any(_holders(t) > count for t, count in free) and time.monotonic() < deadline:
                time.sleep(0.0005)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, used = func._schema.name, [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.settle(used)
            if name == "profiler::_record_function_enter_new" and args[0] in PHASES:
                gc.collect()  # a cycle of a functional collective's wrapper: when it goes is chance
                self.phase = args[0]
                self.note()
            if "c10d" in name:
                self.sent += [(tensor, _holders(tensor)) for tensor in used]
            del used
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if name == "_c10d_functional::wait_tensor":
                time.sleep(0.1)  # a functional collective's tensor has other holders too, so none can be counted
            return result

    run = step_runs.build(run_settings)
    made = {id(documents): step_runs.window_of(run, documents) for documents in steps}
    windows = [made[id(documents)] for documents in steps]
    gc.collect()
    live = LivePhases()
    state = [tensor for values in run.optimizer.state.values() for tensor in values.values()]  # where it is there yet
    eight_bit = getattr(run.optimizer, "eight_bit", None)
    state += vars(eight_bit.tables).values() if eight_bit else ()
    gradients = run.host_gradients.tensors() if run.host_gradients is not None else ()
    for tensor in [*run.model.parameters(), *run.model.buffers(), *state, *gradients]:
        live.count(tensor)
    for window in windows:
        for tensor in tensors_of(window):
            live.count(tensor)
    with live:
        for step, window in enumerate(windows):
            train_step(run, window, learning_rate=1e-3, optimizer_step=step)
        run.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(2):
            total += eval_step(run, windows[-1].micro_batches[0])
        run.model.train()
        run.sharding.reshard_all()
        gc.collect()
        saves = copy_for_a_save if run.config.checkpoint.async_save else save
        for phase, part in (("save", saves), ("export", gather if run.config.export.at_end else _nothing)):
            live.phase, resting = phase, live.current
            part(run)
            live.peaks[phase] = live.peaks.get(phase, resting) - resting
            gc.collect()
    return live.peaks


def _nothing(run: Any) -> None:
    pass


def save(run: Any) -> None:
    """Write a checkpoint while training waits."""
    from fsdp_trainer.checkpoint import save_checkpoint
    from fsdp_trainer.checkpoint_manifest import Progress

    save_checkpoint(
        Path(run.config.output_dir),
        model=run.model,
        optimizer=run.optimizer,
        scaler=None,
        progress=Progress(step=1, optimizer_steps=1),
        facts={},
        device=run.runtime.device,
    )


def gather(run: Any) -> None:
    """Gather and convert, file by file, what an export writes; the writing is not seen."""
    from fsdp_trainer import export

    weights = export.exported_weights(run.model, run.optimizer)
    target = export.resolve_dtype(run.config.export.dtype, run.hf_config, run.model)
    dtypes = export.exported_dtypes(run.model, weights, target)
    plan = export.plan_files(export.plan_export(run.model, weights, dtypes), max_bytes=export.MAX_FILE_BYTES)
    for groups in plan.values():
        kept = [
            export.gather_weights(weights, group.names, dtypes=dtypes, keep=run.runtime.is_main) for group in groups
        ]
        if run.runtime.is_main:
            export.converted(run.model, kept)
        del kept


def copy_for_a_save(run: Any) -> None:
    """Copy to host memory what a save in the background writes; the random states beside it, 30 kB, are left out."""
    from fsdp_trainer.checkpoint import training_tensors
    from fsdp_trainer.checkpoint_copy import plan_copy

    tensors = training_tensors(run.model, run.optimizer)
    copy = plan_copy(tensors, model=run.model, optimizer=run.optimizer, device=run.runtime.device)
    copied = copy.make()
    copy.release()
    del copied


def measure_all(cases: dict[str, tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    """Measure several runs in one group of ranks; a run that fails gives its traceback."""
    return {name: _caught(measure, *case) for name, case in cases.items()}


def simulate_all(cases: dict[str, tuple[dict[str, Any], Any]], world: int, rank: int) -> dict[str, Any]:
    """Simulate one rank of several runs in one process; a run that fails gives its traceback."""
    return {name: _caught(simulated, *case, world, rank) for name, case in cases.items()}


def _caught(function: Any, *args: Any) -> Any:
    import traceback

    try:
        return function(*args)
    except Exception:
        return traceback.format_exc()


def simulated(run_settings: dict[str, Any], steps: Sequence[Sequence[Any]], world: int, rank: int) -> dict[str, Any]:
    """Simulate the same rank on CPU; return each phase's peak bytes and the categories at the peak."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.data.loader import build_window
    from fsdp_trainer.memory.traced_run import trace_run

    config = Config.from_dict(run_settings)
    windows = [
        build_window(
            step_runs.make_rows(documents),
            step=0,
            global_batch_size=config.batch.global_batch_size,
            micro_batch_size=config.batch.micro_batch_size,
            rank=rank,
            world_size=world,
            seed=0,
            shuffle=False,
            seq_len=config.data.seq_len,
            packing=config.data.packing,
        )
        for documents in steps
    ]
    device = trace_run(config, world_size=world, compute_capability=None, windows=windows, rank=rank).device
    saved, exported = device.rises("save")
    phases = {**device.phases, "save": saved, "export": exported}
    return {"phases": phases, "peak": device.peak[0], "breakdown": device.breakdown(), "events": len(device.events)}
