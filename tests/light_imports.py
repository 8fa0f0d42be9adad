"""A light interpreter for many checks: each `run` is a fork of a process that has imported no torch, not a new start.

A check that something imports no torch needs an interpreter that has not imported it, and of the 0.1 to 0.5 s that it
takes most are Pydantic, Typer and Rich, which every command may import. So a server imports those once and forks for
each check: what one has imported is not there in the next. What must be absent is looked for in the server before it
serves, so it is the check's own import that is found.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import warm, warm_zygote

# What the light commands import of others. Not huggingface_hub, which reads the environment when it is imported.
ALLOWED = ("filelock", "pydantic.main", "pydantic.types", "rich.progress", "ruamel.yaml", "typer.rich_utils", "yaml")
# What tests look for, and what they would import it through.
ABSENT = {"accelerate", "datasets", "huggingface_hub", "matplotlib", "numpy", "tokenizers", "torch", "transformers"}
COMMANDS = ("fsdp_trainer.cli", "fsdp_trainer.memory.planning")


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    imported: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command line of this interpreter and return its exit code and what it said.

    `imported`: modules of ours that it finds imported, where a test asks what a command says and not what it imports.
    """
    words = [os.fspath(word) for word in command]
    program = warm.parse_command(words)
    assert program is not None, f"not a program of this interpreter: {words}"
    job = warm.Job(program, words, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd()), [0, 1, 2])
    server, (reading, writing) = _server(imported), os.pipe()
    with open(reading, encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as error:
        socket.send_fds(server, [pickle.dumps(job)], [0, writing, error.fileno()])
        os.close(writing)
        try:
            said, status = out.read(), int(server.recv(16))
        except BaseException:  # pytest's time limit: the answer to this would be taken for the next one's
            _server.cache_clear()
            raise
        error.seek(0)
        return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), said, error.read())


def python(code: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that has imported nothing of ours."""
    return run([sys.executable, "-c", code, *words], cwd=cwd)


@functools.cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path.insert(0, {str(warm.REPOSITORY)!r}); from tests import light_imports as light; "
    code += f"sys.path.remove({str(warm.REPOSITORY)!r}); light.serve()"
    command = [sys.executable, "-c", code, str(theirs.fileno()), *imported]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", warm.MARK)}
    with theirs:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    if ours.recv(16) != b"imported":
        server.wait()
        raise RuntimeError("the light interpreter did not start: what it said stands above")
    server.returncode = 0  # it ends with this process, and nobody waits for it
    return ours


def serve() -> None:
    """Import what is allowed and what was asked for, and fork for each command: the server's program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in (*ALLOWED, *sys.argv[2:]):
        importlib.import_module(name)
    found = ABSENT & set(sys.modules)
    assert not found, f"{sorted(found)} are imported by {(*ALLOWED, *sys.argv[2:])}"
    channel.send(b"imported")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 2**20, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(pickle.loads(message), descriptors)
        for number in descriptors:
            os.close(number)
        channel.send(str(os.waitpid(pid, 0)[1]).encode())


def _become(job: warm.Job, descriptors: Sequence[int]) -> None:
    for number, received in zip(job.descriptors, descriptors, strict=True):
        os.dup2(received, number)
        os.close(received)
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    warm_zygote.run(*warm_zygote.load(job))
