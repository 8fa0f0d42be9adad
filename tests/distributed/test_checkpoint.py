"""A resumed run is the run that was saved, bit for bit, whatever it is sharded over; a failed save costs nothing."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    return settings(model, "unused.jsonl", folder, **sections)


# Resume is the same run

WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one_rank": ("llama", 1, {}),
    "zero_3": ("llama", 2, {}),
    "zero_3_tied_dropout": ("gpt2_dropout", 2, {"activation_checkpointing": {"mode": "full"}}),
    "zero_2_accumulation": ("qwen3", 2, {"sharding": {"zero_stage": 2}, "batch": {"micro_batch_size": 2}}),
    "zero_0": ("llama_tied", 2, {"sharding": {"zero_stage": 0}}),
    "offloaded": ("llama", 2, {"sharding": {"zero_stage": 3, "offload": "params"}}),
    "bf16": ("llama_tied", 2, {"precision": "bf16"}),
    "pure_bf16": ("llama", 2, {"precision": "bf16_pure", "optim": {"state_dtype": "bf16"}}),
    "bf16_averages_offloaded": (
        "llama_tied",
        2,
        {"precision": "bf16", "sharding": {"offload": "params"}, "optim": {"state_dtype": "bf16"}},
    ),
    "fp16_scaler": ("llama", 2, {"precision": "fp16"}),
    "hybrid": ("llama", 4, {"sharding": {"zero_stage": 3, "replicate": 2}}),
    "8bit_fp16_scaler": ("qwen3", 2, {"precision": "fp16", "optim": {"name": "adamw_8bit"}}),
    "8bit_pure_bf16_hybrid": (
        "llama",
        4,
        {"precision": "bf16_pure", "sharding": {"replicate": 2}, "optim": {"name": "adamw_8bit"}},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_resume_equals_uninterrupted_bitwise(way: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    kind, world, sections = WAYS[way]
    config = tiny(model_folder(kind), tmp_path, **sections)
    straight = run_on_kept_ranks(runs.train_and_save, world, config, 4, 2, way != "zero_3")
    resumed = run_ranks(runs.resume_and_train, world, config, 4)
    for rank in range(world):
        assert runs.differing(straight[rank]["at_save"], resumed[rank]["loaded"]) == []
        assert runs.differing(straight[rank]["end"], resumed[rank]["end"]) == []
        assert runs.differing(straight[rank]["at_save"], straight[rank]["end"]), (
            "the steps after the save did something"
        )
        assert resumed[rank]["progress"].tokens_seen == 200
        assert resumed[rank]["notes"] == []


def test_save_before_first_step_changes_nothing(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of a dummy step that creates state (as torch's own helper takes one) and shifts the bias correction."""
    config = tiny(model_folder("llama"), tmp_path)
    unsaved = run_on_kept_ranks(runs.train_and_save, 2, config, 2, None, False)
    saved = run_on_kept_ranks(runs.train_and_save, 2, config, 2, 0, False)
    resumed = run_ranks(runs.resume_and_train, 2, config, 2)
    for rank in range(2):
        assert runs.differing(unsaved[rank]["end"], saved[rank]["end"]) == []
        assert runs.differing(unsaved[rank]["end"], resumed[rank]["end"]) == []


