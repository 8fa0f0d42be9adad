"""SIGTERM and Ctrl-C as a request that all ranks agree on, instead of a death in the middle of a step."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

from fsdp_trainer.errors import Interrupted


@dataclass
class StopRequest:
    """What this process was asked to do; `agreed()` says whether any rank was asked, and names the signal on all."""

    received: str | None = None
    _count: int = field(default=0, repr=False)

    def agreed(self) -> bool:
        """Return True on every rank when any rank received a signal. Collective: call it at the same point everywhere.

        The flag lives in host memory, so it is reduced by the CPU backend and costs the device nothing.
        """
        number = torch.tensor([signal.Signals[self.received] if self.received else 0], dtype=torch.int32)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        if agreed := int(number.item()):
            self.received = signal.Signals(agreed).name
        return bool(agreed)

    def check(self) -> None:
        """Raise Interrupted if this process received a signal; for long work before the first step."""
        if self.received:
            raise Interrupted(
                f"Stopped on {self.received} before the first step.",
                values="nothing was trained, so nothing was saved",
                fix="start the same command again",
            )

    def check_all(self) -> None:
        """Raise Interrupted on every rank when any rank received a signal. Collective, as `agreed`."""
        if self.agreed():
            self.check()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None and os.environ.get("LOCAL_RANK", "0") == "0":
            # Not through rich, whose lock the interrupted code may hold.
            os.write(2, f"{signal.Signals(number).name} received: stopping at the next safe point\n".encode())
        self.received = signal.Signals(number).name
        self._count += 1
        if self._count > 1 and number == signal.SIGINT:  # Ctrl-C twice: the person does not want to wait for the save
            raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a `StopRequest` while the context is open.

    Only the process that opened it reacts: forked workers inherit the handlers, and theirs must not count.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # handlers can be set in the main thread alone
        yield request
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            raise SystemExit(128 + number)
        request._handle(number, frame)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
