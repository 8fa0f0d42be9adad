"""report.html: what is in it, that nothing breaks it, and that no value is taken for markup."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fsdp_trainer.cli import app
from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.report.charts import INK
from fsdp_trainer.report.curves import COLUMNS, needs_log, smooth, thin
from fsdp_trainer.report.run_html import (
    differing_settings,
    format_run_html,
    is_stale,
    leave_report,
    write_run_report,
)
from fsdp_trainer.report.run_pictures import write_run_pictures
from fsdp_trainer.report.run_record import Curve, read_run, read_runs
from tests import light_imports as light
from tests.plans import make_plan
from tests.run_folders import Page, memory, out_of_memory, row, write_run

AXES = (
    *("step", "loss, nats a token", "L2 norm before clipping", "learning rate a step", "tokens/s of all ranks"),
    *("GiB at most so far, rank 0", "GiB alive, rank 0", "order of allocations", "GiB at the peak"),
    "GiB at most, fullest rank",
)
PICTURES = (
    *("gradient_norm", "learning_rate", "ledger", "loss", "memory", "memory_step", "phases", "tokens_per_second"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run can leave."""
    plan = make_plan(tmp_path_factory.mktemp("plan")).to_json()
    return write_run(tmp_path_factory.mktemp("runs") / "whole", memory=memory(), plan=plan)


@pytest.fixture(scope="module")
def html(whole: Path) -> str:
    return format_run_html([whole])


# --- what is in it


def test_a_page_is_whole_and_needs_nothing_else(html: str) -> None:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids)) > 0, "charts would cut each other's lines"
    links = re.findall(r"https?://[^\s\"]+", html)
    assert set(links) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"<script|src=|@import|<link|url\((?!#)", html)
    assert '<meta name="viewport"' in html
    assert len(html) < 400_000


def test_every_axis_has_its_unit(html: str) -> None:
    texts = {text.strip() for text in Page(html).texts}
    assert set(AXES) <= texts


def test_text_and_lines_take_the_colour_of_the_page(html: str) -> None:
    assert INK not in html
    assert html.count("currentColor") > 50
    for rule in ("color-scheme: light dark", "@media print", "@container"):
        assert rule in html


def test_the_facts_come_first(html: str) -> None:
    text = Page(html).text
    for part in (
        *("finished", "20 of 20", "first 4.6193", "2.7500 best 2.5000 at step 10", "600 median, 0.80 s a step"),
        *(
            "9,600 in 16.0 s",
            "17.9 GiB of 23.5 predicted 17.6, -1.7 %",
            "peak 17.9 GiB of 23.5 (predicted 17.6, -1.7 %)",
        ),
        *("NVIDIA GeForce RTX 4090, 25.0 GiB", "2, 2 on each machine", "2.14.1", "zero_stage: 3"),
        *("allocated of a rank, GiB", "of a step: compute, s"),
    ):
        assert part in text, part


def test_of_an_out_of_memory_the_page_says_what_would_fit(tmp_path: Path) -> None:
    status = {"state": "failed", "exit_code": 8, "step": 17, "message": "A GPU ran out of memory."}
    text = Page(format_run_html([write_run(tmp_path / "run", status=status, out_of_memory=out_of_memory())])).text
    for part in (
        *("exit code 8", "A GPU ran out of memory.", "rank 1, backward, step 17, layer 12 (model.layers.12.mlp)"),
        *("asked for 1.25 GiB", "activations 9.12", "activation_checkpointing.mode: full 3.10 18.00 yes 24 %"),
        *("--activation_checkpointing.mode=full", "memory_snapshot_rank1.pickle"),
    ):
        assert part in text, part


# --- several


def test_several_runs_show_only_what_differs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run", memory=memory())
    other = write_run(tmp_path / "b" / "run", settings={"sharding": {"zero_stage": 2}, "optim": {"lr": 3e-5}})
    assert differing_settings(read_runs([one, other])) == [
        ("sharding.zero_stage", ["3", "2"]),
        ("optim.lr", ["1e-05", "3e-05"]),
    ]
    html = format_run_html([one, other])
    text = Page(html).text
    for part in (
        "a/run",
        "b/run",
        "sharding.zero_stage 3 2",
        "b/run: Nothing was measured of memory",
        "Memory in step 2: a/run",
    ):
        assert part in text, part
    assert text.count("Gradient norm") == 1, "curves are laid over one another"
    assert "#0072b2" in html
    assert "#d55e00" in html


def test_runs_that_are_alike_say_so(tmp_path: Path) -> None:
    text = Page(format_run_html([write_run(tmp_path / name) for name in ("one", "two")])).text
    assert "None: the runs have the same settings." in text


