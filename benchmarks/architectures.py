"""Try every causal language model that Transformers has, built tiny: one step here against plain Transformers.

`python -m benchmarks.architectures` makes a small copy of each model type from its default config, saves a random
model, takes one step on one rank in eight ways (fp32 and bf16, attention auto and eager, packed rows and rows of one
document), and compares loss and gradients with documents run alone in plain Transformers of the same dtype. It prints
a line for each type that is not alike in all of them, and the counts of each way.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests import models, reference, step_runs, training_runs
from tests.ranks import RankFailed, end_kept_ranks, run_on_kept_ranks, run_plainly, run_ranks

# What real configs of a type give and its default leaves out.
GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
}
MAX_PARAMETERS = 10**8  # a config whose sizes have other names stays too large
WAYS = list(itertools.product(("fp32", "bf16"), ("auto", "eager"), (True, False)))
# Of the loss, and of the largest gradient: one that is zero but for rounding has no relative error. In bf16 kernels add
# in another order; a table cast to bf16 by mistake is 2 %, a router 20 % off (tests/distributed/test_architectures.py).
TOLERANCES = {"fp32": (1e-4, 1e-4), "bf16": (2e-3, 1.5e-2)}


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def save_tiny(name: str, folder: str) -> str:
    """Save a random model of the type; return "" or why Transformers itself cannot."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from fsdp_trainer.small_copy import shrink

    torch.manual_seed(1)
    try:
        config = shrink(CONFIG_MAPPING[name](**GIVEN.get(name, {})))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            return f"{size} parameters"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.isfinite().all():
                    parameter.normal_(mean=0.5, std=0.05)
        model.save_pretrained(folder)
    except Exception as error:  # whatever it is, it is not the trainer's
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return ""


def documents() -> list[models.Document]:
    return models.make_records(4, seed=13, longest=20)[1]


def plain_step(folder: str, precision: str, attention: str) -> tuple[float, dict[str, Any]] | str:
    """Return the loss and the gradients of documents alone in plain Transformers; why not, where it fails.

    In bf16 with the attention that it takes by itself for `auto`: two of its own may be further apart than we from it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        if precision == "bf16" and attention == "auto":
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
            model.config.use_cache = False
        else:
            model = reference.load(folder, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        loss = reference.gradients(model, documents())
        again = reference.gradients(model, documents())
        found = {name: p.grad.float() / 2 for name, p in model.named_parameters() if p.grad is not None}
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    if not (math.isfinite(loss) and all(gradient.isfinite().all() for gradient in found.values())):
        return "not finite in plain Transformers"
    return "random in training" if loss != again else (loss, found)


def our_step(folder: str, precision: str, attention: str, packed: bool) -> tuple[float, dict[str, Any]] | str:
    """Return our loss and gradients of the same documents, after an export; a refusal's words where it is refused."""
    from fsdp_trainer import Config
    from fsdp_trainer.errors import FsdpTrainerError
    from fsdp_trainer.export import export_model
    from fsdp_trainer.run import prove_small_copy
    from fsdp_trainer.step import train_step

    made = documents()
    rows = [made[:2], made[2:]] if packed else [[document] for document in made]
    settings = training_runs.settings(
        folder,
        "unused.jsonl",
        f"{folder}-run",
        model={"path": folder, "attention": attention},
        data={"packing": packed},
        precision=precision,
        optim={"max_grad_norm": None},
        activation_checkpointing={"mode": "full"},
        batch={"global_batch_size": len(rows), "micro_batch_size": 1},
    )
    try:
        prove_small_copy(Config.from_dict(settings))
        run = step_runs.build(settings)
    except FsdpTrainerError as error:
        return error.what
    with step_runs.captured_gradients(run) as gradients:
        output = train_step(run, step_runs.window_of(run, rows), learning_rate=1e-3, optimizer_step=0)
    export_model(Path(f"{folder}-out"), model=run.model, hf_config=run.hf_config, dtype="fp32")
    return output.loss.item(), {name: tensor.float() for name, tensor in gradients.items()}


