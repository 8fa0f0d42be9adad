"""Climb a ladder: predict every rung, then measure one after the other, each a run of its own that starts afresh.

What a rung ends with is a result: out of memory, or failed, and the next one is measured. What is measured is kept in
ladder.json after every rung, so that a ladder that was stopped goes on where it was.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import check_model_path
from fsdp_trainer.data.sources import resolve_paths
from fsdp_trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FsdpTrainerError,
    Interrupted,
    OutOfMemory,
    OutputError,
)
from fsdp_trainer.ladder_result import LADDER, PAGE, LadderResult, RungResult
from fsdp_trainer.ladder_rungs import STEPS, Rung, choose_rungs, make_rungs, read_rungs
from fsdp_trainer.launch import count_gpus, launch, plan_processes, read_status
from fsdp_trainer.memory.hardware import GIB, Hardware
from fsdp_trainer.memory.ledger import Ledger
from fsdp_trainer.memory.planning import hardware_here
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_workers import Answer, simulation_workers
from fsdp_trainer.run_folder import (
    METRICS,
    SETTINGS,
    STATUS,
    again,
    check_writable,
    parse_json,
    write_json,
    write_text_atomically,
)
from fsdp_trainer.run_lock import lock_folder, unlock_folder
from fsdp_trainer.units import format_bytes, format_number

OUTPUT = "output.log"  # what a rung's processes say
# Told of what is known so far: the result, the rung that runs (None between two), and a line of text.
Watch = Callable[[LadderResult, str | None, str], None]
Start = Callable[[Rung, Callable[[str], None]], int]
# Nothing that a technique could mend: every rung would end like this.
_ENDS = {error.exit_code: error for error in (DataError, CheckpointError, OutputError)}
# Of a run that was asked to stop: with its own code, or before it could.
_STOPPED = {Interrupted.exit_code, 129, 130, 143}
# The phases of a step: what the traced step of a rank on CPU can be compared with.
_STEP = ("forward", "backward", "clip", "step")


def ladder(
    config: Config,
    *,
    processes: int | None = None,
    out: str | Path | None = None,
    steps: int = STEPS,
    rungs: str | Path | Sequence[Mapping[str, Any]] | None = None,
    only: Sequence[str] = (),
    until_fits: bool = False,
    skip_unfit: bool = False,
    fresh: bool = False,
    watch: Watch = lambda result, running, line: None,
) -> LadderResult:
    """Measure what each technique does to memory, speed and loss: one rung after the other, `steps` steps each.

    The global batch, the data and the seed are those of `config`, which names the model and the data. `rungs` is a
    list of one's own ({name, settings}) or a YAML file of it; `only` names those to measure. `out` (default: beside
    output_dir, with -ladder) keeps ladder.json and a run folder a rung; finished rungs of the same settings in it are
    kept unless `fresh`. `until_fits` ends at the first rung that gets through, `skip_unfit` leaves out those that are
    predicted not to fit. Raises ConfigError before anything starts; Interrupted when stopped, with all that was
    measured kept.
    """
    count, _ = plan_processes(config, profile=None, processes=processes)
    check_model_path(config.model.path)
    resolve_paths(config.data.train)
    folder = Path(f"{config.output_dir}-ladder" if out is None else out)
    own = read_rungs(rungs) if isinstance(rungs, str | Path) else rungs
    made = make_rungs(config, processes=count, steps=steps, out=folder, own=own)
    chosen = choose_rungs(made, only)
    on_cpu = count_gpus() == 0
    with _held(folder):
        hardware, unknown = _find_hardware(count, on_cpu=on_cpu)
        named = str(hardware) if hardware is not None else f"{count} GPUs"
        before = _measured_before([rung for rung in made if not (fresh and rung in chosen)], folder, hardware=named)
        shown = [rung for rung in made if rung in chosen or rung.name in before]
        climb = _Climb(_begin(config, shown, before, folder=folder, hardware=named, steps=steps), watch)
        climb.tell(*unknown, *(f"{name}: kept from an earlier start ({old.outcome})" for name, old in before.items()))
        left = [rung for rung in chosen if rung.config is not None and rung.name not in before]
        found = _predict(climb, left, hardware)
        try:
            _measure(climb, left, found, start=_starter(count), until_fits=until_fits, skip_unfit=skip_unfit)
        finally:
            _write_page(climb)
        return climb.result


class _Climb:
    """The result so far, kept in ladder.json as it grows, and whoever watches."""

    def __init__(self, result: LadderResult, watch: Watch) -> None:
        self.result, self.running, self._watch = result, None, watch
        self.running: str | None

    def tell(self, *lines: str) -> None:
        for line in lines:
            self._watch(self.result, self.running, line)

    def put(self, name: str, line: str = "", **values: Any) -> None:
        """Change a rung's row, and tell."""
        rungs = tuple(replace(rung, **values) if rung.name == name else rung for rung in self.result.rungs)
        self.result = replace(self.result, rungs=rungs)
        self.tell(line)

    def save(self) -> None:
        write_json(self.result.folder, LADDER, self.result.to_json())


