"""A ladder goes on through what rungs end with, keeps what was measured, and says what the numbers are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer import cli, cli_ladder, ladder_run
from fsdp_trainer.config import Config
from fsdp_trainer.errors import (
    ConfigError,
    DataError,
    DistributedError,
    FolderInUse,
    FsdpTrainerError,
    Interrupted,
    OutOfMemory,
)
from fsdp_trainer.ladder_result import LadderResult
from fsdp_trainer.ladder_run import ladder
from fsdp_trainer.ladder_rungs import usual_techniques
from fsdp_trainer.memory.ledger import RankMemory, TracedStep, build_ledger
from fsdp_trainer.memory.simulation import GIB, Simulation
from fsdp_trainer.report.ladder_text import format_ladder
from fsdp_trainer.run_lock import lock_folder, unlock_folder
from tests.plans import model_folder

Ended = dict[str, int]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings whose model and data are there; nothing is loaded of either."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    return Config.from_dict(
        {
            "model": {"path": model_folder(tmp_path)},
            "data": {"train": str(tmp_path / "train.jsonl"), "seq_len": 64},
            "batch": {"global_batch_size": 4},
            "output_dir": str(tmp_path / "run"),
        }
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Give a function that puts rungs with known ends in place of real ones, and the list of those that were run."""

    def put(**ends: int) -> list[str]:
        run: list[str] = []

        def launch(config: Config, *, arguments: Sequence[str], processes: int, on_line: Callable[[str], None]) -> int:
            folder = Path(config.output_dir)
            name = folder.name.partition("-")[2]
            run.append(name)
            assert arguments == ["--config", str(folder / "config.yaml")]
            assert Config.load(arguments[1]) == config
            on_line(f"{name} says something")
            code = ends.get(name, 0)
            leave_run(folder, steps=0 if code else config.train.max_steps or 0)
            if code:
                status = {"state": "failed", "exit_code": code, "step": 0, "message": f"{name} ended with {code}"}
                (folder / "status.json").write_text(json.dumps(status))
            return code

        monkeypatch.setattr(ladder_run, "launch", launch)
        return run

    return put


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Simulation | FsdpTrainerError]:
    """Predictions by rung instead of real simulations, which take torch and seconds; none of what is not named."""
    answers: dict[str, Simulation | FsdpTrainerError] = {}

    @contextmanager
    def workers() -> Iterator[Any]:
        unknown = ConfigError("not simulated here")
        yield lambda configs, hardware: [
            answers.get(Path(c.output_dir).name.partition("-")[2], unknown) for c in configs
        ]

    monkeypatch.setattr(ladder_run, "simulation_workers", workers)
    monkeypatch.setattr(ladder_run, "count_gpus", lambda: 0)
    return answers


