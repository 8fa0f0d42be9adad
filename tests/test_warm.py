"""A command that starts warm is, for all that a program or its parent can see, the one that starts cold."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import warm
from tests.e2e.commands import environment, executable

WAYS = pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])


def start(code: str, *words: str, cold: bool, **options: Any) -> subprocess.Popen[str]:
    """Start an interpreter with `-c`, as a test of either way does."""
    environ = {**environment(cold=cold), **options.pop("env", {})}
    command = [sys.executable, *options.pop("flags", ()), "-c", textwrap.dedent(code), *words]
    return subprocess.Popen(command, env=environ, text=True, **options)


def run(code: str, *words: str, cold: bool, **options: Any) -> tuple[int, str, str]:
    """Run it to its end; return its exit code and what it said on both streams."""
    process = start(code, *words, cold=cold, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    said, complained = process.communicate(timeout=60)
    return process.returncode, said, complained


def is_warm(said: str) -> bool:
    return "'torch'" in said


@WAYS
def test_only_a_marked_command_is_warm(cold: bool) -> None:
    code = "import sys; print([name for name in sys.modules if name == 'torch'])"
    assert is_warm(run(code, cold=cold)[1]) != cold


# --- how it ends

ENDS = {
    "pass": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(259)": 3,
    "import sys; sys.exit('words')": 1,
    "raise SystemExit": 0,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(9)": -signal.SIGTERM,
    "import os; os.abort()": -signal.SIGABRT,
    "import os; os._exit(7)": 7,
    "import ctypes; ctypes.string_at(0)": -signal.SIGSEGV,
    "import atexit; atexit.register(print, 'last'); print('first')": 0,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()": 0,
    "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()": 0,
    "import warnings; warnings.warn('careful')": 0,
    "def f(): raise ValueError('here')\nf()": 1,
}


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_a_cold_one(code: str) -> None:
    warm_end, cold_end = (run(code, cold=cold) for cold in (False, True))
    assert warm_end == cold_end
    assert warm_end[0] == ENDS[code]


# --- what it has of its parent and of the call

LOOK = """
import json, os, resource, signal, stat, sys
me = os.getpid()
def read(path):
    return open(path, "rb").read().decode().split("\\0")
def kind(number):  # 3 is that of the listing
    return stat.S_IFMT(os.fstat(int(number)).st_mode)
path = [entry for entry in sys.path if "editable" not in entry]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": path, "main": sorted(vars(sys.modules["__main__"])),
    "name": __name__, "file": globals().get("__file__"), "cwd": os.getcwd(), "environ": dict(os.environ),
    "cmdline": read("/proc/self/cmdline"), "environ seen": sorted(read("/proc/self/environ")),
    "comm": open("/proc/self/comm").read(), "parent": os.getppid(), "leads": [os.getpgrp() == me, os.getsid(0) == me],
    "group": os.getpgrp() if os.getpgrp() != me else 0, "session": os.getsid(0) if os.getsid(0) != me else 0,
    "umask": os.umask(0), "files": {n: kind(n) for n in os.listdir("/proc/self/fd") if n != "3" and int(n) < 200},
    "cores": sorted(os.sched_getaffinity(0)), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": len(os.listdir("/proc/self/task")),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "masked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "children": open(f"/proc/{me}/task/{me}/children").read().split() if "torch" not in sys.modules else [],
    "stdin": sys.stdin.read(), "flags": str(sys.flags),
    "tty": [f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)],
    "buffering": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
    "encoding": [sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
}))
"""
CALLS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: {},
    "folder": lambda folder: {"cwd": folder},
    "session": lambda folder: {"start_new_session": True},
    "path": lambda folder: {"env": {"PYTHONPATH": f"{folder}{os.pathsep}/nowhere", "OTHER": "a=b c"}},
    "unbuffered": lambda folder: {"flags": ["-u"]},
}


def look(call: str, folder: Path, *, cold: bool, script: list[str]) -> dict[str, Any]:
    options = CALLS[call](folder)
    environ = {**environment(cold=cold), **options.pop("env", {})}
    command = [sys.executable, *options.pop("flags", ()), *script, "one", "two words"]
    ended = subprocess.run(
        command, env=environ, input="a question", capture_output=True, text=True, check=True, timeout=60, **options
    )
    seen = json.loads(ended.stdout)
    for words in (seen["environ"], seen["environ seen"]):  # but for the mark itself
        if isinstance(words, dict):
            words.pop(warm.MARK, None)
        elif f"{warm.MARK}=1" in words:
            words.remove(f"{warm.MARK}=1")
    return seen


@pytest.mark.parametrize(
    ("call", "kind"),
    # A module is found in the working folder or on the path.
    [(c, k) for c in CALLS for k in ("code", "module", "script") if k != "module" or c in ("folder", "path")],
)
def test_it_sees_what_a_cold_one_sees(call: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "looking.py").write_text(LOOK)
    script = {"code": ["-c", LOOK], "module": ["-m", "looking"], "script": [str(tmp_path / "looking.py")]}[kind]
    warm_one, cold_one = (look(call, tmp_path, cold=cold, script=script) for cold in (False, True))
    for name in cold_one:
        assert warm_one[name] == cold_one[name], name
    assert warm_one["parent"] == os.getpid()


def test_what_its_parent_ignores_is_ignored_and_the_rest_is_not() -> None:
    """As under nohup, and in the background of a shell script; a handler of the parent's is not inherited."""
    code = "import signal; print([signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)])"
    before = [(n, signal.signal(n, signal.SIG_IGN)) for n in (signal.SIGHUP, signal.SIGINT)]
    before.append((signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None)))
    try:
        warm_one, cold_one = (run(code, cold=cold) for cold in (False, True))
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert warm_one == cold_one
    assert warm_one[1].count("SIG_IGN") == 2


