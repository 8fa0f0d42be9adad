"""A torch profiler trace of a few steps, one file a rank, and what it says in numbers.

The trace opens in any viewer of Chrome traces; the summary is the arithmetic of profile_summary.py over it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_trainer.agreement import gather_from_all, run_on_main
from fsdp_trainer.config_sections import ProfileConfig
from fsdp_trainer.memory.recording import PHASES
from fsdp_trainer.profile_summary import FOLDER, SUMMARY, Operation, divide_time, format_summary
from fsdp_trainer.progress import log_line
from fsdp_trainer.run_folder import write_json, writing
from fsdp_trainer.runtime import Runtime

TOP = 20
LABEL = "optimizer step"  # around each profiled step, so that a viewer shows where one ends
# What only waits for, or only names, what other events do.
_WAITS = ("c10d::", "_c10d_functional::", "record_param_comms")


class StepProfiler:
    """Profiles steps `first` to `last` of a run; without them it does nothing.

    The profiler warms up on the step before, where the run makes one: starting it takes time, which the first profiled
    step would show. Nothing it does changes a value.
    """

    def __init__(self, section: ProfileConfig, runtime: Runtime, *, output_dir: Path, step: int) -> None:
        """Prepare for a run that goes on after `step`; a range that it has passed is not profiled again."""
        self._runtime, self._output_dir = runtime, output_dir
        self._first = section.start
        self._last = -1 if section.start is None else section.start + section.steps - 1
        if self._first is not None and step >= self._first:
            log_line(f"not profiled: the run goes on after step {step}", is_main=runtime.is_main)
            self._first = None
        self._steps, self._profiler = section.steps, None

    @contextmanager
    def watch(self, step: int) -> Iterator[bool]:
        """Take one step, counted from 1, inside the context; yields whether it is profiled."""
        if self._first is None or not self._first - 1 <= step <= self._last:
            yield False
            return
        if self._profiler is None:
            self._profiler = _build_profiler(self._runtime, warm_up=step < self._first, steps=self._steps)
            self._profiler.start()
        profiled = step >= self._first
        with torch.profiler.record_function(LABEL) if profiled else nullcontext():
            yield profiled
            if self._runtime.device.type == "cuda":
                torch.cuda.synchronize(self._runtime.device)
        if step < self._last:
            self._profiler.step()
            return
        self._profiler.stop()
        finished, self._profiler = self._profiler, None
        _write(finished, self._runtime, output_dir=self._output_dir, first=self._first, steps=self._steps)

    def close(self) -> None:
        """End a profile that the run's end cut short; nothing of it is written."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def _build_profiler(runtime: Runtime, *, warm_up: bool, steps: int) -> Any:
    activities = [ProfilerActivity.CPU]
    if runtime.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, schedule=schedule(wait=0, warmup=int(warm_up), active=steps, repeat=1))


def _write(profiler: Any, runtime: Runtime, *, output_dir: Path, first: int, steps: int) -> None:
    """Write each rank's trace and rank 0's summary of all. Collective: a full disk ends the run on all ranks."""
    folder = output_dir / FOLDER

    def write_trace() -> dict[str, Any]:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{runtime.rank}.json.gz"
        with writing(path):
            part = path.with_name(f".rank{runtime.rank}.part.json.gz")  # the profiler packs what ends in .gz
            profiler.export_chrome_trace(str(part))
            os.replace(part, path)
        return {"rank": runtime.rank, **summarize(profiler, steps=steps)}

    ranks = gather_from_all(write_trace)
    summary = {
        "version": 1,
        "device": runtime.device.type,
        "first_step": first,
        "steps": steps,
        "ranks": ranks,
    }
    run_on_main(lambda: write_json(folder, SUMMARY, summary))
    for line in [*format_summary(summary), f"traces: {folder}"]:
        log_line(line, is_main=runtime.is_main)


def summarize(profiler: Any, *, steps: int) -> dict[str, Any]:
    """Return where this rank's time went, in seconds a step: by kind, by phase, and the top operations by self time."""
    events = profiler.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == LABEL)
    end = max(event.start_ns() + event.duration_ns() for event in events if event.name() == LABEL)
    phases = dict.fromkeys(PHASES, 0)
    for event in events:
        if event.name() in phases and event.is_user_annotation() and event.device_type() == DeviceType.CPU:
            phases[event.name()] += event.duration_ns()
    return {
        "seconds": divide_time(_operations(events), window=(begin, end), steps=steps),
        "phases": {name: spent / 1e9 / steps for name, spent in phases.items() if spent},
        "top": _top(profiler.key_averages(), steps=steps),
    }


def _operations(events: Any) -> list[Operation]:
    """Sort events into compute, communication and copies: kernels where there is a GPU, else what CPU threads do."""
    on_gpu = [event for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()]
    if on_gpu:
        return [_timed(_kind_of_kernel(event.name()), event) for event in on_gpu]
    found = []
    waits: dict[int, list[Any]] = {}
    for event in events:
        if event.name().startswith(_WAITS):
            waits.setdefault(event.start_thread_id(), []).append(event)
    for event in events:
        name = event.name()
        if name.startswith("gloo:"):  # from the call to the moment gloo's thread is done
            found.append(_timed("communication", event))
        elif _computes(event) and not _is_within(event, waits.get(event.start_thread_id(), ())):
            found.append(_timed("compute", event))
    return found


def _computes(event: Any) -> bool:
    name = event.name()
    return "::" in name and not event.is_user_annotation() and not name.startswith((*_WAITS, "profiler::"))


def _is_within(event: Any, others: Any) -> bool:
    begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
    return any(other.start_ns() <= begin and end <= other.start_ns() + other.duration_ns() for other in others)


def _kind_of_kernel(name: str) -> Any:
    if name.startswith(("Memcpy", "Memset")):
        return "copy"
    return "communication" if name.lower().startswith("nccl") else "compute"


def _timed(kind: Any, event: Any) -> Operation:
    return Operation(kind, event.start_ns(), event.start_ns() + event.duration_ns())


def _top(averages: Any, *, steps: int) -> list[dict[str, Any]]:
    """Return the operations with the most self time: of kernels where there is a GPU, else of CPU operations."""
    on_gpu = any(found.self_device_time_total > 0 for found in averages)
    rows = []
    for found in averages:
        spent = found.self_device_time_total if on_gpu else found.self_cpu_time_total
        named = found.key in PHASES or found.key == LABEL or found.key.startswith(("FSDP::", "ProfilerStep"))
        if spent > 0 and not named and not getattr(found, "is_user_annotation", False):
            rows.append({"name": found.key, "calls": found.count / steps, "seconds": spent / 1e6 / steps})
    return sorted(rows, key=lambda row: -row["seconds"])[:TOP]