def leave_run(folder: Path, *, steps: int) -> None:
    """Leave what a run of so many steps does: the first takes 10 s, the second, traced, 5 s, the others 0.5 s each."""
    seconds = {1: 10.0, 2: 5.0}
    rows = [
        {"step": n, "loss": 7.0 - n, "tokens": 256, "step_seconds": seconds.get(n, 0.5)} for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = RankMemory({"backward": 3 * 2**29}, {}, categories=None, retries=None, host=0)
    traced = TracedStep(step=2, seconds=5.0, usual_seconds=0.5)
    ledger = build_ledger(
        [measured], device="CPU", usable_bytes=None, source="trace", prediction=None, traced_step=traced, timeline=()
    )
    if steps:
        (folder / "memory.json").write_text(json.dumps(ledger.to_json()))


def simulation(config: Config, *, peak: int, least: int, limit: int = 4 * GIB) -> Simulation:
    return Simulation(
        allocated=peak + 5,
        reserved=peak,
        min_capacity=least,
        host=peak,
        limit=limit,
        phases={"load": peak + 5, "forward": 1, "backward": peak, "clip": 2, "step": 3, "save": peak + 4},
        breakdown={},
        step_time=None,
        tokens_per_rank=1,
        config={},
    )


def outcomes(result: LadderResult) -> dict[str, str]:
    return {rung.name: rung.outcome for rung in result.rungs}


def climb(config: Config, **given: Any) -> LadderResult:
    return ladder(config, processes=2, **given)


# --- what rungs end with


def test_running_out_is_a_result_and_so_is_failing(config: Config, launched: Any) -> None:
    run = launched(baseline=OutOfMemory.exit_code, checkpointing=DistributedError.exit_code, stage1=1)
    result = climb(config, only=["baseline", "checkpointing", "stage1", "stage2"])
    assert run == ["baseline", "checkpointing", "stage1", "stage2"]
    assert list(outcomes(result).values()) == ["out of memory", "failed", "failed", "finished"]
    assert [rung.message for rung in result.rungs][:2] == ["baseline ended with 8", "checkpointing ended with 6"]
    assert result.fits == "stage2"
    assert result.rungs[0].measured_gib is None and result.rungs[0].first_loss is None
    assert json.loads((result.folder / "ladder.json").read_text()) == result.to_json()
    assert LadderResult.read(result.folder) == result
    page = (result.folder / "ladder.html").read_text()
    assert page.startswith("<!doctype html>") and "baseline ended with 8" in page
    assert "stage2" in result._repr_html_()


def test_speed_leaves_out_the_first_and_the_traced_step(config: Config, launched: Any) -> None:
    launched()
    rung = climb(config, only=["stage3"]).rungs[0]
    assert (rung.tokens_per_second, rung.step_seconds) == (512.0, 0.5)
    assert (rung.first_loss, rung.last_loss) == (6.0, 2.0)
    assert (rung.measured_gib, rung.source) == (1.5, "trace")


def test_what_no_technique_mends_ends_the_ladder(config: Config, launched: Any) -> None:
    run = launched(baseline=DataError.exit_code)
    with pytest.raises(DataError, match="baseline ended with 3"):
        climb(config)
    assert run == ["baseline"]


def test_until_fits(config: Config, launched: Any) -> None:
    run = launched(baseline=OutOfMemory.exit_code)
    result = climb(config, until_fits=True)
    assert run == ["baseline", "checkpointing"]
    assert {rung.message for rung in result.rungs[2:]} == {"checkpointing fits already"}
    assert {rung.outcome for rung in result.rungs[2:]} == {"not run"}


def test_predictions_are_of_a_step_on_cpu_and_unfit_rungs_can_be_skipped(
    config: Config, launched: Any, simulated: dict[str, Any]
) -> None:
    run = launched()
    simulated["baseline"] = simulation(config, peak=3 * GIB, least=5 * GIB)
    simulated["stage3"] = simulation(config, peak=2 * GIB, least=3 * GIB)
    told: list[str] = []
    result = climb(
        config,
        only=["baseline", "stage3", "8bit"],
        skip_unfit=True,
        watch=lambda result, running, line: told.append(line),
    )
    baseline, stage3, eight_bit = result.rungs
    assert run == ["stage3", "8bit"]
    assert (baseline.outcome, baseline.predicted_gib, baseline.usable_gib) == ("not run", 3.0, 4.0)
    assert baseline.message == "predicted not to fit: 5.0 GiB needed, 4.0 GiB there"
    assert (stage3.outcome, stage3.predicted_gib) == ("finished", 2.0)
    assert (eight_bit.outcome, eight_bit.predicted_gib) == ("finished", None)
    assert "8bit: not predicted: not simulated here" in told
    assert "stage3 says something" in told
    assert (result.folder / stage3.folder / "output.log").read_text() == "stage3 says something\n"


# --- stopped, and started again


def test_a_stopped_ladder_goes_on(config: Config, launched: Any) -> None:
    names = ["baseline", "checkpointing", "stage1"]
    launched(baseline=OutOfMemory.exit_code, checkpointing=Interrupted.exit_code)
    with pytest.raises(Interrupted, match=r"ladder\.json has what was measured; checkpointing is measured anew"):
        climb(config, only=names)
    kept = LadderResult.read(Path(f"{config.output_dir}-ladder"))
    assert kept is not None and list(outcomes(kept).values()) == ["out of memory", "not run", "not run"]
    run = launched()
    assert list(outcomes(climb(config, only=names)).values()) == ["out of memory", "finished", "finished"]
    assert run == ["checkpointing", "stage1"]


def test_what_was_measured_stays_unless_it_is_asked_for_anew(config: Config, launched: Any) -> None:
    run = launched()
    climb(config, only=["baseline", "stage1"])
    more = climb(config, only=["stage2"])
    assert run == ["baseline", "stage1", "stage2"]
    assert outcomes(more) == dict.fromkeys(("baseline", "stage1", "stage2"), "finished")
    again = climb(config, only=["stage1"], fresh=True)
    assert run == ["baseline", "stage1", "stage2", "stage1"]
    assert outcomes(again) == outcomes(more)
    # Another work: nothing of it has been measured.
    other = climb(config, only=["stage1"], steps=6)
    assert run[4:] == ["stage1"] and outcomes(other) == {"stage1": "finished"}
    assert other.rungs[0].last_loss == 1.0


def test_what_was_measured_elsewhere_is_measured_here(config: Config, launched: Any) -> None:
    run = launched()
    before = climb(config, only=["stage1"])
    elsewhere = before.to_json() | {"hardware": "2xH100-80GB"}
    (before.folder / "ladder.json").write_text(json.dumps(elsewhere))
    climb(config, only=["stage1"])
    assert run == ["stage1", "stage1"]


def test_a_failed_rung_is_tried_again(config: Config, launched: Any) -> None:
    launched(stage1=1)
    climb(config, only=["stage1"])
    run = launched()
    assert outcomes(climb(config, only=["stage1"])) == {"stage1": "finished"}
    assert run == ["stage1"]


# --- refused before anything starts


def test_a_folder_of_something_else_is_left_alone(config: Config, launched: Any, tmp_path: Path) -> None:
    run = launched()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"something else than a ladder[\s\S]*mine has no ladder.json"):
        climb(config, out=tmp_path / "mine")
    assert run == [] and sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["notes.txt"]


