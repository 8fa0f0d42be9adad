"""Kinds of failure from public reports, section M (memory), that touch offloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import models, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.simulation_runs import SMALL, settings, simulate_all


def test_pinning_that_fails_is_no_error() -> None:
    """Report 106: without a driver, or where it refuses, memory stays as it is and the run says so."""
    import torch

    from fsdp_trainer.optim.transfers import pin

    if torch.cuda.is_available():
        pytest.skip("this machine can pin")
    assert pin([torch.ones(3)]) is False
    (said,) = run_ranks(said_of_pinning, 1, "params")[0]
    assert "could not be pinned" in said and "memlock" in said
    assert run_ranks(said_of_pinning, 1, "none")[0] == []


STAND_IN = """
static int last = 0;
int cudaHostRegister(void* address, unsigned long size, unsigned flags) { last = 1; return 1; }
int cudaGetLastError(void) { int found = last; last = 0; return found; }
int cudaPeekAtLastError(void) { return last; }
"""


def error_left_by_pinning(folder: str) -> tuple[bool, int, int]:
    """Pin with a CUDA runtime that refuses; return whether it did, and the error left by a bare call and by ours."""
    import ctypes
    import subprocess

    import torch

    from fsdp_trainer.optim.transfers import pin

    source, library = Path(folder, "runtime.c"), Path(folder, "libcudart.so.12")
    source.write_text(STAND_IN)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    runtime = ctypes.CDLL(str(library))
    torch.cuda.is_available = lambda: True
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: runtime.cudaHostRegister(
            ctypes.c_void_p(address), ctypes.c_ulong(size), flags
        )
    )
    torch.cuda.cudart().cudaHostRegister(0, 1, 1)
    left = runtime.cudaPeekAtLastError()
    runtime.cudaGetLastError()
    return pin([torch.zeros(2**20)]), left, runtime.cudaPeekAtLastError()


def test_a_refusal_leaves_no_error_for_the_next_kernel(tmp_path: Path) -> None:
    """cudaHostRegister's error stays with the thread until it is taken back, and a launch check would raise it."""
    assert run_ranks(error_left_by_pinning, 1, str(tmp_path)) == [(False, 1, 0)]


