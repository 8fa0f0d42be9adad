"""Work that does not end is ended, in a child and in a thread, and work that ends is left alone."""

from __future__ import annotations

import threading
import time

import pytest

from fsdp_trainer.limited import LimitReached, find_excess, run_limited

MIB = 2**20


def loop() -> None:
    while True:
        pass


def grow() -> None:
    text = "x"
    while True:
        text += text


def fail() -> None:
    raise ValueError("its own")


@pytest.mark.parametrize(("work", "said"), [(loop, "more than 1 s"), (grow, "more than 0.25 GiB")])
def test_in_a_child(work: object, said: str) -> None:
    assert callable(work)
    start = time.monotonic()
    assert find_excess(work, seconds=1, memory_bytes=256 * MIB) == said
    assert time.monotonic() - start < 8
    assert find_excess(lambda: "x" * MIB) is None
    assert find_excess(fail) is None, "the caller's own attempt says it"


def slow_growth() -> None:
    held = []
    while True:
        held.append(bytearray(MIB))
        time.sleep(0.001)


@pytest.mark.parametrize(("work", "said"), [(loop, "more than 0.3 s"), (slow_growth, "more than 0.0625 GiB")])
def test_in_a_thread(work: object, said: str) -> None:
    caught: list[str] = []

    def run() -> None:
        assert callable(work)
        try:
            run_limited(work, seconds=0.3, memory_bytes=64 * MIB)
        except LimitReached as error:
            caught.append(str(error))
        caught.append(run_limited(lambda: "the next one is left alone"))
        with pytest.raises(ValueError, match="its own"):
            run_limited(fail)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert caught == [said, "the next one is left alone"]


def test_a_limit_is_met_inside_or_not_at_all() -> None:
    """Work that ends about when its time is up: what is sent to a thread arrives in `run_limited`, never behind it."""

    def work() -> int:
        end = time.thread_time() + 0.11
        while time.thread_time() < end:
            pass
        return 1

    ended = 0
    for _ in range(12):
        try:
            ended += run_limited(work, seconds=0.1)
        except LimitReached:
            ended += 1
        for _ in range(1000):
            pass
    assert ended == 12
