"""Each ZeRO stage is what its collectives say it is, and weights are whole only when the stage says so.

Four micro-batches on an untied tiny Llama: six sharded units (embedding, four decoder layers, norm with head).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.errors import ConfigError, DistributedError
from tests import models, step_runs, training_runs
from tests.ranks import run_on_kept_ranks, run_ranks

Folder = Callable[[str], str]
MICRO_BATCHES, UNITS = 4, models.N_LAYERS + 2
TWICE = (2 * UNITS - 1) * MICRO_BATCHES


def settings_for(model: str, tmp_path: Path, sharding: dict[str, Any], world: int = 2, **more: Any) -> dict[str, Any]:
    batch = {"global_batch_size": MICRO_BATCHES * world, "micro_batch_size": 1}
    return training_runs.settings(model, "unused.jsonl", tmp_path, sharding=sharding, batch=batch, **more)


def rows(world: int = 2) -> list[list[models.Document]]:
    _, docs = models.make_records(MICRO_BATCHES * world, seed=11)
    return [[document] for document in docs]


def count_collectives(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)
    assert len(window.micro_batches) == MICRO_BATCHES
    train_step(run, window, learning_rate=0.0, optimizer_step=0)  # the first step has set-up of its own
    with CommDebugMode() as counted:
        train_step(run, window, learning_rate=0.0, optimizer_step=0)
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for collective, count in counted.get_comm_counts().items():
        name = str(collective).replace("alltoall", "reduce_scatter")  # how gloo ranks reduce-scatter here
        for kind in counts:
            if kind.replace("_", "") in name.replace("_", ""):
                counts[kind] += count
    return counts


# all_reduce includes one for the summed loss, and one for the gradient norm where gradients are sharded.
EXPECTED = {
    # gathered for each micro-batch's forward and again for its backward, but once for the unit with the head, where one
    # ends and the other begins; reduced in every micro-batch
    "stage3": (2, {"zero_stage": 3}, TWICE, UNITS * MICRO_BATCHES, 2),
    # gathered once a step; reduced in every micro-batch
    "stage2": (2, {"zero_stage": 2}, UNITS, UNITS * MICRO_BATCHES, 2),
    # gathered once a step, reduced once a step
    "stage1": (2, {"zero_stage": 1}, UNITS, UNITS, 2),
    # nothing to gather; one all-reduce a unit and step
    "stage0": (2, {"zero_stage": 0}, 0, 0, UNITS + 1),
    # as stage 3 in a group of two; across the groups once a step
    "hybrid": (4, {"zero_stage": 3, "replicate": 2}, TWICE, UNITS * MICRO_BATCHES, UNITS + 2),
    "reshard2": (4, {"zero_stage": 3, "reshard_after_forward": 2}, TWICE, UNITS * MICRO_BATCHES, 2),
    "offload": (2, {"zero_stage": 3, "offload": "params"}, TWICE, UNITS * MICRO_BATCHES, 2),
    # offloaded gradients leave the device after every micro-batch, at any stage
    "offload1": (2, {"zero_stage": 1, "offload": "params"}, UNITS, UNITS * MICRO_BATCHES, 2),
}


@pytest.mark.parametrize("stage", EXPECTED)
def test_collectives_of_a_step(stage: str, model_folder: Folder, tmp_path: Path) -> None:
    world, sharding, gathers, scatters, reduces = EXPECTED[stage]
    got = run_ranks(
        count_collectives, world, settings_for(model_folder("llama"), tmp_path, sharding, world), rows(world)
    )
    expected = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}
    assert got == [expected] * world


def gather_sizes(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[int, int]:
    """Return how many all-gathers of a step go over how many ranks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp_trainer.step import train_step

    sizes: dict[int, int] = {}

    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "allgather_base" in str(func):
                ranks = args[0].numel() // args[1].numel()
                sizes[ranks] = sizes.get(ranks, 0) + 1
            return func(*args, **(kwargs or {}))

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)
    train_step(run, window, learning_rate=0.0, optimizer_step=0)
    with Gathers():
        train_step(run, window, learning_rate=0.0, optimizer_step=0)
    return sizes


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ({"zero_stage": 3}, {4: TWICE}),
        ({"zero_stage": 3, "replicate": 2}, {2: TWICE}),
        # hpZ: the forward gathers over all four ranks, the backward within two
        ({"zero_stage": 3, "reshard_after_forward": 2}, {4: UNITS * MICRO_BATCHES, 2: (UNITS - 1) * MICRO_BATCHES}),
    ],
    ids=["full", "hybrid", "reshard2"],
)
def test_ranks_that_gather(
    sharding: dict[str, Any], expected: dict[int, int], model_folder: Folder, tmp_path: Path
) -> None:
    settings = settings_for(model_folder("llama"), tmp_path, sharding, 4)
    assert run_on_kept_ranks(gather_sizes, 4, settings, rows(4)) == [expected] * 4


def look_between(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, Any]:
    """Return the elements of weights and gradients this rank holds at rest, between micro-batches, and at the step."""
    from torch.distributed.tensor import DTensor

    from fsdp_trainer.step import train_step

    def held(tensors: list[torch.Tensor | None]) -> int:
        here = [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None
        ]
        return sum(tensor.numel() for tensor in here)

    def look(run: Any) -> tuple[int, int]:
        parameters = list(run.model.parameters())
        return held(parameters), held([parameter.grad for parameter in parameters])

    run = step_runs.build(run_settings)
    at_rest, between, at_step = [look(run)], [], []
    run.model.register_forward_pre_hook(lambda *_: between.append(look(run)))
    run.optimizer.register_step_pre_hook(lambda *_: at_step.append(look(run)))
    train_step(run, step_runs.window_of(run, documents), learning_rate=0.0, optimizer_step=0)
    at_rest.append(look(run))
    whole = sum(parameter.numel() for parameter in run.model.parameters())
    return {"whole": whole, "at_rest": at_rest, "between": between[1:], "at_step": at_step}


