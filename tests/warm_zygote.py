"""The process that `tests/warm.py` clones: everything imported, one thread, and nothing begun.

`serve_first` waits for jobs; in each clone it returns the program, which `run` executes.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import importlib.machinery
import io
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import types
from contextlib import suppress
from typing import Any, NoReturn

from tests import warm
from tests.warm import Job, Zygote

_LIBC: Any = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the clone must find the interpreter's lock as it was
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x00008000
_PR_SET_NAME, _PR_SET_MM = 15, 35
_PR_SET_MM_MAP = 14

STANDS_BACK = 19  # the priority of what leaves a core to whoever else wants it

Execution = tuple[Any, dict[str, Any]]  # code, and the module it runs in


def run(code: Any, module: dict[str, Any]) -> NoReturn:
    """Execute a program and end as the interpreter does: exit code, words of an error, threads, what runs at exit.

    But what imported libraries do at exit is left out (0.4 s for torch): their C++ destructors, and freeing memory.
    """
    killed_by = 0
    try:
        exec(code, module)
        status = 0
    except SystemExit as error:
        status = _status(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(shown := _without_ours(error.__traceback__)), shown)
        status, killed_by = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if killed_by:  # so that a shell sees it
        signal.signal(killed_by, signal.SIG_DFL)
        os.kill(os.getpid(), killed_by)
    os._exit(status)


def _status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def serve_first() -> Execution:
    """Import everything, then serve the process that started this one: the first zygote's main program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    environment = dict(os.environ)
    try:
        _SYS_CLONE[os.uname().machine]
        show_to_others([b"zygote"], [])
    except (KeyError, OSError):
        channel.send(b"cannot")
        os._exit(0)
    warm.replace_popen()
    from tests import preload  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread, which a clone would not have"
    channel.send(b"imported")
    return _serve(channel, environment)


def _serve(channel: socket.socket, environment: dict[str, str]) -> Execution:
    _wait_quietly()
    while True:
        message, received, _, _ = socket.recv_fds(channel, 2**20, 253)
        if not message:
            os._exit(0)
        pid = _clone_as_sibling()
        if pid == 0:
            channel.close()
            return _become(pickle.loads(message), received, environment)
        for number in received:
            os.close(number)
        channel.send(struct.pack("q", pid))


