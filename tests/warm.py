"""A warm interpreter: real commands start as forks of a process that has imported torch and Transformers already.

A stand-in for starting Python that only tests use. In a process where it is installed, `subprocess.Popen` of this
interpreter, or of a script that was installed beside it, makes no new program: a *zygote*, a clean child of this
process in which everything is imported, clones itself (`tests/warm_zygote.py`). The clone is this process's own child,
under the pid that Popen returns, with the arguments, environment, working folder, descriptors, session and signals that
a new program would have; only imports that were done do not take 6 to 20 s again. Every process that starts so can
start others so: a launcher its agent, an agent its ranks.

It is asked for by MARK in the child's environment (`tests.e2e.commands.environment`), and whatever it cannot do as a
new program would (other flags, another value of a variable that is read at an import) starts cold.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing.util
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
MARK = "FSDP_TRAINER_TESTS_WARM"
ZYGOTE_NAME = "warm-zygote"  # at most 15 characters: the name that the kernel keeps of a process

# Read when a library is imported, so they must be set before the first zygote starts.
IMPORT_TIME_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

CHANNEL = 200  # the least number of the descriptor by which a process reaches its zygote

# Read by a library or the interpreter when it is imported or started: with another value a process starts cold.
# PYTHONPATH is not among them, since sys.path is made anew.
READ_AT_IMPORT = (
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_LOG_LEVEL", "DS_", "USE_", "BNB_", "BITSANDBYTES_"),
    *("OMP_", "MKL_", "OPENBLAS_", "GOTO_", "KMP_", "MALLOC_", "LD_", "TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
    *("PYTHON", "LOGLEVEL", "LANG", "LC_", "MPLCONFIGDIR", "TZ", "GRPC_", "TF_"),
)


@dataclass(frozen=True)
class Program:
    """What a new interpreter is asked to run: `-c` code, `-m` a module or a script, and with it sys.argv."""

    kind: str
    name: str
    argv: list[str]
    unbuffered: bool = False


@dataclass(frozen=True)
class Job:
    """Everything that a process takes over from the one that starts it, and from the call."""

    program: Program
    command: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]  # the numbers in the new process of those that are sent with the job
    new_session: bool = False
    process_group: int = -1
    umask: int = 0o022
    ignored_signals: list[int] = field(default_factory=list)
    limits: dict[int, tuple[int, int]] = field(default_factory=dict)
    cores: set[int] = field(default_factory=set)


class Zygote:
    """The clean process beside this one, and the socket through which it is asked for clones."""

    def __init__(self, channel: socket.socket, environment: Mapping[str, str]) -> None:
        self.channel, self.environment = channel, dict(environment)
        self._lock = threading.Lock()

    def start(self, job: Job, descriptors: Sequence[int]) -> int:
        """Return the pid of a new child of this process that runs the job; `descriptors` are this process's numbers.

        As after an exec the child has its session, folder and descriptors when this returns: a caller may ask for its
        process group at once, to signal it.
        """
        reading, writing = os.pipe()
        with open(reading, "rb") as ready:
            try:
                with self._lock:
                    socket.send_fds(self.channel, [pickle.dumps(job)], [*descriptors, writing])
                    answer = self.channel.recv(8)
            finally:
                os.close(writing)
            if not answer:
                raise RuntimeError("the warm interpreter has ended: what it said stands above")
            ready.read()  # to its end: the child has closed it
        return struct.unpack("q", answer)[0]


class _Installed:
    """The zygote of this process, made at the first need in the process of pytest."""

    zygote: Zygote | None = None
    is_first = False  # whether this process may start one by a cold start


def install() -> None:
    """Let this process, that of the tests, start marked commands warm; the first costs one cold start."""
    _Installed.is_first = True
    replace_popen()


def zygote_of_this_process() -> Zygote | None:
    """Return what clones children for this process; None where it starts everything cold."""
    if _Installed.zygote is None and _Installed.is_first:
        _Installed.is_first = False  # once, also where this system has no such thing
        _Installed.zygote = _start_first() if sys.platform == "linux" else None
    return _Installed.zygote


def set_zygote(zygote: Zygote | None) -> None:
    """Name what clones children for this process, which was itself cloned."""
    _Installed.zygote = zygote


def _forget() -> None:
    # A fork of this process is another process: clones would not be its children.
    if _Installed.zygote is not None:
        _Installed.zygote.channel.close()
    _Installed.zygote, _Installed.is_first = None, False


os.register_at_fork(after_in_child=_forget)


def _start_first() -> Zygote | None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, **IMPORT_TIME_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("PYTHONPATH", MARK):
        environment.pop(name, None)
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests import warm_zygote as zygote; "
    code += f"sys.path.remove({str(REPOSITORY)!r}); zygote.run(*zygote.serve_first())"
    with theirs:
        first = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    answer = ours.recv(8)
    if answer == b"imported":
        first.returncode = 0  # it ends with this process, and nobody waits for it
        return Zygote(ours, environment)
    first.wait()
    if answer == b"cannot":
        return None
    raise RuntimeError("the warm interpreter did not start: what it said stands above")


# --- which programs


def parse_command(command: Sequence[str]) -> Program | None:
    """Return what a command line runs where that is this interpreter and nothing that a clone could not do."""
    if not command:
        return None
    words = list(command)
    if words[0] != sys.executable:
        if not _is_script_of_ours(words[0]):
            return None
        return Program("script", words[0], words)
    words, unbuffered = words[1:], False
    while words and words[0] in ("-u", "-B"):  # whether bytecode is kept was decided when the first zygote started
        words, unbuffered = words[1:], unbuffered or words[0] == "-u"
    if len(words) >= 2 and words[0] == "-c":
        return Program("code", words[1], ["-c", *words[2:]], unbuffered)
    if len(words) >= 2 and words[0] == "-m":
        return Program("module", words[1], ["-m", *words[2:]], unbuffered)
    if words and not words[0].startswith("-"):
        return Program("script", words[0], words, unbuffered)
    return None


def _is_script_of_ours(path: str) -> bool:
    if Path(path).parent != Path(sys.executable).parent:
        return False
    with suppress(OSError), open(path, "rb") as file:
        return file.readline().strip() == f"#!{sys.executable}".encode()
    return False


def differs_at_import(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two environments differ in what a library reads when it is imported."""
    names = {name for name in {*one, *other} if name.startswith(READ_AT_IMPORT) and name != "PYTHONPATH"}
    return any(one.get(name) != other.get(name) for name in names)


