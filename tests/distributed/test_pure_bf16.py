"""bf16 weights without masters and bf16 averages: they learn what fp32 ones learn, and replicas and resumes agree.

Reports 68: at a learning rate far below bf16's grid no norm weight moves where an update is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import architectures, checkpoint_runs, models, step_runs, training_runs
from tests.checkpoint_runs import digest
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks
from tests.sweeps import share

Folder = Callable[[str], str]
Rows = list[list[models.Document]]
PURE = {"precision": "bf16_pure"}


def rows_of(count: int, seed: int = 12) -> Rows:
    return [[document] for document in models.make_records(count, seed=seed)[1]]


def settings(path: str, folder: Path, /, *, rows: int = 8, **sections: Any) -> dict[str, Any]:
    """Return the settings of a tiny run of steps over `rows` rows."""
    batch = {"global_batch_size": rows, "micro_batch_size": 2}
    return training_runs.settings(path, "unused.jsonl", folder, **{"batch": batch, **sections})


def save_narrow(source: str, target: Path) -> str:
    """Save the model of `source` in bf16, so that every precision starts from the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return str(target)


# Gradients


def gradients_of(run_settings: dict[str, Any], rows: Rows, torch_alone: bool) -> dict[str, Any]:
    """Take a step; return the whole gradients after clipping, the norm before, and the shards' own dtypes."""
    from fsdp_trainer import sharding
    from fsdp_trainer.step import train_step

    if torch_alone:
        sharding.keep_reduced_gradients = lambda unit, dtype: None  # this rank's process ends with the test
    run, dtypes = step_runs.build(run_settings), set()
    run.optimizer.register_step_pre_hook(
        lambda *_: dtypes.update(str(p.grad.dtype) for p in run.model.parameters() if p.grad is not None)
    )
    with step_runs.captured_gradients(run) as gradients:
        output = train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    return {"gradients": gradients, "norm": output.grad_norm.item(), "dtypes": dtypes, "facts": run.facts}


