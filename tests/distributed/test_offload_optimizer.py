"""Training with gradients, averages and masters on the host equals training with all of them on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs, reference, step_runs, training_runs
from tests.distributed.test_parity import Case, case_sections, data, kind_of, references  # noqa: F401
from tests.ranks import run_ranks

Folder = Callable[[str], str]
OFFLOAD = {"zero_stage": 3, "offload": "optimizer"}
# Each sharding and world size with each accumulation, tie and place of the step somewhere.
CASES: dict[str, tuple[Case, str]] = {
    "stage0-1": (Case("stage0", 1, "none", 4, False, True, "gpt2", "chunked", "on"), "device"),
    "stage1-1": (Case("stage1", 1, "full", 1, True, False, "llama", "plain", "off"), "host"),
    "stage1-2": (Case("stage1", 2, "none", 4, True, True, "qwen3", "chunked", "on"), "host"),
    "stage2-2": (Case("stage2", 2, "every2", 1, False, False, "llama", "chunked", "on"), "device"),
    "stage2-4": (Case("stage2", 4, "full", 4, True, True, "gemma2", "plain", "on"), "host"),
    "stage3-1": (Case("stage3", 1, "full", 4, True, True, "llama", "chunked", "on"), "host"),
    "stage3-2": (Case("stage3", 2, "full", 4, True, False, "qwen3", "chunked", "on"), "host"),
    "stage3-4": (Case("stage3", 4, "none", 1, False, True, "gpt2", "plain", "off"), "device"),
    "hybrid-4": (Case("hybrid", 4, "full", 4, True, True, "qwen3", "chunked", "on"), "host"),
    "reshard2-4": (Case("reshard2", 4, "full", 4, False, False, "llama", "chunked", "on"), "device"),
}


@pytest.mark.parametrize("case", CASES)
def test_fp32_parity(case: str, model_folder: Folder, data: Any, references: Any, tmp_path: Path) -> None:  # noqa: F811
    how, where = CASES[case]
    expected = references(kind_of(how), how.packing, how.clip)
    sections = case_sections(how)
    sections["sharding"] |= {"offload": "optimizer"}
    sections["optim"] |= {"offload_step": where}
    run = training_runs.settings(model_folder(kind_of(how)), data[how.packing][0], tmp_path, **sections)
    got = run_ranks(training_runs.train, how.world, run, timeout=120)[0]
    rows = [row for row in got["metrics"] if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=1e-4)
    errors = reference.movement_errors(got["weights"], expected)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


def steps(runs: dict[str, dict[str, Any]], count: int) -> dict[str, Any]:
    """Take the same steps in each way; return (loss, norm, skipped) of each, the weights' norms and their dtypes."""
    from fsdp_trainer.optim.masters import trained_weights
    from fsdp_trainer.step import train_step

    rows, found = checkpoint_runs.documents(), {}
    for name, settings in runs.items():
        run, outputs, moves = step_runs.build(settings), [], 0
        for step in range(count):
            window = step_runs.window_of(run, rows[step:] + rows[:step])
            output = train_step(run, window, learning_rate=1e-3, optimizer_step=moves)
            moves += not output.skipped.item()
            outputs.append((output.loss.item(), output.grad_norm.item(), output.skipped.item()))
        sizes = [
            step_runs.whole(tensor).double().norm().item()
            for tensor in trained_weights(run.model, run.optimizer).values()
        ]
        dtypes = {(str(p.dtype), p.requires_grad) for p in run.model.parameters()}
        found[name] = outputs, sizes, sorted(dtypes)
    return found