def test_two_ladders_in_one_folder(config: Config, launched: Any, tmp_path: Path) -> None:
    run = launched()
    lock = lock_folder(tmp_path / "both", log=lambda line: None)
    try:
        with pytest.raises(FolderInUse):
            climb(config, out=tmp_path / "both")
    finally:
        unlock_folder(lock)
    assert run == []


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"data": {"train": "nowhere.jsonl"}}, DataError, "nowhere.jsonl"),
        ({"model": {"path": "./nowhere"}}, ConfigError, "model folder does not exist"),
        ({"batch": {"global_batch_size": 3}}, ConfigError, "accumulation x ranks"),
    ],
)
def test_model_data_and_ranks_are_checked_first(
    config: Config, launched: Any, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    run = launched()
    with pytest.raises(error, match=said):
        climb(Config.from_dict(config.to_dict() | {k: {**config.to_dict()[k], **v} for k, v in change.items()}))
    assert run == [] and not Path(f"{config.output_dir}-ladder").exists()


# --- the command and the table


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ladder", *words])
    return int(ended.value.code or 0)


def test_the_command(config: Config, launched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(baseline=OutOfMemory.exit_code)
    config.save(tmp_path / "run.yaml")
    words = ("--config", str(tmp_path / "run.yaml"), "--processes", "2", "--only", "baseline,8bit")
    assert command(*words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "baseline: out of memory\n8bit: optimizer averages in 8 bits\n8bit: finished\n" in said.out
    assert "says something" not in said.out
    assert "first to fit: 8bit" in said.out and f"{config.output_dir}-ladder/ladder.json" in said.out
    assert command(*words, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["fits"] == "8bit"
    assert "baseline: kept from an earlier start (out of memory)" in said.err


def test_the_command_where_nothing_gets_through(config: Config, launched: Any, tmp_path: Path) -> None:
    launched(baseline=OutOfMemory.exit_code)
    config.save(tmp_path / "run.yaml")
    assert command("--config", str(tmp_path / "run.yaml"), "--processes", "2", "--only", "baseline") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which model to measure"),
        (("--config", "x.yaml", "--until-fit"), "--until-fits"),
        (("--model.path=a/b", "--rungs", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_wrong_words(
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    assert command(*words) == 2
    assert said in capsys.readouterr().err


# --- docs/ladder.md

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ladder.md").read_text(encoding="utf-8")


def test_the_page_names_every_flag_and_rung() -> None:
    assert all(f"`{flag}" in PAGE or f"{flag} " in PAGE for flag in cli_ladder.FLAGS)
    for name, _, _ in usual_techniques(Config()):
        assert f"| `{name}` |" in PAGE


def test_the_examples_of_the_page_run(
    config: Config, launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched()
    monkeypatch.chdir(tmp_path)
    config.save("run.yaml")
    (line,) = re.findall(r"```bash\nfsdp-trainer ladder (.*?)\n```", PAGE)
    assert command(*line.split()) == 0
    assert len(run) == 9
    (own,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    Path("rungs.yaml").write_text(own)
    assert command(*line.split(), "--rungs", "rungs.yaml", "--out", "own") == 0
    assert run[9:] == ["as-it-is", "gradients-in-bf16", "2-rows-at-once"]
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "ladder.md", "exec"), {})
    assert "first to fit: baseline" in capsys.readouterr().out


def test_the_table_keeps_to_80_columns(config: Config, launched: Any, simulated: dict[str, Any]) -> None:
    launched(baseline=OutOfMemory.exit_code)
    simulated["stage3"] = simulation(config, peak=round(1.485 * GIB), least=3 * GIB)
    text = format_ladder(climb(config).to_json(), width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith("stage3 ")]
    assert row.split() == ["stage3", "1.49", "1.50", "-1.0%", "512", "6.0000", "2.0000", "finished"]
    (row,) = [line for line in lines if line.startswith("baseline ")]
    assert row.split() == ["baseline", *"------", "out", "of", "memory"]
    assert "first loss: 6.0000 on every rung (largest difference 0)" in text
    assert "baseline, out of memory: baseline ended with 8" in text
    assert "first to fit: checkpointing (activations computed again)." in text