def test_it_has_its_parents_limits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
        assert run(code, cold=False) == run(code, cold=True) == (0, f"(0, {hard})\n", "")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@WAYS
def test_descriptors_that_are_passed_keep_their_numbers(cold: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = "import os, sys; os.write(int(sys.argv[1]), b'through it')"
        assert run(code, str(theirs.fileno()), cold=cold, pass_fds=[theirs.fileno()])[0] == 0
        theirs.close()
        assert ours.recv(100) == b"through it"
        assert ours.recv(100) == b"", "nobody else holds the other end"


@WAYS
def test_a_folder_that_is_not_there_is_the_callers_error(cold: bool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run("pass", cold=cold, cwd=tmp_path / "nowhere")
    script = str(tmp_path / "no.py")
    ended = subprocess.run([sys.executable, script], env=environment(cold=cold), capture_output=True, text=True)
    assert (ended.returncode, script in ended.stderr) == (2, True)


@WAYS
def test_a_command_that_was_installed_is_found_by_its_path(cold: bool) -> None:
    command = [executable("fsdp-trainer"), "--version"]
    ended = subprocess.run(command, env=environment(cold=cold), capture_output=True, text=True, check=True)
    assert ended.stdout.strip()


# --- what its parent sees of it, and what becomes of it

SLEEP = "import os, sys, time; print('ready', os.getpid(), flush=True); time.sleep(60)"


def started(code: str, *, cold: bool, **options: Any) -> subprocess.Popen[str]:
    process = start(code, cold=cold, stdout=subprocess.PIPE, **options)
    assert process.stdout is not None
    assert process.stdout.readline().split()[:2] == ["ready", str(process.pid)]
    return process


@WAYS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_its_pid_or_its_group_ends_it(number: signal.Signals, cold: bool) -> None:
    process = started(SLEEP, cold=cold)
    process.send_signal(number)
    assert process.wait(5) == -number
    process = start(SLEEP, cold=cold, start_new_session=True)
    assert os.getpgid(process.pid) == process.pid, "at once: who signals the group must not hit its own"
    os.killpg(process.pid, number)
    assert process.wait(5) == -number
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0) if cold else wait_for_empty_group(process.pid)


def wait_for_empty_group(group: int) -> None:
    """The zygote of a process goes when that has gone."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(0.01)


@WAYS
def test_a_stopped_one_goes_on(cold: bool) -> None:
    process = started(SLEEP, cold=cold)
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == -signal.SIGTERM


WATCH = (
    "import os, time; parent = os.getppid(); print('ready', flush=True)\nwhile os.getppid() == parent: time.sleep(0.01)"
)
NESTED = """
import os, psutil, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
inner.stdout.readline()
print("ready", os.getpid(), inner.pid, [child.pid for child in psutil.Process().children()],
      "torch" in sys.modules, psutil.Process(inner.pid).ppid(), flush=True)
print(inner.wait())
"""


@WAYS
def test_what_it_starts_is_its_own_child(cold: bool) -> None:
    process = start(NESTED, SLEEP, cold=cold, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    _, pid, inner, rest = process.stdout.readline().split(maxsplit=3)
    assert int(pid) == process.pid
    assert rest.split() == [f"[{inner}]", str(not cold), pid]
    children = psutil.Process(process.pid).children(recursive=True)
    assert [child.pid for child in children] == [int(inner)]
    assert children[0].cmdline()[1:] == ["-c", SLEEP]
    os.kill(int(inner), signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == f"{-signal.SIGTERM}\n"
    assert process.returncode == 0


@WAYS
def test_what_it_has_started_outlives_it_as_an_orphan(cold: bool) -> None:
    """Both ways: a parent that is killed does not take its children along, and they see that it is gone."""
    process = start(NESTED, WATCH, cold=cold, stdout=subprocess.PIPE)
    assert process.stdout is not None
    inner = psutil.Process(int(process.stdout.readline().split()[2]))
    process.kill()
    process.wait()
    assert psutil.wait_procs([inner], timeout=5)[1] == []


def test_no_zygote_is_left(tmp_path: Path) -> None:
    def zygotes() -> set[int]:
        return {process.pid for process in psutil.process_iter() if warm.is_zygote(process)}

    before = zygotes()
    process = started(SLEEP, cold=False)
    assert len(zygotes() - before) == 1
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while zygotes() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert zygotes() - before == set()


def test_another_value_of_what_is_read_at_an_import_starts_cold() -> None:
    code = "import sys; print([name for name in sys.modules if name == 'torch'])"
    assert not is_warm(run(code, cold=False, env={"HF_HOME": "/elsewhere"})[1])
    assert not is_warm(run(code, cold=False, flags=["-E"])[1])
    with suppress(KeyError):
        assert not is_warm(run(code, cold=False, env={"PYTHONHASHSEED": "1"})[1])
