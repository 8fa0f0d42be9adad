"""Predict what others published: memory of every row of points.csv that this trainer's settings can express.

`python -m benchmarks.planner` computes the closed form anew and writes PLANNER.md and planner.json; `--full` also runs
the full simulation for rows that planner.json has none of, or for those named. Which row stands for which settings, and
why a row is left out, is data: planner_rows.yaml. Nothing here is fitted to a row.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.planner_programs import closed_form_of, held_bytes_per_logit, simulated_as
from fsdp_trainer.config import Config
from fsdp_trainer.memory.estimate import GIB, RECIPES, estimate_loss
from fsdp_trainer.memory.estimate_model import (
    ModelShape,
    count_layers,
    count_parameters,
    layer_activation_bytes,
    read_model_shape,
)
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_step import estimate_step, find_peak
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.quick import ALLOCATOR_MARGIN, step_settings

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "planner.json", HERE / "PLANNER.md"
TARGET_MEDIAN, TARGET_NEAR, NEAR = 0.05, 0.9, 0.1  # median error, share of rows that are near, and what near is


@dataclass(frozen=True)
class Row:
    """One published row and the settings that stand for it."""

    id: str
    point: Mapping[str, str]
    words: Mapping[str, Any]
    expressed: bool  # by today's settings, so it can be simulated in full

    @property
    def hardware(self) -> Hardware:
        """The row's GPUs."""
        return parse_gpus(self.words["gpus"])

    @property
    def pure(self) -> bool:
        """True where weights, gradients and state are bf16."""
        return self.words.get("pure", not self.expressed)

    @property
    def kind(self) -> str:
        """What was published: allocated | reserved | fits | OOM | unclear."""
        if self.words.get("unclear_kind"):  # points.csv takes it for one kind where the source names none
            return "unclear"
        kind = self.point["peak_kind"].split("(")[0].strip()
        if kind.startswith(("allocated", "active")):
            return "allocated"
        return kind if kind in ("reserved", "fits", "OOM") else "unclear"

    @property
    def published_gib(self) -> float | None:
        """The published peak; None where only the side of a limit is known."""
        return float(self.point["peak_gib"]) if self.kind in ("allocated", "reserved", "unclear") else None

    def config(self, folder: str) -> Config:
        """Return the row as settings of this trainer; all but `pure` ones have fp32 masters."""
        words, ranks = self.words, self.hardware.count
        micro = words.get("micro_batch", 1)
        settings = {
            "model": {"path": folder, "init": "random"},
            "data.seq_len": words["seq_len"],
            "data.packing": False,
            "optim.implementation": "fused" if words.get("fused") else "foreach",
            "loss.kind": words.get("loss", "plain"),
            "batch.micro_batch_size": micro,
            "batch.global_batch_size": micro * ranks * words.get("accumulation", 1),
            "sharding.zero_stage": words.get("stage", 3),
            "activation_checkpointing.mode": words.get("checkpointing", "full"),
            "export.at_end": False,
        }
        if self.pure and self.expressed:
            settings |= {"precision": "bf16_pure", "sharding.reduce_dtype": "bf16", "optim.state_dtype": "bf16"}
            settings["optim.implementation"] = "fused"  # of bf16 state the step is ours, in pieces
        if "reduce" in words:
            settings["sharding.reduce_dtype"] = words["reduce"]
        if "every_n" in words:
            settings["activation_checkpointing.every_n"] = words["every_n"]
        return Config.from_dict(settings)


def read_rows() -> list[Row]:
    """Return the expressed rows, in the file's order."""
    with (HERE / "points.csv").open(encoding="utf-8", newline="") as file:
        points = {row["id"]: row for row in csv.DictReader(file)}
    data = _read_yaml()
    return [
        Row(id, points[id], words, expressed=group == "expressed")
        for group in ("expressed", "closed_form_only")
        for id, words in data[group].items()
    ]


def _read_yaml() -> dict[str, Any]:
    return YAML(typ="safe").load((HERE / "planner_rows.yaml").read_text(encoding="utf-8"))


def model_path(row: Row) -> Path:
    return HERE / "models" / f"{row.words['model']}.json"


# --- predictions -----------------------------------------------------------------------------------------------------


def predict_closed_form(row: Row) -> dict[str, Any]:
    """Return {allocated_gib, fits}; fits is null where the closed form cannot tell."""
    shape, hardware = read_model_shape(model_path(row)), row.hardware
    settings = step_settings(row.config("unused"), shape, ranks=hardware.count, capability=hardware.capability)
    with closed_form_of(row.words):
        return _predict_closed_form(row, shape, settings)


