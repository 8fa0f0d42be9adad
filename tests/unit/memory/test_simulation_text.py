"""A simulation, printed: what a person at a Python prompt sees."""

from __future__ import annotations

import dataclasses

from fsdp_trainer.config import Config
from fsdp_trainer.memory.simulation import Simulation
from fsdp_trainer.memory.simulation_text import check_host

MIB, GIB = 2**20, 2**30
FOUND = Simulation(
    allocated=17 * GIB,
    reserved=18 * GIB,
    min_capacity=int(17.5 * GIB),
    host=3 * GIB,
    limit=22 * GIB,
    phases={"load": 4 * GIB, "forward": 12 * GIB, "backward": 17 * GIB},
    breakdown={"parameters": 6 * GIB, "activations": 11 * GIB - MIB, "temporaries": MIB},
    step_time=None,
    tokens_per_rank=4096,
    config=Config.from_dict({"model.path": "some-owner/some-model"}).to_dict(),
    gpus="2xRTX4090",
)


def test_printing_a_simulation_says_what_the_command_says() -> None:
    lines = str(FOUND).splitlines()
    assert lines[:2] == [
        "2xRTX4090: fits: 17.5 GiB needed of 22.0 GiB for torch on each GPU",
        "allocated 17.0 GiB, reserved 18.0 GiB; host 3.0 GiB a rank",
    ]
    assert [line.split() for line in lines[2:8]] == [
        ["at", "the", "peak:"],
        ["activations", "11.0", "GiB"],
        ["parameters", "6.0", "GiB"],
        ["highest", "in", "each", "phase:"],
        ["load", "4.0", "GiB"],
        ["forward", "12.0", "GiB"],
    ]
    assert "does not fit" in str(dataclasses.replace(FOUND, limit=GIB))
    assert str(dataclasses.replace(FOUND, gpus="")).startswith("some-owner/some-model: fits")
    assert "of RAM for each process" in str(dataclasses.replace(FOUND, gpus="2xCPU"))


def test_a_small_model_is_told_in_small_units() -> None:
    small = dataclasses.replace(FOUND, allocated=80 * MIB, breakdown={"parameters": 60 * MIB, "activations": 20 * MIB})
    assert "60.0 MiB" in str(small) and "0.00" not in str(small)


def test_the_ram_of_a_machine_is_what_all_its_ranks_hold() -> None:
    result = FOUND.to_json()
    enough, line = check_host(result, 24 * GIB, ranks=8, on_cpu=False)
    assert enough["fits"] and line == "RAM of one machine: fits: 24.0 GiB needed by its 8 ranks of 24.0 GiB"
    short, line = check_host(result, 23 * GIB, ranks=8, on_cpu=False)
    assert not short["fits"] and "does not fit" in line
    assert check_host(result, GIB, ranks=2, on_cpu=True)[0]["host_needed_gib"] == 35.0, "tensors and all"
    by_phase = result | {"host_node_gib": {"load": 7.0, "train": 9.0}}
    assert check_host(by_phase, GIB, ranks=8, on_cpu=False)[0]["host_needed_gib"] == 9.0