def said_of_pinning(offload: str) -> list[str]:
    """Return the log's lines about offloading on a GPU whose host pins nothing, as here."""
    import torch

    from fsdp_trainer import run
    from fsdp_trainer.config import Config

    config, runtime = Config.load(None, {"sharding.offload": offload}), SimpleNamespace(device=torch.device("cuda"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    return list(run._offload_facts(config, runtime, optimizer))  # type: ignore[arg-type]


def reduced_gradients(run_settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Take a step over `count` rows and follow the memory of every reduced gradient, from its reduction to its release.

    Returns the most bytes alive at once, those alive before the clip, the most a step without offload would keep, and
    the two largest units' (one rank alone: tensors').
    """
    import weakref

    from fsdp_trainer.optim.sharded_adamw import flat
    from fsdp_trainer.sharding import reduction_units
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    alive: dict[int, int] = {}
    seen, kept = [0], []

    def see(parameter: Any) -> None:
        storage = flat(parameter.grad).untyped_storage()
        if storage._cdata not in alive:
            alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, alive.pop, storage._cdata)
        seen.append(sum(alive.values()))

    units: dict[int, int] = {}
    for parameter, unit in reduction_units(run.sharding).items():
        handle = parameter.register_post_accumulate_grad_hook(see)
        hooks = parameter._post_accumulate_grad_hooks  # torch goes by the order of insertion
        mine, others = hooks.pop(handle.id), dict(hooks)
        hooks.clear()
        hooks.update({handle.id: mine, **others})  # before it leaves for the host
        units[id(unit)] = units.get(id(unit), 0) + 4 * flat(parameter).numel()
    run.optimizer.register_step_pre_hook(lambda *_: kept.append(sum(alive.values())))
    documents = models.make_records(count, seed=3)[1]
    train_step(run, step_runs.window_of(run, [[row] for row in documents]), learning_rate=1e-3, optimizer_step=0)
    sizes = sorted(units.values())
    return {"most": max(seen), "kept": kept[0], "all": sum(sizes), "two": sum(sizes[-2:]), "one": sizes[-1]}


@pytest.mark.parametrize(
    ("world", "sharding"), [(1, {}), (2, {}), (4, {"replicate": 2})], ids=["alone", "stage3", "hybrid"]
)
def test_live_gradients_are_never_more_than_two_units(
    world: int, sharding: dict[str, Any], model_folder: Callable[[str], str], tmp_path: Path
) -> None:
    """On real ranks over two micro-batches: what was reduced leaves before the next but one is; none waits for a step.

    Report 99, and the "two layers" of the host-resident optimizer; without it every gradient is there in the end.
    """
    found = {}
    for offload in ("none", "optimizer"):
        run = training_runs.settings(
            model_folder("llama_deep"),
            "unused.jsonl",
            tmp_path,
            sharding={"zero_stage": 3, "offload": offload, **sharding},
            batch={"global_batch_size": 4 * world, "micro_batch_size": 2},
        )
        found[offload] = run_on_kept_ranks(reduced_gradients, world, run, 4 * world)
    for here, away in zip(found["none"], found["optimizer"], strict=True):
        assert here["kept"] == here["all"] <= here["most"]
        assert away["one"] <= away["most"] <= away["two"] < away["all"] / 2
        assert away["kept"] == 0


def simulated_peaks(cases: dict[str, Any], gpus: str) -> dict[str, dict[str, int]]:
    """Return each phase's peak on the device, and what a rank's process takes on the host."""
    return {name: case["phases"] | {"host": case["host"]} for name, case in simulate_all(cases, gpus).items()}


def test_never_more_than_two_layers_gradients_on_the_device(tmp_path: Path) -> None:
    """A longer model takes its weights and what checkpointing keeps, and no byte of gradients or state.

    Report 99: so the first step cannot run out of memory where the backward before it did not. Report 101: nor does an
    untied table share a buffer with another.
    """

    def case(layers: int, **sharding: Any) -> dict[str, Any]:
        return settings(
            tmp_path,
            model={"num_hidden_layers": layers},
            sharding={"zero_stage": 3} | sharding,
            precision="bf16",
            activation_checkpointing={"mode": "full"},
            batch={"global_batch_size": 16, "micro_batch_size": 1},
        )

    cases = {
        f"{name}-{layers}": case(layers, **more)
        for layers in (3, 5)
        for name, more in {
            "none": {},
            "optimizer": {"offload": "optimizer"},
            "hybrid": {"offload": "optimizer", "replicate": 2},
        }.items()
    }
    got = run_on_kept_ranks(simulated_peaks, 1, cases, "8xA100-80GB", timeout=300, group="simulated")[0]
    kept = 2 * 512 * SMALL["hidden_size"] * 2
    for name in ("optimizer", "hybrid"):
        few, many = got[f"{name}-3"], got[f"{name}-5"]
        weights = many["load"] - few["load"]
        assert many["backward"] - few["backward"] == pytest.approx(weights + kept, abs=1024)
        assert many["step"] - few["step"] == pytest.approx(weights, abs=1024)
    assert got["none-5"]["backward"] - got["none-3"]["backward"] > got["none-5"]["load"] - got["none-3"]["load"] + kept
    for name, phases in got.items():
        if not name.startswith("none"):
            assert phases["step"] < phases["backward"]
    # On the host: masters, two averages, gradients, where those of two units land, and the save's copy.
    added = got["optimizer-5"]["host"] - got["none-5"]["host"]
    weights = (got["none-5"]["load"] - got["none-3"]["load"]) * 5 / 2  # fp32 shards of the five layers
    assert added > 16 / 4 * weights


def copies_that_are_not_waited_for(run_settings: dict[str, Any]) -> list[str]:
    """Return the copies to the host that the clip of a step on simulated GPUs queues without waiting for them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp_trainer import step
    from fsdp_trainer.config import Config
    from fsdp_trainer.memory.traced_run import trace_run

    found: list[str] = []
    clip = step._clip_gradients

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (
                kwargs or {}
            )
            source: Any = given.get("src", given.get("self"))
            if given.get("non_blocking") and out.device.type == "cpu" and source.device.type != "cpu":
                found.append(str(func))
            return out

    def watched(run: Any) -> Any:
        with Watch():
            return clip(run)

    step._clip_gradients = watched
    trace_run(Config.from_dict(run_settings), world_size=2, compute_capability=8.0)
    assert step._clip_gradients is watched
    return found


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
@pytest.mark.parametrize("offload", ["params", "optimizer"])
def test_no_kernel_on_the_host_reads_what_is_still_on_its_way(
    offload: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    """The gradient scaler copies its scale to where gradients are without waiting: they are on the host here."""
    run = settings(
        tmp_path,
        precision="fp16",
        sharding={"zero_stage": 3, "offload": offload},
        optim={"max_grad_norm": max_grad_norm},
        batch={"global_batch_size": 4, "micro_batch_size": 1},
    )
    assert run_ranks(copies_that_are_not_waited_for, 1, run, timeout=120) == [[]]
