"""Predict what others published: tokens a second of each GPU, for every row of points.csv that can be expressed.

`python -m benchmarks.speed` computes the closed form and writes SPEED.md. Which row stands for which settings, and why
a row is left out, is data: speed_rows.yaml. Nothing here, and no rate, is fitted to a row.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ruamel.yaml import YAML

from fsdp_trainer.memory import estimate_time, estimate_work
from fsdp_trainer.memory.estimate import RECIPES
from fsdp_trainer.memory.estimate_model import ModelShape, count_parameters, read_model_shape
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_time import estimate_step_time
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.rates import Rates, Stretch, read_rates
from fsdp_trainer.memory.timing import StepTime

HERE = Path(__file__).parent
TABLE = HERE / "SPEED.md"
NEAR = 0.25  # what counts as met
# Published speeds closer than this are no order: runs of one setting differ by as much.
TIE = 0.01


@dataclass(frozen=True)
class Row:
    """One published row and the settings that stand for it."""

    id: str
    point: Mapping[str, str]
    words: Mapping[str, Any]
    shape: ModelShape

    @property
    def published(self) -> float:
        """Tokens a second of each GPU."""
        return float(self.point["tokens_per_s_per_gpu"])

    @property
    def settings(self) -> StepSettings:
        """The row as the closed form takes it; dense attention over whole rows by the flash kernel."""
        words, ranks = self.words, parse_gpus(self.words["gpus"]).count
        pure = words.get("pure", False)
        return StepSettings(
            ranks=ranks,
            seq_len=words["seq_len"],
            micro_batch_size=words.get("micro_batch", 1),
            micro_batches=words.get("micro_batches", 1),
            zero_stage=words.get("stage", 3),
            replicate=words.get("replicate", 1),
            offload_optimizer=False,
            recipe=RECIPES["bf16_pure" if pure else "bf16"],
            reduce_bytes=words.get("reduce_bytes", 4),
            checkpointing=words.get("checkpointing", "full").replace("selective", "full"),
            every_n=words.get("every_n", 1),
            loss=words.get("loss", "plain"),
        )


def read_rows() -> list[Row]:
    """Return the expressed rows, in the file's order."""
    data, points = read_data(), read_points()
    return [Row(id, points[id], words, _shape(words, data["shapes"])) for id, words in data["expressed"].items()]


def read_points() -> dict[str, dict[str, str]]:
    """Return the published rows that have a speed, by id."""
    with (HERE / "points.csv").open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file) if row["tokens_per_s_per_gpu"]}


def read_data() -> dict[str, Any]:
    """Return speed_rows.yaml."""
    return YAML(typ="safe").load((HERE / "speed_rows.yaml").read_text(encoding="utf-8"))


def _shape(words: Mapping[str, Any], shapes: Mapping[str, Any]) -> ModelShape:
    if "model" in words:
        return read_model_shape(HERE / "models" / f"{words['model']}.json")
    mpt = {"model_type": "gpt2", "activation_function": "gelu", "vocab_size": 50368, "n_positions": words["seq_len"]}
    return read_model_shape(mpt | shapes[words["shape"]])


# --- other programs --------------------------------------------------------------------------------------------------

# Tensors of the compute dtype that one fused kernel reads and writes for an element, forward and backward: a norm with
# the residual's sum, rotary positions, and the activation with what it is multiplied by.
_FUSED_NORMS = {"NORM_MOVES": dict.fromkeys(estimate_work.NORM_MOVES, ((0, 2), (0, 4)))}
_COMPILED = {
    **_FUSED_NORMS,
    "ROTARY_MOVES": (2, 2),
    "MLP_MOVES": {True: (3, 5), False: (2, 3)},
    "RESIDUAL_MOVES": (4, 6),
}


def _kernel_rates(kernel: str, values: Mapping[str, float]) -> dict[str, float]:
    """Other kernels than FlashAttention-2, which rates.csv has: sources in speed_rows.yaml."""
    changes = {
        "flash2": {},
        "triton": {"attention_share": values["attention_share"] / 1.4, "attention_backward_share": 0.6},
        "flash3": {"attention_share": 0.655},
    }
    return {**values, **changes[kernel]}


# torch's fused AdamW on bf16 weights, gradients and averages: four read, three written.
_BF16_UPDATE = 14.0


def _with_kernel(row: Row) -> Any:
    def read(hardware: Hardware) -> Rates | None:
        rates = read_rates(hardware)
        kernel = row.words.get("attention", "flash2")
        return None if rates is None else replace(rates, values=_kernel_rates(kernel, rates.values))

    return read


def _bf16_update(shape: ModelShape, settings: StepSettings) -> Stretch:
    return Stretch(moved=_BF16_UPDATE * count_parameters(shape) / settings.shards, operations=10)