def _begin(
    config: Config,
    rungs: Sequence[Rung],
    before: Mapping[str, RungResult],
    *,
    folder: Path,
    hardware: str,
    steps: int,
) -> LadderResult:
    def row(rung: Rung) -> RungResult:
        if (old := before.get(rung.name)) is not None:
            return replace(old, what=rung.what, settings=rung.settings, folder=rung.folder)
        return RungResult(rung.name, rung.what, rung.settings, rung.folder, message=rung.refusal or None)

    return LadderResult(
        folder=folder,
        model=config.model.path,
        hardware=hardware,
        global_batch_size=config.batch.global_batch_size,
        seq_len=config.data.seq_len,
        steps=steps,
        rungs=tuple(map(row, rungs)),
    )


def _write_page(climb: _Climb) -> None:
    """Leave ladder.html; a page that cannot be written is a line, for the numbers are there."""
    from fsdp_trainer.report.ladder_html import format_ladder_html  # here: it draws, with matplotlib

    try:
        page = format_ladder_html(climb.result.to_json())
        write_text_atomically(climb.result.folder / PAGE, page)
    except OSError as error:
        climb.tell(f"{PAGE} cannot be written: {error}")


# --- before the first rung -------------------------------------------------------------------------------------------


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the ladder's folder, which must be new, empty, or a ladder's: what is measured again is replaced."""
    if folder.is_dir() and not (folder / LADDER).exists() and any(not p.name.startswith(".") for p in folder.iterdir()):
        raise ConfigError(
            "The folder holds something else than a ladder.",
            values=f"{folder} has no {LADDER}",
            fix="give another --out, which is made when it does not exist",
        )
    check_writable(folder)
    lock = lock_folder(folder, log=lambda line: None)
    try:
        yield
    finally:
        unlock_folder(lock)


def _find_hardware(count: int, *, on_cpu: bool) -> tuple[Hardware | None, list[str]]:
    """Describe what the rungs run on; None, and a line that says why, for a GPU of which no rates are known."""
    try:
        return hardware_here(ranks=count, ranks_per_node=count, on_cpu=on_cpu), []
    except ConfigError as error:
        return None, [f"nothing is predicted: {error.what} ({error.values})"]


def _measured_before(rungs: Sequence[Rung], folder: Path, *, hardware: str) -> dict[str, RungResult]:
    """Return what an earlier start in `folder` measured of these rungs, with the same settings on the same hardware."""
    before = LadderResult.read(folder)
    if before is None or before.hardware != hardware:
        return {}
    ended = {old.name: old for old in before.rungs if old.outcome in ("finished", "out of memory")}
    return {
        rung.name: ended[rung.name]
        for rung in rungs
        if rung.name in ended and rung.config is not None and _settings_of(folder / rung.folder) == rung.config
    }


def _settings_of(folder: Path) -> Config | None:
    try:
        return Config.load(folder / SETTINGS)
    except ConfigError:  # not there, or of another version
        return None


def _predict(climb: _Climb, rungs: Sequence[Rung], hardware: Hardware | None) -> dict[str, Simulation]:
    """Simulate the rungs; one that cannot be simulated is measured all the same."""
    if hardware is None or not rungs:
        return {}
    climb.tell(f"predicting {format_number(len(rungs), 'rung')} ...")
    configs = [rung.config for rung in rungs if rung.config is not None]
    answers: Sequence[Answer]
    try:
        with simulation_workers() as ask:
            answers = ask(configs, hardware)
    except FsdpTrainerError as error:
        answers = [error] * len(rungs)
    found = {}
    for rung, answer in zip(rungs, answers, strict=True):
        if isinstance(answer, Simulation):
            found[rung.name] = answer
            predicted = predicted_bytes(answer, on_cpu=hardware.is_cpu) / GIB
            climb.put(rung.name, predicted_gib=predicted, usable_gib=answer.limit / GIB)
        else:
            climb.tell(f"{rung.name}: not predicted: {answer.what}")
    return found


def predicted_bytes(simulation: Simulation, *, on_cpu: bool) -> int:
    """Return the peak to compare with what is measured: of a CUDA allocator the whole run, on CPU the traced step."""
    return max(simulation.phases[phase] for phase in _STEP) if on_cpu else simulation.allocated


# --- one rung after the other ----------------------------------------------------------------------------------------


def _measure(
    climb: _Climb,
    rungs: Sequence[Rung],
    simulations: Mapping[str, Simulation],
    *,
    start: Start,
    until_fits: bool,
    skip_unfit: bool,
) -> None:
    for index, rung in enumerate(rungs):
        if until_fits and (fits := climb.result.fits) is not None:
            for other in rungs[index:]:
                climb.put(other.name, message=f"{fits} fits already")
            break
        simulation = simulations.get(rung.name)
        if skip_unfit and simulation is not None and not simulation.fits:
            least, limit = format_bytes(simulation.min_capacity), format_bytes(simulation.limit)
            climb.put(rung.name, message=f"predicted not to fit: {least} needed, {limit} there")
            climb.save()
            continue
        climb.running = rung.name
        climb.tell(f"{rung.name}: {rung.what}")
        try:
            ended = _run_rung(climb, rung, start)
        finally:
            climb.running = None
            climb.save()
        climb.put(rung.name, f"{rung.name}: {ended['outcome']}", **ended)
        climb.save()
    climb.save()


def _run_rung(climb: _Climb, rung: Rung, start: Start) -> dict[str, Any]:
    """Run one rung from the start and return what is known of it; raises what would end every rung, and Interrupted."""
    assert rung.config is not None
    folder = climb.result.folder / rung.folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    rung.config.save(folder / SETTINGS)
    last: list[str] = []
    with (folder / OUTPUT).open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            last[:] = [*last[-4:], line]
            log.write(line + "\n")
            log.flush()
            climb.tell(line)

        try:
            code = start(rung, say)
        except KeyboardInterrupt:
            code = 130
    if code in _STOPPED:
        raise Interrupted(
            "The ladder was stopped.",
            values=f"{climb.result.folder / LADDER} has what was measured; {rung.name} is measured anew",
            fix=again(" to go on"),
        )
    message = "" if code == 0 else read_status(folder / STATUS)[1] or "\n".join(last)
    if code in _ENDS:
        raise _ENDS[code](message)
    outcome = "finished" if code == 0 else "out of memory" if code == OutOfMemory.exit_code else "failed"
    return {"outcome": outcome, "message": message or None, **read_measured(folder)}


def _starter(processes: int) -> Start:
    def start(rung: Rung, say: Callable[[str], None]) -> int:
        assert rung.config is not None
        settings = Path(rung.config.output_dir) / SETTINGS
        try:
            return launch(rung.config, arguments=["--config", str(settings)], processes=processes, on_line=say)
        except FsdpTrainerError as error:  # this rung alone, such as of a card without bf16
            say(error.headed())
            return error.exit_code

    return start


@dataclass(frozen=True)
class _Step:
    step: int
    loss: float | None
    seconds: float
    tokens: int


def read_measured(folder: Path) -> dict[str, Any]:
    """Return what the run in `folder` measured, as far as it got: losses, speed without warm-up, peak memory."""
    steps = list(_read_steps(folder))
    ledger = Ledger.read(folder)
    traced = ledger.traced_step.step if ledger is not None and ledger.traced_step is not None else None
    timed = [step for step in steps if step.step not in (1, traced)]
    seconds = sum(step.seconds for step in timed)
    return {
        "measured_gib": ledger.peak.measured_gib if ledger is not None else None,
        "source": ledger.source if ledger is not None else None,
        "tokens_per_second": sum(step.tokens for step in timed) / seconds if seconds else None,
        "step_seconds": seconds / len(timed) if timed else None,
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
    }


def _read_steps(folder: Path) -> Iterator[_Step]:
    with suppress(OSError):
        for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # torn by a kill
                row = parse_json(line)
                if "loss" in row:
                    yield _Step(row["step"], row["loss"], row["step_seconds"], row["tokens"])