def test_settings_that_cannot_be_read_do_not_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two", "three")]
    (runs[1] / "config.yaml").write_text("model: [broken")
    (runs[2] / "config.yaml").unlink()
    found = read_runs(runs)
    assert differing_settings(found) == []
    assert [len(run.notes) for run in found] == [0, 1, 1]


def test_a_run_beside_itself_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="beside itself"):
        format_run_html([run, run / ".." / "run"])


# --- what runs leave when things go wrong


def test_lines_that_are_torn_null_or_done_again(tmp_path: Path) -> None:
    rows = [row(1), row(2, loss=None, grad_norm=None), row(3, loss=9.0), row(3, loss=2.0), row(4, loss=float("inf"))]
    run = write_run(tmp_path / "run", rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n\n"step"\n{"step": 5, "lo')
    found = read_run(run)
    assert found.curve("loss").steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(found.curve("loss").values[1:], [np.nan, 2.0, np.nan])
    assert found.notes == ("metrics.jsonl: 3 lines left out: torn, or no row of a run.",)
    text = Page(format_run_html([run])).text
    assert "not finite 2 steps without a loss" in text
    assert "3 lines left out" in text


def test_brackets_without_end_are_as_any_other_torn_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    deep = '{"a": ' + 100_000 * "[" + 100_000 * "]" + "}\n"
    for name in ("status.json", "memory.json", "plan.json", "devices.json", "out_of_memory.json"):
        (tmp_path / name).write_text(deep)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(deep)
    assert "cannot be read" in Page(format_run_html([tmp_path])).text


@pytest.mark.parametrize("rows", [[], [{"step": 3, "eval_loss": 2.0}], [row(1)], [row(1, loss=None, lr=None)]])
def test_few_steps_or_none(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    text = Page(format_run_html([write_run(tmp_path / "run", rows)])).text
    assert ("No step was logged." in text) == (rows == [])


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status={"state": "running", "exit_code": 0, "step": 0, "message": ""})
    (run / "metrics.jsonl").unlink()
    (run / "devices.json").unlink()
    (run / "memory.json").write_text('{"version": 1, "pea')
    (run / "plan.json").write_text("[]")
    (run / "out_of_memory.json").write_text('{"version": 99}')
    text = Page(format_run_html([run])).text
    for part in (
        *("There is no metrics.jsonl", "memory.json is not what this version", "was going on when this was written"),
        *("plan.json is not what this version", "out_of_memory.json is not what this version", "No step was logged."),
    ):
        assert part in text, part


@pytest.mark.parametrize("folder", ["nothing", "empty"])
def test_what_is_no_run_is_one_error(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no.* run folder"):
        format_run_html([tmp_path / folder])


# --- values are values


EVIL = "<script>alert('x')</script>\" $x$ &amp;"


def test_no_value_is_taken_for_markup(tmp_path: Path) -> None:
    settings = {"model": {"path": EVIL}}
    status = {"state": EVIL, "exit_code": 1, "step": 1, "message": EVIL}
    found = memory(phases=[{**phase, "phase": EVIL} for phase in memory()["phases"]])
    ended = out_of_memory(module=EVIL, command=EVIL, phase=EVIL, snapshot=EVIL)
    devices = {"device": EVIL, "ranks": EVIL, "versions": {EVIL: EVIL}}
    files = {"memory": found, "out_of_memory": ended, "devices": devices}
    # A slash would be another folder.
    names = ("<script>$x$", "_under & <b>")
    runs = [write_run(tmp_path / name, settings=settings, status=status, **files) for name in names]
    for html in (format_run_html(runs), format_run_html(runs[:1])):
        page = Page(html)
        assert "script" not in page.tags
        assert "b" not in page.tags
        assert "&lt;script&gt;" in html
        assert names[0] in page.text


def test_a_number_in_a_name_is_left_as_it_is(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, memory=memory()) for name in ("lr_0.12345", "lr_0.2")]
    assert "lr_0.12345, load" in Page(format_run_html(runs)).text


# --- many steps


def test_long_runs_stay_small_and_keep_their_spikes(tmp_path: Path) -> None:
    count = 8000
    rows = [
        row(step, loss=50.0 if step == 5001 else 2.0, grad_norm=7e5 if step == 6007 else 1.0)
        for step in range(1, count)
    ]
    run = write_run(tmp_path / "run", rows)
    html = format_run_html([run])
    assert len(html) < 1_000_000
    text = Page(html).text
    assert f"7,999 steps, drawn as the lowest and highest of each of {COLUMNS} stretches" in text
    assert "100000" in text, "the axis of the gradient norm reaches the spike"


def test_thinning_keeps_every_stretch_s_extremes_and_its_gaps() -> None:
    steps = np.arange(10_000, dtype=float)
    values = np.sin(steps / 7)
    values[3000:4000] = np.nan
    values[7777], values[2222] = 99.0, -99.0
    thinned = thin(Curve(steps, values), columns=100)
    assert len(thinned.steps) <= 200
    assert bool((np.diff(thinned.steps) > 0).all())
    assert {99.0, -99.0} <= set(thinned.values.tolist())
    assert np.isnan(thinned.values[(thinned.steps > 3100) & (thinned.steps < 3900)]).all()
    for low in range(0, 10_000, 1000):  # each thousand has its own lowest and highest
        part, kept = values[low : low + 1000], thinned.values[(thinned.steps >= low) & (thinned.steps < low + 1000)]
        if low != 3000:
            assert (np.nanmin(part), np.nanmax(part)) == (np.nanmin(kept), np.nanmax(kept))
    short = Curve(steps[:400], values[:400])
    assert thin(short, columns=100) is short


def test_smoothing_is_right_from_the_first_value_and_keeps_gaps() -> None:
    steps = np.arange(50, dtype=float)
    same = smooth(Curve(steps, np.full(50, 3.0)), rows=10).values
    np.testing.assert_allclose(same, 3.0)
    values = np.where(steps == 20, np.nan, steps)
    found = smooth(Curve(steps, values), rows=10).values
    assert np.isnan(found[20])
    assert np.isnan(found).sum() == 1
    # A mean over about 10 runs 9 steps behind a line.
    assert found[-1] == pytest.approx(49 - 9, abs=0.5)


def test_a_few_high_values_ask_for_a_logarithmic_axis() -> None:
    assert needs_log(np.array([1.0, 1.0, 1.0, 50.0]))
    assert not needs_log(np.array([1.0, 1.0, 1.0, 5.0]))
    assert not needs_log(np.array([0.0, 1.0, 1.0, 50.0]))
    assert not needs_log(np.array([]))


# --- files


def size_of(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_pictures_are_the_charts_of_the_page(whole: Path, tmp_path: Path) -> None:
    written = write_run_pictures([whole], tmp_path / "pictures")
    assert sorted(path.stem for path in written) == sorted(PICTURES)
    for path in written:
        width, height = size_of(path)
        assert width == 840
        assert height > 200


def test_pictures_of_runs_with_strange_names(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, memory=memory()) for name in ("_a $x$", "b<c>")]
    names = {path.name for path in write_run_pictures(runs, tmp_path / "pictures")}
    assert {"memory_step__a_x_.png", "memory_step_b_c_.png"} <= names


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    told = tmp_path / "new" / "both.html"
    for words in ([runs[0]], [*runs, "--out", str(told), "--pictures"]):
        assert CliRunner().invoke(app, ["report", *words]).exit_code == 0
    assert "one" in Page((tmp_path / "one" / "report.html").read_text()).text
    assert "one and two" in Page(told.read_text()).text
    assert (told.parent / "pictures" / "loss.png").is_file()


@pytest.mark.parametrize(
    ("words", "what"), [(["--out", "x.pdf"], "HTML page"), (["--out", "/dev/null/x.html"], "written")]
)
def test_a_place_that_cannot_be_is_refused(words: list[str], what: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["report", str(write_run(tmp_path / "run")), *words])
    assert isinstance(ended.exception, ConfigError)
    assert what in str(ended.exception)


def test_a_report_never_fails_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    leave_report(run)
    assert (run / "report.html").is_file()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    with pytest.raises(OutputError):
        write_run_report([run], run / "report.html")
    leave_report(run)
    assert "report.html was not written (A file of the run cannot be written.)" in capsys.readouterr().out
    # A run that ended before it began has no settings in its folder.
    early = tmp_path / "early"
    early.mkdir()
    (early / "status.json").write_text(json.dumps({"state": "failed", "exit_code": 2, "step": 0, "message": "x"}))
    leave_report(early)
    assert not (early / "report.html").exists()


def test_a_report_is_stale_once_the_run_says_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert is_stale(run)
    leave_report(run)
    assert not is_stale(run)
    (run / "out_of_memory.json").write_text("{}")
    os.utime(run / "out_of_memory.json", (2e9, 2e9))
    assert is_stale(run)


def test_a_report_needs_no_torch_and_draws_only_when_it_is_made(whole: Path) -> None:
    code = (
        "import sys; from fsdp_trainer.report.run_html import format_run_html; assert 'matplotlib' not in sys.modules; "
        f"format_run_html([{str(whole)!r}]); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    ended = light.python(code, cwd=root)
    assert ended.returncode == 0, ended.stderr
