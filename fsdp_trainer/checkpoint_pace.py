"""How long a save or a load may keep the other ranks waiting: by its size, and by how fast the disk has shown to be.

`train.timeout_minutes` says how long a step may hang. A save of a large model to a slow disk takes longer and hangs
nowhere; a rank that is dead in it is found by its signs of life (rank_watch.py), whatever the limit here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_trainer.agreement import is_broken_collective
from fsdp_trainer.errors import DistributedError
from fsdp_trainer.units import format_bytes, format_duration

LEAST_SECONDS = 600.0  # of any save or load: opening files on a busy network disk, whatever their size
MARGIN = 10.0  # a disk that others write to as well is slower at times
# Until a save was seen: bytes a second of a slow network disk, all ranks together, are a tenth of it.
ASSUMED_SPEED = 200e6
_TELLING_BYTES = 2**24  # less says how long files take to open, not how fast they are written


@dataclass
class Pace:
    """The fewest bytes a second that all ranks together were seen to move to or from the disk.

    Never more than was assumed: what a cache has taken in is no promise that the disk is as fast the next time.
    """

    speed: float = ASSUMED_SPEED

    def saw(self, size: int, seconds: float) -> None:
        """Learn from a transfer of `size` bytes, all ranks together."""
        if size >= _TELLING_BYTES:
            self.speed = min(self.speed, size / max(seconds, 1e-3))

    def limit(self, size: int) -> timedelta:
        """Return how long the transfer of `size` bytes may take."""
        return timedelta(seconds=LEAST_SECONDS + MARGIN * size / self.speed)


DISK = Pace()  # of this process's run folder


@contextmanager
def waiting_for(what: str, size: int, *, process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let collectives of the group wait as long as moving `size` bytes (all ranks together) may take.

    DistributedError that names `what` where a rank is not there even then. What the others wait for is learnt from.
    """
    if not dist.is_initialized():
        yield
        return
    group = process_group or dist.group.WORLD
    assert group is not None
    before = group._get_backend(torch.device("cpu")).options._timeout  # pyright: ignore[reportAttributeAccessIssue]
    limit, started = max(before, DISK.limit(size)), time.monotonic()
    _set_timeout(limit, group)
    try:
        yield
    except RuntimeError as error:
        if not (is_broken_collective(error) and "timed out" in str(error).lower()):
            raise
        raise DistributedError(
            f"{what} did not end in time.",
            values=f"{format_bytes(size)}, {format_duration(limit.total_seconds())} waited at "
            f"{format_bytes(DISK.speed)}/s: {str(error).splitlines()[0]}",
            fix="look at the disk of the rank that the others wait for; the limit follows from the size and from how "
            "fast the disk was before",
        ) from error
    finally:
        _set_timeout(before, group)
    DISK.saw(size, time.monotonic() - started)


def _set_timeout(limit: timedelta, group: dist.ProcessGroup) -> None:
    # `set_timeout` where there is one: the older name warns then (torch 2.14).
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit, group)
