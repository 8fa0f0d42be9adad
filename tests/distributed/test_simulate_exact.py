"""The simulator against real ranks: the same live bytes, to the byte, in every phase and for every technique."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import architectures, live_phases, models, training_runs
from tests.ranks import run_plainly, run_ranks
from tests.sweeps import share, wanted_cases

Folder = Callable[[str], str]

FULL = {"mode": "full"}
# Training waits for a save, and an export follows: gathering tensor by tensor takes long on real ranks.
SAVES_AND_EXPORTS = {"checkpoint": {"async_save": False}, "export": {"at_end": True}}
# model and what differs from the plain settings: fp32, stage 3, chunked loss, fused AdamW, two micro-batches of one
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage0": ("llama", {"sharding": {"zero_stage": 0}, **SAVES_AND_EXPORTS}),
    "stage1-bf16-accumulation": (
        "qwen3",
        {"sharding": {"zero_stage": 1}, "precision": "bf16", "batch": {"global_batch_size": 12, "micro_batch_size": 2}},
    ),
    "stage2-bf16-tied-full": (
        "llama_tied",
        {"sharding": {"zero_stage": 2}, "precision": "bf16", "activation_checkpointing": FULL},
    ),
    "stage3": ("llama", {}),
    "stage3-packed-bf16-full": (
        "qwen3_tied",
        {"data": {"packing": True}, "precision": "bf16", "activation_checkpointing": FULL},
    ),
    "packed-plain-foreach": (
        "llama",
        {"data": {"packing": True}, "loss": {"kind": "plain"}, "optim": {"implementation": "foreach"}},
    ),
    "every-2-plain": (
        "llama",
        {
            "activation_checkpointing": {"mode": "every_n_layers", "every_n": 2},
            "loss": {"kind": "plain"},
            **SAVES_AND_EXPORTS,
        },
    ),
    "fp16": ("qwen3", {"precision": "fp16", "loss": {"chunk_tokens": 7}}),
    "offload-bf16": ("llama", {"sharding": {"offload": "params"}, "precision": "bf16"}),
    "offload-stage1-foreach": (
        "llama",
        {
            "sharding": {"zero_stage": 1, "offload": "params"},
            "optim": {"implementation": "foreach", "max_grad_norm": None},
        },
    ),
    "offload-optimizer-bf16": (
        "llama",
        {
            "sharding": {"zero_stage": 2, "offload": "optimizer"},
            "precision": "bf16",
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
        },
    ),
    "offload-optimizer-device": (
        "qwen3_tied",
        {
            "sharding": {"offload": "optimizer"},
            "optim": {"offload_step": "device"},
            "model": {"freeze": ["model.layers.0"]},
        },
    ),
    "gpt2-dropout-full": ("gpt2_dropout", {"activation_checkpointing": FULL, **SAVES_AND_EXPORTS}),
    "gemma2-eager-softcap": ("gemma2", {"precision": "bf16"}),
    "gemma3-windows-packed": ("gemma3", {"data": {"packing": True}, "precision": "bf16"}),
    "reduce-bf16-frozen": (
        "llama",
        {"sharding": {"reduce_dtype": "bf16"}, "precision": "bf16", "model": {"freeze": ["model.layers.0"]}},
    ),
    "pure-bf16": ("llama", {"precision": "bf16_pure", "activation_checkpointing": FULL}),
    "pure-bf16-stage1-bf16-state": (
        "qwen3",
        {
            "sharding": {"zero_stage": 1, "reduce_dtype": "bf16"},
            "precision": "bf16_pure",
            "optim": {"state_dtype": "bf16"},
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
        },
    ),
    "bf16-state-offload": (
        "llama_tied",
        {"sharding": {"offload": "params"}, "precision": "bf16", "optim": {"state_dtype": "bf16"}},
    ),
    "8bit": ("llama", {"optim": {"name": "adamw_8bit"}}),
    "8bit-pure-bf16-stage1": (
        "qwen3_tied",
        {
            "sharding": {"zero_stage": 1, "reduce_dtype": "bf16"},
            "precision": "bf16_pure",
            "optim": {"name": "adamw_8bit"},
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
        },
    ),
    "8bit-offload-fp16-frozen": (
        "llama",
        {
            "sharding": {"offload": "params"},
            "precision": "fp16",
            "optim": {"name": "adamw_8bit"},
            "model": {"freeze": ["model.layers.0"]},
        },
    ),
    "moe": ("mixtral", {"precision": "bf16", **SAVES_AND_EXPORTS}),
    "moe-router": ("qwen3_moe_router", {"activation_checkpointing": FULL}),
}
# One rank of a kind of its own: FSDP manages none of its weights.
ONE_RANK = {
    "offload-optimizer-alone": (
        "qwen3_tied",
        {
            "sharding": {"offload": "optimizer"},
            "precision": "bf16",
            "activation_checkpointing": FULL,
            "batch": {"global_batch_size": 4, "micro_batch_size": 2},
        },
    ),
}
# On four ranks: two copies of two shards, and backward gathers within pairs.
FOUR_RANKS = {
    "hybrid": ("llama", {"sharding": {"replicate": 2}, "batch": {"global_batch_size": 24, "micro_batch_size": 2}}),
    "reshard2": ("llama", {"sharding": {"reshard_after_forward": 2}, "precision": "bf16"}),
    "hybrid-offload-optimizer-fp16": (
        "llama",
        {
            "sharding": {"replicate": 2, "offload": "optimizer"},
            "precision": "fp16",
            "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        },
    ),
    "hybrid-8bit": ("llama", {"sharding": {"replicate": 2}, "precision": "bf16", "optim": {"name": "adamw_8bit"}}),
    "hybrid-pure-bf16": ("llama", {"sharding": {"replicate": 2}, "precision": "bf16_pure", **SAVES_AND_EXPORTS}),
}


# Of each technique one that has it, in CI; the others are a sweep.
SHARE = (
    *("stage1-bf16-accumulation", "stage3-packed-bf16-full", "every-2-plain", "fp16", "offload-bf16", "moe"),
    *("offload-optimizer-device", "gpt2-dropout-full", "gemma3-windows-packed", "8bit-pure-bf16-stage1"),
    *("hybrid-8bit", "reshard2", "offload-optimizer-alone"),
)
# Where the last rank is simulated too: its rows are shorter, and its shards where nothing divides evenly.
BOTH_ENDS = ("hybrid-8bit", "stage3-packed-bf16-full", "moe", "gpt2-dropout-full")
Case = tuple[dict[str, Any], Any]


MEASURED_AGAIN = 6
RANDOM_STATES = 12_000  # of torch, NumPy and Python


@pytest.fixture(scope="module")
def prepared_cases() -> dict[str, tuple[int, Case]]:
    """What `measured` prepared: world size, settings and rows by case."""
    return {}


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest,
    model_folder: Folder,
    tmp_path_factory: pytest.TempPathFactory,
    prepared_cases: dict[str, tuple[int, Case]],
) -> dict[str, list[tuple[Any, Any]]]:
    """Return for each case what a real rank held and what the simulated one did: of rank 0, and of the last."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    wanted = wanted_cases(request)
    for all_cases, world in ((CASES, 2), (FOUR_RANKS, 4), (ONE_RANK, 1)):
        cases = {name: case for name, case in all_cases.items() if name in wanted}
        if not cases:
            continue
        prepared = {name: prepare(*case, world, model_folder, tmp_path_factory) for name, case in cases.items()}
        prepared_cases |= {name: (world, case) for name, case in prepared.items()}
        real = run_ranks(live_phases.measure_all, world, prepared, timeout=500)
        first = run_ranks(live_phases.simulate_all, 1, prepared, world, 0, timeout=500)[0]
        chosen = {name: case for name, case in prepared.items() if name in BOTH_ENDS}
        last = run_ranks(live_phases.simulate_all, 1, chosen, world, world - 1, timeout=500)[0] if chosen else {}
        found |= {name: [(real[0][name], first[name])] for name in cases}
        for name in last:
            found[name].append((real[-1][name], last[name]))
    return found


