"""The ledger and the ladder as HTML: all numbers with their units, what is not known as a dash, nothing as markup."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_trainer.report.ladder_html import format_ladder_html
from fsdp_trainer.report.ledger_html import format_difference, format_ledger_html
from fsdp_trainer.report.out_of_memory_html import out_of_memory_section
from tests.run_folders import Page, memory, out_of_memory

EVIL = "<script>$x$</script>"


def rung(name: str, outcome: str = "finished", **changes: Any) -> dict[str, Any]:
    known = outcome == "finished"
    return {
        "name": name,
        "what": "what it does",
        "settings": {"sharding.zero_stage": 2},
        "outcome": outcome,
        "message": None if known else f"{name} ran out",
        "predicted_gib": 21.0,
        "measured_gib": 21.25 if known else None,
        "source": "allocator" if known else None,
        "usable_gib": 23.5,
        "tokens_per_second": 2200.0 if known else None,
        "step_seconds": 1.86 if known else None,
        "first_loss": 2.1 if known else None,
        "last_loss": 1.9 if known else None,
        "folder": f"01-{name}",
    } | changes


def ladder(*rungs: dict[str, Any], fits: str | None = None) -> dict[str, Any]:
    facts = {"model": "org/model", "hardware": "2xRTX4090", "global_batch_size": 8, "seq_len": 512, "steps": 5}
    return {"version": 1, **facts, "rungs": list(rungs), "fits": fits}


# --- ledger


def test_a_ledger_has_its_numbers_and_units() -> None:
    html = format_ledger_html(memory())
    page = Page(html)
    assert page.tags[0] == "div", "a piece for a notebook's cell"
    for part in (
        *("measured, GiB", "predicted, GiB", "GiB at the peak", "activations 6.50 to 6.60 6.30 -4.5 %"),
        *("backward 17.80 to 17.90 19.00 17.60 -1.7 %", "evaluate – – – –", "reserved at most 19.00 to 19.25 GiB"),
        *("5.0 to 7.0 %", "allocator retries 2", "3.00 to 3.10 GiB (predicted 2.90)", "Step 2 was traced"),
    ):
        assert part in page.text, part
    assert html.count("<svg") == 1
    assert html.index("6.00 to 6.10") < html.index("6.50 to 6.60"), "as they lie in the bars"


def test_a_ledger_of_a_run_that_measured_nothing() -> None:
    nothing = {"measured_gib": None, "predicted_gib": None, "difference": None, "phase": None}
    unknown = dict.fromkeys(("allocated_gib", "reserved_gib", "fragmentation", "allocator_retries", "traced_step"))
    host = {"measured": {"min": 1.0, "max": 1.0}, "predicted": None}
    bare = {"peak": nothing, "phases": [], "categories": [], "source": None, "prediction": None, "timeline": []}
    page = Page(format_ledger_html(memory(**bare, **unknown, usable_gib=None, host_gib=host)))
    assert "peak not measured" in page.text
    assert "Nothing was measured" in page.text
    assert "svg" not in page.tags
    assert "table" not in page.tags


def test_a_small_ledger_is_in_mib() -> None:
    rows = [{"category": "parameters", "measured_gib": {"min": 0.25, "max": 0.25}, "predicted_gib": 0.125}]
    peak = {"measured_gib": 0.25, "predicted_gib": 0.125, "difference": -0.5, "phase": "step"}
    text = Page(format_ledger_html(memory(categories=rows, phases=[], peak=peak, source="trace"))).text
    assert "measured, MiB" in text
    assert "parameters 256.00 128.00 -50.0 %" in text
    assert "MiB at the peak" in text


# --- ladder


def test_a_ladder_shows_every_rung_and_its_outcome() -> None:
    rungs = (rung("baseline", "out of memory"), rung("stage 2"), rung("offload", "not run", predicted_gib=None))
    html = format_ladder_html(ladder(*rungs, fits="stage 2"))
    page = Page(html)
    assert page.tags[0] == "html"
    for part in (
        *("org/model on 2xRTX4090", "The first that fits: stage 2", "8 rows of 512 tokens", "measured, GiB"),
        *("peak of the fullest rank, GiB", "tokens/s of all ranks", "baseline ran out", "not run"),
        "finished 21.25 21.00 -1.2 % 2,200 1.86 2.100 to 1.900 01-stage 2",
    ):
        assert part in page.text, part
    assert html.count("<svg") == 2
    assert len(page.ids) == len(set(page.ids))
    assert Page(format_ladder_html(ladder(*rungs), page=False)).tags[0] == "div"


def test_a_ladder_before_its_first_rung_and_one_that_fits_nowhere() -> None:
    none = rung("baseline", "not run", predicted_gib=None, usable_gib=None)
    page = Page(format_ladder_html(ladder(none)))
    assert "svg" not in page.tags
    assert "No rung has fitted." in page.text
    Page(format_ladder_html(ladder()))


# --- no value is markup


def test_no_value_is_taken_for_markup() -> None:
    evil = rung(EVIL, "failed", what=EVIL, message=EVIL, settings={EVIL: EVIL}, folder=EVIL)
    for html in (
        format_ladder_html({**ladder(evil), "model": EVIL, "hardware": EVIL, "fits": EVIL}),
        format_ledger_html(memory(phases=[{**memory()["phases"][0], "phase": EVIL}])),
        str(out_of_memory_section(out_of_memory(module=EVIL, command=EVIL, snapshot=EVIL))),
    ):
        page = Page(html)
        assert "script" not in page.tags
        assert EVIL in page.text


def test_an_out_of_memory_of_which_little_is_known() -> None:
    unknown = dict.fromkeys(("layer", "module", "requested_gib", "free_gib", "total_gib", "allocated_gib", "snapshot"))
    unknown |= {
        "reserved_gib": None,
        "predicted_gib": None,
        "advice": [],
        "largest": [],
        "batch": None,
        "command": None,
    }
    page = Page(str(out_of_memory_section(out_of_memory(place="host", **unknown))))
    assert page.text == "Out of host RAM: rank 1, backward, step 17"


@pytest.mark.parametrize(
    ("measured", "predicted", "text"),
    [
        (2.0, 2.0001, "0.0 %"),
        (2.0, 1.9999, "0.0 %"),
        (2.0, 1.8, "-10.0 %"),
        (2.0, 3.0, "+50.0 %"),
        (2.0, 2.4, "+20.0 %"),
    ],
)
def test_a_difference_of_nothing_has_no_sign(measured: float, predicted: float, text: str) -> None:
    assert format_difference(measured, predicted) == text
