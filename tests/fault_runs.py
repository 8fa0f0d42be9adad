"""Run train.py's own `main` on the ranks of a test while a signal strikes some of them at a chosen moment.

What a run leaves behind is handed back bit by bit, so that a struck and resumed run can be compared with a quiet one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import REPOSITORY, RankFailed, run_ranks
from tests.training_runs import read_metrics

# What two equal runs do not share: time, memory, which is None on CPU, and which step was traced after a resume.
UNEQUAL = (
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "max_allocated_gib",
    "max_reserved_gib",
    "num_alloc_retries",
    "traced",
)
WHO_AND_WHEN = ("host", "pid", "started", "started_step", "updated")


@dataclass(frozen=True)
class Fault:
    """A signal to the processes of `ranks`.

    It comes within the `call`-th call (or, if that has ended too soon, a later one) of `within`, a function of a module
    of fsdp_trainer as rank 0 sees it, after `share` of the time that the call before took. Without `within`: `delay`
    seconds after rank 0 started.
    """

    number: signal.Signals
    ranks: tuple[int, ...]
    within: str | None = "training.train_step"
    call: int = 1
    share: float = 0.0
    delay: float = 0.0


class Watched:
    """A function of the package, named `module.function`, with its calls counted and timed."""

    def __init__(self, name: str) -> None:
        module_name, self._name = name.split(".")
        self._module = importlib.import_module(f"fsdp_trainer.{module_name}")
        self._function = getattr(self._module, self._name)
        self.calls, self.inside, self.seconds = 0, False, 0.0
        setattr(self._module, self._name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        self.calls, self.inside = self.calls + 1, True
        try:
            return self._function(*args, **kwargs)
        finally:
            self.inside, self.seconds = False, time.perf_counter() - start


def train(run_settings: dict[str, Any], fault: Fault | None = None) -> int:
    """Run train.py on this rank and return its exit code; `fault` is carried out by a thread of rank 0.

    The rows of each step and a digest of what this rank feeds go to `seen-rank<n>.jsonl` in the run folder.
    """
    folder, rank = Path(run_settings["output_dir"]), int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FSDP_TRAINER_REFUSALS"] = str(refusals_of(run_settings))  # as the launcher does
    settings = folder / f"settings-of-rank{rank}.yaml"
    settings.write_text(json.dumps(run_settings))  # JSON is YAML
    main = _load_main()
    _record_windows(folder / f"seen-rank{rank}.jsonl")
    if fault is not None:
        watched = Watched(fault.within) if fault.within and rank == 0 else None
        threading.Thread(target=_strike, args=(fault, watched, folder, rank), daemon=True).start()
    return main(["--config", str(settings)])


def _load_main() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("train_script", REPOSITORY / "fsdp_trainer" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def _record_windows(path: Path) -> None:
    from fsdp_trainer import training

    take_step = training.train_step

    def recorded(run: Any, window: Any, **options: Any) -> Any:
        content = hashlib.sha256()
        for batch in window.micro_batches:
            for tensor in (batch.input_ids, batch.position_ids, batch.supervised_positions, batch.targets):
                content.update(tensor.numpy().tobytes())
        with path.open("a") as file:
            file.write(json.dumps([window.epoch, list(window.row_indices), content.hexdigest()[:16]]) + "\n")
        return take_step(run, window, **options)

    training.train_step = recorded


def _strike(fault: Fault, watched: Watched | None, folder: Path, rank: int) -> None:
    if fault.number not in (signal.SIGKILL, signal.SIGSTOP):
        while signal.getsignal(fault.number) in (signal.SIG_DFL, signal.default_int_handler):
            time.sleep(0.001)  # before that the process would simply end, with nothing to save
    ready = folder / f"pid-of-rank{rank}"
    ready.with_suffix(".part").write_text(str(os.getpid()))
    ready.with_suffix(".part").rename(ready)
    if rank != 0:
        return
    victims = [int(_wait_for(folder / f"pid-of-rank{victim}")) for victim in fault.ranks]
    time.sleep(fault.delay)
    while watched is not None:
        if watched.inside and watched.calls >= fault.call:
            time.sleep(fault.share * watched.seconds)
            if watched.inside:
                break
        time.sleep(0.0005)
    for pid in victims:
        os.kill(pid, fault.number)


def _wait_for(path: Path) -> str:
    while not path.is_file():
        time.sleep(0.001)
    return path.read_text()


# From the test process


def run(run_settings: dict[str, Any], world: int, fault: Fault | None = None, *, timeout: float = 120.0) -> list[int]:
    """Train on `world` ranks and return their exit codes."""
    _forget_processes(run_settings)
    return run_ranks(train, world, run_settings, fault, timeout=timeout)


def run_killed(run_settings: dict[str, Any], world: int, fault: Fault) -> bool:
    """Train on `world` ranks, of which SIGKILL ends some; return False when all ended well before it came."""
    _forget_processes(run_settings)
    try:
        codes = run_ranks(train, world, run_settings, fault, timeout=120.0)
    except (RankFailed, RuntimeError) as error:  # the latter from a rank that lost its peer
        told = f"{error} {error.__cause__}"
        assert "died with exit code -9" in told, told
        return True
    assert codes == [0] * world
    return False


def run_losing(run_settings: dict[str, Any], world: int, fault: Fault) -> dict[int, int]:
    """Train on `world` ranks, of which `fault` takes some away; return the exit codes of those that gave no answer."""
    _forget_processes(run_settings)
    try:
        answers = run_ranks(train, world, run_settings, fault, timeout=120.0, grace=20.0)
    except RankFailed as error:
        answers = re.findall(r"--- rank (\d+)\n.*?died with exit code (-?\d+)", str(error))
        return {int(rank): int(code) for rank, code in answers}
    return dict(enumerate(answers))


def _forget_processes(run_settings: dict[str, Any]) -> None:
    for path in Path(run_settings["output_dir"]).glob("pid-of-rank*"):
        path.unlink()


def read_seen(folder: Path, rank: int) -> list[Any]:
    """Return what `train` recorded of each step begun: epoch, rows of the window, digest of this rank's part."""
    return [json.loads(line) for line in (folder / f"seen-rank{rank}.jsonl").read_text().splitlines()]


