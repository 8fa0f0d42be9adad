"""8-bit optimizers (reports J): local shards, whole checkpoints, one rule for which tensors, 32-bit embeddings.

Entries 73 to 79: bitsandbytes refuses FSDP2's tensors, FSDP1's gathering loses other ranks' state, which tensors are
8-bit follows the wrapping, embeddings are unstable in 8 bits, `prepare` gives another optimizer, offloading breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from tests import checkpoint_runs as runs
from tests import eight_bit_runs, models, training_runs
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.training_runs import settings

Folder = Callable[[str], str]
EIGHT_BIT = {"optim": {"name": "adamw_8bit"}, "batch": {"global_batch_size": 12, "micro_batch_size": 1}}
MLP = {
    f"model.layers.{layer}.mlp.{part}_proj.weight"
    for layer in range(models.N_LAYERS)
    for part in ("gate", "up", "down")
}


def eight_bit(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return settings(model, "unused.jsonl", folder, **{**EIGHT_BIT, **sections})


# 73, 76, 77, 78, 79: it steps on every sharding, on the same tensors

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stage0": (2, {"sharding": {"zero_stage": 0}}),
    "stage1": (2, {"sharding": {"zero_stage": 1}}),
    "stage2": (3, {"sharding": {"zero_stage": 2}}),
    "stage3": (4, {}),
    "hybrid": (4, {"sharding": {"replicate": 2}}),
    "offload": (2, {"sharding": {"offload": "params"}, "precision": "bf16"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kind_76_77_the_same_tensors_are_8bit_in_every_layout(
    layout: str, model_folder: Folder, tmp_path: Path
) -> None:
    """Reports 73, 76, 77 and 79: a step is taken on shards of every kind and on the host, and what is a norm, a bias or
    an embedding has fp32 moments in each."""
    world, sections = LAYOUTS[layout]
    for rank in run_on_kept_ranks(
        eight_bit_runs.state_kinds, world, eight_bit(model_folder("llama"), tmp_path, **sections)
    ):
        assert eight_bit_runs.eight_bit_names(rank["kinds"]) == MLP | {"lm_head.weight"}
        for name, state in rank["kinds"].items():
            if name not in MLP | {"lm_head.weight"}:
                assert state == {"exp_avg": "float32", "exp_avg_sq": "float32"}, name


def test_kind_77_a_tied_head_is_an_embedding(model_folder: Folder, tmp_path: Path) -> None:
    """Report 77: whatever name it goes by."""
    for rank in run_on_kept_ranks(eight_bit_runs.state_kinds, 2, eight_bit(model_folder("llama_tied"), tmp_path)):
        assert eight_bit_runs.eight_bit_names(rank["kinds"]) == MLP
        assert rank["kinds"]["model.embed_tokens.weight"] == {"exp_avg": "float32", "exp_avg_sq": "float32"}


def test_kind_78_prepare_leaves_the_optimizer_as_it_is(model_folder: Folder, tmp_path: Path) -> None:
    """Report 78: the same object, still with codes; another one would take four times the memory."""
    for rank in run_on_kept_ranks(eight_bit_runs.state_kinds, 2, eight_bit(model_folder("llama"), tmp_path)):
        assert rank["optimizer"] == "ShardedAdamW"
        assert rank["same"]
        assert sum("8 bits" in fact for fact in rank["facts"]) == 1
        assert sum("slow" in fact for fact in rank["facts"]) == 1


# 74, 75: what is saved is everything that every rank had


@pytest.mark.parametrize("world", [2, 4])
def test_kind_74_75_every_ranks_codes_and_scales_come_back(world: int, model_folder: Folder, tmp_path: Path) -> None:
    """Reports 74 and 75: one rank's half saved for all, or nothing of the others at all."""
    config = eight_bit(model_folder("llama"), tmp_path)
    straight = run_on_kept_ranks(runs.train_and_save, world, config, 3, 2, True)
    resumed = run_ranks(runs.resume_and_train, world, config, 3)
    digests = [
        {name: digest for name, digest in rank["at_save"].items() if "codes" in name or "absmax" in name}
        for rank in straight
    ]
    assert len(digests[0]) == 4 * (len(MLP) + 1)
    assert len({digests[rank]["optim.lm_head.weight.exp_avg_codes"] for rank in range(world)}) == world
    for rank in range(world):
        assert runs.differing(digests[rank], {name: resumed[rank]["loaded"][name] for name in digests[rank]}) == []
        assert runs.differing(straight[rank]["end"], resumed[rank]["end"]) == []


def test_kind_74_a_stopped_run_goes_on_as_the_uninterrupted_one(model_folder: Folder, tmp_path: Path) -> None:
    """Report 74, through `finetune`: the same losses and the same exported weights, to the bit."""
    records, _ = models.make_records(40, seed=0)
    file = models.write_jsonl(records, tmp_path / "train.jsonl")
    found = {}
    for name, lengths in {"straight": (6,), "stopped": (3, 6)}.items():
        for max_steps in lengths:
            run = settings(
                model_folder("llama"),
                file,
                tmp_path / name,
                optim=EIGHT_BIT["optim"],
                schedule={"name": "constant", "min_lr_ratio": 0.1, "warmup_steps": 1},
                train={"max_steps": max_steps},
                checkpoint={"every_steps": 3, "resume": "auto"},
            )
            found[name] = run_on_kept_ranks(training_runs.train, 2, run, timeout=120)[0]
    losses = [[row["loss"] for row in found[name]["metrics"] if "loss" in row] for name in found]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]
    for name, weight in found["straight"]["weights"].items():
        assert torch.equal(weight, found["stopped"]["weights"][name]), name


# 79: what cannot work is refused before anything starts


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optim": {"name": "paged_adamw_8bit"}, "sharding": {"offload": "optimizer"}}, "optim.name"),
        ({"optim": {"name": "adamw_8bit", "implementation": "foreach"}}, "optim.implementation"),
        ({"optim": {"name": "adamw_8bit", "state_dtype": "bf16"}}, "optim.state_dtype"),
    ],
    ids=["paged", "foreach", "bf16_state"],
)
def test_kind_79_refused_with_the_reason(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Report 79: what cannot be combined is said before anything starts."""
    with pytest.raises(ConfigError, match=said):
        Config.from_dict(settings("model", "unused.jsonl", tmp_path, **sections))


def test_kind_79_paged_moments_never_become_plain_ones_in_silence(model_folder: Folder, tmp_path: Path) -> None:
    """Report 79: on a CPU, where bitsandbytes warns and goes on without."""
    run = settings(model_folder("llama"), "unused.jsonl", tmp_path, optim={"name": "paged_adamw_8bit"})
    with pytest.raises(ConfigError, match="paged_adamw_8bit on cpu") as caught:
        run_on_kept_ranks(eight_bit_runs.state_kinds, 1, run)
    assert "optim.name: adamw_8bit" in str(caught.value)
