"""What a notebook is shown of a run, what a run returns, and how lines come from its file, without a kernel."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer import Config, TrainResult, finetune, finetuning
from fsdp_trainer.errors import ConfigError, DataError, DistributedError, FsdpTrainerError, Interrupted
from fsdp_trainer.output_log import describe_parent, follow_lines
from fsdp_trainer.report.result_html import format_result_html, format_run_so_far


def write_run(folder: Path, *, state: str = "running", total_steps: int | None = 20, steps: int = 5) -> Path:
    """A run folder as the trainer leaves it; the first step is slow, as it is in a run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 3.0 - 0.1 * step,
            "step_seconds": 6.0 if step == 1 else 2.0,
            "tokens_per_second": 100.0 * step,
        }
        for step in range(1, steps + 1)
    ]
    rows.append({"step": steps, "eval_loss": 2.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = {"state": state, "exit_code": 0, "step": 0, "message": "", "total_steps": total_steps}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text("train: {max_steps: null}\n")
    return folder


# --- what a run returns


def test_a_result_is_what_the_folder_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", state="finished")
    result = TrainResult.read(folder)
    assert (result.folder, result.state, result.steps) == (folder, "finished", 5)
    assert result.loss == pytest.approx(2.5)
    assert result.eval_loss == 2.75
    assert result.seconds == pytest.approx(14.0)
    assert result.tokens_per_second == pytest.approx(350.0), "the median without the first step"
    assert result.model is None
    assert str(result) == f"{folder}: finished, 5 steps, loss 2.5000, eval_loss 2.7500, 14.0 s, 350 tokens/s"
    (folder / "model").mkdir()
    assert TrainResult.read(str(folder)).model == folder / "model"


def test_a_result_stands_for_its_folder(tmp_path: Path) -> None:
    result = TrainResult.read(write_run(tmp_path / "run"))
    assert Path(result) == tmp_path / "run"
    assert os.listdir(result)
    assert (result / "metrics.jsonl").is_file()


def test_a_run_without_a_step_and_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    result = TrainResult.read(tmp_path)
    assert (result.state, result.steps, result.loss, result.seconds, result.tokens_per_second) == (
        "",
        0,
        None,
        None,
        None,
    )
    assert "state unknown" in str(result)
    with pytest.raises(ConfigError, match="run folder"):
        TrainResult.read(tmp_path / "nothing")


# --- what a cell shows


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    html = format_run_so_far(write_run(tmp_path / "run"), lines=["step 5/20", "<b>&"], seconds=75)
    assert 'max="20" value="5"' in html
    assert "step 5 of 20" in html
    assert "about 30.0 s left" in html, "15 steps of 2 s: the first one does not count"
    assert html.count("<svg") == 1
    assert "&lt;b&gt;&amp;" in html and "<b>&" not in html
    assert re.search(r"<details open>", html)


@pytest.mark.parametrize(("state", "total"), [("finished", 20), ("interrupted", 20), ("running", None)])
def test_no_bar_where_nothing_goes_on_or_the_length_is_unknown(tmp_path: Path, state: str, total: int | None) -> None:
    """Of a folder that is gone on with, the status is the old run's until the new one has begun."""
    html = format_run_so_far(write_run(tmp_path / "run", state=state, total_steps=total), lines=[], seconds=1)
    assert "<progress" not in html
    assert "left" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_before_the_run_has_a_folder(tmp_path: Path) -> None:
    html = format_run_so_far(tmp_path / "run", lines=["loading"], seconds=2)
    assert "loading" in html
    assert "<svg" not in html


def test_a_result_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = format_result_html(write_run(tmp_path / "run", state="finished"), lines=["one", "two"])
    assert "2.7500" in html and "<svg" in html and "output, 2 lines" in html
    assert not re.search(r'(src|href)="(?!#)|@import|url\((?!#)|<script', html)


def test_ipython_shows_an_error_without_a_traceback() -> None:
    error = DataError("A record is wrong.", values="line 3", fix="correct it")
    assert error._render_traceback_() == ["DataError: A record is wrong.", "  found: line 3", "  to fix: correct it"]


# --- lines


def test_lines_are_followed_until_all_is_read(tmp_path: Path) -> None:
    path, seen = tmp_path / "output.log", []
    path.write_text("of an earlier run\n")
    start, over = path.stat().st_size, threading.Event()

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            for piece in (b"first\nsec", b"ond\r\n", b"\xff\n", b"no end"):
                file.write(piece)
                over.wait(0.15)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    follow_lines(path, start=start, is_over=over.is_set, on_line=seen.append)
    writer.join()
    assert seen == ["first", "second", "\ufffd", "no end"]


def test_a_child_writes_no_colours_for_a_file() -> None:
    environ = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "PATH": "x"}
    describe_parent(environ)
    assert environ == {"FSDP_TRAINER_PARENT": str(os.getpid()), "PATH": "x"}


# --- how the processes are started


Started = list[tuple[dict[str, Any], list[str], dict[str, Any] | None]]


def start_with(monkeypatch: pytest.MonkeyPatch, *, code: int = 0, status: dict[str, Any] | None = None) -> Started:
    """Keep what the launcher is given; the run folder is written as ranks would."""
    started: Started = []

    def launch(config: Config, *, arguments: Sequence[str], **_: Any) -> int:
        file = Path(arguments[1])
        prediction = file.with_name("plan.json")
        found = json.loads(prediction.read_text()) if prediction.exists() else None
        started.append((dict(zip(arguments[::2], arguments[1::2], strict=True)), list(Config.load(file).given), found))  # type: ignore[arg-type]
        folder = write_run(Path(config.output_dir), state="finished")
        if status is not None:
            (folder / "status.json").write_text(json.dumps(status))
        return code

    monkeypatch.setattr(finetuning, "launch", launch)
    return started


def test_a_plan_is_left_what_was_not_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = start_with(monkeypatch)
    config = Config.from_dict({"data": {"seq_len": 512}, "output_dir": str(tmp_path / "run")})
    assert finetune(config, processes=2, plan="auto").state == "finished"
    finetune(config, processes=2, prediction={"candidates": []})
    (planned, given, none), (plain, everything, kept) = started
    assert planned["--plan"] == "auto" and "--plan" not in plain
    assert sorted(given) == ["data.seq_len", "output_dir"]
    assert "sharding.zero_stage" in everything
    assert (none, kept) == (None, {"candidates": []})


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="no way to plan"):
        finetune(Config(), processes=2, plan="manual")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no earlier prediction"):
        finetune(Config(), processes=2, plan="auto", prediction={})


