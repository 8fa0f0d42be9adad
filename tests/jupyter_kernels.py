"""A notebook's kernel, driven as a notebook does: cells are run in it, interrupted, and what they show comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.e2e.commands import environment
from tests.ranks import REPOSITORY


@dataclass
class Shown:
    """What a cell has shown: HTML by the order of updates of its displays, its value, and the error it ended with."""

    updates: list[str] = field(default_factory=list)
    displays: dict[str, str] = field(default_factory=dict)
    value: dict[str, str] = field(default_factory=dict)
    printed: str = ""
    error: dict[str, Any] = field(default_factory=dict)


@dataclass
class Kernel:
    """A running kernel; its working folder is that of the test."""

    manager: KernelManager
    client: BlockingKernelClient

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid  # type: ignore[union-attr]

    def run(
        self, code: str, *, until: Callable[[], bool] | None = None, strike: Callable[[], None] | None = None
    ) -> Shown:
        """Execute a cell to its end; as soon as `until` is true `strike` is called, once."""
        sent, shown, deadline = self.client.execute(code), Shown(), time.monotonic() + 240
        while time.monotonic() < deadline:
            if strike is not None and until is not None and until():
                strike()
                strike = None
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "update_display_data"):
                html = content["data"].get("text/html", "")
                shown.displays[content.get("transient", {}).get("display_id", "")] = html
                shown.updates.append(html)
            elif kind == "execute_result":
                shown.value = content["data"]
            elif kind == "stream":
                shown.printed += content["text"]
            elif kind == "error":
                shown.error = content
            elif kind == "status" and content["execution_state"] == "idle":
                print(shown.printed, "\n".join(shown.error.get("traceback", ())))
                return shown
        raise TimeoutError(f"the cell did not end: {code}")


@contextmanager
def start_kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel as Jupyter does, on CPU, with the package of this checkout; it is gone afterwards."""
    manager = KernelManager(kernel_name="python3")
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    manager.start_kernel(cwd=str(folder), env={**environment(), "PYTHONPATH": path, "FORCE_COLOR": "1"})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
