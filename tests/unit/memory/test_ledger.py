"""memory.json: what ranks measured beside what was predicted, written and read back, and the table of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_trainer.memory.ledger import FILE, GIB, Ledger, Prediction, RankMemory, Source, TracedStep, build_ledger
from fsdp_trainer.memory.recording import CATEGORIES, PHASES
from fsdp_trainer.report.ledger_text import format_ledger_text, format_peak

RANK = RankMemory(
    phases={"load": 4 * GIB, "forward": 12 * GIB, "backward": round(17.9 * GIB), "save": 6 * GIB},
    reserved_phases={"load": 5 * GIB, "forward": 13 * GIB, "backward": 20 * GIB, "save": 20 * GIB},
    categories={"parameters": 4 * GIB, "activations": 13 * GIB},
    retries=0,
    host=2 * GIB,
)
OTHER = RankMemory(
    phases={"load": 4 * GIB, "forward": 11 * GIB, "backward": 16 * GIB, "save": 6 * GIB},
    reserved_phases={"load": 5 * GIB, "forward": 13 * GIB, "backward": 20 * GIB, "save": 20 * GIB},
    categories={"parameters": 4 * GIB, "activations": 12 * GIB},
    retries=3,
    host=1 * GIB,
)
PREDICTION = Prediction(
    kind="simulation",
    allocated_gib=17.6,
    phases={"forward": 12.0, "backward": 17.6},
    categories={"parameters": 4.0, "activations": 12.9},
    host_gib=2.5,
)


def ledger(
    *ranks: RankMemory,
    source: Source | None = "allocator",
    prediction: Prediction | None = PREDICTION,
    usable: float | None = 23.5,
) -> Ledger:
    """Return the ledger of two ranks on one kind of card."""
    return build_ledger(
        ranks or (RANK, OTHER),
        device="NVIDIA GeForce RTX 4090",
        usable_bytes=None if usable is None else round(usable * GIB),
        source=source,
        prediction=prediction,
        traced_step=TracedStep(2, 1.9, 0.8),
        timeline=[(7, "backward", {"parameters": 4 * GIB})],
    )


def test_what_memory_json_holds() -> None:
    found = json.loads(json.dumps(ledger().to_json()))
    assert found["version"] == 1 and found["ranks"] == 2 and found["source"] == "allocator"
    assert found["peak"] == {
        "measured_gib": pytest.approx(17.9),
        "predicted_gib": 17.6,
        "difference": pytest.approx(17.6 / 17.9 - 1),
        "phase": "backward",
    }
    assert [row["phase"] for row in found["phases"]] == list(PHASES)
    assert [row["category"] for row in found["categories"]] == list(CATEGORIES)
    phases = {row["phase"]: row for row in found["phases"]}
    assert phases["forward"] == {
        "phase": "forward",
        "measured_gib": {"min": 11.0, "max": 12.0},
        "reserved_gib": {"min": 13.0, "max": 13.0},
        "predicted_gib": 12.0,
    }
    assert phases["evaluate"]["measured_gib"] is None and phases["load"]["predicted_gib"] is None
    assert found["reserved_gib"] == {"min": 20.0, "max": 20.0}
    assert found["fragmentation"] == {"min": pytest.approx(1 - 17.9 / 20), "max": pytest.approx(0.2)}
    assert found["allocator_retries"] == {"min": 0, "max": 3}
    assert found["host_gib"] == {"measured": {"min": 1.0, "max": 2.0}, "predicted": 2.5}
    assert found["traced_step"] == {"step": 2, "seconds": 1.9, "usual_seconds": 0.8}
    assert found["timeline"] == [[7, "backward", {"parameters": 4 * GIB}]]


def test_written_and_read_back(tmp_path: Path) -> None:
    assert Ledger.read(tmp_path) is None
    (tmp_path / FILE).write_text(json.dumps(ledger().to_json()))
    assert Ledger.read(tmp_path) == ledger()
    for text in ("{", "[]", '{"version": 2}', '{"version": 1, "device": 3}'):
        (tmp_path / FILE).write_text(text)
        assert Ledger.read(tmp_path) is None, text


def test_a_traced_step_is_compared_with_the_prediction_of_a_step() -> None:
    """On CPU a save's copies may be the predicted peak of the run: a trace has not seen one."""
    prediction = replace(PREDICTION, allocated_gib=40.0, phases={**PREDICTION.phases, "save": 40.0})
    traced = replace(RANK, phases={"forward": 12 * GIB, "backward": 18 * GIB}, reserved_phases={})
    found = ledger(traced, source="trace", prediction=prediction)
    assert (found.peak.measured_gib, found.peak.predicted_gib) == (18.0, 17.6)
    assert found.allocated_gib is None and found.reserved_gib is None and found.fragmentation is None


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (ledger(), "peak 17.9 GiB of 23.5 (predicted 17.6, -1.7 %)"),
        (ledger(prediction=None), "peak 17.9 GiB of 23.5 (no prediction)"),
        (ledger(usable=None), "peak 17.9 GiB (predicted 17.6, -1.7 %)"),
        (ledger(prediction=replace(PREDICTION, allocated_gib=17.9)), "peak 17.9 GiB of 23.5 (predicted 17.9, 0.0 %)"),
        (
            ledger(replace(RANK, phases={}, reserved_phases={}), source=None),
            "peak not measured (predicted 17.6 GiB of 23.5)",
        ),
        (ledger(replace(RANK, phases={}), source=None, prediction=None), "peak not measured (no prediction)"),
        (
            ledger(
                replace(RANK, phases={"step": 3 * 2**20}),
                source="trace",
                prediction=replace(PREDICTION, phases={"step": 3 / 1024}),
            ),
            "peak 3.0 MiB of 24,064.0 (predicted 3.0, 0.0 %)",
        ),
    ],
)
def test_first_line(found: Ledger, line: str) -> None:
    assert format_peak(found.to_json()) == line
    assert str(found).splitlines()[0] == line
    assert format_ledger_text(found.to_json(), width=40) == line


def test_table_says_what_every_number_is() -> None:
    text = format_ledger_text(ledger().to_json())
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["backward"] == ["backward", "16.00", "-", "17.90", "20.00", "17.60", "-1.7", "%"]
    assert rows["forward"][-2:] == ["0.0", "%"]
    assert rows["activations"] == ["activations", "12.00", "-", "13.00", "12.90", "-0.8", "%"]
    assert "evaluate" not in rows  # neither measured nor predicted
    assert "by phase, GiB" in text and "of what is reserved 20.0 % holds no tensor" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert "3 times" in text and "step 2 was traced: 1.90 s, a usual one 0.80 s" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_keep_to_the_width(width: int) -> None:
    big = replace(RANK, phases={name: 1234 * GIB + index for index, name in enumerate(PHASES)})
    small = replace(RANK, phases=dict.fromkeys(PHASES, 1000 * GIB))
    text = format_ledger_text(ledger(big, small).to_json(), width=width)
    assert max(map(len, text.splitlines())) <= width, text