def _wait_quietly() -> None:
    """Be no part of what the process does that this one serves: its signals, its descriptors, its name."""
    os.chdir("/")
    _LIBC.prctl(_PR_SET_NAME, warm.ZYGOTE_NAME.encode(), 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


# --- cloning


def _clone_as_sibling() -> int:
    """Fork, but as a child of this process's parent, which can wait for it; return 0 in the clone.

    os.fork cannot: glibc has no such flag. What glibc does in a fork besides is locks, of which one thread holds none,
    and its note of the thread's number, which is put right.
    """
    note = _note_of_thread_number()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _LIBC.syscall(_SYS_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        if note is not None:
            note.value = os.getpid()
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _note_of_thread_number() -> ctypes.c_int | None:
    """Where glibc keeps this thread's number, in its own structure that the thread's handle points to."""
    found = []
    for offset in range(0, 1024, 4):
        place = ctypes.c_int.from_address(threading.get_ident() + offset)
        if place.value == threading.get_native_id():
            found.append(place)
    return found[0] if len(found) == 1 else None


# --- in the clone


def _become(job: Job, received: list[int], environment: dict[str, str]) -> Execution:
    """Turn this clone into the program that was asked for."""
    *received, unready = received
    unready = _move_up(unready)
    if job.new_session:
        os.setsid()
        weigh_session()
    elif job.process_group >= 0:
        os.setpgid(0, job.process_group)
    else:
        with suppress(OSError):  # another session's: then it has that of the zygote, as its starter had
            os.setpgid(0, os.getpgid(os.getppid()))
    _take_descriptors(job.descriptors, received)
    os.chdir(job.folder)
    os.umask(job.umask)
    os.sched_setaffinity(0, job.cores)
    for number, values in job.limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(number, values)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.close(unready)
        for number in job.descriptors:
            if number > 2:
                os.close(number)
        return _serve(theirs, environment)
    theirs.close()
    warm.set_zygote(Zygote(socket.socket(fileno=_move_up(ours.detach())), environment))
    _set_signals(job.ignored_signals)
    _set_environment(job)
    _set_streams(job.program.unbuffered)
    numpy, matplotlib = sys.modules["numpy"], sys.modules["matplotlib"]
    numpy.random.seed()  # from the system, as at an import
    if backend := job.environment.get("MPLBACKEND"):  # a notebook's kernel sets it for all that is started from it
        matplotlib.rcParams["backend"] = backend
    execution = load(job)
    os.close(unready)
    return execution


def weigh_session() -> None:
    """Let the session of a process that stands back stand back as a whole (schedule.py)."""
    if os.getpriority(os.PRIO_PROCESS, 0) == STANDS_BACK:
        with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(STANDS_BACK))


def _move_up(descriptor: int) -> int:
    """Give a descriptor a number out of the way of those that the program's own files would have."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, warm.CHANNEL)
    os.close(descriptor)
    return moved


def _take_descriptors(wanted: list[int], received: list[int]) -> None:
    assert len(wanted) == len(received)
    above = max([*wanted, 2]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in received]
    for number in received:
        os.close(number)
    for number, source in zip(wanted, moved, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)


def _set_signals(ignored: list[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):  # those that the C library keeps for itself
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    # What the interpreter sets when it starts.
    for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _set_environment(job: Job) -> None:
    """Set the environment and the command line, also as other processes see them, and the name."""
    os.environ.clear()
    os.environ.update(job.environment)
    command = [os.fsencode(word) for word in job.command]
    if job.command[0] != sys.executable:
        command.insert(0, os.fsencode(sys.executable))  # as the kernel reads a script's first line
    show_to_others(command, [os.fsencode(f"{name}={value}") for name, value in job.environment.items()])
    _LIBC.prctl(_PR_SET_NAME, os.path.basename(job.command[0]).encode()[:15], 0, 0, 0)


def show_to_others(command: list[bytes], environment: list[bytes]) -> None:
    """Let /proc/self/cmdline and environ show these (prctl(2), PR_SET_MM_MAP: the one of its kind that anybody may)."""
    texts = [b"".join(word + b"\0" for word in words) for words in (command, environment)]
    shown = mmap.mmap(-1, len(texts[0] + texts[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shown.write(texts[0] + texts[1])
    _KEPT.append(shown)
    start = ctypes.addressof(ctypes.c_char.from_buffer(shown))
    middle, end = start + len(texts[0]), start + len(texts[0] + texts[1])
    with open("/proc/self/stat", encoding="utf-8") as file:
        stat = ["pid", "comm", *file.read().rpartition(")")[2].split()]
    code, stack, data = stat[25:27], stat[27], stat[44:46]  # numbered from 1 in proc(5)
    sbrk = _LIBC.sbrk
    sbrk.restype = ctypes.c_void_p
    places = [*code, *data, stat[46], sbrk(ctypes.c_long(0)), stack, start, middle, middle, end, 0, 0xFFFFFFFF_00000000]
    table = (ctypes.c_uint64 * 13)(*map(int, places))
    zero = ctypes.c_ulong(0)
    if _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(table), ctypes.c_ulong(ctypes.sizeof(table)), zero):
        raise OSError(ctypes.get_errno(), "this kernel does not let a process change its command line")


def _set_streams(unbuffered: bool) -> None:
    """Fit the standard streams to what they now lead to; the objects stay, since modules hold them."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
    if unbuffered:
        for name, number in (("stdout", 1), ("stderr", 2)):
            before = getattr(sys, name)
            raw = io.FileIO(number, "wb", closefd=False)
            # TextIOWrapper asks for what a buffered writer has; a raw file is what the interpreter itself gives it.
            stream = io.TextIOWrapper(raw, before.encoding, before.errors, "\n", write_through=True)  # type: ignore[arg-type]
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    else:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


def load(job: Job) -> Execution:
    """Make a new main module and sys.path, and return the code that runs in it."""
    program = job.program
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=importlib.machinery.BuiltinImporter)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    _KEPT.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv[:] = program.argv
    sys.orig_argv[:] = job.command
    extra = [entry for entry in job.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"code": "", "module": os.getcwd()}.get(program.kind)
    if first is None:
        first = os.path.dirname(os.path.realpath(program.name))
    base = sys.path[1:]  # of `-c`, with which the first zygote was started
    sys.path[:] = [first, *extra, *base]
    sys.path_importer_cache.clear()
    if program.kind == "code":
        return compile(program.name, "<string>", "exec"), main.__dict__
    if program.kind == "module":
        code = f"__import__('runpy')._run_module_as_main({program.name!r})"
        return compile(code, "<frozen runpy>", "exec"), main.__dict__
    loader = importlib.machinery.SourceFileLoader("__main__", program.name)
    main.__dict__.update(__file__=program.name, __cached__=None, __loader__=loader)
    with open(program.name, "rb") as file:
        return compile(file.read(), program.name, "exec"), main.__dict__


_KEPT: list[Any] = []