def both(path: str, folder: Path, /, **sections: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of the same run without offload, with it, and with its step on the device."""
    made = {}
    for name, more in {"none": {}, "host": {"offload_step": "host"}, "device": {"offload_step": "device"}}.items():
        changed = {key: dict(value) if isinstance(value, dict) else value for key, value in sections.items()}
        if more:
            changed["sharding"] = changed.get("sharding", {}) | {"offload": "optimizer"}
            changed["optim"] = changed.get("optim", {}) | more
        made[name] = training_runs.settings(path, "unused.jsonl", folder, **changed)
    return made


ALIKE: dict[str, tuple[int, str, dict[str, Any], float]] = {
    "three ranks, uneven, frozen, decayed": (
        3,
        "llama_tied",
        {
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
            "model": {"freeze": ["model.layers.0"]},
            "optim": {"weight_decay": 0.5, "no_decay": ["norm"]},
        },
        1e-6,
    ),
    "bf16 on two ranks": (
        2,
        "qwen3",
        {"precision": "bf16", "batch": {"global_batch_size": 8, "micro_batch_size": 2}},
        1e-3,
    ),
    "bf16 alone": (1, "llama", {"precision": "bf16", "batch": {"global_batch_size": 8, "micro_batch_size": 2}}, 1e-3),
    "fp16 in pairs": (
        4,
        "llama",
        {"precision": "fp16", "sharding": {"replicate": 2}, "batch": {"global_batch_size": 16, "micro_batch_size": 2}},
        1e-3,
    ),
    "bf16_pure": (
        2,
        "llama",
        {"precision": "bf16_pure", "batch": {"global_batch_size": 8, "micro_batch_size": 4}},
        1e-2,
    ),
    "8 bits": (
        2,
        "llama",
        {
            "precision": "bf16",
            "optim": {"name": "adamw_8bit"},
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
        },
        1e-3,
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_the_same_numbers_as_without(case: str, model_folder: Folder, tmp_path: Path) -> None:
    """Losses, norms, skipped steps and masters are those of the run on the device."""
    world, kind, sections, tolerance = ALIKE[case]
    got = run_ranks(steps, world, both(model_folder(kind), tmp_path, **sections), 4, timeout=200)[0]
    outputs, sizes, _ = got["none"]
    for name in ("host", "device"):
        assert [x for row in got[name][0] for x in row] == pytest.approx(
            [x for row in outputs for x in row], rel=tolerance
        )
        assert got[name][1] == pytest.approx(sizes, rel=tolerance)
    compute = {"bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}.get(sections.get("precision"), "float32")
    assert {dtype for dtype, _ in got["host"][2]} == {f"torch.{compute}"}


def test_an_overflow_in_fp16_is_skipped(model_folder: Folder, tmp_path: Path) -> None:
    """The host finds what is not finite, the scale falls, and the steps that fit move the weights."""
    from tests.distributed.test_kind_h_schedule import with_large_gradients

    model = run_ranks(with_large_gradients, 1, model_folder("llama"), tmp_path / "model")[0]
    batch = {"global_batch_size": 4, "micro_batch_size": 1}
    got = run_ranks(steps, 2, both(model, tmp_path, precision="fp16", batch=batch), 8)[0]
    skipped = [row[2] for row in got["none"][0]]
    assert skipped[0] == 1 and skipped[-1] == 0
    for name in ("host", "device"):
        assert [row[2] for row in got[name][0]] == skipped
        assert [row[0] for row in got[name][0]] == pytest.approx([row[0] for row in got["none"][0]], rel=1e-2)


def resumes(plain: dict[str, Any], offloaded: dict[str, Any], folder: str) -> dict[str, Any]:
    """Interrupt an offloaded run after two of four steps, and go from plain to offloaded and back, a step each."""
    from fsdp_trainer.checkpoint_folder import checkpoint_path

    def go(settings: dict[str, Any], name: str, first: int, last: int, *, start: str | None = None) -> Any:
        run = checkpoint_runs.build(settings | {"output_dir": f"{folder}/{name}"})
        if start is not None:
            progress = checkpoint_runs.load(run, checkpoint_path(Path(f"{folder}/{start}"), first))
            assert progress.optimizer_steps == first
        checkpoint_runs.take_steps(run, first, last)
        checkpoint_runs.save(run, last, process_group=checkpoint_runs.save_group(), asynchronous=True).wait()
        return run

    straight = checkpoint_runs.local_digests(go(offloaded, "straight", 0, 4))
    go(offloaded, "cut", 0, 2)
    cut = checkpoint_runs.local_digests(go(offloaded, "cut", 2, 4, start="cut"))
    whole = step_runs.parameters(go(plain, "plain", 0, 4))
    go(plain, "turns", 0, 1)
    go(offloaded, "turns", 1, 3, start="turns")
    turned = step_runs.parameters(go(plain, "turns", 3, 4, start="turns"))
    furthest = max(((turned[name] - whole[name]).norm() / whole[name].norm()).item() for name in whole)
    return {"differing": checkpoint_runs.differing(straight, cut), "entries": len(straight), "furthest": furthest}


@pytest.mark.parametrize(
    ("precision", "name", "where"),
    [("bf16", "adamw", "host"), ("bf16_pure", "adamw", "device"), ("bf16", "adamw_8bit", "device")],
)
def test_resume(precision: str, name: str, where: str, model_folder: Folder, tmp_path: Path) -> None:
    """Bitwise in itself; and a run may be offloaded between two checkpoints and not before and after."""
    sections: dict[str, Any] = {"batch": {"global_batch_size": 8, "micro_batch_size": 2}, "precision": precision}
    sections["optim"] = {"name": name}
    made = both(model_folder("llama_tied"), tmp_path, **sections)
    got = run_ranks(resumes, 2, made["none"], made[where], str(tmp_path), timeout=200)
    for rank in got:
        assert rank["differing"] == [] and rank["entries"] > 30
        assert rank["furthest"] < (1e-6 if made[where]["optim"]["name"] == "adamw" and precision == "bf16" else 2e-2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_reads_the_same_tensors(
    before: int, after: int, model_folder: Folder, tmp_path: Path
) -> None:
    """One rank alone keeps plain tensors where several have shards: a checkpoint does not show it."""
    batch = {"global_batch_size": 8, "micro_batch_size": 2}
    run = both(model_folder("llama_tied"), tmp_path, precision="bf16", batch=batch)["host"]
    straight = run_ranks(checkpoint_runs.train_and_save, before, run, 1, 1, False)
    resumed = run_ranks(checkpoint_runs.resume_and_train, after, run, 1)
    for rank in resumed:
        assert checkpoint_runs.differing(straight[0]["whole"], rank["whole"]) == []


def fits_one_card(folder: str) -> dict[str, Any]:
    """Extrapolate an 8B model of 128k words over its layers; return each phase's peak in GiB, by number of cards."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.extrapolate import extrapolate
    from fsdp_trainer.memory.hardware import parse_gpus

    found = {}
    for cards in (1, 2):
        config = Config.from_dict(
            {
                "model": {"path": folder},
                "data": {"packing": False, "seq_len": 2048},
                "precision": "bf16",
                "sharding": OFFLOAD,
                "batch": {"global_batch_size": 16, "micro_batch_size": 2},
            }
        )
        guessed = extrapolate(config, parse_gpus(f"{cards}x4090"))
        found[cards] = max(guessed.phases.values()) / 2**30, guessed.linear
    return found


@pytest.mark.slow
def test_an_8b_model_trains_on_one_card_of_24_gb(tmp_path: Path) -> None:
    """With clipping and accumulation on, in what others need without both: 18.9 GiB."""
    source = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-3.1-8b.json"
    (tmp_path / "config.json").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    got = run_ranks(fits_one_card, 1, str(tmp_path), timeout=300)[0]
    for cards in (1, 2):
        allocated, is_linear = got[cards]
        assert is_linear
        assert 10 < allocated < 18.9, cards