def _predict_closed_form(row: Row, shape: ModelShape, settings: StepSettings) -> dict[str, Any]:
    hardware = row.hardware
    if row.pure:
        settings = replace(
            settings, recipe=RECIPES["bf16_pure" if row.words.get("fused") else "bf16_pure_foreach"], reduce_bytes=2
        )
    if row.words.get("unsharded"):
        allocated = unsharded_peak(shape, settings)
    else:
        allocated = sum(find_peak(estimate_step(shape, settings))[2].values())
    allocated += held_bytes_per_logit(row.words) * settings.tokens * shape.vocab
    if row.words.get("checkpointed_parts"):  # four hidden states of a layer are kept where it counts one
        allocated += 3 * 2 * shape.hidden * settings.tokens * shape.layers
    limit = hardware.usable_bytes - hardware.outside_bytes
    fits = False if allocated > limit else True if allocated * ALLOCATOR_MARGIN <= limit else None
    return {"allocated_gib": round(allocated / GIB, 2), "fits": fits}


def unsharded_peak(shape: ModelShape, settings: StepSettings) -> float:
    """Return the peak of a run without FSDP, which this trainer does not make: the largest of three moments.

    Where the loss is: weights, state, what is kept, logits. Where the backward ends: all gradients and one layer. In
    the step: gradients, state and what the optimizer adds.
    """
    recipe, parameters = settings.recipe, count_parameters(shape)
    tokens, hidden = settings.tokens, shape.hidden * 2
    layer = layer_activation_bytes(shape, seq_len=settings.seq_len) * tokens
    kept = sum(hidden * tokens if settings.is_checkpointed(i) else layer for i in range(len(count_layers(shape))))
    loss = estimate_loss(
        tokens=tokens,
        vocab=shape.vocab,
        hidden=shape.hidden,
        kind=settings.loss,
        bytes_per_logit=settings.bytes_per_logit,
    )
    resting = (recipe.weights + recipe.optimizer_state) * parameters
    return max(
        resting + kept + loss.backward + 3 * hidden * tokens,
        resting + recipe.gradients * parameters + layer,
        (recipe.total + recipe.step) * parameters,
    )


