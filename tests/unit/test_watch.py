"""What `watch` and `runs` say of folders that runs of every kind have left, without a run in sight."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from fsdp_trainer import cli, cli_watch
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.report.runs_text import format_runs
from fsdp_trainer.report.watch_text import SCALE, format_curve, format_end, format_row, format_watch
from fsdp_trainer.run_folder import append_metrics, write_json, write_status
from fsdp_trainer.run_lock import LOCK_FILE, OWNER_FILE, lock_folder, unlock_folder
from fsdp_trainer.run_metrics import Curve, Metrics, read_last_rows
from fsdp_trainer.run_record import (
    SILENT_SECONDS,
    STATES,
    find_newest_checkpoint,
    find_runs,
    measure_disk,
    read_facts,
    read_record,
)

HERE = {"host": socket.gethostname(), "pid": os.getpid()}


def row(step: int, **values: Any) -> dict[str, Any]:
    """A row as training writes it."""
    base = {"step": step, "loss": 5 / step, "grad_norm": 1.0, "lr": 1e-5, "tokens": 1000, "step_seconds": 0.5}
    return {**base, "tokens_per_second": 2000.0, "max_allocated_gib": None, **values}


def status(folder: Path, **values: Any) -> None:
    """A status.json with any value set by hand; None takes a key away."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"state": "running", "exit_code": 0, "step": 0, "message": "", "started": time.time(), "started_step": 0}
    base |= {"total_steps": 40, "updated": time.time(), **HERE}
    write_json(folder, "status.json", {key: value for key, value in {**base, **values}.items() if value is not None})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that this process is at, after 10 of 40 steps and two evaluations."""
    folder = tmp_path / "runs" / "one"
    status(folder)
    for step in range(1, 11):
        append_metrics(folder, row(step))
        if step % 5 == 0:
            append_metrics(folder, {"step": step, "eval_loss": 6 / step})
    (folder / "checkpoints" / "step-00000008").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000008" / "part").write_bytes(b"x" * 1000)
    write_json(folder, "devices.json", {"device": "CPU", "memory_bytes": None, "ranks": 2, "ranks_per_node": 2})
    return folder


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def picture(folder: Path, *, width: int = 80, height: int | None = None) -> str:
    metrics = Metrics(folder)
    metrics.read_new()
    record = read_record(folder)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(format_watch(record, metrics, read_facts(record), width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- the state -------------------------------------------------------------------------------------------------------


def test_a_run_of_a_living_process_is_running(run: Path) -> None:
    assert read_record(run).state == "running"


def test_a_run_whose_process_is_gone_is_lost(run: Path, dead: int) -> None:
    status(run, pid=dead)
    assert read_record(run).state == "lost"
    assert read_record(run).command_code == 6


def test_a_process_that_got_the_number_later_is_another_one(run: Path) -> None:
    status(run, started=time.time() - 10 * 365 * 86400)
    assert read_record(run).state == "lost"


def test_what_a_kill_left_before_the_status_is_lost_too(tmp_path: Path, dead: int) -> None:
    write_json(tmp_path, OWNER_FILE, {**HERE, "pid": dead, "boot": None})
    assert read_record(tmp_path).state == "lost"


def test_another_boot_of_the_machine_means_lost(run: Path) -> None:
    status(run, started=None)
    write_json(run, OWNER_FILE, {**HERE, "boot": "of yesterday"})
    assert read_record(run).state == "lost"


def test_the_lock_says_that_a_process_lives_that_cannot_be_seen(run: Path, dead: int) -> None:
    status(run, pid=dead)  # as from another container
    with FileLock(run / LOCK_FILE):
        assert read_record(run).state == "running"
    assert read_record(run).state == "lost"


@pytest.mark.parametrize(
    ("age", "step_seconds", "state"),
    [
        (60, 1.0, "running"),
        (SILENT_SECONDS - 60, 1.0, "running"),
        (SILENT_SECONDS + 60, 1.0, "lost"),
        (SILENT_SECONDS + 60, 600.0, "running"),
        (SILENT_SECONDS + 60, None, "lost"),
    ],
)
def test_on_another_machine_silence_counts(run: Path, age: float, step_seconds: float | None, state: str) -> None:
    status(run, host="elsewhere")
    for path in (run / "status.json", run / "metrics.jsonl"):
        os.utime(path, (time.time() - age, time.time() - age))
    assert read_record(run, step_seconds=step_seconds).state == state


def test_a_run_that_is_taken_up_again_is_starting(run: Path) -> None:
    status(run, state="interrupted", exit_code=75, step=10)
    assert read_record(run).state == "interrupted"
    lock = lock_folder(run, log=print)
    assert read_record(run).state == "starting"
    unlock_folder(lock)
    assert read_record(run).command_code == 75


@pytest.mark.parametrize(
    ("written", "state", "code"),
    [
        ({"state": "finished", "exit_code": 0}, "finished", 0),
        ({"state": "interrupted", "exit_code": 75}, "interrupted", 75),
        ({"state": "failed", "exit_code": 5}, "failed", 5),
        ({"state": "failed", "exit_code": "5"}, "failed", 1),
        ({"state": "failed", "exit_code": 8}, "out of memory", 8),
        ({"state": "odd"}, None, 0),
    ],
)
def test_an_ended_run_is_what_it_wrote(run: Path, written: dict[str, Any], state: str, code: int) -> None:
    status(run, **written)
    assert (read_record(run).state, read_record(run).command_code) == (state, code)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"running"', "\x00" * 50, "[" * 100_000])
def test_torn_files_are_as_if_missing(run: Path, text: str) -> None:
    for name in ("status.json", "plan.json", "memory.json", "devices.json"):
        (run / name).write_text(text)
    record = read_record(run)
    assert (record.state, record.step, record.total_steps) == (None, 0, None)
    facts = read_facts(record)
    assert (facts.predicted, facts.memory) == (None, None)
    assert "0.5" in picture(run)


def test_values_of_other_types_are_as_if_missing(run: Path) -> None:
    status(run, step="3", total_steps=[1], started="now", host=3, message={"a": 1}, started_step=None)
    write_json(run, "plan.json", {"candidates": [], "chosen": 3, "hardware": None})
    write_json(run, "memory.json", {"peak": 3, "host_gib": "much", "usable_gib": None})
    assert "one" in picture(run)


def test_who_runs_it_and_since_when_stays_with_the_run(tmp_path: Path) -> None:
    before = time.time()
    write_status(tmp_path, state="running", exit_code=0, step=4, total_steps=9)
    status_file = tmp_path / "status.json"
    start = json.loads(status_file.read_text())
    assert before <= start["started"] <= time.time()
    assert (start["started_step"], start["total_steps"], start["host"], start["pid"]) == (4, 9, *HERE.values())
    write_json(tmp_path, "status.json", {**start, "started": 1.5})
    write_status(tmp_path, state="running", exit_code=0, step=6)  # after a save
    write_status(tmp_path, state="failed", exit_code=5, step=7, message="why")
    end = json.loads(status_file.read_text())
    assert (end["started"], end["started_step"], end["total_steps"], end["step"]) == (1.5, 4, 9, 7)
    assert end["updated"] >= start["updated"]
    write_status(tmp_path, state="failed", exit_code=1, step=7)  # the same end, told a second time
    again = json.loads(status_file.read_text())
    assert {**again, "exit_code": 5, "message": "why", "updated": 0} == {**end, "updated": 0}
    write_json(tmp_path, "status.json", {**start, "pid": 1, "started": 1.5})
    write_status(tmp_path, state="running", exit_code=0, step=6, total_steps=9)  # another process takes it up
    again = json.loads(status_file.read_text())
    assert again["started"] > 1.5 and again["started_step"] == 6


# --- the rows --------------------------------------------------------------------------------------------------------


def test_only_new_rows_are_read_and_a_torn_one_waits(run: Path) -> None:
    metrics = Metrics(run)
    assert len(metrics.read_new()) == 12
    assert metrics.read_new() == []
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(11)) + "\n" + '{"step": 12, "lo')
    assert [found["step"] for found in metrics.read_new()] == [11]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.0}\n')
    assert metrics.read_new() == [{"step": 12, "loss": 1.0}]
    assert metrics.curves["loss"].steps[-2:] == [11, 12]


def test_rows_that_a_resume_keeps_are_not_new(run: Path) -> None:
    from fsdp_trainer.run_folder import trim_metrics

    metrics = Metrics(run)
    metrics.read_new()
    trim_metrics(run, after_step=8)
    append_metrics(run, row(9, loss=0.25))
    assert [found["step"] for found in metrics.read_new()] == [9]
    assert metrics.curves["loss"].steps == list(range(1, 10))
    assert metrics.last["loss"] == 0.25
    assert metrics.curves["eval_loss"].steps == [5]


def test_nulls_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(row(1)), json.dumps(row(2, loss=None, grad_norm=None)), "\x00\x00", "null", '{"loss": 3}']
    lines += ['{"step": "4"}', '{"step": 3, "loss": NaN}', '{"step": 4, "eval_loss": null}', json.dumps(row(5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    metrics = Metrics(tmp_path)
    assert [found["step"] for found in metrics.read_new()] == [1, 2, 3, 4, 5]
    assert metrics.curves["loss"].steps == [1, 5]
    assert metrics.curves["eval_loss"].steps == []
    assert "not finite" in format_row(row(2, loss=None), total_steps=3)
    assert read_last_rows(tmp_path)[0]["step"] == 5


def test_a_hundred_thousand_rows_are_read_once(tmp_path: Path) -> None:
    line = json.dumps(row(1)).replace('"step": 1', '"step": %d')
    (tmp_path / "metrics.jsonl").write_text("".join(line % step + "\n" for step in range(1, 100_001)))
    metrics = Metrics(tmp_path)
    started = time.process_time()
    assert len(metrics.read_new()) == 100_000
    first = time.process_time() - started
    append_metrics(tmp_path, row(100_001))
    started = time.process_time()
    assert len(metrics.read_new()) == 1
    assert time.process_time() - started < first / 20
    started = time.process_time()
    assert read_last_rows(tmp_path)[0]["step"] == 100_001
    assert time.process_time() - started < first / 3
    curve = format_curve("loss", metrics.curves["loss"], width=60, height=8)
    assert len(curve.plain.splitlines()) == 10


def test_time_left_passes_over_a_slow_step_and_counts_what_lies_between(tmp_path: Path) -> None:
    for step in range(1, 11):
        append_metrics(tmp_path, row(step, step_seconds=30.0 if step == 7 else 1.0))
    metrics = Metrics(tmp_path)
    metrics.read_new()

    def left(**values: Any) -> float | None:
        base = {"total_steps": 30, "started": 1000.0, "started_step": 0, "updated": 1039.0, "now": 1039.0}
        return metrics.seconds_left(**{**base, **values})

    assert left() == pytest.approx(20)  # 39 s were steps, 9 of 1 s and one of 30 s
    assert left(updated=1059.0, now=1059.0) == pytest.approx(20 * 3)  # 20 s more for 10 steps: evaluations and saves
    assert left(now=1045.0) == pytest.approx(14)
    assert left(now=2000.0) == 0
    assert left(started=None) == pytest.approx(20)
    assert left(total_steps=None) is None
    # Of this start are the last five steps alone: 5 s, in 25 s.
    assert left(started=1000.0, started_step=8, updated=1010.0, now=1010.0) == pytest.approx(20 * 5)


# --- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("height", [None, 50, 24, 12])
def test_the_picture_keeps_to_the_terminal(run: Path, width: int, height: int | None) -> None:
    lines = picture(run, width=width, height=height).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    if height is not None and width >= 60:
        assert len(lines) <= height
    text = "\n".join(lines)
    assert "running" in text and "10 of 40" in text and "2,000 tokens/s" in text and "step 8" in text
    assert (" |" in text) == (height is None or height > 12) or width < 60
    assert "0.6 after step 10" in text


def test_memory_is_a_bar_beside_what_the_device_has(run: Path) -> None:
    write_json(run, "devices.json", {"device": "NVIDIA L4", "memory_bytes": 24 * 2**30, "ranks": 2})
    append_metrics(run, row(11, max_allocated_gib=12.0))
    assert "peak 12.0 GiB" in picture(run) and "50% of 24.0 GiB" in picture(run)
    write_json(run, "memory.json", {"usable_gib": 20.0, "peak": {"measured_gib": 11.0, "predicted_gib": 12.5}})
    assert "60% of 20.0 GiB, predicted 12.5 GiB" in picture(run, width=100)


def test_on_a_cpu_the_traced_peak_and_the_resident_bytes_stand_in(run: Path) -> None:
    assert "memory      rank 0 holds" in picture(run)
    peak = {"measured_gib": 0.5, "predicted_gib": 0.5}
    write_json(run, "memory.json", {"source": "trace", "peak": peak, "host_gib": {"measured": {"min": 1, "max": 1.5}}})
    assert "peak of the traced step 512.0 MiB, predicted 512.0 MiB, rank 0 holds" in picture(run, width=120)
    status(run, state="finished")
    assert "a rank held 1.5 GiB of RAM" in picture(run, width=120)


def test_the_plan_s_speed_stands_beside_the_measured_one(run: Path) -> None:
    chosen = {"tokens_per_second_per_gpu": 1100.0, "allocated_gib": 3.0}
    write_json(run, "plan.json", {"candidates": [{}, chosen], "chosen": 1, "hardware": {"count": 2}})
    assert "(predicted 2,200 tokens/s)" in picture(run) and "predicted 3.0 GiB" in picture(run)


def test_an_ended_run_says_why_and_how_to_go_on(run: Path) -> None:
    status(run, state="failed", exit_code=8, message="Out of memory.\n  to fix: less")
    write_json(run, "out_of_memory.json", {"command": "fsdp-trainer train --less"})
    text = picture(run)
    assert "out of memory" in text and "to fix: less" in text and "fsdp-trainer train --less" in text
    assert "left" not in text.splitlines()[1]


def test_a_run_that_has_written_nothing_is_shown(tmp_path: Path) -> None:
    assert "nothing written yet" in picture(tmp_path)
    lock = lock_folder(tmp_path, log=print)
    assert "starting" in picture(tmp_path) and "reads data" in picture(tmp_path)
    unlock_folder(lock)


def test_a_curve_reaches_its_ends() -> None:
    curve = Curve(steps=[1, 2, 3, 4], values=[4.0, 3.0, 2.0, 1.0])
    lines = format_curve("loss", curve, marks=Curve([4], [2.5]), width=40, height=6).plain.splitlines()
    assert lines[0].strip() == "loss"
    assert lines[1].startswith("     4.0 |⠉"[: SCALE + 1]) and lines[6].startswith("     1.0 |")
    assert lines[6].endswith("⣀") or lines[6].endswith("⡀") or lines[6].endswith("⢄"), lines[6]
    assert len(lines[6]) == 40 and any(line.endswith("o") for line in lines)
    assert lines[7].split() == ["1", "step", "4"]


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-12, 2e-12], [1e30, 2e30], [-3.0, -3.0], [5e6, 5e6 + 1]])
def test_curves_of_any_size_can_be_drawn(values: list[float]) -> None:
    lines = format_curve("x", Curve([7, 9], values), width=50, height=4).plain.splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 50


# --- the commands ----------------------------------------------------------------------------------------------------


def ended(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_watch_once_shows_and_ends(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(["watch", str(run), "--once"], capsys)
    assert code == 0 and "10 of 40" in out
    status(run, state="interrupted", exit_code=75, step=10)
    assert ended(["watch", str(run), "--once"], capsys)[0] == 75


def test_watch_into_a_pipe_says_what_is_new(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(run, state="failed", exit_code=5, step=10, message="The gradient of a step is not finite.")
    code, out, _ = ended(["watch", str(run)], capsys)
    assert code == 5
    lines = out.splitlines()
    assert lines[0].startswith("step 10: eval_loss 0.6") and "checkpoint:" in lines[1]
    assert lines[-1] == f"{run}: failed: The gradient of a step is not finite."


def test_a_lost_run_is_given_time_to_say_why(
    run: Path, dead: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_watch, "LOST_SECONDS", 0.3)
    status(run, pid=dead)
    code, out, _ = ended(["watch", str(run), "--every", "0.1"], capsys)
    assert code == 6 and "lost: no process of it is left" in out

    looks = cli_watch._looks(run, Metrics(run), 0.1)
    assert next(looks).record.state == "lost"
    status(run, state="failed", exit_code=6, message="rank 1 is gone")
    assert [look.record.state for look in looks] == ["failed"]


def test_ctrl_c_leaves_the_run_alone(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_watch.time, "sleep", interrupted)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, _, err = ended(["watch", str(run)], capsys)
    assert code == 130 and "goes on as it was" in err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/two", ["does not exist", "runs/one", "waited for"]),
        ("runs", ["holds runs and is none itself", "runs/one"]),
        ("file", ["is a file"]),
        ("empty", ["has no status.json"]),
    ],
)
def test_what_is_no_run_is_refused(
    run: Path, tmp_path: Path, name: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    code, _, err = ended(["watch", str(tmp_path / name), "--once"], capsys)
    assert code == ConfigError.exit_code
    assert all(part in err for part in said), err


def test_runs_are_found_and_told_apart(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = tmp_path / "runs" / "ladder"
    status(ladder / "01-baseline", state="failed", exit_code=8)
    status(ladder / "02-full", state="finished", step=5, total_steps=5)
    write_json(ladder, "ladder.json", {"rungs": []})
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / ".hidden").mkdir()
    status(tmp_path / "runs" / ".hidden" / "x")
    status(run / "model" / "inside")  # a run holds no other
    monkeypatch.chdir(tmp_path)
    os.utime(run / "status.json", (1.0, 1.0))
    code, out, _ = ended(["runs", "--json"], capsys)
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert set(found) == {"runs/one", "runs/ladder/01-baseline", "runs/ladder/02-full"}
    assert found["runs/ladder/01-baseline"]["state"] == "out of memory"
    one = found["runs/one"]
    assert (one["state"], one["step"], one["total_steps"], one["eval_loss"]) == ("running", 10, 40, 0.6)
    assert one["checkpoint"] == "runs/one/checkpoints/step-00000008" and one["checkpoint_step"] == 8
    assert one["bytes_on_disk"] == sum(path.stat().st_size for path in run.rglob("*") if path.is_file())

    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = ended(["runs", "runs", "runs/one"], capsys)
    assert max(map(len, out.splitlines())) <= 60
    assert out.count("one") == 1 and "10/40" in out and "no room for:" in out and "all in runs/" in out
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = ended(["runs"], capsys)
    assert "no room" not in out and "tokens/s" in out and "resumes at" in out


def test_runs_says_where_it_looked_in_vain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["runs", str(tmp_path)], capsys)[:2] == (0, f"no runs in {tmp_path}\n")
    code, _, err = ended(["runs", str(tmp_path / "x")], capsys)
    assert code == ConfigError.exit_code and "no such folder" in err


def test_a_folder_nobody_may_read_is_passed_over(tmp_path: Path) -> None:
    status(tmp_path / "good")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs([tmp_path], depth=3) == [tmp_path / "good"]
    assert find_newest_checkpoint(tmp_path) is None


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 500)
    os.link(tmp_path / "a", tmp_path / "b")
    assert measure_disk(tmp_path) == 500


def test_the_last_line_says_how_it_ended(run: Path) -> None:
    status(run, state="finished", step=40)
    assert format_end(read_record(run)) == "finished after 40 steps"


def test_long_names_do_not_widen_the_table(run: Path) -> None:
    described = {**cli_watch.describe(run), "name": "/".join(["a-long-folder-name"] * 8)}
    console = Console(width=60, file=io.StringIO(), color_system=None)
    table, _ = format_runs([described, described], width=60)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 60


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_the_page_names_every_state_and_key(run: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    assert [state for state in STATES if f"| `{state}` |" not in page] == []
    assert [key for key in cli_watch.describe(run) if f"`{key}`" not in page] == []


def test_runs_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, said in ((["runs"], "no run yet: runs/ is not here"), (["runs", "--json"], "[]")):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


def test_what_a_folder_says_is_not_obeyed_by_the_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An escape sequence in a status file could clear the screen, rename the window or hide what follows."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal: what rich writes itself stays
    status(run, state="failed", exit_code=1, message="a\x1b[2Jb\x1b]0;title\x07c\u202ed\x9b5m", host="h\x1b[1m")
    for command in (["watch", str(run), "--once"], ["runs", str(run)]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main(command)
        text = out.getvalue()
        for obeyed in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\x9b"):
            assert obeyed not in text
        assert "a\\x1b[2Jb" in text or command[0] == "runs", "it is shown all the same"
