"""Long counts of what CI holds a share of: every recipe, every space of plans, hundreds of kills, thousands of damages.

They take minutes each, so they are run by hand, one after the other on a quiet machine: before a release, and after a
change to what they are about. `recipes` and `spaces`: the simulation, the planner, or another torch, Transformers or
Accelerate. `configurations`: the step, the loss, sharding, attention. `kill` and `damage`: saving, resuming,
exporting. The cases of tests that CI leaves out are run by `./launch.sh test -m sweep` (tests/sweeps.py).

    python -m benchmarks.sweeps.recipes
    python -m benchmarks.sweeps.spaces
    python -m benchmarks.sweeps.configurations
    python -m benchmarks.sweeps.kill
    python -m benchmarks.sweeps.damage

Each prints a line for every case (`configurations`: every disagreement) and a summary, and exits 1 when a case fails.
The last result, with date and versions, goes into benchmarks/RESULTS.md.
"""