@pytest.mark.parametrize(
    ("code", "status", "kind", "said"),
    [
        (75, {"exit_code": 75, "message": "Stopped on SIGINT after step 6."}, Interrupted, "after step 6"),
        (3, {"exit_code": 3, "message": "A record is wrong."}, DataError, "A record is wrong."),
        # Stopped before a rank could write: what stands there is of the run before.
        (130, {"exit_code": 75, "message": "Stopped on SIGINT after step 6."}, Interrupted, "step-00000006"),
        (130, None, Interrupted, "there is no checkpoint yet"),
        (137, None, FsdpTrainerError, "exit code 137"),
    ],
)
def test_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: int,
    status: dict[str, Any] | None,
    kind: type[FsdpTrainerError],
    said: str,
) -> None:
    start_with(monkeypatch, code=code, status=status)
    if status is not None:
        (tmp_path / "run/checkpoints/step-00000006").mkdir(parents=True)
    with pytest.raises(kind) as caught:
        finetune(Config.from_dict({"output_dir": str(tmp_path / "run")}), processes=2)
    assert type(caught.value) is kind
    assert said in str(caught.value)


def test_a_process_group_that_cannot_reduce_in_host_memory() -> None:
    from fsdp_trainer.runtime import check_backends

    check_backends("cpu:gloo,cuda:nccl")
    with pytest.raises(DistributedError, match="host memory") as caught:
        check_backends("cuda:nccl")
    assert "processes=N" in caught.value.fix
