"""The ledger of a run: measure this rank's memory while it trains, and keep memory.json beside the metrics.

Phases by the device's allocator, where there is one; kinds of memory, and on CPU the phases too, by one traced step.
"""

import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_trainer.agreement import gather_from_all, run_on_main
from fsdp_trainer.data.loader import Window
from fsdp_trainer.errors import OutputError
from fsdp_trainer.memory.ledger import FILE, Ledger, Prediction, RankMemory, TracedStep, build_ledger
from fsdp_trainer.memory.machine import machine_bytes
from fsdp_trainer.memory.measure import measure_host_peak, measure_memory
from fsdp_trainer.memory.phase_peaks import PhasePeaks
from fsdp_trainer.memory.predicted import find_predicted
from fsdp_trainer.memory.recording import Recording
from fsdp_trainer.memory.trace import MemoryTrace
from fsdp_trainer.progress import log_line, make_console
from fsdp_trainer.report.ledger_text import format_ledger_text
from fsdp_trainer.run import Run
from fsdp_trainer.run_folder import write_json
from fsdp_trainer.runtime import Runtime
from fsdp_trainer.trace_marks import mark_resting, mark_window, marking
from fsdp_trainer.training_folder import describe_devices

# The optimizer's state exists from the first on, and the first also loads kernels.
TRACED = 2
WIDEST = 100


@contextmanager
def tracing(run: Run, window: Window) -> Iterator[MemoryTrace]:
    """Watch one optimizer step of a real run over `window`; nothing that is computed changes.

    On CPU the live bytes are exact, so cycles are collected and gloo's threads waited for: about half a second.
    """
    exact = run.runtime.device.type == "cpu"
    trace = MemoryTrace(run.runtime.device, real=True, began="step")
    if exact:
        gc.collect()
        gc.freeze()  # what is there now need not be looked through again at each phase
    try:
        with trace, marking(run, trace.mark):
            mark_resting(run, trace.mark)
            mark_window(window, trace.mark)
            yield trace
    finally:
        if exact:
            gc.unfreeze()


class RunLedger:
    """What one run measures of its memory. `write` and `finish` are collective; a file that cannot be is said, no more.

    Made before the run is built, so that loading counts. `plan` is what plan.json says of this run.
    """

    def __init__(self, runtime: Runtime, *, output_dir: Path, plan: Mapping[str, Any] | None) -> None:
        self._runtime, self._output_dir, self._plan = runtime, output_dir, plan
        self._peaks = PhasePeaks(runtime.device)
        runtime.phases.ended = self._peaks.close
        self._prediction: Prediction | None = None
        self._recording: Recording | None = None
        self._traced: tuple[int, float] | None = None
        self._seconds: list[float] = []  # of every step of this process but the traced one

    def measure(self) -> dict[str, float | int | None]:
        """Return the device's memory as metrics.jsonl has it."""
        return measure_memory(self._runtime.device, phases=self._peaks)

    @contextmanager
    def watch(self, run: Run, window: Window, *, is_last: bool, profiled: bool = False) -> Iterator[bool]:
        """Trace the step inside where one is due: the second of the process, or the first where there is no second.

        A profiled step is left to the profiler, which would show the tracing; the next one takes its place.
        """
        number = len(self._seconds) + 1
        wanted = run.config.log.trace_step and not run.config.compile.enabled and self._recording is None
        if not wanted or not (is_last or (number >= TRACED and not profiled)):
            yield False
            return
        with tracing(run, window) as trace:
            yield True
        self._recording, _ = trace.ledgers()

    def took(self, run: Run, step: int, seconds: float, *, traced: bool) -> None:
        """Note how long a step took; after the traced one memory.json is written, by all ranks together."""
        if not traced:
            self._seconds.append(seconds)
            return
        self._traced = step, seconds
        self.write(run)

    def write(self, run: Run) -> Ledger | None:
        """Write memory.json with what is known by now. Returns it on rank 0."""
        ranks = gather_from_all(self._measured)

        def write() -> None:
            nonlocal ledger
            ledger = self._build(run, ranks)
            try:
                write_json(self._output_dir, FILE, ledger.to_json(), indent=None)
            except OutputError as error:  # the run is worth more than what it says about itself
                log_line(f"{FILE} is not written: {error}")

        ledger: Ledger | None = None
        run_on_main(write)
        return ledger

    def finish(self, run: Run) -> None:
        """Count the last phase, write memory.json and show the ledger; a start without a step keeps what is there."""
        if not self._seconds and self._traced is None and run_on_main((self._output_dir / FILE).is_file):
            return
        self._peaks.close(self._runtime.phases.current)
        ledger = self.write(run)
        if ledger is not None:
            log_line(format_ledger_text(ledger.to_json(), width=min(make_console().width, WIDEST)))

    def _measured(self) -> RankMemory:
        recording = self._recording
        on_cpu = self._runtime.device.type == "cpu"
        phases = recording.phases if on_cpu and recording is not None else self._peaks.allocated
        return RankMemory(
            phases=dict(phases),
            reserved_phases=dict(self._peaks.reserved),
            categories=recording.breakdown() if recording is not None else None,
            retries=self._peaks.retries,
            host=measure_host_peak(),
        )

    def _build(self, run: Run, ranks: list[RankMemory]) -> Ledger:
        devices = describe_devices(self._runtime)
        on_cpu = self._runtime.device.type == "cpu"
        usable = machine_bytes() // devices["ranks_per_node"] if on_cpu else devices["memory_bytes"]
        if self._prediction is None:
            self._prediction = self._predict(run, devices)
        traced = None
        if self._traced is not None:
            step, seconds = self._traced
            warm = self._seconds[TRACED - 1 :] or self._seconds[:1]
            traced = TracedStep(step, seconds, statistics.median(warm) if warm else None)
        return build_ledger(
            ranks,
            device=devices["device"],
            usable_bytes=usable,
            source=("trace" if self._recording is not None else None) if on_cpu else "allocator",
            prediction=self._prediction,
            traced_step=traced,
            timeline=self._recording.outline if self._recording is not None else (),
        )

    def _predict(self, run: Run, devices: Mapping[str, Any]) -> Prediction | None:
        try:
            return find_predicted(self._plan, run.config, devices)
        except Exception as error:  # a model, a card or a setting that the closed form does not know
            log_line(f"no prediction of this run's memory: {str(error).splitlines()[0]}")
            return None