def predict_in_full(row: Row) -> dict[str, Any]:
    """Return {allocated_gib, reserved_gib, min_capacity_gib, limit, fits, seconds} of the full simulation.

    reserved_gib is what the row's own card would show: where the allocator would keep more than there is, it gives
    cached blocks back, which is replayed.
    """
    from fsdp_trainer.memory.allocator import replay
    from fsdp_trainer.memory.simulate import allocator_events, simulate

    expandable = row.words.get("expandable", False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(model_path(row).read_text(encoding="utf-8"), encoding="utf-8")
        started = time.monotonic()
        with simulated_as(row.words):
            result = simulate(row.config(folder), row.hardware, expandable_segments=expandable)
    found = {key: round(result.to_json()[key], 2) for key in ("allocated_gib", "reserved_gib", "min_capacity_gib")}
    if result.reserved > result.limit and result.fits:
        assert result.ledger is not None
        events = allocator_events(result.ledger)
        found["reserved_gib"] = round(replay(events, expandable=expandable, capacity=result.limit).reserved / GIB, 2)
    found |= {"limit": round(result.limit / GIB, 2), "fits": result.fits}
    return found | {"seconds": round(time.monotonic() - started)}


# --- the table -------------------------------------------------------------------------------------------------------


def compare(row: Row, predicted: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (method, relative error) for every prediction of the kind that was published."""
    if row.published_gib is None or row.kind == "unclear":
        return
    closed, full = predicted["closed_form"], predicted.get("full")
    if row.kind == "allocated":
        yield "closed form", closed["allocated_gib"] / row.published_gib - 1
    if full is not None:
        yield "full", full[f"{row.kind}_gib"] / row.published_gib - 1


def format_table(results: Mapping[str, Any]) -> str:
    """Return PLANNER.md."""
    rows = read_rows()
    lines = [HEAD, _statistics(rows, results), "", COLUMNS, "|---|---|--:|--:|--:|--:|---|---|"]
    lines += [_line(row, results[row.id]) for row in rows]
    data = _read_yaml()
    lines += ["", data["remarks"], "## Rows that are not predicted", ""]
    lines += [f"- {reason}: {', '.join(f'`{id}`' for id in ids)}" for reason, ids in data["not_expressed"].items()]
    return "\n".join(lines) + "\n"


def _line(row: Row, predicted: Mapping[str, Any]) -> str:
    closed, full = predicted["closed_form"], predicted.get("full")
    published = row.kind if row.published_gib is None else row.point["peak_gib"]
    errors = ", ".join(f"{method} {error:+.1%}" for method, error in compare(row, predicted))
    kind = row.kind.replace("unclear", "of no stated kind") if row.published_gib is not None else ""
    shown = [row.id, f"{published} {kind}".strip(), f"{closed['allocated_gib']:.2f}"]
    if full is None:
        shown += ["", "", ""]
    else:
        shown += [f"{full[key]:.2f}" for key in ("allocated_gib", "reserved_gib", "min_capacity_gib")]
    return "| " + " | ".join([*shown, errors or _side(row, predicted), row.words.get("note", "")]) + " |"


def answers(row: Row, predicted: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return, by method, whether a row of which only a side is known was put on it; None where undecided."""
    if row.kind not in ("fits", "OOM"):
        return {}
    found = {"closed form": predicted["closed_form"]["fits"]}
    if predicted.get("full") is not None:
        found["full"] = predicted["full"]["fits"]
    return {method: None if fits is None else fits is (row.kind == "fits") for method, fits in found.items()}


def _side(row: Row, predicted: Mapping[str, Any]) -> str:
    if row.kind == "unclear":
        return "not compared"
    words = {None: "undecided", True: "right", False: "**wrong**"}
    found = answers(row, predicted)
    return ", ".join(f"{method} {words[answer]}" for method, answer in found.items()) or "bound only"


def errors_of(method: str, results: Mapping[str, Any], *, held_out: bool = False) -> dict[str, float]:
    """Return {row: relative error} of every row whose kind the method predicts, or of those that were held out."""
    rows = [row for row in read_rows() if row.words.get("held_out", False) is held_out]
    found = {row.id: dict(compare(row, results[row.id])) for row in rows}
    return {id: errors[method] for id, errors in found.items() if method in errors}


def _statistics(rows: list[Row], results: Mapping[str, Any]) -> str:
    lines = []
    for method in ("full", "closed form"):
        errors = [abs(error) for error in errors_of(method, results).values()]
        median, near = statistics.median(errors), sum(error <= NEAR for error in errors)
        sides = [found[method] for row in rows if method in (found := answers(row, results[row.id]))]
        lines.append(
            f"- {method}: {len(errors)} rows of its kind, median error {median:.1%} "
            f"({_met(median <= TARGET_MEDIAN)}), {near} within 10 % ({_met(near >= TARGET_NEAR * len(errors))}); of "
            f"{len(sides)} rows where only the side of a limit is known, {sides.count(True)} right, "
            f"{sides.count(None)} undecided, {sides.count(False)} wrong ({_met(not sides.count(False))})"
        )
    errors = [abs(error) for error in errors_of("full", results, held_out=True).values()]
    lines.append(
        f"- full, {len(errors)} further rows of one of the programs, read and predicted once, when the settings stood: "
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
    )
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


HEAD = """# Predicted and published memory

Generated by `python -m benchmarks.planner` from [points.csv](points.csv) (published by others, with their sources) and
[planner_rows.yaml](planner_rows.yaml) (the settings that stand for each row, with the source of each). GiB of one GPU.
Allocated is compared with allocated and reserved with reserved; the closed form knows no allocator, so beside a
reserved row its figure is only a lower bound. No constant is fitted to a row: what a row's program does otherwise than
this trainer is read in that program's source and done to the simulation (planner_programs.py). The programs run other
versions of torch, and some other units of sharding or compiled layers, which are predicted as if they did not.

Targets: median error 5 %, 90 % of the rows within 10 %, no row that ran called too big, none that ran out of memory
called fitting.
"""
COLUMNS = "| row | published | closed form | full: allocated | reserved | least capacity | error | note |"


def main() -> None:
    """Compute, write planner.json and PLANNER.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full", nargs="*", metavar="ID", help="run the full simulation: of all rows that lack it, or of these"
    )
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = read_rows()
    for row in rows:
        results[row.id] = {"full": None, **results.get(row.id, {}), "closed_form": predict_closed_form(row)}
    lacking = [row.id for row in rows if row.expressed and results[row.id]["full"] is None]
    by_id = {row.id: row for row in rows}
    for name in [] if arguments.full is None else arguments.full or lacking:
        results[name]["full"] = predict_in_full(by_id[name])
        print(name, results[name], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    RESULTS.write_text(json.dumps({row.id: results[row.id] for row in rows}, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(format_table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