def compare(precision: str, ours: Any, plain: Any, truth: Any) -> tuple[str, str]:
    """Return works, differs, refused or no measure, and a word on it.

    A gradient may be as far from plain Transformers' in bf16 as that is from its own in fp32, the `truth`: two kernels
    of attention are further apart there (11.7 % of the largest gradient in Gemma 3n).
    """
    if isinstance(ours, str):
        return "refused", ours
    if isinstance(plain, str):
        return "no measure", plain
    (loss, gradients), (expected_loss, expected) = ours, plain
    if missing := sorted(expected.keys() ^ gradients.keys()):
        return "differs", f"gradients of one side only: {', '.join(missing[:3])}"
    largest = max(tensor.norm() for tensor in expected.values())
    loss_limit, limit = TOLERANCES[precision]
    exact = expected if isinstance(truth, str) else truth[1]
    errors, excess = {}, {}
    for name, tensor in expected.items():
        errors[name] = float((gradients[name] - tensor).norm() / largest)
        excess[name] = errors[name] - max(limit, float((exact[name] - tensor).norm() / largest))
    worst = max(excess, key=lambda name: excess[name] if math.isfinite(excess[name]) else math.inf)
    fits = abs(loss - expected_loss) < loss_limit * expected_loss and excess[worst] < 0
    return "works" if fits else "differs", f"loss {loss:.5f} for {expected_loss:.5f}, {worst} {errors[worst]:.1e}"


def try_type(name: str, folder: str) -> dict[tuple[str, str, bool], tuple[str, str]]:
    """Return what came of each way, and a word on it."""
    if unbuilt := run_plainly(save_tiny, name, folder)[0]:
        return dict.fromkeys(WAYS, ("not built", unbuilt))
    found, plain = {}, {}
    for way in WAYS:
        precision, attention, packed = way
        try:
            measure = precision, attention if precision == "bf16" else "eager"
            if measure not in plain:
                plain[measure] = run_plainly(plain_step, folder, *measure)[0]
            ours = run_on_kept_ranks(our_step, 1, folder, precision, attention, packed, timeout=90)[0]
            found[way] = compare(precision, ours, plain[measure], plain["fp32", "eager"])
        except Exception as error:  # a raw traceback is what this looks for
            said = f"{type(error).__name__}: {error}"
            found[way] = "crashes", said.splitlines()[-1] if isinstance(error, RankFailed) else said
    return found


def main() -> int:
    """Try all types, or those named, and print what came of each; 1 where one differs or crashes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    words = parser.parse_args()
    counts: dict[tuple[str, str, bool], Counter[str]] = {way: Counter() for way in WAYS}
    begun = time.monotonic()
    for name in words.names or run_ranks(names, 1)[0]:
        with tempfile.TemporaryDirectory() as scratch:
            found = try_type(name, f"{scratch}/model")
        said: dict[tuple[str, str], list[str]] = {}
        for way, (kind, word) in found.items():
            counts[way][kind] += 1
            precision, attention, packed = way
            said.setdefault((kind, word if kind not in ("works", "differs") else ""), []).append(
                f"{precision} {attention} {'packed' if packed else 'alone'}" + (f" {word}" if kind == "differs" else "")
            )
        for (kind, word), ways in said.items():
            every = "in every way" if len(ways) == len(WAYS) else "; ".join(ways)
            print(f"{name}: {kind} {every} ({' '.join(itertools.islice(word.split(), 40))})", flush=True)
    end_kept_ranks()
    for (precision, attention, packed), counted in counts.items():
        shown = ", ".join(f"{count} {kind}" for kind, count in counted.most_common())
        print(f"{precision}, {attention}, {'packed' if packed else 'alone'}: {shown}")
    print(f"{time.monotonic() - begun:.0f} s")
    return int(any(counted["differs"] or counted["crashes"] for counted in counts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
