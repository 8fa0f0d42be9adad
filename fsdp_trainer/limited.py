"""Running what somebody else wrote (a chat template) so that it ends: with limits on the time and memory it takes.

Once in a child process, where the system's own limits hold whatever it does, and then each time under a watch that
ends the thread's work from outside. Linux; elsewhere what the system cannot limit is not limited.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

SECONDS, GIB = 10.0, 2**30  # of CPU, and of memory beside what the process has already
_LOOK_SECONDS = 0.1
_NO_MEMORY = 3  # the child's exit code


def find_excess(action: Callable[[], object], *, seconds: float = SECONDS, memory_bytes: int = GIB) -> str | None:
    """Run `action` in a fork of this process; say which limit it went over, None where it ends by itself.

    Whether it succeeds is not asked, nor what it returns. The fork has this thread alone: `action` may take no lock
    that another one can hold.
    """
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            _limit_this_process(seconds, memory_bytes)
            action()
        except MemoryError:
            code = _NO_MEMORY
        except BaseException:  # said by the caller's own attempt
            code = 0
        finally:
            os._exit(code)
    status = _wait(pid, time.monotonic() + 6 * seconds)  # of a machine that is busy with other things
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return f"more than {seconds:g} s"
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == _NO_MEMORY:
        return f"more than {memory_bytes / GIB:g} GiB"
    return None


def _limit_this_process(seconds: float, memory_bytes: int) -> None:
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    whole = max(1, round(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    if (present := _memory(0)) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes, present + memory_bytes))


def _memory(column: int) -> int | None:
    """Return a size of this process in bytes, of /proc/self/statm: 0 the address space, 1 what is resident."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # no Linux
        return None


def _wait(pid: int, deadline: float) -> int | None:
    pause = 0.001
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


class LimitReached(BaseException):
    """Raised in the thread whose work took too much; no `except Exception` of the work's own may hold it up."""


@dataclass
class _Work:
    thread: int
    seconds: float
    memory_bytes: int
    start: float  # CPU seconds of the thread
    resident: int | None = None  # at the first look
    excess: str | None = None


class _Watch:
    """One thread a process that looks at what is being run, ten times a second."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.works: dict[int, _Work] = {}
        self.pid = os.getpid()
        threading.Thread(target=self._run, name="limits", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self.lock:
                for work in self.works.values():
                    if work.excess is None and (excess := _excess_of(work)) is not None:
                        work.excess = excess
                        # Python's own way to end another thread's work; it takes effect at that thread's next step.
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(work.thread), ctypes.py_object(LimitReached)
                        )


def _excess_of(work: _Work) -> str | None:
    if _cpu_seconds(work.thread) - work.start > work.seconds:
        return f"more than {work.seconds:g} s"
    resident = _memory(1) or 0
    work.resident = resident if work.resident is None else work.resident
    if resident - work.resident > work.memory_bytes:
        return f"more than {work.memory_bytes / GIB:g} GiB"
    return None


def _cpu_seconds(thread: int) -> float:
    # Its own time: on a busy machine a short work may take long.
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


_watch: _Watch | None = None
_making = threading.Lock()


def run_limited(action: Callable[[], Result], *, seconds: float = SECONDS, memory_bytes: int = GIB) -> Result:
    """Run `action` in this thread and return its result; LimitReached, with what it took, where it goes over a limit.

    A single operation of the interpreter, such as one multiplication, is not cut short.
    """
    global _watch
    with _making:
        if _watch is None or _watch.pid != os.getpid():  # a fork has no threads
            _watch = _Watch()
        watch = _watch
    thread = threading.get_ident()
    work = _Work(thread, seconds, memory_bytes, _cpu_seconds(thread))
    try:
        try:
            with watch.lock:
                watch.works[thread] = work
            result = action()
        except LimitReached:
            raise
        except BaseException:
            _leave(watch, work)
            raise
        _leave(watch, work)
        return result
    except LimitReached:
        with watch.lock:
            watch.works.pop(thread, None)
        raise LimitReached(work.excess) from None


def _leave(watch: _Watch, work: _Work) -> None:
    with watch.lock:
        watch.works.pop(work.thread, None)
    while work.excess is not None:  # sent already: it must not arrive behind the back of `run_limited`
        time.sleep(0)