def gradients_of_both(runs: list[dict[str, Any]], rows: Rows) -> list[dict[str, Any]]:
    return [gradients_of(run_settings, rows, False) for run_settings in runs]


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "stage0": (2, {"zero_stage": 0}),
    "stage1": (2, {"zero_stage": 1}),
    "stage2": (2, {"zero_stage": 2}),
    "stage3": (2, {"zero_stage": 3}),
    "offload": (2, {"offload": "params"}),
    "uneven": (3, {}),
    "hybrid": (4, {"replicate": 2}),
    "reshard": (4, {"reshard_after_forward": 2}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_those_of_masters_to_the_bit(mesh: str, model_folder: Folder, tmp_path: Path) -> None:
    """From the same weights, over two micro-batches, clipped: reduced, summed and kept in fp32 in both."""
    world, sharding = MESHES[mesh]
    model = run_plainly(save_narrow, model_folder("llama"), tmp_path / "model")[0]
    runs = [
        settings(model, tmp_path, rows=4 * world, precision=precision, sharding=sharding)
        for precision in ("bf16", "bf16_pure")
    ]
    masters, pure = run_on_kept_ranks(gradients_of_both, world, runs, rows_of(4 * world))[0]
    assert pure["dtypes"] == masters["dtypes"] == {"torch.float32"}
    assert pure["norm"] == masters["norm"] > 1.0, "clipping must act"
    assert all(torch.equal(pure["gradients"][name], gradient) for name, gradient in masters["gradients"].items())
    assert any("14 bytes a trained parameter: weights 2, gradients 4, optimizer state 8" in f for f in pure["facts"])
    assert any("16 bytes a trained parameter: weights 4, gradients 4" in fact for fact in masters["facts"])


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_in_bf16_by_choice(stage: int, model_folder: Folder, tmp_path: Path) -> None:
    """Kept in bf16; their norm is summed in fp32 all the same, and clips them to what was asked for."""
    sharding = {"zero_stage": stage, "reduce_dtype": "bf16"}
    runs = [settings(model_folder("llama"), tmp_path, sharding=s, **PURE) for s in (sharding, {"zero_stage": stage})]
    narrow, wide = run_on_kept_ranks(gradients_of_both, 2, runs, rows_of(8))[0]
    assert narrow["dtypes"] == {"torch.bfloat16"}
    assert narrow["norm"] == pytest.approx(wide["norm"], rel=2e-3)
    assert narrow["norm"] != float(torch.tensor(narrow["norm"]).bfloat16()), "the norm itself came out in bf16"
    clipped = sum(g.double().square().sum().item() for g in narrow["gradients"].values()) ** 0.5
    assert clipped == pytest.approx(1.0, rel=2e-3)
    assert any("12 bytes a trained parameter" in fact for fact in narrow["facts"])


def test_torch_alone_would_round_the_gradients(model_folder: Folder, tmp_path: Path) -> None:
    """When this fails FSDP2 heeds a parameter's grad_dtype, and `patches.keep_reduced_gradients` can go."""
    run = settings(model_folder("llama"), tmp_path, **PURE)
    with pytest.raises(RuntimeError, match="gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'"):
        run_on_kept_ranks(gradients_of, 1, run, rows_of(8), True)


# Learning

STEPS = 50


def save_wide(folder: str) -> str:
    """Save a model in bf16 with norms enough to average over: one weight's rounding is a coin."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=models.VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def movements(run_settings: dict[str, Any], rows: Rows, lr: float) -> dict[str, torch.Tensor]:
    """Take steps at a constant rate; return how far every weight has come."""
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    before = step_runs.parameters(run)
    windows = [step_runs.window_of(run, rows, step=step) for step in range(2)]
    for step in range(STEPS):
        train_step(run, windows[step % 2], learning_rate=lr, optimizer_step=step)
    return {name: after.double() - before[name].double() for name, after in step_runs.parameters(run).items()}


def compare_movements(ways: list[dict[str, Any]], rows: Rows, lr: float) -> tuple[list[dict[str, float]], list[str]]:
    """Return each way's shares of the first's movement, and the norms that nearest rounding moves in the last way."""
    from fsdp_trainer.optim import sharded_adamw

    masters, *others = [movements(way, rows, lr) for way in ways]
    sharded_adamw.round_stochastically_ = lambda target, source, generator: target.copy_(source)
    nearest = movements(ways[-1], rows, lr)
    moved = [name for name, tensor in nearest.items() if kind_of(name) == "norm" and tensor.any()]
    return [pooled(other, masters) for other in others], moved


def kind_of(name: str) -> str:
    return "norm" if "norm" in name else "embedding" if "embed" in name else "matrix"


def pooled(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return by kind of tensor the projection of our movement on the reference's, as a share of the latter."""
    kinds = {kind_of(name) for name in reference}
    shares = {}
    for kind in kinds:
        names = [name for name in reference if kind_of(name) == kind]
        along = sum((mine[name] * reference[name]).sum() for name in names)
        shares[kind] = float(along / sum(reference[name].square().sum() for name in names))
    return shares


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model with many norm weights."""
    return run_plainly(save_wide, str(tmp_path_factory.mktemp("wide")))[0]


# At 1e-5 a norm weight moves by a sixteenth of its grid in all 50 steps: of one run's 4608 norm weights the mean is
# known to 6 %, so two seeds are pooled.
SEEDS = {1e-5: (7, 8), 1e-4: (7,)}


@pytest.mark.parametrize("lr", share(SEEDS, [1e-5]))
@pytest.mark.timeout(400)
def test_every_kind_of_weight_moves_as_masters_do(lr: float, wide_model: str, tmp_path: Path) -> None:
    """By 0.9 to 1.1 of the fp32-master run's movement over 50 steps, pooled by kind, norms included."""
    narrow_state = {"optim": {"state_dtype": "bf16"}}
    ways = [{**PURE, **narrow_state, "sharding": {"reduce_dtype": "bf16"}}, PURE]
    if lr == 1e-4:
        ways.insert(0, {"precision": "bf16", **narrow_state})
    seeded = [{**way, "train": {"seed": seed}} for way in ways for seed in SEEDS[lr]]
    runs = [settings(wide_model, tmp_path, rows=4, **way) for way in ({"precision": "bf16"}, *seeded)]
    found, moved_by_nearest = run_ranks(compare_movements, 1, runs, rows_of(8), lr, timeout=380)[0]
    for index, way in enumerate(ways):
        of_seeds = found[index * len(SEEDS[lr]) : (index + 1) * len(SEEDS[lr])]
        shares = {kind: sum(share[kind] for share in of_seeds) / len(of_seeds) for kind in of_seeds[0]}
        assert set(shares) == {"norm", "embedding", "matrix"}
        assert all(0.9 < share < 1.1 for share in shares.values()), (way, shares)
    assert moved_by_nearest == [], "the test's own yardstick: rounded to nearest, norms stay"


# The same on every replica, and exact where it can be


def shards_after(run_settings: dict[str, Any], rows: Rows, steps: int) -> dict[str, str]:
    """Train; return a digest of this rank's shards of weights and averages."""
    from fsdp_trainer.checkpoint import training_tensors
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    for step in range(steps):
        train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=step)
    tensors = training_tensors(run.model, run.optimizer)
    return {name: digest(getattr(t, "to_local", lambda t=t: t)()) for name, t in tensors.items()}