@pytest.mark.parametrize(
    ("stage", "sharding", "weights_whole", "gradients_whole"),
    [
        ("stage3", {"zero_stage": 3}, False, False),
        ("stage2", {"zero_stage": 2}, True, False),
        ("stage1", {"zero_stage": 1}, True, True),
        ("offload1", {"zero_stage": 1, "offload": "params"}, True, False),
    ],
)
def test_what_is_whole_between_micro_batches(
    stage: str,
    sharding: dict[str, Any],
    weights_whole: bool,
    gradients_whole: bool,
    model_folder: Folder,
    tmp_path: Path,
) -> None:
    """Report 10: whole gradients are what skipping the reduction costs. All stages rest as shards."""
    settings = settings_for(model_folder("llama"), tmp_path, sharding)
    for rank in run_on_kept_ranks(look_between, 2, settings, rows()):
        whole = rank["whole"]
        half = whole // 2  # every dimension of this model divides by two
        assert rank["at_rest"] == [(half, 0), (half, 0)]
        assert rank["at_step"] == [(half, half)], "weights must be shards again before the optimizer moves them"
        assert len(rank["between"]) == MICRO_BATCHES - 1
        for weights, gradients in rank["between"]:
            assert weights == (whole if weights_whole else half)
            # While a weight is whole, its sharded gradient hangs on the shard, where this look does not reach.
            assert gradients == (whole if gradients_whole else 0 if weights_whole else half)


def test_stage_0_keeps_everything_whole(model_folder: Folder, tmp_path: Path) -> None:
    settings = settings_for(model_folder("llama"), tmp_path, {"zero_stage": 0})
    for rank in run_on_kept_ranks(look_between, 2, settings, rows()):
        whole = rank["whole"]
        assert rank["at_rest"] == [(whole, 0), (whole, 0)]
        assert rank["between"] == [(whole, whole)] * (MICRO_BATCHES - 1)


def evaluate_between(run_settings: dict[str, Any], documents: list[list[models.Document]]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    from fsdp_trainer.step import eval_step, train_step

    run = step_runs.build(run_settings)
    window = step_runs.window_of(run, documents)

    def evaluate() -> float:
        total = sum(eval_step(run, micro_batch) for micro_batch in window.micro_batches)
        run.sharding.reshard_all()
        assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())
        assert isinstance(total, torch.Tensor)
        torch.distributed.all_reduce(total)
        return total.item() / window.supervised_tokens

    evaluated, trained = [], []
    for step in range(3):
        evaluated.append(evaluate())
        trained.append(train_step(run, window, learning_rate=1e-2, optimizer_step=step).loss.item())
        with torch.no_grad():  # a weight change from outside, as a load makes it
            for parameter in run.model.parameters():
                parameter.mul_(0.97)
    return {"evaluated": evaluated, "trained": trained}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_weights_are_shards_again_after_evaluation(zero_stage: int, model_folder: Folder, tmp_path: Path) -> None:
    """Weights left gathered would hide the next change: the loss evaluated is then not the loss trained on."""
    settings = settings_for(model_folder("llama"), tmp_path, {"zero_stage": zero_stage})
    for rank in run_on_kept_ranks(evaluate_between, 2, settings, rows()):
        assert rank["evaluated"] == pytest.approx(rank["trained"], rel=1e-6)
        assert len({round(loss, 3) for loss in rank["trained"]}) == 3


def join_alone() -> None:
    import torch.distributed as dist

    from fsdp_trainer.runtime import build_runtime

    alone = f"file://{tempfile.mkdtemp()}/alone"
    dist.init_process_group("gloo", init_method=alone, rank=0, world_size=1)
    build_runtime(timeout_minutes=1)


def test_fewer_ranks_than_launched_is_an_error() -> None:
    """Two processes that each believe to be alone would train two models, and end with code 0."""
    with pytest.raises(DistributedError, match="launched") as caught:
        run_ranks(join_alone, 2)
    assert "2 launched, 1 " in caught.value.values


def join_after_another_accelerator() -> None:
    from accelerate import Accelerator

    from fsdp_trainer.runtime import build_runtime

    Accelerator(cpu=True)
    build_runtime(timeout_minutes=1)


def test_fsdp_not_active_is_an_error() -> None:
    """An Accelerator that the notebook or script made before decides the distributed type for the whole process."""
    environment = {"ACCELERATE_USE_FSDP": "", "FSDP_VERSION": ""}
    with pytest.raises(DistributedError, match="FSDP is not active"):
        run_ranks(join_after_another_accelerator, 2, environment=environment)


def test_ranks_that_the_settings_do_not_fit(model_folder: Folder, tmp_path: Path) -> None:
    settings = settings_for(model_folder("llama"), tmp_path, {"zero_stage": 3})
    settings["batch"] = {"global_batch_size": 8, "micro_batch_size": 3}
    with pytest.raises(ConfigError, match="global_batch_size"):
        run_ranks(step_runs.build, 2, settings)
