"""Encode many records side by side, in order: in threads of this process, or in several processes.

Threads, because the Rust tokenizer works without Python's lock and spreads a batch over the cores itself: two cores are
kept busy by it and by the one thread that renders, and nothing is loaded twice. Only with many cores is rendering what
they wait for, and processes pay.

The processes are plain ones with pickles through their pipes: multiprocessing would run the user's script again in each
(fatal in one without a __main__ guard), must not fork a process with threads, and is refused in a daemonic process.
"""

import gc
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_trainer.data.encode import Encoded, Encoder, encode_examples
from fsdp_trainer.data.sources import BadRecord, Example
from fsdp_trainer.errors import DataError

_THREADS = 4  # one in Python, the others in the tokenizer or waiting for either


def encode_in_threads(
    chunks: Iterable[list[Example | BadRecord]], *, encoder: Encoder
) -> Generator[Encoded, None, None]:
    """Encode chunks of records in threads of this process and yield the results in the order of the chunks."""
    threads = ThreadPoolExecutor(_THREADS)
    gc.freeze()  # else the cycle collector walks through all of torch again and again: an eighth of the time
    try:
        yield from _in_order(chunks, partial(encode_examples, encoder=encoder), threads=threads, ahead=2 * _THREADS)
    finally:
        gc.unfreeze()
        threads.shutdown(cancel_futures=True)


def _in_order(
    chunks: Iterable[list[Example | BadRecord]],
    encode: Callable[[list[Example | BadRecord]], Encoded],
    *,
    threads: ThreadPoolExecutor,
    ahead: int,
) -> Iterator[Encoded]:
    """Yield what `encode` makes of each chunk, in order, with at most `ahead` chunks begun before they are wanted.

    An error of reading comes after what was read before it, as without threads.
    """
    waiting: deque[Future[Encoded]] = deque()
    failure: DataError | None = None
    iterator = iter(chunks)
    while True:
        try:
            chunk = next(iterator, None)
        except DataError as error:
            chunk, failure = None, error
        if chunk is None:
            break
        waiting.append(threads.submit(encode, chunk))
        if len(waiting) > ahead:  # bounded: the records of a large file are not all held at once
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
    if failure is not None:
        raise failure


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

    threads = ThreadPoolExecutor(workers)
    try:
        # in the threads, because a pipe takes the tokenizer only once its process has started, seconds later
        list(threads.map(_send, processes, [pickle.dumps(encoder)] * workers))
        yield from _in_order(chunks, encode, threads=threads, ahead=2 * workers)
    finally:
        for process in processes:
            process.kill()  # nothing is lost: a worker holds no state, and what it was asked for is not wanted any more
        threads.shutdown(cancel_futures=True)
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