# --- multiprocessing


@contextlib.contextmanager
def spawning() -> Iterator[None]:
    """Let multiprocessing's helpers that are started meanwhile, the fork server above all, be warm."""
    cold = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
        command = [os.fsdecode(word) for word in args]
        zygote, program = zygote_of_this_process(), parse_command(command)
        if zygote is None or program is None or differs_at_import(os.environ, zygote.environment):
            return cold(path, args, passfds)
        kept = [0, 1, 2, *passfds]
        job = Job(program, command, dict(os.environ), os.getcwd(), kept, **_inherited(-1))
        return zygote.start(job, kept)

    multiprocessing.util.spawnv_passfds = spawn
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = cold


# --- subprocess.Popen

_start_cold: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_start_cold)


def replace_popen() -> None:
    """Let `subprocess.Popen` of this process start what is marked as a clone, and psutil see no zygote."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    psutil.Process.children = _children


def _execute_child(self: Any, *given: Any) -> None:
    call = _signature.bind(self, *given).arguments
    zygote, program = None, None
    environment = dict(os.environ if call["env"] is None else call["env"])
    if MARK in environment:
        program = _warm_program(call)
        zygote = zygote_of_this_process() if program is not None else None
    if zygote is None or program is None or differs_at_import(environment, zygote.environment):
        _start_cold(self, *given)
        return
    sent: dict[int, int] = {number: number for number in _kept_descriptors(call)}
    for number, pipe in enumerate((call["p2cread"], call["c2pwrite"], call["errwrite"])):
        sent[number] = pipe if pipe != -1 else number
    job = Job(
        program=program,
        command=[os.fspath(word) for word in call["args"]],
        environment=environment,
        folder=os.fspath(call["cwd"] or os.getcwd()),
        descriptors=list(sent),
        new_session=bool(call["start_new_session"]),
        process_group=call.get("process_group", -1),
        **_inherited(call["umask"]),
    )
    self.pid = zygote.start(job, list(sent.values()))
    self._child_created = True
    self._close_pipe_fds(
        *(call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _warm_program(call: Mapping[str, Any]) -> Program | None:
    plain = not any((call["shell"], call["preexec_fn"], call["executable"]))
    plain = plain and all(call[name] is None for name in ("uid", "gid", "gids"))
    plain = plain and all(isinstance(word, str | os.PathLike) for word in call["args"])
    if not plain or isinstance(call["args"], str) or not os.path.isdir(call["cwd"] or "."):
        return None
    program = parse_command([os.fspath(word) for word in call["args"]])
    if program is None or (
        program.kind == "script" and not os.path.isfile(os.path.join(call["cwd"] or "", program.name))
    ):
        return None
    return program


def _kept_descriptors(call: Mapping[str, Any]) -> list[int]:
    if call["close_fds"]:
        return [int(number) for number in call["pass_fds"]]
    kept = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself is gone
            if os.get_inheritable(int(name)):
                kept.append(int(name))
    return kept


def _inherited(umask: int) -> dict[str, Any]:
    """What a new program has of the process that started it, whoever cloned it."""
    if umask < 0:
        umask = os.umask(0o022)
        os.umask(umask)
    limits = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limits[getattr(resource, name)] = resource.getrlimit(getattr(resource, name))
    # SIGPIPE is ignored by Python itself, and Popen gives it back to its children.
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN and n != signal.SIGPIPE]
    cores = os.sched_getaffinity(0)
    return {"umask": umask, "limits": limits, "ignored_signals": [int(number) for number in ignored], "cores": cores}


_all_children: Any = psutil.Process.children


def _children(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    return [process for process in _all_children(self, recursive=recursive) if not is_zygote(process)]


def is_zygote(process: psutil.Process) -> bool:
    """Return whether a process only waits to be cloned: no part of the command that was started."""
    with suppress(psutil.Error):
        return process.name() == ZYGOTE_NAME
    return False
