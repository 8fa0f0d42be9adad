"""Random configurations beside plain PyTorch: a few steps of each, losses, gradient norms and movement of every weight.

    python -m benchmarks.sweeps.configurations [COUNT] [--seed N]

The reference (tests/reference.py) is one process, one document at a time, and shares no code with the package.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests import architectures, models, reference, step_runs, training_runs
from tests.ranks import end_kept_ranks, run_on_kept_ranks, run_plainly

STEPS, ROWS = 3, 8
# AdamW makes a step of rounding where a gradient is nearly zero; at ten times this rate the third norm was once 2.7e-6
# off, on one rank as on two, the first one 8.5e-8.
RATE = 1e-4
# Of the loss and of the norm, relative; of a tensor's movement, as a share of it, by norm.
LOSS, NORM, MOVEMENT = 1e-6, 1e-6, 1e-3
KINDS = ("llama", "llama_tied", "qwen3", "qwen3_tied", "gemma2", "gemma3", "gpt2")
# Those that the package refuses (tests/distributed/test_architectures.py), and losses that the reference does not have.
LEFT_OUT = ("opt", "bloom", "stablelm", "falcon", "doge", "deepseek_v32", "qwen2_moe_window", "qwen3_moe_router")
MODELS = (*KINDS, *(name for name in architectures.ARCHITECTURES if name not in LEFT_OUT))
SHARDINGS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"zero_stage": stage} for stage in range(4)},
    "hybrid": {"zero_stage": 3, "replicate": 2},
    "reshard": {"zero_stage": 3, "reshard_after_forward": 2},
}


class Configuration(NamedTuple):
    """One way to train one model; `longest` is the longest document's tokens, around the limits of rotary types."""

    model: str
    ranks: int
    sharding: str
    packing: bool
    checkpointing: str
    micro_batches: int
    loss: str
    attention: str
    clip: float | None
    offload: str
    frozen: bool
    longest: int
    seed: int


def draw(seed: int, *, ranks: tuple[int, ...] = (1, 2, 2, 4), models_of: tuple[str, ...] = MODELS) -> Configuration:
    """Draw a configuration that the package takes."""
    chance = random.Random(seed)
    world = chance.choice(ranks)
    offload = chance.choice(("none", "none", "params", "optimizer"))
    names = [name for name in SHARDINGS if world == 4 or name not in ("hybrid", "reshard")]
    if offload == "params" or (offload == "optimizer" and world > 1):
        names.remove("stage0")  # every rank would keep all of it
    return Configuration(
        model=models_of[seed % len(models_of)],
        ranks=world,
        sharding=chance.choice(names),
        packing=chance.random() < 0.5,
        checkpointing=chance.choice(("none", "full", "every_n_layers")),
        micro_batches=chance.choice((1, 2)),
        loss=chance.choice(("chunked", "plain")),
        attention=chance.choice(("auto", "auto", "eager")),
        clip=chance.choice((0.5, None)),
        offload=offload,
        frozen=chance.random() < 0.25,
        longest=chance.choice((10, 12, 13, 20)),
        seed=seed,
    )


