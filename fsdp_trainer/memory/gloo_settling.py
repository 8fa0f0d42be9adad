"""Wait until gloo's threads have let go of what a collective was given: a race of them, not memory of the run.

A thread that has finished a collective drops its references a moment after the caller goes on. Whether a tensor that
the caller has dropped is still alive then is chance, and the peak of a traced step would be as well.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fsdp_trainer.memory.recording import PHASES

# In all, of one traced step: something else may hold a tensor, and that is no reason to wait for ever.
PATIENCE_SECONDS = 2.0
# A functional collective's result has other holders too, which cannot be counted; a thread of gloo needs less.
WAIT_SECONDS = 0.02


class GlooSettling:
    """What collectives were given and is to be let go; `before` and `after` every operation."""

    def __init__(self) -> None:
        self._sent: list[tuple[torch.Tensor, int]] = []
        self._patience = PATIENCE_SECONDS

    def before(self, name: str, args: Any) -> None:
        """Wait for what is over. What the operation itself uses is held by its call, so that waits for a later one."""
        if not self._sent and "c10d" not in name and name != _ENTER:
            return
        used = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        self._settle(used)
        # The wrapper of a functional collective's result is a cycle: when it goes is chance. Looked for where a phase
        # begins, and not at each label of FSDP's: that was a fifth of the traced step of a model of 135M.
        if name == _ENTER and args[0] in PHASES:
            gc.collect()
        if "c10d" in name:
            self._sent += [(tensor, _holders(tensor)) for tensor in used]

    def after(self, name: str) -> None:
        """Give the threads a moment where no count can tell."""
        if name == "_c10d_functional::wait_tensor":
            time.sleep(WAIT_SECONDS)

    def _settle(self, used: Sequence[torch.Tensor]) -> None:
        kept = {id(tensor) for tensor in used}
        free = [(tensor, count) for tensor, count in self._sent if id(tensor) not in kept]
        self._sent = [(tensor, count) for tensor, count in self._sent if id(tensor) in kept]
        started = time.monotonic()
        while self._patience > 0 and any(_holders(tensor) > count for tensor, count in free):
            time.sleep(0.0005)
            if time.monotonic() - started > self._patience:
                break
        self._patience -= time.monotonic() - started


_ENTER = "profiler::_record_function_enter_new"


def _holders(tensor: Any) -> int:
    return tensor._use_count()  # of the tensor behind the Python object: gloo's queue is among them
