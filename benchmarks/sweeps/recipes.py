"""The memory that each recipe of configs/recipes promises, beside what its simulation says now.

    python -m benchmarks.sweeps.recipes [NAME ...] [--full]

The peak is that to which simulations with few layers and micro-batches lead, 11 s of CPU each; with `--full` every
recipe is simulated in full. Two at a time, each on a process of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence

from configs import make_recipes
from configs.make_recipes import FOLDER, RECIPES, TOLERANCE, name_of, read_promise
from tests.ranks import run_ranks

AT_ONCE = 2
# A model, GPUs, and whether in full.
Case = tuple[str, str, bool]


def difference_in_full(model: str, gpus: str) -> str:
    """Return what a recipe's full simulation does not keep of its promise; empty where it keeps all."""
    promise = read_promise(FOLDER / f"{name_of(model, gpus)}.yaml")
    return make_recipes.difference(make_recipes.simulate_recipe(model, gpus), promise)


def difference_of_peak(model: str, gpus: str) -> str:
    """Return how the peak that few layers lead to is not the promised one; empty where it is."""
    promise = read_promise(FOLDER / f"{name_of(model, gpus)}.yaml")
    found = make_recipes.extrapolate_recipe(model, gpus)
    is_kept = abs(found - promise.allocated) <= TOLERANCE * promise.allocated
    return "" if is_kept else f"{found:.3f} GiB at the peak; {promise.line()}"


def check_own(cases: Sequence[Case]) -> tuple[str, float]:
    """On a rank: check the case that has its number; return what is wrong, and the CPU seconds."""
    model, gpus, in_full = cases[int(os.environ["RANK"])]
    begun = time.process_time()
    try:
        wrong = (difference_in_full if in_full else difference_of_peak)(model, gpus)
    except Exception as error:  # the other cases are still to be seen
        wrong = f"{type(error).__name__}: {error}"
    return wrong, time.process_time() - begun


def check_all(cases: Sequence[Case]) -> Iterator[tuple[Case, str, float]]:
    """Give each case with what is wrong with it and its CPU seconds."""
    for start in range(0, len(cases), AT_ONCE):
        some = cases[start : start + AT_ONCE]
        for case, (wrong, seconds) in zip(some, run_ranks(check_own, len(some), some, timeout=600), strict=True):
            yield case, wrong, seconds


def main() -> int:
    """Check the recipes; 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as qwen3-8b-2xrtx4090; all by default")
    parser.add_argument("--full", action="store_true", help="in full instead")
    asked = parser.parse_args()
    recipes = {name_of(model, gpus): (model, gpus) for model, gpus, _ in RECIPES}
    if unknown := set(asked.names) - set(recipes):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    cases = [(*recipes[name], asked.full) for name in asked.names or recipes]
    broken, begun = 0, time.monotonic()
    for (model, gpus, _), wrong, seconds in check_all(cases):
        print(f"{name_of(model, gpus)}: {wrong or 'kept'}, {seconds:.1f} s of CPU", flush=True)
        broken += bool(wrong)
    way = "in full" if asked.full else "with few layers"
    print(f"{len(cases) - broken} of {len(cases)} promises kept, simulated {way}; {time.monotonic() - begun:.0f} s")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
