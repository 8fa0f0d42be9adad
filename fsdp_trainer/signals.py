"""SIGTERM and Ctrl-C as a request that all ranks agree on, instead of a death in the middle of a step."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from fsdp_trainer.errors import Interrupted
from fsdp_trainer.run_folder import again


def stopped_before_the_first_step(name: str, *, command: str = "") -> Interrupted:
    """Return the error of a stop that has cost nothing; `command` is what was typed, if not known."""
    return Interrupted(
        f"Stopped on {name} before the first step.",
        values="nothing was trained, so nothing was saved",
        fix=command or again(),
    )


@dataclass
class StopRequest:
    """What this process was asked to do; `agreed()` says whether any rank was asked, and names the signal on all."""

    received: str | None = None
    owner: int = field(default_factory=os.getpid, repr=False)
    _count: int = field(default=0, repr=False)

    def agreed(self) -> bool:
        """Return True on every rank when any rank received a signal. Collective: call it at the same point everywhere.

        The flag lives in host memory, so it is reduced by the CPU backend and costs the device nothing.
        """
        import torch  # not before: signals are watched for while it is imported
        import torch.distributed as dist

        number = torch.tensor([signal.Signals[self.received] if self.received else 0], dtype=torch.int32)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        if agreed := int(number.item()):
            self.received = signal.Signals(agreed).name
        return bool(agreed)

    def check(self) -> None:
        """Raise Interrupted if this process received a signal; for long work before the first step."""
        if self.received:
            raise stopped_before_the_first_step(self.received)

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

    Only the process that opened it reacts: forked workers inherit the handlers, and theirs must not count. Opened
    within another one (train.py has one around its imports) it goes on with the request of that.
    """
    if _open and _open[-1].owner == os.getpid():
        yield _open[-1]
        return
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # handlers can be set in the main thread alone
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != request.owner:
            raise SystemExit(128 + number)
        request._handle(number, frame)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    _open.append(request)
    try:
        yield request
    finally:
        _open.remove(request)
        for number, handler in previous.items():
            if signal.getsignal(number) is handle:  # else somebody decided otherwise meanwhile, and that stays
                signal.signal(number, handler)


_open: list[StopRequest] = []
