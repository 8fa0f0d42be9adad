"""Which part of a step a rank is in: the name a profile shows, a memory trace counts by and an error report gives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from fsdp_trainer.memory.recording import PHASES


class Phases:
    """The phase of this rank, by the names of memory/recording.py; one lasts until the next begins.

    What fails leaves it where it was, so `current` says where, and `rehearsing` whether it was before the first step.
    `ended` is called with the phase that is over.
    """

    def __init__(self) -> None:
        self.current = "load"
        self.rehearsing = False
        self.ended: Callable[[str], None] | None = None

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        """Begin a phase, under a label of the same name for torch's profiler and for dispatch modes."""
        assert phase in PHASES, phase
        if self.ended is not None:
            self.ended(self.current)
        self.current = phase
        with record_function(phase):
            yield
