"""Our training equals a plain single-process PyTorch loop over the same tokens, whatever the way it is run.

Twenty fp32 optimizer steps: every loss within 1e-5, every gradient norm within 1e-4, and every tensor's movement within
1e-4 of the reference's, by norm. The cases cover every allowed pair of settings; a test proves that they do. In CI some
of them run, which cover every value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import models, reference, training_runs
from tests.ranks import run_on_kept_ranks, run_plainly
from tests.sweeps import every_value, share
from tests.twenty_steps import name_of

STEPS = 20
GLOBAL_BATCH_SIZE = 16
N_RECORDS = {
    False: 37,
    True: 110,
}  # by packing: neither gives a whole number of windows, so an epoch ends in a short one
CLIP = {"on": 0.5, "off": None}


class Case(NamedTuple):
    """One way to run the same training."""

    sharding: str
    world: int
    checkpointing: str
    accumulation: int
    packing: bool
    tied: bool
    model: str
    loss: str
    clip: str


VALUES: dict[str, tuple[Any, ...]] = {
    "sharding": ("stage0", "stage1", "stage2", "stage3", "hybrid", "reshard2", "offload"),
    "world": (1, 2, 4),
    "checkpointing": ("none", "full", "every2"),
    "accumulation": (1, 4),
    "packing": (False, True),
    "tied": (False, True),
    "model": ("llama", "qwen3", "gemma2", "gpt2"),
    "loss": ("chunked", "plain"),
    "clip": ("on", "off"),
}

CASES = [
    Case("stage0", 1, "none", 4, True, False, "llama", "plain", "off"),
    Case("stage0", 1, "none", 4, False, True, "gemma2", "plain", "off"),
    Case("stage0", 2, "every2", 1, True, True, "qwen3", "chunked", "on"),
    Case("stage0", 4, "full", 1, False, True, "gpt2", "plain", "on"),
    Case("stage1", 1, "full", 1, False, False, "llama", "chunked", "off"),
    Case("stage1", 1, "every2", 1, False, True, "qwen3", "chunked", "off"),
    Case("stage1", 2, "none", 4, False, True, "gpt2", "plain", "off"),
    Case("stage1", 4, "every2", 1, True, True, "gemma2", "plain", "on"),
    Case("stage2", 1, "none", 1, True, True, "gpt2", "chunked", "on"),
    Case("stage2", 1, "full", 1, True, True, "qwen3", "plain", "on"),
    Case("stage2", 2, "every2", 4, False, False, "llama", "plain", "off"),
    Case("stage2", 4, "full", 4, True, True, "gemma2", "chunked", "off"),
    Case("stage3", 1, "every2", 1, False, True, "gemma2", "chunked", "off"),
    Case("stage3", 1, "full", 1, True, True, "gpt2", "plain", "off"),
    Case("stage3", 2, "full", 4, True, True, "llama", "plain", "off"),
    Case("stage3", 4, "none", 4, False, False, "qwen3", "chunked", "on"),
    Case("hybrid", 4, "none", 4, False, True, "gemma2", "chunked", "off"),
    Case("hybrid", 4, "full", 1, True, False, "qwen3", "plain", "on"),
    Case("hybrid", 4, "every2", 1, True, False, "llama", "chunked", "on"),
    Case("hybrid", 4, "none", 1, True, True, "gpt2", "chunked", "off"),
    Case("reshard2", 4, "full", 1, False, False, "llama", "chunked", "on"),
    Case("reshard2", 4, "every2", 4, True, True, "gpt2", "plain", "off"),
    Case("reshard2", 4, "none", 4, True, True, "qwen3", "chunked", "on"),
    Case("reshard2", 4, "full", 1, False, True, "gemma2", "plain", "on"),
    Case("offload", 1, "every2", 4, False, False, "qwen3", "plain", "off"),
    Case("offload", 1, "every2", 4, True, True, "gpt2", "plain", "on"),
    Case("offload", 2, "full", 1, True, True, "gemma2", "chunked", "on"),
    Case("offload", 4, "none", 1, False, True, "llama", "plain", "on"),
]


def allowed(**some: Any) -> bool:
    """Return whether the named values can occur together in a case."""
    if some.get("sharding") in ("hybrid", "reshard2") and some.get("world", 4) != 4:
        return False  # two groups of two, or gathering within two of four
    return not (some.get("model") in ("gemma2", "gpt2") and some.get("tied", True) is False)  # always tied


def _pairs(case: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


def test_cases_cover_every_allowed_pair() -> None:
    covered = set().union(*(_pairs(case._asdict()) for case in CASES))
    wanted = {
        ((first, a), (second, b))
        for first, second in itertools.combinations(VALUES, 2)
        for a, b in itertools.product(VALUES[first], VALUES[second])
        if allowed(**{first: a, second: b})
    }
    assert wanted == covered
    assert all(allowed(**case._asdict()) for case in CASES)


def kind_of(case: Case) -> str:
    """Return the tiny model of a case."""
    tied_by_name = case.tied and case.model in ("llama", "qwen3")
    return f"{case.model}_tied" if tied_by_name else case.model


def case_sections(case: Case) -> dict[str, Any]:
    """Return the settings that make a case what it is."""
    sharding: dict[str, Any] = {
        "hybrid": {"zero_stage": "HYBRID_SHARD", "replicate": 2},
        "reshard2": {"zero_stage": 3, "reshard_after_forward": 2},
        "offload": {"zero_stage": 3, "offload": "params"},
    }.get(case.sharding) or {"zero_stage": int(case.sharding[-1])}
    checkpointing = (
        {"mode": "every_n_layers", "every_n": 2} if case.checkpointing == "every2" else {"mode": case.checkpointing}
    )
    return {
        "sharding": sharding,
        "activation_checkpointing": checkpointing,
        "data": {"packing": case.packing},
        "loss": {"kind": case.loss},
        "optim": {"max_grad_norm": CLIP[case.clip]},
        "batch": {
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "micro_batch_size": GLOBAL_BATCH_SIZE // (case.world * case.accumulation),
        },
    }


def recipe_for(clip: str) -> reference.Recipe:
    """Return the reference's hyperparameters, as `training_runs.settings` has them."""
    return reference.Recipe(
        lr=1e-3, weight_decay=0.1, max_grad_norm=CLIP[clip], warmup_steps=3, min_lr_ratio=0.1, total_steps=STEPS
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[str, list[models.Document]]]:
    """Return the training file and the documents it must become, by packing."""
    folder, made = tmp_path_factory.mktemp("data"), {}
    for packing, n_records in N_RECORDS.items():
        records, documents = models.make_records(n_records, seed=int(packing))
        made[packing] = models.write_jsonl(records, folder / f"packing-{packing}.jsonl"), documents
    return made