@pytest.mark.parametrize(
    ("before", "after", "sharding"),
    [(2, 1, {}), (1, 2, {}), (2, 4, {"replicate": 2}), (4, 2, {"zero_stage": 0})],
    ids=["2_to_1", "1_to_2", "2_to_hybrid_4", "4_to_replicated_2"],
)
def test_other_world_size_reads_the_same_tensors(
    before: int, after: int, sharding: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = model_folder("gpt2")
    straight = run_on_kept_ranks(runs.train_and_save, before, tiny(model, tmp_path), 1, 1, False)
    resumed = run_ranks(runs.resume_and_train, after, tiny(model, tmp_path, sharding=sharding), 2)
    again = run_ranks(runs.resume_and_train, after, tiny(model, tmp_path, sharding=sharding), 2)
    for rank in range(after):
        assert runs.differing(straight[0]["whole"], resumed[rank]["whole"]) == []
        # The random states are new, but the same in every resume.
        assert runs.differing(resumed[rank]["end"], again[rank]["end"]) == []
    assert f"saved by {before} ranks, this run has {after}" in resumed[0]["notes"][0]
    assert after == 1 or resumed[0]["loaded"]["rng.0.cpu"] != resumed[1]["loaded"]["rng.1.cpu"]


def small_tensors(settings: dict[str, Any]) -> tuple[bool, list[str]]:
    """Save a model in which some ranks hold no row of some tensors, and load it again in the same process."""
    import torch

    run = runs.build(settings)
    empty = any(p.to_local().numel() == 0 for p in run.model.parameters())  # type: ignore[operator]
    before = runs.local_digests(run)
    path = runs.save(run, 1).wait()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    runs.load(run, path)
    return empty, runs.differing(before, runs.local_digests(run))


def test_uneven_and_empty_shards_round_trip(tmp_path: Path) -> None:
    folder = run_ranks(save_narrow_model, 1, str(tmp_path / "model"))[0]
    answers = run_ranks(small_tensors, 4, tiny(folder, tmp_path))
    assert any(empty for empty, _ in answers), "a rank with an empty shard is what this is about"
    assert [wrong for _, wrong in answers] == [[], [], [], []]


def save_narrow_model(folder: str) -> str:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.models import build_tokenizer

    config = LlamaConfig(
        vocab_size=161,
        hidden_size=6,
        intermediate_size=5,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=64,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


# Background saves; what they copy is test_background_copy.py's


def save_twice_through_one_memory(settings: dict[str, Any]) -> list[list[str]]:
    run = runs.build(settings)
    group, memory = runs.save_group(), {}
    pending, before, paths = None, [], []
    for step in (1, 2):
        runs.take_steps(run, step - 1, step)
        before.append(runs.local_digests(run))
        pending = runs.save(run, step, asynchronous=True, process_group=group, after=pending, memory=memory)
        paths.append(pending.path)
    runs.take_steps(run, 2, 3)
    assert pending is not None
    pending.wait()
    wrong = []
    for digests, path in zip(before, paths, strict=True):
        runs.load(run, path)
        wrong.append(runs.differing(digests, runs.local_digests(run)))
    return wrong


def test_host_memory_is_reused_without_mixing_two_saves(model_folder: ModelFolder, tmp_path: Path) -> None:
    answers = run_ranks(save_twice_through_one_memory, 2, tiny(model_folder("llama"), tmp_path))
    assert answers == [[[], []], [[], []]]


def save_in_a_row(settings: dict[str, Any]) -> dict[str, Any]:
    run = runs.build(settings)
    group = runs.save_group()
    pending, polls = None, 0
    for step in (1, 2, 3):
        runs.take_steps(run, step - 1, step)
        pending = runs.save(run, step, asynchronous=True, process_group=group, after=pending, keep_latest=2)
    assert pending is not None
    while not pending.poll():
        polls += 1
    return {"names": sorted(path.name for path in (Path(run.config.output_dir) / "checkpoints").iterdir())}


def test_one_save_in_flight_and_old_ones_pruned(model_folder: ModelFolder, tmp_path: Path) -> None:
    answers = run_ranks(save_in_a_row, 2, tiny(model_folder("llama"), tmp_path))
    assert [answer["names"] for answer in answers] == [["step-00000002", "step-00000003"]] * 2


# A save that fails


def fail_on_one_rank(settings: dict[str, Any], asynchronous: bool, failing: int) -> dict[str, Any]:
    """Save, save again where one rank cannot write more than 4 KiB to a file, and save once more without the limit."""
    import torch.distributed as dist

    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    run = runs.build(settings)
    group = runs.save_group()
    output_dir = Path(run.config.output_dir)
    runs.save(run, 1, process_group=group).wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.runtime.rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    message, polls = "", 0
    try:
        pending = runs.save(run, 2, asynchronous=asynchronous, process_group=group, keep_latest=1)
        while not pending.poll():
            polls += 1
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = find_checkpoint(output_dir, resume="auto")
    names = sorted(path.name for path in (output_dir / "checkpoints").iterdir())
    dist.barrier()  # both ranks have looked before the next save begins
    last = runs.save(run, 3, process_group=group).wait()
    return {"message": message, "polls": polls, "left": left and left.name, "names": names, "last": last.is_dir()}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("failing", [0, 1])
def test_failing_write_on_one_rank_is_known_to_all(
    asynchronous: bool, failing: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    answers = run_ranks(fail_on_one_rank, 2, tiny(model_folder("llama"), tmp_path), asynchronous, failing)
    for answer in answers:
        assert f"rank {failing}: " in answer["message"]
        assert "File too large" in answer["message"], answer["message"]
        assert answer["left"] == "step-00000001"
        assert answer["names"] == ["step-00000001"], "nothing half-written stays, nothing good is pruned"
        assert answer["last"]
    assert answers[0]["polls"] == answers[1]["polls"], "every rank raises at the same poll"


def copy_in_vain(settings: dict[str, Any]) -> tuple[str, list[str]]:
    """Save, and again in the background where rank 1 has no memory for the copy; return what is said and is left."""
    from fsdp_trainer.errors import OutOfMemory

    class NoMemory(dict[str, Any]):
        def __setitem__(self, name: str, tensor: Any) -> None:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")

    run = runs.build(settings)
    group = runs.save_group()
    runs.save(run, 1, process_group=group).wait()
    memory = NoMemory() if run.runtime.rank == 1 else {}
    pending = runs.save(run, 2, asynchronous=True, process_group=group, memory=memory, keep_latest=1)
    said = ""
    try:
        while not pending.poll():
            runs.take_steps(run, 0, 1)
    except OutOfMemory as error:
        said = str(error)
    return said, sorted(path.name for path in (Path(run.config.output_dir) / "checkpoints").iterdir())


def test_a_rank_without_memory_for_the_copy_is_heard_of_on_all(model_folder: ModelFolder, tmp_path: Path) -> None:
    for said, names in run_ranks(copy_in_vain, 2, tiny(model_folder("llama"), tmp_path)):
        assert said.startswith("The state to save could not be copied to host memory.")
        assert "not enough memory" in said and "checkpoint.async_save: false" in said
        assert names == ["step-00000001"]


def save_where_a_file_lies(settings: dict[str, Any]) -> str:
    from fsdp_trainer.errors import CheckpointError

    run = runs.build(settings)
    try:
        runs.save(run, 1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_unusable_folder_is_named_on_all_ranks(model_folder: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    for message in run_ranks(save_where_a_file_lies, 2, tiny(model_folder("llama"), tmp_path)):
        assert message.startswith("The checkpoint could not be written")
        assert "Error" in message
        assert str(tmp_path) in message


# What is refused


def resume_problem(settings: dict[str, Any], path: str, freeze: str) -> str:
    """Return what loading `path` says; parameters whose name contains `freeze` are not trained."""
    import torch

    from fsdp_trainer.errors import CheckpointError

    run = runs.build(settings)
    if freeze:
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(freeze not in name)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        run = type(run)(**{**vars(run), "optimizer": torch.optim.AdamW(trained, fused=True)})
    try:
        runs.load(run, Path(path))
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.fixture(scope="module")
def saved(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama after one step on one rank."""
    folder = tmp_path_factory.mktemp("saved")
    run_on_kept_ranks(runs.train_and_save, 1, tiny(model_folder("llama"), folder), 1, 1, False)
    return folder / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(
    ("kind", "freeze", "said"),
    [
        ("llama_tied", "", "model.lm_head.weight is not in this run"),
        ("gpt2", "", "model.transformer.h.0.attn.c_attn.bias is missing"),
        ("llama", "norm", "optim.model.layers.0.input_layernorm.weight.exp_avg is not in this run"),
    ],
    ids=["tie", "other_model", "frozen_since"],
)
def test_checkpoint_of_another_run_is_refused(
    kind: str, freeze: str, said: str, saved: Path, model_folder: ModelFolder, tmp_path: Path
) -> None:
    config = tiny(model_folder(kind), tmp_path)
    messages = run_ranks(resume_problem, 2, config, str(saved), freeze)
    assert said in messages[0]
    assert messages[0] == messages[1]


def test_other_precision_is_refused(saved: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    config = tiny(model_folder("llama"), tmp_path, precision="fp16")
    message = run_ranks(resume_problem, 1, config, str(saved), "")[0]
    assert "saved without a gradient scaler, this run is with one" in message


def save_partly_frozen(settings: dict[str, Any]) -> list[str]:
    import torch

    run = runs.build(settings)
    for name, parameter in run.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    run = type(run)(**{**vars(run), "optimizer": torch.optim.AdamW(trained, fused=True)})
    path = runs.save(run, 1).wait()
    from fsdp_trainer.checkpoint import _stored_tensors

    return sorted(name for name in _stored_tensors(path) if name.startswith("optim."))


def test_missing_optimizer_entries_are_an_error(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The kind of optimizer state that is left out in silence, so that a resumed run warms up anew."""
    config = tiny(model_folder("llama_tied"), tmp_path)
    entries = run_ranks(save_partly_frozen, 1, config)[0]
    assert entries
    assert all("norm" in name for name in entries), "a frozen parameter has no state"
    message = run_ranks(resume_problem, 1, config, str(tmp_path / "checkpoints" / "step-00000001"), "")[0]
    assert "optim.model.embed_tokens.weight.exp_avg is missing" in message


# Damaged and partial folders


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "no_state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "cut_state": (lambda path: _cut(path / "state.json") or _cut(path / "state.json"), "state.json cannot be read"),
    "empty_state": (lambda path: (path / "state.json").write_text("{}"), "state.json cannot be read (KeyError"),
    "no_part": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "cut_part": (lambda path: _cut(path / "__0_0.distcp"), "__0_0.distcp has"),
    "foreign_file": (lambda path: (path / "__9_0.distcp").write_bytes(b""), "__9_0.distcp does not belong to it"),
    "linked_part": (lambda path: _link(path / "__0_0.distcp"), "__0_0.distcp is no plain file"),
    "edited_state": (
        lambda path: (path / "state.json").write_text(
            (path / "state.json").read_text().replace('"tokens_seen": 100', '"tokens_seen": 101')
        ),
        "its bytes do not fit its digest",
    ),
    "newer_format": (
        lambda path: (path / "state.json").write_text(
            (path / "state.json").read_text().replace('"format": 2', '"format": 9')
        ),
        "format 9",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_skipped_and_refused_by_path(damage: str, saved: Path, tmp_path: Path) -> None:
    from fsdp_trainer.checkpoint_manifest import find_damage

    good, bad = tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / "step-00000002"
    shutil.copytree(saved, good)
    shutil.copytree(saved, bad)
    DAMAGE[damage][0](bad)
    assert find_damage(good) is None
    assert DAMAGE[damage][1] in (find_damage(bad) or "")
    found, notes, message = run_ranks(find, 2, str(tmp_path), str(bad))[0]
    assert found == str(good)
    assert notes == [f"skipped {bad}: {find_damage(bad)}"]
    assert DAMAGE[damage][1] in message


def find(output_dir: str, explicit: str) -> tuple[str, list[str], str]:
    import torch.distributed as dist

    from fsdp_trainer.checkpoint_search import find_checkpoint
    from fsdp_trainer.errors import CheckpointError

    dist.init_process_group("gloo")
    notes: list[str] = []
    found = find_checkpoint(Path(output_dir), resume="auto", log=notes.append)
    assert find_checkpoint(Path(output_dir), resume="never") is None
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint(Path(output_dir), resume=explicit)
    return str(found), notes, str(raised.value)


def test_what_a_kill_leaves_is_never_chosen_and_goes_at_the_next_start(saved: Path, tmp_path: Path) -> None:
    from fsdp_trainer.checkpoint_folder import published, remove_leftovers

    folder = tmp_path / "checkpoints"
    assert published(tmp_path) == []
    shutil.copytree(saved, folder / "step-00000001")
    shutil.copytree(saved, folder / ".step-00000002.tmp")
    shutil.copytree(saved, folder / ".step-00000000.deleting")
    (folder / "notes.txt").write_text("a user's own file")
    assert [path.name for path in published(tmp_path)] == ["step-00000001"]
    assert sorted(path.name for path in remove_leftovers(tmp_path)) == [".step-00000000.deleting", ".step-00000002.tmp"]
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "step-00000001"]


def test_prune_keeps_the_newest_complete_ones(saved: Path, tmp_path: Path) -> None:
    from fsdp_trainer.checkpoint_folder import prune, published

    for step in (10, 9, 100, 2, 30):
        shutil.copytree(saved, tmp_path / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "checkpoints" / "step-00000100" / ".metadata").unlink()
    prune(tmp_path, keep_latest=2)
    # The damaged newest one does not count: two good ones stay.
    assert [int(path.name[5:]) for path in published(tmp_path)] == [100, 30, 10]
    went_back = tmp_path / "checkpoints" / "step-00000005"
    shutil.copytree(saved, went_back)
    prune(tmp_path, keep_latest=1, keep=[went_back])
    assert [int(path.name[5:]) for path in published(tmp_path)] == [100, 30, 5]


def test_state_says_what_the_run_was(saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    assert state["progress"] == {
        "step": 1,
        "optimizer_steps": 1,
        "skipped_steps": 0,
        "consecutive_skipped": 0,
        "tokens_seen": 100,
        "supervised_tokens_seen": 0,
        "stream": None,
    }
    assert state["facts"] == runs.FACTS
    assert state["world_size"] == 1
    assert {name for group in state["param_groups"] for name in group["names"]} >= {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert [group["betas"] for group in state["param_groups"]] == [[0.9, 0.95]] * 2
    assert set(state["files"]) == {".metadata", "__0_0.distcp"}
