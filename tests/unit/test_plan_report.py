"""A plan as text and as HTML: all that was asked for is in it, at every width, and no value is taken for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.memory.plan import QUALITIES, Plan
from fsdp_trainer.memory.quick import quick_timeline
from fsdp_trainer.report.plan_html import format_plan_html
from fsdp_trainer.report.plan_text import compare, format_plan, summarize
from tests import light_imports as light
from tests.plans import make_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(tmp_path_factory.mktemp("plan"), fixed=("model.path", "optim.lr", "sharding.zero_stage"))


@pytest.fixture(scope="module")
def misfit(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(tmp_path_factory.mktemp("misfit"), fits=False)


def shown(plan: Plan, width: int, top: int = 10) -> str:
    timeline = quick_timeline(plan.chosen.config, plan.hardware) if plan.chosen else None
    return format_plan(plan.to_json(), timeline, width=width, top=top).plain


@pytest.mark.parametrize("width", [72, 80, 100, 120, 200])
def test_no_line_is_wider_than_asked_for(plan: Plan, misfit: Plan, width: int) -> None:
    for found in (plan, misfit):
        lines = shown(found, width).splitlines()
        # The folder's name is pytest's, and a path is not broken.
        assert [line for line in lines if len(line) > width and "llama-8b" not in line] == []


@pytest.mark.parametrize("width", [80, 120])
def test_every_combination_has_its_settings_and_numbers(plan: Plan, width: int) -> None:
    text = " ".join(shown(plan, width).split())
    first = plan.candidates[0].prediction
    for part in (
        *("bf16 pure", "adamw 8-bit", "every 2", "optimizer", "2 x 4", "GPU memory"),
        *(f"{first['allocated_gib']:.2f}", f"{64 * 4096 / 10:,.0f}", "16 min 40 s"),
        "412 combinations looked at in 3.14 s; quality first; held fixed: optim.lr, sharding.zero_stage",
        "host RAM was not said: #1 needs",
        "held back: fragmentation 2%, context 0.50 GiB",
    ):
        assert part in text, part
    for candidate in plan.candidates:
        assert f"{candidate.quality} (" in text
        assert QUALITIES[candidate.quality] in text


def test_step_down_says_what_it_costs(plan: Plan) -> None:
    found = plan.to_json()
    one, other = found["candidates"][:2]
    more = other["allocated_gib"] - one["allocated_gib"]
    assert more > 5  # stage 2 keeps whole weights
    assert compare(found, one, other) == f"stage 2 for 3: 9% slower, {more:.2f} GiB more on each GPU"
    assert compare(found, other, one).startswith(f"stage 3 for 2: 10% faster, {more:.2f} GiB less")
    assert f"one step down, #2: {compare(found, one, other)}" in " ".join(shown(plan, 120).split())


def test_ledger_adds_up_at_the_three_moments(plan: Plan) -> None:
    """Each column's kinds add up to its last line, and the highest of the three is the predicted peak."""
    lines = shown(plan, 80).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("alive at the highest moment of"))
    rows = [line for line in lines[start + 2 : start + 12] if re.search(r"\d\.\d\d +\d", line)]
    numbers = [[float(word) for word in re.findall(r"\d+\.\d\d", line)] for line in rows]
    *kinds, total = numbers
    assert rows[-1].startswith("allocated")
    for column in range(3):
        assert sum(row[column] for row in kinds) == pytest.approx(total[column], abs=0.05)
    assert plan.chosen is not None
    assert max(total) == pytest.approx(plan.chosen.prediction["allocated_gib"], abs=0.006)
    assert total[2] < total[0]  # three different moments
    assert f"peak {max(total):.2f} GiB in forward" in "\n".join(lines)


def test_nothing_fits_is_said_with_the_nearest_and_what_would_help(misfit: Plan) -> None:
    text = " ".join(shown(misfit, 80).split())
    for part in (
        "NOTHING FITS",
        "nearest, #3: lacks 3.2 GiB of GPU memory and 40.0 GiB of host RAM",
        "would fit with: data.seq_len: 2048",
        "would fit with: 16xH100-80GB",
        "host RAM 64 GiB",
        "calibrated, memory: +3.1% (x 1.031)",
        "calibrated, seconds: -5.0% (x 0.950)",
    ):
        assert part in text, part
    assert "peak" not in text
    assert "one step down" not in text


def test_rows_beyond_the_top_are_counted(plan: Plan) -> None:
    text = shown(plan, 120, top=1)
    assert "and 2 more: --top 3, or --json" in text
    assert "every 2" not in text.split("and 2 more")[0]


def test_a_printed_plan_is_its_table(plan: Plan) -> None:
    text = str(plan)
    assert "one step down, #2" in text
    assert f"{plan.candidates[0].prediction['allocated_gib']:.2f}" in text
    assert len(text) < 3000


def test_summary_is_one_line(plan: Plan) -> None:
    text = summarize(plan.to_json())
    assert "\n" not in text
    for part in ("8xH100-80GB", "stage 3", "bf16", "micro-batch x accumulation 2 x 4", " GiB allocated of "):
        assert part in text


class Page(HTMLParser):
    """Collects tags and text, and fails on a tag that is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_whole_and_needs_nothing_else(plan: Plan) -> None:
    html = plan._repr_html_()
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert page.tags.count("tr") == 1 + len(plan.candidates)
    assert not re.search(r"https?:|src=|@import|<script", html)
    text = " ".join(page.text)
    for part in ("8xH100-80GB", "adamw 8-bit", "16 min 40 s", "one step down", "GiB are allocated of"):
        assert part in text
    for name in ("alloc, GiB", "reserved, GiB", "least, GiB", "host, GiB", "tokens/s"):
        assert name in page.text
    # Phones get a card a row; colours are those of the page around it.
    assert "@container (max-width" in html
    assert "color: inherit" in html


def test_html_escapes_every_value(plan: Plan) -> None:
    found = plan.to_json()
    evil = "<script>alert('x')</script>\""
    for candidate in found["candidates"]:
        candidate["config"] = {
            **candidate["config"],
            "model": {**candidate["config"]["model"], "path": evil},
            "precision": evil,
        }
        candidate["lacks"] = [evil]
        candidate["gives_up"] = evil
    found["hardware"]["written"] = evil
    html = format_plan_html(found)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    page = Page()
    page.feed(html)
    assert "script" not in page.tags


def test_html_of_a_plan_that_does_not_fit(misfit: Plan) -> None:
    html = misfit._repr_html_()
    assert "NOTHING FITS" in html
    assert "GiB are allocated of" not in html


def test_a_plan_is_shown_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.plans import make_plan; "
        f"make_plan(Path({str(tmp_path)!r}))._repr_html_(); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    ended = light.python(code, cwd=root)
    assert ended.returncode == 0, ended.stderr
