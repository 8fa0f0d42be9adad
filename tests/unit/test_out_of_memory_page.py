"""What the page of an out-of-memory error asks the closed form."""

from __future__ import annotations

from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.machine import machine_bytes
from fsdp_trainer.out_of_memory_page import GIB, _shortage


def test_what_the_host_was_asked_for_counts() -> None:
    """An allocation larger than the machine must not be answered with a change that frees little."""
    record = {"place": "host", "limit_gib": None, "allocated_gib": None, "requested_gib": 931.0}
    found = _shortage(record, parse_gpus("2xCPU"))
    assert found.needed == machine_bytes() + 931 * GIB
    assert _shortage({**record, "requested_gib": None}, parse_gpus("2xCPU")).needed is None