@pytest.mark.parametrize("mesh", ["stage0", "hybrid"])
def test_replicas_stay_equal(mesh: str, model_folder: Folder, tmp_path: Path) -> None:
    world, sharding = MESHES[mesh]
    run = settings(
        model_folder("llama"), tmp_path, rows=4 * world, sharding=sharding, optim={"state_dtype": "bf16"}, **PURE
    )
    ranks = run_on_kept_ranks(shards_after, world, run, rows_of(4 * world), 5)
    apart = 1 if mesh == "stage0" else 2
    for rank in range(apart, world):
        assert ranks[rank] == ranks[rank - apart]
    assert mesh == "stage0" or ranks[0] != ranks[1]


def test_other_ranks_resume_from_the_same_bits(model_folder: Folder, tmp_path: Path) -> None:
    """Weights and averages in bf16 are resharded as they are, and a resume is the same again."""
    batch = {"global_batch_size": 12, "micro_batch_size": 2}
    run = settings(model_folder("llama"), tmp_path, batch=batch, optim={"state_dtype": "bf16"}, **PURE)
    saved = run_on_kept_ranks(checkpoint_runs.train_and_save, 2, run, 1, 1, False)
    once, again = (run_ranks(checkpoint_runs.resume_and_train, 3, run, 2) for _ in range(2))
    for rank in range(3):
        assert checkpoint_runs.differing(saved[0]["whole"], once[rank]["whole"]) == []
        assert checkpoint_runs.differing(once[rank]["end"], again[rank]["end"]) == []
        assert checkpoint_runs.differing(once[rank]["loaded"], once[rank]["end"])


def both_ways(run_settings: dict[str, Any], rows: Rows) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Train 20 steps with torch's AdamW and with ours; return how far apart the weights are, and both losses."""
    from fsdp_trainer.config import Config
    from fsdp_trainer.optim.sharded_adamw import ShardedAdamW
    from fsdp_trainer.step import train_step

    runs = [step_runs.build(run_settings)]
    Config.steps_with_torch = property(lambda _: False)  # type: ignore[assignment,method-assign]
    runs.append(step_runs.build(run_settings))
    assert [isinstance(run.optimizer, ShardedAdamW) for run in runs] == [False, True]
    losses = []
    for step in range(20):
        window = step_runs.window_of(runs[0], rows)
        pair = [train_step(run, window, learning_rate=1e-3 / (1 + step), optimizer_step=step) for run in runs]
        losses.append((pair[0].loss.item(), pair[1].loss.item()))
    theirs, ours = (step_runs.parameters(run) for run in runs)
    return {name: (ours[name] - theirs[name]).abs().max().item() for name in ours}, losses


EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"sharding": {"zero_stage": 0}, "optim": {"max_grad_norm": None}}),
    "two": (2, {"sharding": {"zero_stage": 1}, "precision": "bf16"}),
    "three": (3, {"sharding": {"zero_stage": 3}, "model": {"freeze": ["model.layers.0"]}}),
    "four": (4, {"sharding": {"zero_stage": 3, "replicate": 2, "offload": "params"}}),
}


@pytest.mark.parametrize("way", EXACT)
def test_our_step_is_torchs_in_fp32(way: str, model_folder: Folder, tmp_path: Path) -> None:
    """What the other techniques rest on, over worlds of one to four, empty shards included."""
    world, sections = EXACT[way]
    run = settings(model_folder("llama"), tmp_path, rows=4 * world, **sections)
    apart, losses = run_on_kept_ranks(both_ways, world, run, rows_of(4 * world))[0]
    assert max(apart.values()) < 1e-6, apart
    assert [ours for _, ours in losses] == pytest.approx([theirs for theirs, _ in losses], rel=1e-6)
    assert losses[-1][0] < 0.9 * losses[0][0], "it learns"