@contextlib.contextmanager
def as_program(row: Row) -> Iterator[None]:
    """Let the closed form count what the row's own program moves and recomputes."""
    with contextlib.ExitStack() as stack:
        program = {"eager": {}, "fused": _FUSED_NORMS, "compiled": _COMPILED}[row.words.get("program", "eager")]
        for name, value in program.items():
            stack.enter_context(patch.object(estimate_work, name, value))
        if row.words.get("checkpointing") == "selective":
            stack.enter_context(patch.object(estimate_time, "layer_recomputed", every_second_product))
        stack.enter_context(patch.object(estimate_time, "read_rates", _with_kernel(row)))
        if row.words.get("pure"):
            stack.enter_context(patch.object(estimate_time, "update_stretch", _bf16_update))
        if row.words.get("alone"):
            stack.enter_context(patch.object(StepSettings, "is_alone", True))
            stack.enter_context(patch.object(Rates, "pcie_seconds", lambda *_: 0.0))
            stack.enter_context(patch.object(Rates, "host_seconds", lambda *_: 0.0))
        yield


def every_second_product(shape: ModelShape, settings: StepSettings, *, index: int) -> Stretch:
    """Return what torchtitan's selective checkpointing runs again: keys, output and up, and all that is no product."""
    stretch = estimate_work.layer_forward(shape, settings, index=index)
    stretch.matrices.clear()
    stretch.attention.clear()
    for columns, inner in ((shape.kv_size, shape.hidden), (shape.hidden, shape.query_size), (shape.ffn, shape.hidden)):
        stretch.matrices[settings.tokens, columns, inner, settings.compute_bytes] += 1
    return stretch


def predict(row: Row) -> StepTime:
    """Return the time of one of the row's steps."""
    with as_program(row):
        time = estimate_step_time(row.shape, row.settings, parse_gpus(row.words["gpus"]))
    assert time is not None, row.id
    return time


def tokens_per_second(row: Row) -> float:
    """Return the predicted tokens a second of each GPU."""
    return row.settings.tokens * row.settings.micro_batches / predict(row).seconds


# --- the table -------------------------------------------------------------------------------------------------------


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return every two rows of one table whose published speeds differ."""
    by_source = itertools.groupby(
        sorted(rows, key=lambda row: row.point["source"]), key=lambda row: row.point["source"]
    )
    found = []
    for _, group in by_source:
        for a, b in itertools.combinations(list(group), 2):
            if abs(a.published / b.published - 1) > TIE:
                found.append((a, b))
    return found


def format_table() -> str:
    """Return SPEED.md."""
    rows = read_rows()
    predicted = {row.id: tokens_per_second(row) for row in rows}
    lines = [HEAD, _statistics(rows, predicted), "", COLUMNS, "|---|--:|--:|--:|---|---|"]
    lines += [_line(row, predicted[row.id]) for row in rows]
    data = read_data()
    lines += ["", data.get("remarks", ""), "## Rows that are not predicted", ""]
    lines += [f"- {reason}: {', '.join(f'`{id}`' for id in ids)}" for reason, ids in data["not_expressed"].items()]
    return "\n".join(lines) + "\n"


def _line(row: Row, predicted: float) -> str:
    error = predicted / row.published - 1
    shown = f"{error:+.0%}" if abs(error) <= NEAR else f"**{error:+.0%}**"
    program = row.words.get("program", "eager")
    cells = [row.id, f"{row.published:,.0f}", f"{predicted:,.0f}", shown, predict(row).limited_by, program]
    return "| " + " | ".join(cells) + " |"


def _statistics(rows: Sequence[Row], predicted: Mapping[str, float]) -> str:
    errors = [abs(predicted[row.id] / row.published - 1) for row in rows]
    ordered = pairs(rows)
    right = [(predicted[a.id] > predicted[b.id]) is (a.published > b.published) for a, b in ordered]
    wrong = [f"`{a.id}` and `{b.id}`" for (a, b), is_right in zip(ordered, right, strict=True) if not is_right]
    return "\n".join(
        [
            f"- {len(rows)} rows of {len(read_points())} with a speed: median error {statistics.median(errors):.0%}, "
            f"{sum(error <= NEAR for error in errors)} within {NEAR:.0%}.",
            f"- Order of two rows of one table that differ by more than {TIE:.0%}: {sum(right)} of {len(right)} right "
            f"({sum(right) / len(right):.0%}).",
            f"- In the wrong order: {'; '.join(wrong) or 'none'}.",
        ]
    )


HEAD = """# Predicted and published speed

Generated by `python -m benchmarks.speed` from [points.csv](points.csv) (published by others, with their sources) and
[speed_rows.yaml](speed_rows.yaml) (the settings that stand for each row). Tokens a second of each GPU, by the closed
form of `fsdp_trainer/memory/estimate_time.py`, which follows the traced simulation within 6 %. Rates are those of
`fsdp_trainer/memory/rates.csv`: published measurements of single products, kernels and links, none of a training run;
no constant is fitted to a row. The programs differ from this one: other units of sharding, fused or compiled kernels,
older torch.
"""
COLUMNS = "| row | published | predicted | error | limited by | program |"


def main() -> None:
    """Write SPEED.md."""
    TABLE.write_text(format_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
