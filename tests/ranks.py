"""Run a function on several processes as `accelerate launch` would start them, in a tenth of a second a test.

A fork server, itself started warm (tests/warm.py), has imported torch, Transformers and Accelerate; every rank of every
test is a fork of it, so a rank starts with everything imported and nothing initialised. Nothing here imports torch: the
test process stays light.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from tests import warm
from tests.warm import IMPORT_TIME_ENVIRONMENT, REPOSITORY

PRELOAD = "tests.preload"

# What `accelerate launch` with an FSDP profile on CPU exports (accelerate 1.15, utils/launch.py).
LAUNCH_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_MIXED_PRECISION": "no",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

GRACE_SECONDS = 1.0  # after the first failure, so that the ranks that follow it into failure can say so


class RankFailed(RuntimeError):
    """A rank died without a word, did not finish in time, or raised something that cannot be pickled."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    environment: dict[str, str] | None = None,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Run `function(*args)` on `world_size` processes and return what each rank returned, rank 0 first.

    `function` must be importable (top level of a module). When a rank raises, its exception is raised here, from one
    that has every failed rank's traceback; when one dies or the time is up, every rank is killed. `environment` adds
    to, or with a value of "" removes from, what a launcher would export. After the first failure the others have
    `grace` seconds to end.
    """
    ranks = _start(function, world_size, args, environment or {})
    try:
        return _collect(ranks, timeout, grace)
    finally:
        _stop(ranks)


def run_on_kept_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, group: str = "ours"
) -> list[Any]:
    """As `run_ranks`, on ranks that the last call for this world size and group left, where nothing went wrong there.

    For functions that leave nothing behind that the next would notice, as the cells of a notebook: what libraries do at
    their first use is half of a small run's time. Not for what must not know of an earlier run, such as a resumed one.
    conftest.py ends the ranks with the file that started them.
    """
    ranks = _kept.pop((world_size, group), None)
    try:
        if ranks is None:
            ranks = _start(function, world_size, args, {})
        else:
            for rank in ranks:
                rank.ask(function, args)
        found = _collect(ranks, timeout, GRACE_SECONDS)
    except BaseException:
        _stop(ranks or [])
        raise
    _kept[world_size, group] = ranks
    return found


def run_plainly(function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run plain PyTorch or Transformers on one kept rank, in which no code of ours has changed anything."""
    return run_on_kept_ranks(function, 1, *args, timeout=timeout, group="plain")


def end_kept_ranks() -> None:
    """End the ranks that `run_on_kept_ranks` has left."""
    while _kept:
        _stop(_kept.popitem()[1])


class _Rank:
    """One started process, the pipe its answer comes through, and the file its stacks are dumped to."""

    def __init__(self, process: Any, pipe: connection.Connection, stacks: Path) -> None:
        self.process, self.pipe, self.stacks = process, pipe, stacks
        self.answer: tuple[str, Any] | None = None

    def ask(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.answer = None
        self.pipe.send_bytes(pickle.dumps((function, tuple(args))))

    def stop(self) -> None:
        if self.answer is None:
            self.process.kill()
        self.pipe.close()  # a rank that has answered waits for this
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.stacks.unlink(missing_ok=True)

    def dump_stacks(self) -> str:
        if not self.process.is_alive():
            return "(ended)"
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.stacks.read_text()


_kept: dict[tuple[int, str], list[_Rank]] = {}


def _stop(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.stop()


def _start(function: Callable[..., Any], world_size: int, args: Sequence[Any], extra: dict[str, str]) -> list[_Rank]:
    context = _context()
    port, ranks = free_port(), []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=True)
        handle, name = tempfile.mkstemp(prefix=f"rank{rank}-stacks-")
        os.close(handle)
        environment = {**LAUNCH_ENVIRONMENT, **_rendezvous(rank, world_size, port), **extra}
        # Not daemonic: asynchronous checkpoint savers of the process kind do not start from a daemonic one.
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        process = context.Process(target=_main, args=(theirs, name, cores, environment, function, tuple(args)))
        process.start()
        theirs.close()
        ranks.append(_Rank(process, ours, Path(name)))
    return ranks


def _rendezvous(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # the one instance; set_forkserver_preload uses it too
    if server._forkserver_pid is None:
        context.set_forkserver_preload([PRELOAD])
        names = {**IMPORT_TIME_ENVIRONMENT, "PYTHONPATH": _python_path(), warm.MARK: "1"}
        with _environment(names), warm.spawning():
            forkserver.ensure_running()
    return context


def _python_path() -> str:
    # Python 3.11's fork server ignores the sys.path it is given, so the preload module must be found another way.
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _main(
    pipe: connection.Connection,
    stacks: str,
    cores: set[int] | None,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if cores is not None:  # not those of the fork server, which may have been started when there were fewer
        os.sched_setaffinity(0, cores)
    for name, value in environment.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    with open(stacks, "w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        # Ranks leave together, when the pipe is closed: the others may still be receiving what this one sent in the
        # last collective.
        with contextlib.suppress(EOFError, OSError):
            while True:
                # Plain pickle: torch's own reductions would pass file descriptors that die with this process.
                pipe.send_bytes(_answer(function, args))
                sys.stdout.flush()
                sys.stderr.flush()
                function, args = pickle.loads(pipe.recv_bytes())
    os._exit(0)  # nothing is left to do, and waiting for stray threads could hang


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import torch

    torch.set_num_threads(1)
    try:
        return pickle.dumps(("returned", function(*args)))
    except BaseException as error:  # SystemExit too: the test decides what it means
        text = "".join(traceback.format_exception(error))
        try:
            answer = pickle.dumps(("raised", (error, text)))
            pickle.loads(answer)
        except Exception:
            return pickle.dumps(("raised", (None, text)))
        return answer


def _collect(ranks: Sequence[_Rank], timeout: float, grace: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    while waiting := {rank.pipe: index for index, rank in enumerate(ranks) if rank.answer is None}:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            index = waiting[pipe]  # type: ignore[index]
            ranks[index].answer = _receive(ranks[index])
            if ranks[index].answer[0] != "returned":  # type: ignore[index]
                failed.append(index)
                deadline = min(deadline, time.monotonic() + grace)
    if failed:
        _raise(ranks, failed)
    late = [index for index, rank in enumerate(ranks) if rank.answer is None]
    if late:
        stacks = "\n".join(f"--- rank {index}\n{ranks[index].dump_stacks()}" for index in late)
        raise RankFailed(f"ranks {late} of {len(ranks)} did not finish in {timeout} s\n{stacks}")
    return [rank.answer[1] for rank in ranks if rank.answer]


def _receive(rank: _Rank) -> tuple[str, Any]:
    try:
        return pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(5)
        return "died", rank.process.exitcode


def _raise(ranks: Sequence[_Rank], failed: Sequence[int]) -> None:
    first: BaseException | None = None
    texts = []
    for index in failed:
        answer = ranks[index].answer
        assert answer is not None
        if answer[0] == "raised":
            error, text = answer[1]
            # Whichever is heard first, a rank that only says that another failed has nothing to say itself.
            if first is None or str(first).startswith("Another rank failed"):
                first = error or first
        else:
            text = f"died with exit code {answer[1]}"
        texts.append(f"--- rank {index}\n{text}")
    all_of_it = RankFailed(f"ranks {list(failed)} of {len(ranks)} failed, rank {failed[0]} first\n" + "\n".join(texts))
    if first is None:
        raise all_of_it
    raise first from all_of_it