def prepare(
    kind: str, sections: dict[str, Any], world: int, model_folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    """Return the settings of a case, and the rows of two steps, as uneven as real ones."""
    folder = tmp_path_factory.mktemp(kind)
    if kind in models.KINDS:
        path = model_folder(kind)
    else:
        path = run_plainly(architectures.save_architecture, kind, str(folder / "model"))[0]
    batch = {"global_batch_size": 4 * world // 2, "micro_batch_size": 2}
    sections = {"batch": batch, "eval": {"at_end": True}, "export": {"at_end": False}, **sections}
    settings = training_runs.settings(path, "unused.jsonl", folder, **sections)
    settings["data"]["eval"] = "unused.jsonl"
    documents = iter(models.make_records(200, seed=3, shortest=12, longest=16)[1])
    per_row = 2 if settings["data"]["packing"] else 1
    rows = settings["batch"]["global_batch_size"]
    return settings, [[[next(documents) for _ in range(per_row)] for _ in range(rows)] for _ in range(2)]


def same(fake: dict[str, int], real: dict[str, int], *, world: int, waits: bool) -> bool:
    """Equal to the byte, but for what a save has besides: a copy the table of ranks, 8 bytes each, of up to two meshes;
    one that training waits for the random states, which are less than any rank's part of a table here."""
    besides = real["save"] - fake["save"]
    allowed = range(RANDOM_STATES) if waits else range(0, 16 * world + 1, 8 * world)
    return {**fake, "save": real["save"]} == real and besides in allowed


@pytest.mark.parametrize("case", share([*CASES, *FOUR_RANKS, *ONE_RANK], SHARE))
@pytest.mark.timeout(900)  # the first one measures all of them: one group of ranks for all cases
def test_live_bytes_are_those_of_real_ranks(
    case: str, measured: dict[str, list[tuple[Any, Any]]], prepared_cases: dict[str, tuple[int, Case]]
) -> None:
    world, prepared = prepared_cases[case]
    waits = not prepared[0].get("checkpoint", {}).get("async_save", True)
    for index, (real, fake) in enumerate(measured[case]):
        assert isinstance(real, dict), real
        assert isinstance(fake, dict), fake
        # Gloo's threads may let go of a tensor late, which only adds: the least of a few measurements is the run's. A
        # save is what it adds to what rests, where such a tensor is taken off: there it is the most.
        for _ in range(MEASURED_AGAIN):
            if same(fake["phases"], real, world=world, waits=waits):
                break
            again = run_ranks(live_phases.measure_all, world, {case: prepared}, timeout=200)[-1 if index else 0][case]
            real = {name: (max if name == "save" else min)(size, again[name]) for name, size in real.items()}
        assert same(fake["phases"], real, world=world, waits=waits), (fake["phases"], real)
        assert set(real) == {"load", "forward", "backward", "clip", "step", "evaluate", "save", "export"}
        assert sum(fake["breakdown"].values()) == fake["peak"]
