"""Encode many records in several processes, in order.

Plain subprocesses with pickles through their pipes: multiprocessing would run the user's script again in each child
(fatal in one without a __main__ guard), must not fork a process with threads, and is refused in a daemonic process.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_trainer.data.encode import Encoded, Encoder, encode_examples
from fsdp_trainer.data.sources import BadRecord, Example
from fsdp_trainer.errors import DataError


def encode_in_processes(
    chunks: Iterable[list[Example | BadRecord]], *, encoder: Encoder, workers: int
) -> Generator[Encoded, None, None]:
    """Encode chunks of records in `workers` processes and yield the results in the order of the chunks."""
    processes = [_start() for _ in range(workers)]
    idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def encode(chunk: list[Example | BadRecord]) -> Encoded:
        process = idle.get()
        try:
            _send(process, pickle.dumps(chunk))
            return _receive(process)
        finally:
            idle.put(process)

    waiting: deque[Future[Encoded]] = deque()
    threads = ThreadPoolExecutor(workers)
    try:
        # in the threads, because a pipe takes the tokenizer only once its process has started, seconds later
        list(threads.map(_send, processes, [pickle.dumps(encoder)] * workers))
        for chunk in chunks:
            waiting.append(threads.submit(encode, chunk))
            if len(waiting) > 2 * workers:  # bounded: the records of a large file are not all held at once
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for process in processes:
            process.kill()  # nothing is lost: a worker holds no state, and what it was asked for is not wanted any more
        threads.shutdown()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what a buffer still held for a killed process
                    pipe.close()


def _start() -> subprocess.Popen:
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # one thread of the tokenizer's each: the processes are the parallelism
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "fsdp_trainer.data.workers"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _send(process: subprocess.Popen, blob: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(len(blob).to_bytes(8, "little") + blob)
        process.stdin.flush()
    except OSError as error:
        raise _lost(process) from error


def _receive(process: subprocess.Popen) -> Encoded:
    try:
        kind, value = pickle.load(process.stdout)  # type: ignore[arg-type]
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise _lost(process) from error
    if kind == "error":
        raise DataError(value["what"], values=value["values"], fix=value["fix"])
    return value


def _lost(process: subprocess.Popen) -> DataError:
    return DataError(
        "a process that prepares data ended early",
        values=f"exit code {process.poll()}; its own message is above",
        fix="set data.workers: 0 to prepare in the main process, which shows the error, or free some memory",
    )


def _serve() -> None:
    """Answer the parent until it closes the pipe: first an encoder comes, then chunks of records."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a tokenizer's own code prints must not mix with the answers
    requests = sys.stdin.buffer
    encoder = None
    while size := requests.read(8):
        value: Any = pickle.loads(requests.read(int.from_bytes(size, "little")))
        if encoder is None:
            encoder = value
            continue
        try:
            answer = ("encoded", encode_examples(value, encoder=encoder))
        except DataError as error:
            answer = ("error", {"what": error.what, "values": error.values, "fix": error.fix})
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