def settings_of(made: Configuration, model: str, folder: str) -> dict[str, Any]:
    """Return the settings of a configuration for the model in a folder."""
    return training_runs.settings(
        model,
        "unused.jsonl",
        folder,
        model={"path": model, "attention": made.attention, "freeze": frozen_part(made)},
        data={"packing": made.packing},
        sharding=SHARDINGS[made.sharding] | {"offload": made.offload},
        activation_checkpointing={"mode": made.checkpointing}
        | ({"every_n": 2} if made.checkpointing == "every_n_layers" else {}),
        loss={"kind": made.loss},
        optim={"max_grad_norm": made.clip, "lr": RATE},
        batch={"global_batch_size": ROWS, "micro_batch_size": ROWS // (made.ranks * made.micro_batches)},
    )


def frozen_part(made: Configuration) -> list[str]:
    """Return the pattern of the layer that a configuration freezes."""
    layers = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
    return [f"{layers.get(made.model, 'model.layers')}.1"] if made.frozen else []


def recipe_of(made: Configuration) -> reference.Recipe:
    """Return the reference's hyperparameters."""
    return reference.Recipe(lr=RATE, max_grad_norm=made.clip, warmup_steps=1, total_steps=STEPS)


def rows_by_step(made: Configuration) -> list[list[list[models.Document]]]:
    """Return the rows of each step: one document each, or with packing two."""
    each = 2 if made.packing else 1
    documents = iter(models.make_records(STEPS * ROWS * each, seed=made.seed, longest=made.longest)[1])
    return [[[next(documents) for _ in range(each)] for _ in range(ROWS)] for _ in range(STEPS)]


def train(made: Configuration, settings: dict[str, Any]) -> dict[str, Any]:
    """Take the steps; return losses, norms and the whole weights by name."""
    from fsdp_trainer.step import train_step

    run, recipe = step_runs.build(settings), recipe_of(made)
    outputs = [
        train_step(
            run,
            step_runs.window_of(run, rows),
            learning_rate=reference.learning_rate(step, recipe),
            optimizer_step=step,
        )
        for step, rows in enumerate(rows_by_step(made))
    ]
    return {
        "losses": [output.loss.item() for output in outputs],
        "grad_norms": [output.grad_norm.item() for output in outputs],
        "weights": {name: tensor.float() for name, tensor in step_runs.parameters(run).items()},
    }


def train_reference(made: Configuration, folder: str) -> reference.Result:
    """Train the plain reference on the same documents."""
    load = reference.load

    def load_frozen(path: str) -> Any:
        model = load(path)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(f"{part}." in name for part in frozen_part(made)))
        return model

    steps = [[document for row in rows for document in row] for rows in rows_by_step(made)]
    reference.load = load_frozen
    try:
        return reference.train(folder, steps, recipe_of(made))
    finally:
        reference.load = load


def save_model(name: str, folder: str) -> str:
    """Save a tiny model of a kind or an architecture."""
    return (models.save_model if name in KINDS else architectures.save_architecture)(name, folder)


def compare(made: Configuration, model: str, folder: str) -> dict[str, float]:
    """Return the largest relative error of the losses, of the norms, and of any tensor's movement."""
    got = run_on_kept_ranks(train, made.ranks, made, settings_of(made, model, folder), timeout=120)[0]
    expected = run_plainly(train_reference, made, model)[0]
    still = [name for name in got["weights"] if any(f"{part}." in name for part in frozen_part(made))]
    assert bool(still) == made.frozen
    for name in still:
        assert got["weights"].pop(name).equal(expected.initial[name]), f"{name} is frozen and moved"
    moved = replace(expected, final={name: expected.final[name] for name in got["weights"]})

    def worst(ours: list[float], theirs: list[float]) -> float:
        return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))

    return {
        "loss": worst(got["losses"], expected.losses),
        "norm": worst(got["grad_norms"], expected.grad_norms),
        "movement": max(reference.movement_errors(got["weights"], moved).values()),
    }


def agrees(errors: dict[str, float]) -> bool:
    """Return whether a configuration trains what the reference does."""
    return errors["loss"] <= LOSS and errors["norm"] <= NORM and errors["movement"] <= MOVEMENT


def folders(scratch: Path) -> Callable[[str], str]:
    """Return a function that gives the folder of a model, made on first use."""
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = run_plainly(save_model, name, str(scratch / name))[0]
        return made[name]

    return folder


def main() -> int:
    """Draw and compare configurations; print each that disagrees and the counts; 1 where one does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow")
    words = parser.parse_args()
    begun, wrong = time.monotonic(), 0
    most: dict[str, float] = dict.fromkeys(("loss", "norm", "movement"), 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = folders(Path(scratch))
        for seed in range(words.seed, words.seed + words.count):
            made = draw(seed)
            try:
                errors = compare(made, folder(made.model), scratch)
            except Exception as error:  # whatever it is, it is a disagreement, and the others are tried all the same
                wrong += 1
                print(f"{made}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            most = {name: max(most[name], size) for name, size in errors.items()}
            if not agrees(errors):
                wrong += 1
                print(f"{made}: {', '.join(f'{name} {size:.1e}' for name, size in errors.items())}", flush=True)
    end_kept_ranks()
    print(
        f"{words.count - wrong} of {words.count} configurations of {len(MODELS)} models agree; at most "
        f"{', '.join(f'{name} {size:.1e}' for name, size in most.items())}; {time.monotonic() - begun:.0f} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
