"""The claims of docs/claims.md: what is said, what the closed form computes for it, and what follows for a run.

Every figure is computed here or read from benchmarks/points.csv, and a verdict follows from its cases alone; only the
words are typed. docs/make_claims.py writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from docs.claim_cases import (
    MASTERS_8BIT,
    NOTHING_AGAIN,
    OPTIMIZER_OFF,
    PARAMS_OFF,
    PURE,
    PURE_8BIT,
    PURE_BF16,
    SEQ_LEN,
    SEVEN_BILLION,
    SEVENS,
    STAGE_2,
    Case,
    Claim,
    fitting,
    gb,
    host_gib,
    parameters,
    peak,
    percent,
    points,
    predict,
    recipe,
    recomputed,
    shape_of,
    sized,
)
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.estimate import GIB, estimate_states, estimate_zero_states
from fsdp_trainer.memory.estimate_step import state_bytes
from fsdp_trainer.memory.hardware import parse_gpus

# --- how much a model takes ------------------------------------------------------------------------------------------


def sixteen_bytes() -> Claim:
    """16 bytes a parameter."""
    found = {
        "`precision: fp32`": recipe(precision="fp32").total,
        "`precision: bf16`, whose weights at rest are fp32": recipe(precision="bf16").total,
        "2 + 2 + 12 of the ZeRO paper: half-precision weights beside fp32 ones": estimate_zero_states(
            1, ranks=1, zero_stage=0
        ),
    }
    foreach = recipe(**{"optim.implementation": "foreach"})
    return Claim(
        said="Full fine-tuning with AdamW holds 16 bytes a parameter, and mixed precision takes no less than fp32.",
        rule="exactly 16 bytes a parameter",
        cases=[Case(what, f"{size:g} bytes", size == 16) for what, size in found.items()],
        advice="Mixed precision saves activations and time, not this. What saves it is `precision: bf16_pure`, which "
        f"keeps no fp32 weights: {recipe(precision='bf16_pure').total:g} bytes, {recipe(**PURE_BF16).total:g} with "
        f"gradients and averages in bf16 too, {recipe(**PURE_8BIT).total:.2f} with 8-bit averages. On top come "
        f"activations, logits, gathered weights, and {foreach.step:g} bytes at the step with torch's foreach kernels.",
    )


def seven_billion() -> Claim:
    """112 GB."""
    claimed = 16 * SEVEN_BILLION
    return Claim(
        said=f"So a 7B model takes {claimed / 1e9:.0f} GB before activations.",
        rule=f"within 10 % of {claimed / 1e9:.0f} GB",
        cases=[
            sized(model, recipe().total * parameters(model), lambda size: abs(size / claimed - 1) <= 0.1)
            for model in SEVENS
        ],
        advice="What is sold as 7B or 8B differs: "
        + ", ".join(f"{model} has {parameters(model) / 1e9:.2f}e9 parameters" for model in SEVENS)
        + ". `fsdp-trainer simulate --quick` counts those of any model.",
    )


def over_280() -> Claim:
    """More than 280 GB."""
    claimed = 280e9
    ways = (
        (f"rows of {SEQ_LEN} tokens", SEQ_LEN, {}),
        ("rows of 4096, nothing recomputed", 4096, NOTHING_AGAIN),
        ("rows of 8192, nothing recomputed, whole logits", 8192, {**NOTHING_AGAIN, "loss.kind": "plain"}),
    )
    return Claim(
        said="With everything counted, a 7B model needs more than 280 GB.",
        rule="peak of one GPU, were it large enough, above 280 GB",
        cases=[
            sized(what, peak(model, "H200", seq_len=length, **changes), lambda size: size > claimed, model=model)
            for what, length, changes in ways
            for model in SEVENS
        ],
        advice=f"280 GB would be {claimed / SEVEN_BILLION:.0f} bytes a parameter, and no recipe has those. What comes "
        "on top of 16 bytes grows with the tokens of a micro-batch; checkpointing and a chunked loss, both on by "
        "default, keep it small.",
    )


def eighty() -> Claim:
    """80 GB to begin with."""
    recipes = {
        "`precision: bf16`": recipe(),
        "`bf16_pure`, gradients and averages in fp32": recipe(precision="bf16_pure"),
        "`bf16_pure`, averages in fp32": recipe(**PURE),
        "`bf16_pure`, averages in bf16": recipe(**PURE_BF16),
        "`bf16_pure`, 8-bit averages": recipe(**PURE_8BIT),
    }
    measured = float(points()["swift-q7b-512"]["peak_gib"]) * GIB
    return Claim(
        said="Without sharding a 7B model needs somewhat more than 80 GB.",
        rule="80 to 100 GB of weights, gradients and averages",
        cases=[
            sized(f"{what}: {found.total:.3g} bytes", found.total * SEVEN_BILLION, lambda size: 80e9 <= size <= 100e9)
            for what, found in recipes.items()
        ],
        advice=f"Measurements near 80 GB, such as the first below ({gb(measured)}), are of bf16 weights without fp32 "
        "ones; set beside a sharded run that has fp32 ones, they make sharding look worse than it is.",
        measured=("swift-q7b-512", "tune-l2-7b-pr389-adamw"),
    )


# --- what sharding divides -------------------------------------------------------------------------------------------


def zero_2() -> Claim:
    """ZeRO-2 divides by N."""

    def nearly(ranks: int) -> Callable[[float], bool]:
        return lambda size: size <= 1.25 * recipe().total * SEVEN_BILLION / ranks

    def resting(ranks: int) -> float:
        return estimate_states(SEVEN_BILLION, ranks=ranks, zero_stage=2, recipe=recipe())

    gathered = recipe().compute * SEVEN_BILLION
    engine = {n: estimate_zero_states(SEVEN_BILLION, ranks=n, zero_stage=2) for n in (2, 4, 8, 64)}
    cases = [sized(f"weights kept whole (the ZeRO paper), N = {n}", size, nearly(n)) for n, size in engine.items()]
    cases += [sized(f"here, in a step, N = {n}", resting(n) + gathered, nearly(n)) for n in (2, 4, 8, 64)]
    cases += [sized(f"here, between two steps, N = {n}", resting(n), nearly(n)) for n in (2, 64)]
    third = " / ".join(gb(estimate_zero_states(SEVEN_BILLION, ranks=n, zero_stage=3)) for n in (2, 4, 8))
    return Claim(
        said="ZeRO-2 brings the static memory of each of N GPUs close to 1/N.",
        rule="at most 25 % above 16 bytes x 7e9 / N",
        cases=cases,
        advice=f"Gradients and optimizer state are divided, weights are not: {gb(gathered)} of them in half precision "
        f"are a floor that no number of GPUs lowers. ZeRO-3 has none: {third} for N = 2 / 4 / 8. Here every stage "
        "rests in shards, and stage 2 holds whole weights from the forward to the end of the backward, which is where "
        "the peak is. Short of memory, keep `sharding.zero_stage: 3`, the default.",
    )


def thirty() -> Claim:
    """ZeRO-2 with checkpointing."""
    return Claim(
        said="ZeRO-2 with activation checkpointing brings a 7B model down to about 30 GB a GPU.",
        rule="peak of at most 33 GB at stage 2",
        cases=[
            sized(f"{n} GPUs", peak(model, f"{n}xA100-80GB", **STAGE_2), lambda size: size <= 33e9, model=model)
            for n in (2, 4, 8)
            for model in SEVENS
        ],
        advice="At stage 3 the same models peak at "
        + ", ".join(gb(peak(model, "4xA100-80GB")) for model in SEVENS)
        + " on 4 GPUs, and at "
        + ", ".join(gb(peak(model, "8xA100-80GB")) for model in SEVENS)
        + " on 8.",
        measured=("swift-q25-14b-z2", "swift-q25-14b-z3"),
    )


def twenty() -> Claim:
    """The optimizer on the host."""
    ways = (("1 GPU", "RTX4090", {}), ("2 GPUs, stage 2", "2xRTX4090", STAGE_2), ("2 GPUs, stage 3", "2xRTX4090", {}))
    return Claim(
        said="With the optimizer on the host, less than 20 GB a GPU are enough for a 7B model.",
        rule="peak below 20 GB with `sharding.offload: optimizer`",
        cases=[
            sized(what, peak(model, gpus, **OPTIMIZER_OFF, **changes), lambda size: size < 20e9, model=model)
            for what, gpus, changes in ways
            for model in SEVENS
        ],
        advice="On a GPU stay bf16 weights, one or two layers' gradients and activations. At stage 2 each of several "
        "GPUs has whole weights beside its shard of them, so that one GPU alone takes less; take stage 3. FSDP2 by "
        "itself offloads weights, gradients and averages together, which is `sharding.offload: params` here: slower, "
        f"and {gb(peak('Llama 3.1 8B', '2xRTX4090', **PARAMS_OFF))} for Llama 3.1 8B on 2 GPUs. Either way host memory "
        f"holds {recipe().total:g} bytes a parameter, and {recipe().weights + recipe().optimizer_state:g} more while a "
        "save runs in the background.",
        measured=("ds7b-2x4090-z2acoff", "ds7b-2x4090-z3acoff"),
    )


# --- what checkpointing costs ----------------------------------------------------------------------------------------


def forward_time() -> Claim:
    """Checkpointing as a share of the forward."""
    names = {1: "every layer (`mode: full`)", 2: "every second layer", 3: "every third layer"}
    found = {(n, model): recomputed(model, every_n=n)[0] for n in names for model in SEVENS}
    return Claim(
        said="Activation checkpointing costs 30 to 40 % of the time of the forward pass.",
        rule="30 to 40 % of one forward's arithmetic is done again",
        cases=[Case(names[n], percent(share), 0.3 <= share <= 0.4, model) for (n, model), share in found.items()],
        advice="Full checkpointing runs every decoder layer a second time, which is nearly a whole forward; the 30 to "
        "40 % that are often quoted are of a whole step, the next claim.",
    )


def step_time() -> Claim:
    """Checkpointing as a share of the step."""
    full = {model: recomputed(model, every_n=1)[1] for model in ("Llama 3.2 1B", *SEVENS)}
    whole, second = (float(points()[f"titan-a100-13b-{name}"]["tokens_per_s_per_gpu"]) for name in ("none", "sel2"))
    every_2 = {"activation_checkpointing.mode": "every_n_layers", "activation_checkpointing.every_n": 2}
    all_layers = slowdown("Llama 3.1 8B", "8xA100-80GB")
    half = slowdown("Llama 2 13B", "8x8xA100-80GB", **every_2)
    return Claim(
        said="Full checkpointing adds about a third to the work of a step.",
        rule="25 to 40 % more arithmetic than a step in which nothing is computed again",
        cases=[Case("every layer", f"+{percent(share)}", 0.25 <= share <= 0.4, model) for model, share in full.items()],
        advice=f"A third more work is a quarter fewer tokens a second where nothing else takes time; predicted for "
        f"Llama 3.1 8B on 8 A100 are {percent(all_layers)} fewer. Every second layer costs Llama 2 13B on 64 A100 "
        f"{percent(half)} by prediction and {percent(1 - second / whole)} by measurement (below): "
        "`activation_checkpointing: {mode: every_n_layers, every_n: 2}`, where half of the activations have room.",
        measured=("titan-a100-13b-none", "titan-a100-13b-sel2"),
    )


def slowdown(model: str, gpus: str, **changes: Any) -> float:
    """Return the share of tokens a second that checkpointing costs, for rows of 4096."""
    kept, again = (predict(model, gpus, seq_len=4096, **way) for way in (NOTHING_AGAIN, changes))
    return 1 - again["tokens_per_second_per_gpu"] / kept["tokens_per_second_per_gpu"]


# --- 8-bit Adam ------------------------------------------------------------------------------------------------------


def quarter() -> Claim:
    """8-bit averages."""

    def state(model: str, **changes: Any) -> float:
        return state_bytes(shape_of(model), recipe(**changes))

    eight, fp32, bf16 = recipe(**MASTERS_8BIT), recipe(), recipe(**PURE_BF16)
    ratios = {
        "beside fp32 averages, of a matrix": eight.optimizer_state / fp32.optimizer_state,
        "beside bf16 averages, of a matrix": eight.optimizer_state / bf16.optimizer_state,
        "fp32 weights counted with the averages": (eight.weights + eight.optimizer_state)
        / (fp32.weights + fp32.optimizer_state),
        "weights, gradients and averages": eight.total / fp32.total,
    }
    for model in ("Llama 3.1 8B", "Qwen3 0.6B"):
        ratios[f"{model}: embeddings, norms and biases keep fp32 averages"] = state(model, **MASTERS_8BIT) / state(
            model
        )
    return Claim(
        said="8-bit Adam cuts the optimizer's memory to a quarter.",
        rule="23 to 27 %",
        cases=[Case(what, percent(share), abs(share - 0.25) <= 0.02) for what, share in ratios.items()],
        advice=f"{eight.optimizer_state:.3f} bytes a parameter in place of {fp32.optimizer_state:g}: one for each "
        f"average, and a scale for each block of 256. Of {fp32.total:g} bytes a parameter, {eight.total:.1f} are left; "
        f"with `precision: bf16_pure`, {recipe(**PURE_8BIT).total:.2f} of {recipe(**PURE).total:g}.",
        measured=("tune-3b-07", "tune-3b-08"),
    )


def not_sharded() -> Claim:
    """8-bit and sharding."""
    ways = {
        **{f"stage {stage}": {"sharding.zero_stage": stage} for stage in (1, 2, 3)},
        "HYBRID (`replicate: 2`)": {"sharding.replicate": 2},
    }
    model, gpus = "Llama 3.1 8B", "8xA100-80GB"
    alone = predict(model, "H200", **PURE_8BIT)["breakdown"]["optimizer_state"]
    cases = []
    for what, changes in ways.items():
        try:
            found = predict(model, gpus, **PURE_8BIT, **changes)["breakdown"]["optimizer_state"]
            cases.append(Case(what, f"accepted: {found:.2f} GiB of averages a GPU, {alone:.1f} on one GPU", False))
        except ConfigError:
            cases.append(Case(what, "refused", True))
    return Claim(
        said="8-bit Adam cannot be combined with ZeRO or FSDP.",
        rule=f"the settings are refused ({model} on 8 GPUs)",
        cases=cases,
        advice="Each rank quantises its own shard. There are limits elsewhere: bitsandbytes' own optimizer fails on "
        "FSDP2's sharded tensors (bitsandbytes #1633), and where the size of a shard decides which tensors are 8-bit, "
        "more GPUs save less (ao #4912). Here the whole tensor decides, so any number of GPUs has the same state.",
    )


# --- what a card can hold --------------------------------------------------------------------------------------------


def one_24() -> Claim:
    """One card of 24 GB."""
    card = parse_gpus("RTX4090")
    limit = card.usable_bytes - card.outside_bytes
    stays = recipe(**PURE).weights + recipe(**PURE).gradients
    kept = [
        Case(
            f"`bf16_pure`, only the averages leave: {stays:g} bytes a parameter stay",
            f"{stays * parameters(model) / GIB:.1f} of {limit / GIB:.1f} GiB",
            None if stays * parameters(model) <= limit else False,
            model,
        )
        for model in SEVENS
    ]
    with_8bit = fitting("`bf16_pure`, 8-bit, `offload: optimizer`", "RTX4090", SEVENS, **PURE_8BIT, **OPTIMIZER_OFF)
    with_8, without = (host_gib("Llama 3.1 8B", "RTX4090", **OPTIMIZER_OFF, **way) for way in (PURE_8BIT, {}))
    return Claim(
        said="A 7B model can be trained on one card of 24 GB with bf16, checkpointing, 8-bit Adam and offloading.",
        rule="fits one RTX 4090",
        cases=[*kept, *with_8bit, *fitting("fp32 masters, `offload: optimizer`", "RTX4090", SEVENS, **OPTIMIZER_OFF)],
        advice="Gradients decide it: an offload that leaves them on the card is not enough. With `sharding.offload: "
        "optimizer` each one leaves as soon as it is made, with clipping and accumulation as ever. 8 bits then save "
        f"host memory, not the card's: {with_8:.0f} GiB for Llama 3.1 8B, {without:.0f} without.",
        measured=("tune-8b-4090", "galore-7b-4090"),
    )


def one_48() -> Claim:
    """One card of 48 GB."""
    cards = ", ".join(f"{card} {parse_gpus(card).usable_bytes / GIB:.1f}" for card in ("RTX-A6000", "L40S", "A40"))
    off = predict("Llama 3.1 8B", "RTX-A6000", **OPTIMIZER_OFF)["allocated_gib"]
    return Claim(
        said="A 7B model can be trained on one card of 48 GB with bf16 and 8-bit Adam, without offloading.",
        rule="fits the one card",
        cases=[
            *fitting("RTX A6000, `bf16_pure`, 8-bit", "RTX-A6000", SEVENS, **PURE_8BIT),
            *fitting("L40S, `bf16_pure`, 8-bit", "L40S", SEVENS, **PURE_8BIT),
            *fitting("RTX A6000, fp32 masters, 8-bit", "RTX-A6000", SEVENS, **MASTERS_8BIT),
        ],
        advice=f"Cards of 48 GB do not leave the same (GiB: {cards}). `sharding.offload: optimizer` makes room for "
        f"fp32 masters: {off:.1f} GiB for Llama 3.1 8B.",
        measured=("tune-8b-a6000", "ao-l2-7b-ao4"),
    )


def two_24() -> Claim:
    """Two cards of 24 GB."""
    shards = recipe().total * parameters("Llama 2 7B") / 2
    four = predict("Llama 3.1 8B", "4xRTX4090", **PURE_8BIT)["allocated_gib"]
    return Claim(
        said="Two cards of 24 GB with ZeRO-3 (FULL_SHARD) are enough for a 7B model.",
        rule="fits two RTX 4090 at stage 3",
        cases=[
            *fitting("fp32 masters, AdamW", "2xRTX4090", SEVENS),
            *fitting("`bf16_pure`, 8-bit", "2xRTX4090", SEVENS, **PURE_8BIT),
            *fitting("fp32 masters, `offload: optimizer`", "2xRTX4090", SEVENS, **OPTIMIZER_OFF),
        ],
        advice=f"With fp32 masters the shards of Llama 2 7B alone are {gb(shards)} a card. On four cards Llama 3.1 8B "
        f"with `bf16_pure` and 8-bit averages peaks at {four:.1f} GiB.",
        measured=("ds7b-2x4090-z3ac", "ds7b-2x4090-z3acoff", "tune-l2-7b-4x4090"),
    )


def thirteen() -> Claim:
    """13B and more."""
    models = ("Llama 2 13B", "Qwen2.5 14B")
    found = [
        *fitting("A100 80 GB, fp32 masters", "A100-80GB", models),
        *fitting("A100 80 GB, `bf16_pure`, 8-bit", "A100-80GB", models, **PURE_8BIT),
        *fitting("RTX A6000, `offload: optimizer`", "RTX-A6000", models, **OPTIMIZER_OFF),
        *fitting("RTX 4090, `offload: params`", "RTX4090", models, **PARAMS_OFF),
    ]
    return Claim(
        said="From 13B on, several GPUs and ZeRO-3 are unavoidable.",
        rule="does not fit the one GPU",
        cases=[replace(case, holds=None if case.holds is None else not case.holds) for case in found],
        advice=f"They are for {recipe().total:g} bytes a parameter on GPUs: "
        f"{gb(recipe().total * parameters(models[0]))} for {models[0]}. One GPU pays in host memory and time instead.",
        measured=("qwen-14b-nb-oom", "qwen-14b-4x80-z3"),
    )


CLAIMS: Mapping[str, Sequence[Callable[[], Claim]]] = {
    "How much a model takes": (sixteen_bytes, seven_billion, over_280, eighty),
    "What sharding divides": (zero_2, thirty, twenty),
    "What checkpointing costs": (forward_time, step_time),
    "8-bit Adam": (quarter, not_sharded),
    "What a card can hold": (one_24, one_48, two_24, thirteen),
}


def find_claims() -> dict[str, list[Claim]]:
    """Return every claim with its numbers, by topic."""
    return {topic: [make() for make in makes] for topic, makes in CLAIMS.items()}