References = Callable[[str, bool, str], reference.Result]


@pytest.fixture(scope="module")
def references(
    model_folder: Callable[[str], str],
    data: dict[bool, tuple[str, list[models.Document]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> References:
    """Return a function of (model, packing, clipping) that trains the reference, once each."""
    plans: dict[bool, list[list[models.Document]]] = {}
    results: dict[tuple[str, bool, str], reference.Result] = {}

    def plan(packing: bool) -> list[list[models.Document]]:
        if packing not in plans:
            file, documents = data[packing]
            run = training_runs.settings(model_folder("llama"), file, tmp_path_factory.mktemp("plan"))
            run["data"]["packing"] = packing
            plans[packing] = run_on_kept_ranks(training_runs.documents_by_step, 1, run, STEPS)[0]
            check_plan(plans[packing], documents, packing=packing)
        return plans[packing]

    def get(kind: str, packing: bool, clip: str) -> reference.Result:
        key = kind, packing, clip
        if key not in results:
            results[key] = run_plainly(reference.train, model_folder(kind), plan(packing), recipe_for(clip))[0]
        return results[key]

    return get


def check_plan(plan: list[list[models.Document]], documents: list[models.Document], *, packing: bool) -> None:
    """The steps of an epoch hold every document once, tokens and mask as written down; the last step is a short one."""
    sizes = [len(step) for step in plan]
    epoch = next(count for count in range(1, STEPS) if sum(sizes[:count]) >= len(documents))
    assert Counter(itertools.chain.from_iterable(plan[:epoch])) == Counter(documents)
    assert 1 < epoch < STEPS / 2 and sizes[epoch - 1] < min(sizes[: epoch - 1]), sizes
    assert plan[:epoch] != plan[epoch : 2 * epoch], "epochs must differ in order"
    assert packing == (len(documents) > GLOBAL_BATCH_SIZE * epoch), "packed rows hold several documents"


def train_case(case: Case, model: str, file: str, output: Path, **more: Any) -> dict[str, Any]:
    """Train one case and return rank 0's metrics and weights."""
    sections = case_sections(case) | more
    run = training_runs.settings(model, file, output, **sections)
    return run_on_kept_ranks(training_runs.train, case.world, run, timeout=120)[0]


@pytest.mark.parametrize("case", share(CASES, every_value(CASES), ids=name_of))
def test_fp32_parity(
    case: Case, model_folder: Callable[[str], str], data: Any, references: References, tmp_path: Path
) -> None:
    expected = references(kind_of(case), case.packing, case.clip)
    got = train_case(case, model_folder(kind_of(case)), data[case.packing][0], tmp_path)
    rows = [row for row in got["metrics"] if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=1e-4)
    assert [row["lr"] for row in rows] == pytest.approx(expected.lrs, rel=1e-9)
    if case.clip == "on":
        assert min(expected.grad_norms) > CLIP["on"], "clipping must act in every step of these cases"
    errors = reference.movement_errors(got["weights"], expected)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


BF16_CASES = [
    Case("stage3", 2, "full", 4, True, True, "llama", "chunked", "on"),
    Case("stage2", 2, "none", 1, False, False, "qwen3", "plain", "off"),
    Case("stage1", 1, "every2", 4, True, True, "gpt2", "chunked", "on"),
    Case("stage3", 1, "none", 1, False, True, "gemma2", "chunked", "off"),
]


@pytest.mark.parametrize("case", share(BF16_CASES, BF16_CASES[1:3], ids=name_of))
def test_bf16_stays_close(
    case: Case, model_folder: Callable[[str], str], data: Any, references: References, tmp_path: Path
) -> None:
    expected = references(kind_of(case), case.packing, case.clip)
    got = train_case(case, model_folder(kind_of(case)), data[case.packing][0], tmp_path, precision="bf16")
    losses = [row["loss"] for row in got["metrics"] if "loss" in row]
    assert losses == pytest.approx(expected.losses, rel=1e-2)
    assert losses != pytest.approx(expected.losses, rel=1e-6), "nothing was computed in bf16"


def test_gemma3_sliding_window_through_sdpa(
    model_folder: Callable[[str], str], data: Any, references: References, tmp_path: Path
) -> None:
    """Gemma 2 runs eager for its soft-capped scores; Gemma 3 takes the sdpa path with windows and two rotary tables."""
    case = Case("stage3", 2, "full", 1, True, True, "gemma3", "chunked", "on")
    expected = references("gemma3", True, "on")
    got = train_case(case, model_folder("gemma3"), data[True][0], tmp_path)
    assert [row["loss"] for row in got["metrics"] if "loss" in row] == pytest.approx(expected.losses, rel=1e-5)
    errors = reference.movement_errors(got["weights"], expected)
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]
