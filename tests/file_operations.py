"""Kill a process at its n-th file operation, or in the middle of a file, and hand back what the next start finds.

One process without a process group and a model of two tensors, forked anew for every kill: some 30 ms each.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What audit hooks report of file operations; fsync has no event and is wrapped.
EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink", "os.chmod")
SAVED = (1, 2)  # published before the save that is struck


class Tiny:
    """A model and its optimizer whose values follow from the step alone."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.model = torch.nn.Linear(40, 30)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def become(self, step: int) -> None:
        """Give every tensor the values that belong to `step`."""
        import torch

        from fsdp_trainer.checkpoint import _create_optimizer_state, training_tensors

        _create_optimizer_state(self.optimizer)
        with torch.no_grad():
            for index, tensor in enumerate(training_tensors(self.model, self.optimizer).values()):
                tensor.fill_(step + index / 8)

    def save(self, folder: Path, step: int, *, keep_latest: int = 9) -> None:
        """Save as `step`, in this thread."""
        import torch

        from fsdp_trainer.checkpoint import save_checkpoint
        from fsdp_trainer.checkpoint_manifest import Progress

        self.become(step)
        save_checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            scaler=None,
            progress=Progress(step=step),
            facts={},
            device=torch.device("cpu"),
            keep_latest=keep_latest,
        )

    def resume(self, folder: Path) -> tuple[int, bool, list[str]]:
        """Do what a start does: clear leftovers, find, load. Return the step, whether its values fit it, and notes."""
        import torch

        from fsdp_trainer.checkpoint import load_checkpoint, training_tensors
        from fsdp_trainer.checkpoint_folder import remove_leftovers
        from fsdp_trainer.checkpoint_search import find_checkpoint

        remove_leftovers(folder)
        notes: list[str] = []
        found = find_checkpoint(folder, resume="auto", log=notes.append)
        if found is None:
            return 0, False, notes
        progress = load_checkpoint(
            found,
            model=self.model,
            optimizer=self.optimizer,
            scaler=None,
            device=torch.device("cpu"),
            seed=0,
            already_verified=True,
        )
        loaded = {k: v.clone() for k, v in training_tensors(self.model, self.optimizer).items()}
        self.become(progress.step)
        fits = all(torch.equal(v, loaded[k]) for k, v in training_tensors(self.model, self.optimizer).items())
        return progress.step, fits, notes


def kill_at_every_operation(folder: str, keep_latest: int) -> list[dict[str, Any]]:
    """Strike a save of step 3, with its prune, before each of its file operations; one answer a kill."""
    tiny, base = Tiny(), Path(folder)
    prepare(tiny, base)
    _, log = in_child(base, tiny, keep_latest, lambda: watch_operations(None, base / "log"))
    total = len((base / "log").read_text().splitlines())
    assert log == 0 and total > 20, (log, total)
    return [
        struck(base, tiny, keep_latest, lambda nth=nth: watch_operations(nth, base / "log")) for nth in range(total)
    ]


def kill_in_every_file(folder: str, limits: list[int]) -> list[dict[str, Any]]:
    """Strike a save of step 3 when a file of it grows beyond so many bytes; one answer a limit."""
    tiny, base = Tiny(), Path(folder)
    prepare(tiny, base)
    return [struck(base, tiny, 1, lambda limit=limit: die_beyond(limit)) for limit in limits]


def prepare(tiny: Tiny, base: Path) -> None:
    for step in SAVED:
        tiny.save(base / "before", step)


def struck(base: Path, tiny: Tiny, keep_latest: int, arm: Callable[[], None]) -> dict[str, Any]:
    run, status = in_child(base, tiny, keep_latest, arm)
    last = (base / "log").read_text().splitlines()[-1:] if (base / "log").exists() else []
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    step, fits, notes = tiny.resume(run)
    tiny.save(run, step + 1, keep_latest=keep_latest)  # and the run goes on
    again = tiny.resume(run)
    left = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status)
    return {
        "killed": killed,
        "at": last,
        "names": names,
        "step": step,
        "fits": fits,
        "notes": notes,
        "again": again,
        "left": left,
    }


def in_child(base: Path, tiny: Tiny, keep_latest: int, arm: Callable[[], None]) -> tuple[Path, int]:
    """Save step 3 in a fork that is armed, over a fresh copy of the run; return the folder and the wait status."""
    run = base / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(base / "before", run)
    (base / "log").unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            arm()
            tiny.save(run, 3, keep_latest=keep_latest)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return run, os.waitpid(pid, 0)[1]


def watch_operations(kill_at: int | None, log: Path, *, within: str = "checkpoints") -> None:
    """Log every file operation under the run's folder from now on, and die before number `kill_at`.

    Of files that are opened only those count that have `within` in their path.
    """
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    count = 0

    def happened(what: str) -> None:
        nonlocal count
        os.write(written, f"{what}\n".encode())
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        # Deleting a tree names its files relative to an open folder.
        if event in EVENTS and (event != "open" or within in str(arguments[0])):
            happened(f"{event} {arguments[0]}")
        elif event == "ctypes.dlsym" and arguments[1] == "renameat2":  # looked up for each call of it
            happened(f"exchange {arguments[1]}")

    sync = os.fsync

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        happened(f"fsync {os.readlink(f'/proc/self/fd/{number}')}")
        sync(descriptor)

    sys.addaudithook(hook)
    os.fsync = fsync


def die_beyond(limit: int) -> None:
    """Let the system end this process when it writes beyond `limit` bytes of any file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
