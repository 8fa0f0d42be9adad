"""Signs of life of every rank, so that a rank that is stopped or gone is named and the others end in bounded time.

A thread writes them to the process group's store, not the training loop, so that no long preparation, save or step
looks like a death. No clock of another machine is compared: a rank counts as silent since its record last changed here.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from fsdp_trainer.agreement import is_broken_collective
from fsdp_trainer.errors import DistributedError, OutputError
from fsdp_trainer.launch_agent import tell_agent
from fsdp_trainer.progress import log_error
from fsdp_trainer.run_folder import STATUS, how_to_go_on, write_status
from fsdp_trainer.runtime import Runtime

_FIX = "look for its own message or an out-of-memory kill in the system's log"

# A rank that hangs in a collective does not notice that another has failed, and torch's agent gives it 30 s.
SECONDS_AFTER_A_FAILURE = 10.0


@dataclass
class _Peer:
    """What another rank last said of itself, and when that was new to us."""

    seen: float
    record: dict[str, Any]

    def process(self) -> psutil.Process | None:
        """Return its process where it runs on this machine and has not been replaced by another of the same number."""
        if self.record["host"] != socket.gethostname():
            return None
        with suppress(psutil.Error):
            process = psutil.Process(self.record["pid"])
            # Not equal to the last digit: it is counted from the boot, whose time a clock that is set moves.
            if abs(process.create_time() - self.record["started"]) < 2:
                return process
        return None

    def is_gone(self) -> bool:
        """Return whether it has said goodbye, or its process on this machine is no more."""
        if self.record["ended"]:
            return True
        process = self.process()
        if process is None:
            return self.record["host"] == socket.gethostname()
        with suppress(psutil.Error):
            return process.status() == psutil.STATUS_ZOMBIE
        return True


class RankWatch:
    """Shows that this rank is alive and watches the others; `step` is for the loop to set, and only shown.

    Ends the process with DistributedError's exit code when a rank was silent for `limit` seconds, or has failed and
    this one does not follow: the main thread may hang where no exception reaches it (NCCL), so there is no other way.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        processes: list[dict[str, Any]],
        limit: float,
        interval: float,
        output_dir: Path,
    ) -> None:
        self.step = 0
        self._store, self._rank, self._limit, self._interval = store, rank, limit, interval
        self._output_dir = output_dir
        now = time.monotonic()
        self._me = processes[rank]
        self._peers = {peer: _Peer(now, record) for peer, record in enumerate(processes) if peer != rank}
        self._answered = now  # when the store last did
        self._closed, self._explaining = threading.Event(), False
        # Two threads: where the process that holds the store is stopped, the one that talks to it waits for ever.
        self._talker = threading.Thread(target=self._talk, name="rank-watch-store", daemon=True)
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        self._talker.start()

    def close(self, *, together: bool = True) -> None:
        """Say goodbye: from here on this rank's silence means nothing to the others.

        With `together` rank 0 waits a little for theirs, since the store may go with its process.
        """
        self._closed.set()
        self._talker.join(timeout=2 * self._interval)
        goodbye = threading.Thread(target=self._say_goodbye, args=(together,), daemon=True)
        goodbye.start()
        goodbye.join(timeout=3 * self._interval)

    def _say_goodbye(self, together: bool) -> None:
        deadline = time.monotonic() + 2 * self._interval
        with suppress(RuntimeError):
            self._say(ended=True, failed=not together)
            while together and self._rank == 0 and time.monotonic() < deadline:
                self._listen()
                if all(peer.record["ended"] for peer in self._peers.values()):
                    return
                time.sleep(0.01)

    def explain(self, error: Exception) -> DistributedError:
        """Turn a broken collective into an error that names the rank behind it, as far as it can be found out."""
        self._explaining = True
        deadline = time.monotonic() + 3 * self._interval
        while not (lost := self._find_lost(silent_for=2.5 * self._interval)) and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
        first_line = f"{error}\n".splitlines()[0].split(". This is typically")[0] or type(error).__name__
        if not lost:
            steps = {peer: known.record["step"] for peer, known in self._peers.items()} | {self._rank: self.step}
            behind = [rank for rank, step in steps.items() if step == min(steps.values())]
            where = "; every rank is alive" if len(behind) == len(steps) else f"; last in step: {_ranks(behind)}"
            return DistributedError(
                "The ranks lost touch.", values=f"after step {self.step}: {first_line}{where}", fix=self._fix()
            )
        self._end_silent(lost)
        return _lost_error(lost, detail=f"after step {self.step}: {first_line}", fix=self._fix())

    def _fix(self) -> str:
        return f"{_FIX}; {how_to_go_on(self._output_dir)}"

    def _talk(self) -> None:
        with suppress(RuntimeError):  # the store went with the process that held it; `_watch` sees its silence
            while True:
                self._say(ended=False)
                self._listen()
                self._answered = time.monotonic()
                if self._closed.wait(self._interval):
                    return

    def _say(self, *, ended: bool, failed: bool = False) -> None:
        record = {**self._me, "step": self.step, "ended": ended, "failed": failed, "at": time.monotonic()}
        self._store.set(str(self._rank), json.dumps(record))

    def _listen(self) -> None:
        keys = [str(peer) for peer in self._peers]
        if not self._store.check(keys):  # multi_get would wait for those that have not started
            keys = [key for key in keys if self._store.check([key])]
        for key, text in zip(keys, self._store.multi_get(keys) if keys else [], strict=True):
            peer, record = self._peers[int(key)], json.loads(text)
            if record != peer.record:
                peer.record, peer.seen = record, time.monotonic()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if now - before > max(5 * self._interval, self._limit / 2):
                # This process itself was stopped, as a whole job is that its scheduler suspends: all clocks anew.
                self._answered = now
                for peer in self._peers.values():
                    peer.seen = now
            before = now
            failed = {
                peer: "has failed"
                for peer, known in self._peers.items()
                if known.record["failed"] and now - known.seen > SECONDS_AFTER_A_FAILURE
            }
            lost = failed or self._find_lost(silent_for=self._limit, gone=False)
            if lost and not self._explaining:
                self._give_up(lost, has_said_why=bool(failed))

    def _find_lost(self, *, silent_for: float, gone: bool = True) -> dict[int, str]:
        """Return why a rank counts as lost, by rank; -1 is the launcher where that holds the store."""
        now, lost = time.monotonic(), {}
        if gone:
            for peer, known in self._peers.items():
                if known.is_gone():
                    ended = known.record["ended"]
                    lost[peer] = "has ended" if ended else "is gone: its process was killed"
        if not lost and (silent := now - self._answered) > silent_for:
            holder = -1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
            if holder not in self._peers or not self._peers[holder].record["ended"]:
                lost[holder] = f"has not answered for {silent:.0f} s (it holds the ranks' common store)"
        elif not lost:
            for peer, known in self._peers.items():
                if (silent := now - known.seen) > silent_for and not known.record["ended"]:
                    lost[peer] = f"has not answered for {silent:.0f} s{_describe_process(known)}"
        return lost

    def _give_up(self, lost: dict[int, str], *, has_said_why: bool) -> None:
        error = _lost_error(lost, detail=f"after step {self.step}", fix=self._fix())
        log_error(f"[rank {self._rank}] error: {error}")
        tell_agent(str(error), secondary=True)
        step, state = self.step, "running"
        with suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads((self._output_dir / STATUS).read_text(encoding="utf-8"))
            step, state = status["step"], status["state"]
        if not has_said_why or state == "running":
            with suppress(OutputError):  # the message stands on the screen
                write_status(self._output_dir, state="failed", exit_code=error.exit_code, step=step, message=str(error))
        self._end_silent(lost)
        os._exit(error.exit_code)

    def _end_silent(self, lost: dict[int, str]) -> None:
        """End lost ranks of this machine: a stopped process keeps the launcher's SIGTERM for later, and its memory.

        Not one that was silent for a moment only: it may be about to say what went wrong.
        """
        for rank in lost:
            peer = self._peers.get(rank)
            if peer is None or peer.record["ended"] or time.monotonic() - peer.seen < self._limit / 2:
                continue
            if (process := peer.process()) is not None:
                with suppress(psutil.Error):
                    process.kill()