def refusals_of(run_settings: dict[str, Any]) -> Path:
    """Return the folder whose status.json says why the last start was refused on a run that was there before."""
    return Path(f"{run_settings['output_dir']}-refusals")


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json without what differs between two equal runs: who ran them, and when."""
    status = json.loads((folder / "status.json").read_text())
    return {key: value for key, value in status.items() if key not in WHO_AND_WHEN}


def comparable_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without what depends on the clock and the device."""
    return [{key: value for key, value in row.items() if key not in UNEQUAL} for row in read_metrics(folder)]


def checkpoints(folder: Path) -> list[str]:
    """Return the names of the published checkpoints, oldest first."""
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def end_state(folder: Path) -> dict[str, str]:
    """Return a digest of every tensor of the newest checkpoint, its progress, and digests of the exported files."""
    found = run_ranks(_checkpoint_digests, 1, str(folder / "checkpoints" / checkpoints(folder)[-1]))[0]
    # The card names the run's own folder and data file, which differ between two runs that are compared; so do the
    # checksums, which count it in.
    exported = [path for path in (folder / "model").iterdir() if path.name not in ("README.md", "checksums.json")]
    model = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in exported}
    return found | model


def _checkpoint_digests(folder: str) -> dict[str, str]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from tests.checkpoint_runs import digest

    reader = FileSystemReader(folder)
    tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} is a pickle"
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(tensors, storage_reader=reader, no_dist=True)
    progress = json.loads((Path(folder) / "state.json").read_text())["progress"]
    return {name: digest(tensor) for name, tensor in tensors.items()} | {"progress": str(progress)}