# What is not bf16, and what is not finite


def dtypes_after(run_settings: dict[str, Any], rows: Rows) -> dict[str, Any]:
    from fsdp_trainer.model import names_in_fp32
    from fsdp_trainer.step import train_step

    run = step_runs.build(run_settings)
    before = step_runs.parameters(run)
    window = step_runs.window_of(run, rows)
    losses = [train_step(run, window, learning_rate=1e-3, optimizer_step=step).loss.item() for step in range(3)]
    after = step_runs.parameters(run)
    names = names_in_fp32(run.model, before, torch.bfloat16)
    return {
        "kept": names,
        "fp32": {name for name, tensor in after.items() if tensor.dtype == torch.float32},
        "buffers": {name: str(buffer.dtype) for name, buffer in run.model.named_buffers()},
        "moved": {name: (before[name] != after[name]).float().mean().item() for name in names},
        "losses": losses,
    }


def test_what_transformers_keeps_in_fp32_stays_so(tmp_path: Path) -> None:
    model = run_plainly(architectures.save_architecture, "glm4_moe", str(tmp_path / "model"))[0]
    got = run_on_kept_ranks(dtypes_after, 2, settings(model, tmp_path, **PURE), rows_of(8))[0]
    assert got["fp32"] >= got["kept"]
    assert len(got["fp32"]) < len(got["kept"]) + 3, "nothing else rests in fp32"
    assert all(share > 0.9 for share in got["moved"].values()), "fp32 weights move without rounding"
    corrections = [dtype for name, dtype in got["buffers"].items() if name.endswith("correction_bias")]
    assert corrections and set(corrections) == {"torch.float32"}
    assert got["losses"][-1] < got["losses"][0]


def spoiled(run_settings: dict[str, Any], rows: Rows) -> list[tuple[float, bool]]:
    """Take three steps, the second with an infinite gradient on one rank; return (skipped, changed anything) each."""
    from fsdp_trainer.checkpoint import training_tensors
    from fsdp_trainer.step import train_step

    run, moves, found = step_runs.build(run_settings), 0, []
    window = step_runs.window_of(run, rows)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * float("inf"))

    def digests() -> dict[str, str]:
        return {n: digest(step_runs.whole(t)) for n, t in training_tensors(run.model, run.optimizer).items()}

    for step in range(3):
        spoils = step == 1 and run.runtime.rank == 1
        hook = run.model.get_input_embeddings().register_forward_hook(spoil) if spoils else None
        before = digests()
        output = train_step(run, window, learning_rate=1e-2, optimizer_step=moves)
        moves += not output.skipped.item()
        found.append((output.skipped.item(), digests() != before))
        if hook is not None:
            hook.remove()
    return found


@pytest.mark.parametrize("sharding", [{"zero_stage": 3}, {"zero_stage": 1, "reduce_dtype": "bf16"}], ids=str)
def test_a_step_that_is_not_finite_changes_nothing(
    sharding: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    run = settings(model_folder("llama"), tmp_path, sharding=sharding, optim={"state_dtype": "bf16"}, **PURE)
    for found in run_on_kept_ranks(spoiled, 2, run, rows_of(8)):
        assert found == [(0.0, True), (1.0, False), (0.0, True)]


def test_a_run_trains_evaluates_and_exports_what_it_trained(model_folder: Folder, tmp_path: Path) -> None:
    """The bf16 folder holds the weights themselves: written in fp32, the same numbers come out."""
    records, _ = models.make_records(37, seed=0)
    file = models.write_jsonl(records, tmp_path / "train.jsonl")
    found = {}
    for name, sections in {"masters": {"precision": "bf16"}, "bf16": PURE, "fp32": PURE}.items():
        export = {"dtype": "bf16" if name == "bf16" else "fp32"}
        run = training_runs.settings(model_folder("llama_tied"), file, tmp_path / name, export=export, **sections)
        found[name] = run_on_kept_ranks(training_runs.train, 2, run, timeout=120)[0]
    losses = {name: [row["loss"] for row in got["metrics"] if "loss" in row] for name, got in found.items()}
    assert losses["bf16"] == losses["fp32"], "the same seed, the same bits"
    assert losses["bf16"] == pytest.approx(losses["masters"], rel=1e-2)
    assert losses["bf16"] != losses["masters"]
    for name, tensor in found["bf16"]["weights"].items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor.float(), found["fp32"]["weights"][name])
