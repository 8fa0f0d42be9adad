"""Training with gradients, averages and masters on the host equals training with all of them on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import checkpoint_runs, reference, step_runs, training_runs
from tests.distributed.test_eight_bit import save_flat_model
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks
from tests.sweeps import every_value, share, wanted_cases
from tests.twenty_steps import allowed_pairs, batch, covered_pairs, frozen_part, name_of, train_all

Folder = Callable[[str], str]
OFFLOAD = {"zero_stage": 3, "offload": "optimizer"}


class Case(NamedTuple):
    """One way to train with the optimizer on the host."""

    sharding: str
    step: str
    world: int
    checkpointing: str
    micro_batches: int
    loss: str
    model: str
    frozen: bool


VALUES: dict[str, tuple[Any, ...]] = {
    "sharding": ("stage0", "stage1", "stage2", "stage3", "hybrid", "reshard2"),
    "step": ("host", "device"),
    "world": (1, 2, 3, 4),
    "checkpointing": ("none", "full", "every2"),
    "micro_batches": (1, 2),
    "loss": ("chunked", "plain"),
    "model": ("llama", "llama_tied", "qwen3", "gpt2"),
    "frozen": (False, True),
}
CASES = [
    Case("stage0", "device", 1, "full", 1, "chunked", "qwen3", False),
    Case("stage0", "device", 1, "every2", 1, "plain", "llama", True),
    Case("stage0", "host", 1, "none", 2, "chunked", "llama_tied", True),
    Case("stage0", "host", 1, "full", 1, "chunked", "gpt2", True),
    Case("stage1", "host", 1, "none", 1, "plain", "qwen3", False),
    Case("stage1", "host", 2, "full", 1, "chunked", "llama_tied", True),
    Case("stage1", "device", 3, "every2", 2, "plain", "gpt2", True),
    Case("stage1", "host", 4, "full", 2, "chunked", "llama", False),
    Case("stage2", "host", 1, "full", 2, "plain", "llama_tied", False),
    Case("stage2", "host", 2, "every2", 2, "chunked", "qwen3", True),
    Case("stage2", "host", 2, "none", 1, "plain", "gpt2", True),
    Case("stage2", "device", 3, "none", 1, "chunked", "llama", True),
    Case("stage2", "device", 4, "every2", 1, "plain", "llama_tied", True),
    Case("stage3", "host", 1, "full", 2, "chunked", "gpt2", False),
    Case("stage3", "device", 2, "none", 2, "plain", "llama", False),
    Case("stage3", "device", 3, "every2", 1, "chunked", "llama_tied", False),
    Case("stage3", "host", 3, "full", 2, "chunked", "qwen3", False),
    Case("stage3", "host", 4, "none", 1, "chunked", "llama", True),
    Case("hybrid", "host", 4, "full", 2, "chunked", "gpt2", True),
    Case("hybrid", "device", 4, "every2", 1, "plain", "qwen3", False),
    Case("hybrid", "host", 4, "none", 2, "plain", "llama_tied", True),
    Case("hybrid", "device", 4, "full", 2, "plain", "llama", True),
    Case("reshard2", "device", 4, "none", 1, "plain", "gpt2", False),
    Case("reshard2", "host", 4, "full", 2, "chunked", "qwen3", True),
    Case("reshard2", "host", 4, "every2", 1, "chunked", "llama_tied", True),
    Case("reshard2", "device", 4, "every2", 1, "plain", "llama", False),
]


def allowed(some: Mapping[str, Any]) -> bool:
    """Return whether the named values can occur together: stage 0 is for one rank, two groups of two are for four."""
    worlds = {"stage0": 1, "hybrid": 4, "reshard2": 4}
    world = worlds.get(some.get("sharding", ""))
    return world is None or some.get("world", world) == world


def test_cases_cover_every_pair() -> None:
    assert covered_pairs(case._asdict() for case in CASES) == allowed_pairs(VALUES, allowed)
    assert all(allowed(case._asdict()) for case in CASES)


def case_settings(case: Case, model: str, folder: Path) -> dict[str, Any]:
    """Return the settings that make a case what it is."""
    sharding: dict[str, Any] = {
        "hybrid": {"zero_stage": 3, "replicate": 2},
        "reshard2": {"zero_stage": 3, "reshard_after_forward": 2},
    }.get(case.sharding) or {"zero_stage": int(case.sharding[-1])}
    checkpointing = (
        {"mode": "every_n_layers", "every_n": 2} if case.checkpointing == "every2" else {"mode": case.checkpointing}
    )
    return training_runs.settings(
        model,
        "unused.jsonl",
        folder,
        sharding=sharding | {"offload": "optimizer"},
        optim={"offload_step": case.step, "max_grad_norm": 0.5},
        activation_checkpointing=checkpointing,
        loss={"kind": case.loss},
        batch=batch(case.world, case.micro_batches),
        model={"freeze": frozen_part(case.model, case.frozen)},
    )


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, model_folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], dict[str, Any]]:
    """Return a function that gives what a case trained; one group of ranks for all wanted cases of a world size."""
    wanted = [case for case in wanted_cases(request) if isinstance(case, Case)]
    found: dict[int, dict[str, Any]] = {}

    def get(case: Case) -> dict[str, Any]:
        if case.world not in found:
            folder = tmp_path_factory.mktemp("cases")
            runs = {
                name_of(c): case_settings(c, model_folder(c.model), folder) for c in wanted if c.world == case.world
            }
            found[case.world] = run_ranks(train_all, case.world, runs, timeout=500)[0]
        return found[case.world][name_of(case)]

    return get


@pytest.mark.parametrize("case", share(CASES, every_value(CASES), ids=name_of))
@pytest.mark.timeout(900)  # the first of a world size trains all of them
def test_fp32_parity(case: Case, trained: Any, twenty_reference_steps: Any) -> None:
    """Twenty steps of the plain reference: losses, norms and every tensor's movement; a frozen one has none."""
    got, expected = trained(case), twenty_reference_steps(case.model, case.frozen)
    assert got["skipped"] == 0
    assert got["losses"] == pytest.approx(expected.losses, rel=1e-5)
    assert got["grad_norms"] == pytest.approx(expected.grad_norms, rel=1e-4)
    assert min(expected.grad_norms) > 0.5, "clipping must act in every step"
    still = {name for name in got["weights"] if any(p in name for p in frozen_part(case.model, case.frozen))}
    assert bool(still) == case.frozen
    for name in still:
        assert torch.equal(got["weights"].pop(name), expected.initial[name])
    moved = replace(expected, final={name: expected.final[name] for name in got["weights"]})
    errors = reference.movement_errors(got["weights"], moved)
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
    "one norm alone trains, unclipped": (
        2,
        "llama",
        {
            "precision": "bf16",
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
            "model": {"freeze": ["model.layers.*", "model.embed_tokens.weight", "lm_head.weight"]},
            "optim": {"max_grad_norm": None},
        },
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
    got = run_on_kept_ranks(steps, world, both(model_folder(kind), tmp_path, **sections), 4, timeout=200)[0]
    outputs, sizes, _ = got["none"]
    for name in ("host", "device"):
        assert [x for row in got[name][0] for x in row] == pytest.approx(
            [x for row in outputs for x in row], rel=tolerance
        )
        assert got[name][1] == pytest.approx(sizes, rel=tolerance)
    compute = {"bf16": "bfloat16", "fp16": "float16", "bf16_pure": "bfloat16"}.get(sections.get("precision"), "float32")
    assert {dtype for dtype, _ in got["host"][2]} == {f"torch.{compute}"}


def test_ranks_without_a_row_of_a_tensor(tmp_path: Path) -> None:
    """Three rows over four ranks: one has nothing to send, to measure or to step."""
    model = run_plainly(save_flat_model, str(tmp_path / "model"))[0]
    runs = both(model, tmp_path, batch={"global_batch_size": 12, "micro_batch_size": 1})
    got = run_on_kept_ranks(steps, 4, runs, 2)[0]
    flat = {name: [number for row in outputs for number in row] + sizes for name, (outputs, sizes, _) in got.items()}
    assert flat["host"] == pytest.approx(flat["none"], rel=1e-6)
    assert flat["device"] == pytest.approx(flat["none"], rel=1e-6)


def moved_at_zero(runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Take two steps at a learning rate of 0 in each way; tell which changed a weight, a master or its copy."""
    from fsdp_trainer.optim.masters import trained_weights
    from fsdp_trainer.step import train_step

    def weights(run: Any) -> list[torch.Tensor]:
        held = [*trained_weights(run.model, run.optimizer).values(), *run.model.parameters()]
        return [step_runs.whole(tensor) for tensor in held]

    found = {}
    for name, settings in runs.items():
        run = step_runs.build(settings)
        before, window = weights(run), step_runs.window_of(run, checkpoint_runs.documents())
        for step in range(2):
            train_step(run, window, learning_rate=0.0, optimizer_step=step)
        found[name] = not all(map(torch.equal, before, weights(run)))
    return found


def test_a_learning_rate_of_zero_moves_nothing(model_folder: Folder, tmp_path: Path) -> None:
    """Where a schedule ends there: no rounding and no decay may."""
    sections = {"batch": {"global_batch_size": 16, "micro_batch_size": 4}, "optim": {"weight_decay": 0.5}}
    pure = both(model_folder("llama"), tmp_path, precision="bf16_pure", **sections)
    sections["optim"] = sections["optim"] | {"name": "adamw_8bit"}
    eight = both(model_folder("llama"), tmp_path, precision="bf16", **sections)
    runs = {f"pure {name}": run for name, run in pure.items()} | {f"8bit {name}": run for name, run in eight.items()}
    assert run_on_kept_ranks(moved_at_zero, 2, runs)[0] == dict.fromkeys(runs, False)


def test_an_overflow_in_fp16_is_skipped(model_folder: Folder, tmp_path: Path) -> None:
    """The host finds what is not finite, the scale falls, and the steps that fit move the weights."""
    from tests.distributed.test_kind_h_schedule import with_large_gradients

    model = run_plainly(with_large_gradients, model_folder("llama"), tmp_path / "model")[0]
    batch = {"global_batch_size": 4, "micro_batch_size": 1}
    got = run_on_kept_ranks(steps, 2, both(model, tmp_path, precision="fp16", batch=batch), 8)[0]
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
    straight = run_on_kept_ranks(checkpoint_runs.train_and_save, before, run, 1, 1, False)
    resumed = run_ranks(checkpoint_runs.resume_and_train, after, run, 1)
    for rank in resumed:
        assert checkpoint_runs.differing(straight[0]["whole"], rank["whole"]) == []


# What may change between two checkpoints, and what cannot

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"precision": "bf16"},
    "bf16 state": {"precision": "bf16", "optim": {"state_dtype": "bf16"}},
    "pure": {"precision": "bf16_pure"},
    "8bit": {"precision": "bf16", "optim": {"name": "adamw_8bit"}},
    "8bit on the host": {"precision": "bf16", "optim": {"name": "adamw_8bit"}, "sharding": OFFLOAD},
    "pure 8bit on the host": {"precision": "bf16_pure", "optim": {"name": "adamw_8bit"}, "sharding": OFFLOAD},
    "frozen": {"precision": "bf16", "sharding": OFFLOAD, "model": {"freeze": ["model.layers.0"]}},
}
FITS = [
    ("8bit", "8bit on the host"),
    ("8bit on the host", "8bit"),
    ("pure 8bit on the host", "pure 8bit on the host"),
    ("frozen", "frozen"),
]
FITS_NOT = [("adamw", "8bit"), ("8bit on the host", "adamw"), ("adamw", "bf16 state"), ("adamw", "pure")]
FITS_NOT += [("frozen", "adamw"), ("adamw", "frozen")]


def kind_settings(kind: str, model: str, folder: Path, world: int) -> dict[str, Any]:
    batch = {"global_batch_size": 12, "micro_batch_size": 12 // world}
    return training_runs.settings(model, "unused.jsonl", folder / kind, batch=batch, **KINDS[kind])


def held(run: Any) -> dict[str, torch.Tensor]:
    from fsdp_trainer.optim.masters import trained_weights

    return {name: step_runs.whole(t) for name, t in trained_weights(run.model, run.optimizer).items()}


def save_each(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Take a step in each way and save it; return the weights."""
    found = {}
    for kind, settings in runs.items():
        run = checkpoint_runs.build(settings)
        checkpoint_runs.take_steps(run, 0, 1)
        checkpoint_runs.save(run, 1).wait()
        found[kind] = held(run)
    return found


def load_each(pairs: dict[tuple[str, str], tuple[str, dict[str, Any]]]) -> dict[tuple[str, str], Any]:
    """Load each checkpoint into a run of other settings: the weights and whether a step went well, or what was said."""
    from fsdp_trainer.checkpoint_folder import checkpoint_path
    from fsdp_trainer.errors import CheckpointError

    found: dict[tuple[str, str], Any] = {}
    for pair, (folder, settings) in pairs.items():
        run = checkpoint_runs.build({**settings, "model": {**settings["model"], "init": "random"}})
        try:
            checkpoint_runs.load(run, checkpoint_path(Path(folder), 1), log=lambda _: None)
        except CheckpointError as error:
            found[pair] = str(error)
            continue
        found[pair] = held(run)
        checkpoint_runs.take_steps(run, 1, 2)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in held(run).values())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_resume_takes_what_fits_and_nothing_else(
    world: int, saved_kinds: tuple[Path, dict[str, Any]], model_folder: Folder, tmp_path: Path
) -> None:
    """Masters come back to the bit on other ranks and on or off the host; another optimizer's state is refused."""
    folder, saved = saved_kinds
    pairs = FITS + (FITS_NOT if world == 2 else [])
    wanted = {(a, b): (str(folder / a), kind_settings(b, model_folder("llama"), tmp_path, world)) for a, b in pairs}
    got = run_ranks(load_each, world, wanted, timeout=200)[0]
    for before, after in FITS:
        weights = got[before, after]
        assert isinstance(weights, dict), weights
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved[before].items())
    for pair in FITS_NOT if world == 2 else ():
        assert "does not fit" in got[pair] and "model.freeze, precision, optim.name and optim.state_dtype" in got[pair]


@pytest.fixture(scope="module")
def saved_kinds(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder with a checkpoint of two ranks of each of KINDS, and the weights in it."""
    folder = tmp_path_factory.mktemp("kinds")
    runs = {kind: kind_settings(kind, model_folder("llama"), folder, 2) for kind in KINDS}
    return folder, run_ranks(save_each, 2, runs, timeout=200)[0]


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