@contextmanager
def watch_ranks(runtime: Runtime, *, timeout_minutes: float, output_dir: Path) -> Iterator["RankWatch | None"]:
    """Watch the other ranks while the context is open; a collective that breaks becomes a DistributedError.

    Collective. A rank that is silent for `timeout_minutes` ends the run; None for a run of one process.
    """
    if runtime.world_size == 1:
        yield None
        return
    # A connection of its own: the main thread may wait on the other one for hours.
    store = dist.distributed_c10d._get_default_store().clone()
    turn = store.add(f"alive/turns of rank {runtime.rank}", 1)  # a process may train twice
    timeout = 60 * timeout_minutes
    interval = min(2.0, max(0.1, timeout / 20))
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    processes: list[Any] = [None] * runtime.world_size
    # Told before anything can happen: a rank that is lost early is to be named, and ended, as well.
    dist.all_gather_object(processes, {**me, "step": 0, "ended": False, "failed": False})
    watch = RankWatch(
        dist.PrefixStore(f"alive/{turn}", store),
        rank=runtime.rank,
        processes=processes,
        # Before NCCL's own watchdog, which aborts the process without a name.
        limit=max(timeout - 2 * interval, timeout / 2),
        interval=interval,
        output_dir=output_dir,
    )
    together = False
    try:
        yield watch
        together = True
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        raise watch.explain(error) from error
    finally:
        watch.close(together=together)


def _lost_error(lost: dict[int, str], *, detail: str, fix: str) -> DistributedError:
    reasons = [f"{f'rank {rank}' if rank >= 0 else 'the launcher'} {reason}" for rank, reason in sorted(lost.items())]
    more = f"; {len(reasons) - 8} more" if len(reasons) > 8 else ""
    what = "A rank is lost." if len(lost) == 1 else f"{len(lost)} ranks are lost."
    return DistributedError(what, values=f"{'; '.join(reasons[:8])}{more}; {detail}", fix=fix)


def _describe_process(peer: _Peer) -> str:
    where, process = f"process {peer.record['pid']} on {peer.record['host']}", peer.process()
    with suppress(psutil.Error):
        return f" ({where}, {process.status()})" if process is not None else f" ({where})"
    return f" ({where})"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{'...' if len(ranks) > 8 else ''}"
