"""Many simulations, two at a time, each in a process that is kept for the next: importing torch takes longer than one.

For the planner, which asks about a few configurations, looks at the answers and asks about more. No torch here.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.memory.hardware import Hardware
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_cache import find_simulation, simulate_cached
from fsdp_trainer.memory.simulation_process import child_environment, end_with_parent

Answer = Simulation | FsdpTrainerError
Ask = Callable[[Sequence[Config], Hardware], list[Answer]]
# One takes up to 2 GB of memory, and a thread; more than two gained nothing where two cores are the rule.
WORKERS = min(2, os.cpu_count() or 1)
_CODE = "from fsdp_trainer.memory.simulation_workers import serve; serve()"


@contextlib.contextmanager
def simulation_workers() -> Iterator[Ask]:
    """Give a function that simulates configurations on given GPUs, with expandable segments as runs start with them.

    What the user's cache has needs no process; the others are started with the first question they get and end with
    this context. A configuration that is refused comes back as its error. Simulations have no ledger.
    """
    workers: list[_Worker] = []

    def ask(configs: Sequence[Config], hardware: Hardware) -> list[Answer]:
        found: list[Answer | None] = [find_simulation(c, hardware, expandable_segments=True) for c in configs]
        missing = [index for index, answer in enumerate(found) if answer is None]
        while len(workers) < min(WORKERS, len(missing)):
            workers.append(_Worker())

        def answer_share(start: int) -> dict[int, Answer]:
            share = missing[start :: len(workers)]
            return {index: workers[start].ask(configs[index], hardware) for index in share}

        answers: dict[int, Answer] = {}
        with ThreadPoolExecutor(max(1, len(workers))) as threads:
            try:
                for part in threads.map(answer_share, range(len(workers))):
                    answers |= part
            except BaseException:  # Ctrl-C, or one has failed: the threads would wait for answers that nobody wants
                for worker in workers:
                    worker.process.kill()
                raise
        return [answers[index] if answer is None else answer for index, answer in enumerate(found)]

    try:
        yield ask
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """One process that answers questions until it is closed."""

    def __init__(self) -> None:
        reader, writer = os.pipe()  # standard output is for whatever libraries print
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(writer), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            # Two of them share the cores, and fake tensors compute nothing.
            env=child_environment(os.environ) | {"OMP_NUM_THREADS": "1"},
        )
        os.close(writer)
        self.answers = os.fdopen(reader, "rb")

    def ask(self, config: Config, hardware: Hardware) -> Answer:
        """Wait for the answer to one question; raises FsdpTrainerError where the process failed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(pickle.dumps((config.to_dict(), hardware)))
            self.process.stdin.flush()
            found = pickle.load(self.answers)
        except (EOFError, OSError, pickle.UnpicklingError):  # it ended before or within an answer
            found = f"it ended with exit code {self.process.wait()}"
        if isinstance(found, str):
            raise FsdpTrainerError(
                "The simulation's process failed.",
                values=found,
                fix="give the machine 4 GB of free memory or plan with --quick, or report this with the settings",
            )
        return found

    def close(self) -> None:
        """End the process, whatever it is doing: nothing of it is needed any more."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.answers):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent words of a question
                    stream.close()


def serve() -> None:
    """Answer questions from standard input until it ends: the child's part. What fails is told as text."""
    end_with_parent(int(sys.argv[2]))
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        while (question := _next_question()) is not None:
            found: Answer | str
            try:
                found = _answer(*question)
            except FsdpTrainerError as error:
                found = error
            except Exception:  # the parent raises it
                found = traceback.format_exc()[-2000:]
            pickle.dump(found, answers)
            answers.flush()


def _answer(settings: Mapping[str, Any], hardware: Hardware) -> Simulation:
    made = simulate_cached(Config.from_dict(settings), hardware, expandable_segments=True)
    return replace(made, ledger=None)


def _next_question() -> Any:
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None
