"""The command line: answers at once, without torch, and says what is wrong in three parts."""

from __future__ import annotations

import errno
import json
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import fsdp_trainer
from fsdp_trainer import cli
from fsdp_trainer.config import Config
from tests import light_imports as light

PACKAGE = Path(fsdp_trainer.__file__).parent
WITHOUT_TORCH = ("", ".config", ".cli", ".launch", ".launch_profile", ".progress", ".units", ".errors")


def command(*words: str, cwd: Path | None = None, cold: bool = False) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "fsdp_trainer", *words]
    if cold:
        return subprocess.run(line, capture_output=True, text=True, env=environ, cwd=cwd, check=False)
    return light.run(line, env=environ, cwd=cwd, imported=light.COMMANDS)


def test_light_modules_import_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'accelerate', 'datasets'}"
    imports = "; ".join(f"import fsdp_trainer{name}" for name in WITHOUT_TORCH)
    code = f"{imports}; import sys; found = {heavy} & set(sys.modules); assert not found, found"
    result = light.python(code, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr


def test_help_answers_quickly() -> None:
    seconds = []
    for _ in range(3):  # the best of up to three, of the processor's time: the machine may be busy with something else
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = command("--help", cold=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert result.returncode == 0
        for name in ("train", "export", "simulate", "plan", "watch", "runs", "verify", "schema"):
            assert name in result.stdout
        if seconds[-1] < 1.0:
            break
    assert min(seconds) < 1.0


def test_train_help_names_its_flags_and_the_overrides() -> None:
    text = command("train", "--help").stdout
    for word in ("--config", "--processes", "--profile", "--plan", "--section.key=value"):
        assert word in text


def test_short_help_and_version() -> None:
    assert command("train", "-h").stdout == command("train", "--help").stdout
    assert command("--version").stdout == f"fsdp-trainer {fsdp_trainer.__version__}\n"


def test_only_commands_that_exist_are_listed() -> None:
    assert {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    } == {
        "train",
        "data",
        "export",
        "verify",
        "simulate",
        "plan",
        "report",
        "ladder",
        "import-deepspeed",
        "import-accelerate",
        "import-trainer",
        "profile",
        "doctor",
        "schema",
        "watch",
        "runs",
    }


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["schema"])
    assert caught.value.code in (0, None)
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--optim.lrr=1"], ["optim.lrr is not a setting", "did you mean optim.lr?"]),
        (["--learning_rate=1"], ["learning_rate is not a setting", "did you mean optim.lr?"]),
        (["--optim.lr=abc"], ["optim.lr cannot be 'abc'", "a number above 0"]),
        (["--optim.lr"], ["--section.key=value"]),
        ([], ["nothing says what to train", "configs/recipes/"]),
        (["run.yaml"], ["neither a flag nor a setting", "write --config run.yaml"]),
        (["-c", "run.yaml"], ["neither a flag nor a setting", "found: -c"]),
        (["--proccesses=2"], ["did you mean --processes?"]),
        (["--config", "nosuch.yaml"], ["does not exist", "nosuch.yaml"]),
        (["--precision=fp32", "--profile", "nosuch.yaml"], ["profile does not exist", "nosuch.yaml"]),
        (["--processes", "2", "--batch.global_batch_size=7"], ["7 = 1 x accumulation x 2"]),
        (["--precision=fp32", "--processes", "0"], ["--processes 0"]),
        (["--precision=fp32", "--plan", "out"], ["--plan out", "--config DIR/run.yaml"]),
    ],
    ids=str,
)
def test_errors_are_three_parts_on_stderr_with_code_2(words: list[str], parts: list[str], tmp_path: Path) -> None:
    result = command("train", *words, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    for part in [*parts, "found:", "to fix:"]:
        assert part in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_words_reach_the_launcher_as_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    def remember(config: Config, **words: object) -> int:
        seen.update(words, lr=config.optim.lr, seq_len=config.data.seq_len)
        return 75

    monkeypatch.setattr(cli, "launch", remember)
    path = tmp_path / "run.yaml"
    path.write_text("optim: {lr: 1e-4}\ndata: {seq_len: 64}\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--optim.lr", "2e-4", "--config", str(path), "--processes=2", "--batch.micro_batch_size=2"])
    assert caught.value.code == 75
    assert seen.pop("typed")[0] == "fsdp-trainer"  # the rest is what this process was started with
    assert seen == {
        "lr": 2e-4,
        "seq_len": 64,
        "profile": None,
        "processes": 2,
        "machines": None,
        "unsaid": (),
        "arguments": ["--config", str(path), "--optim.lr", "2e-4", "--batch.micro_batch_size=2"],
    }


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config, **words: object) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cli, "launch", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["train", "--precision=fp32"])


def run_script(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the training script by path, the way `accelerate launch` does, from a folder that is not the repository."""
    base = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, PACKAGE / "train.py", *words]
    return light.run(line, cwd=folder, env={**base, **environ}, imported=light.COMMANDS)


def test_plan_auto_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They plan, not the launcher: so it is the same under a bare `accelerate launch`."""
    seen = {}
    monkeypatch.setattr(cli, "launch", lambda config, **words: seen.update(words) or 0)
    with pytest.raises(SystemExit):
        cli.main(["train", "--plan", "auto", "--precision=bf16"])
    assert seen["arguments"] == ["--plan", "auto", "--precision=bf16"]


def test_script_names_the_rank_that_failed(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--optim.lr=-1", RANK="1", WORLD_SIZE="2")
    assert result.returncode == 2
    assert result.stderr.startswith("[rank 1] error: optim.lr cannot be -1")
    assert "Traceback" not in result.stderr


def test_script_compares_the_launcher_with_the_settings(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--precision=fp32", ACCELERATE_MIXED_PRECISION="bf16")
    assert result.returncode == 2
    assert "precision: fp32" in result.stderr
    assert "mixed_precision: bf16" in result.stderr


def test_script_checks_the_batch_before_it_imports_torch(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--batch.global_batch_size=3", RANK="0", WORLD_SIZE="2")
    assert result.returncode == 2
    assert "3 = 1 x accumulation x 2" in result.stderr


def test_script_takes_its_own_folder_off_the_path(tmp_path: Path) -> None:
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(PACKAGE)!r}); "
        f"runpy.run_path({str(PACKAGE / 'train.py')!r}); "
        f"import os; assert {str(PACKAGE)!r} not in [os.path.realpath(p) for p in sys.path if p]; "
        "assert not {'config', 'step', 'model', 'run'} & set(sys.modules)"
    )
    result = light.python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def ends(tmp_path: Path, *, earlier: dict[str, object] | None = None) -> tuple[Callable[..., None], Callable[[], int]]:
    """The script's own `record_end` on an empty run folder, and a reader of the exit code it leaves."""
    script = runpy.run_path(str(PACKAGE / "train.py"))
    status = tmp_path / "status.json"
    if earlier is not None:
        status.write_text(json.dumps(earlier))
        os.utime(status, (1.0, 1.0))
    return partial(script["record_end"], tmp_path), lambda: json.loads(status.read_text())["exit_code"]


def test_the_rank_that_knows_the_cause_names_the_exit_code(tmp_path: Path) -> None:
    record, code = ends(tmp_path)
    record(6, state="failed", message="another rank failed", secondary=True)
    assert code() == 6
    record(2, state="failed", message="the cause", secondary=False)
    record(6, state="failed", message="another rank failed", secondary=True)
    record(75, state="interrupted", message="SIGTERM of the agent", secondary=True)
    record(1, state="failed", message="connection closed", secondary=True)
    assert code() == 2


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_failure_of_an_earlier_run_is_replaced_and_its_step_kept(tmp_path: Path, state: str) -> None:
    record, code = ends(tmp_path, earlier={"state": state, "exit_code": 3, "step": 7, "message": ""})
    record(75, state="interrupted", message="", secondary=True)
    assert code() == 75
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 7


LOSE_A_RANK = """
import os, runpy, signal, sys, threading, time, types
from fsdp_trainer.errors import DistributedError
def finetune(config, *, prediction):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # the agent has seen it as well
    raise DistributedError("A rank is lost.", values="rank 1 is gone", fix="start again")
sys.modules["fsdp_trainer.training"] = types.SimpleNamespace(finetune=finetune)
sys.exit(runpy.run_path(SCRIPT)["main"](sys.argv[1:]))
"""


def test_the_agents_sigterm_does_not_end_a_rank_that_is_about_to_say_which_one_is_lost(tmp_path: Path) -> None:
    settings = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "output_dir": str(tmp_path / "run")}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings | {"log": {"report": False}}))
    code = f"SCRIPT = {str(PACKAGE / 'train.py')!r}{LOSE_A_RANK}"
    words = [sys.executable, "-c", code, "--config", str(file)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 6, result.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["message"].startswith("A rank is lost.")


FULL = """
import errno, runpy, sys, types
def finetune(config, *, prediction):
    raise OSError(errno.ENOSPC, "full", "/a/tracker")
sys.modules["fsdp_trainer.training"] = types.SimpleNamespace(finetune=finetune)
sys.exit(runpy.run_path(SCRIPT)["main"](sys.argv[1:]))
"""


def test_a_disk_that_is_full_where_nobody_expects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"path": "m"}, "data": {"train": "t"}, "output_dir": str(tmp_path / "run")}))
    result = light.python(f"SCRIPT = {str(PACKAGE / 'train.py')!r}{FULL}", "--config", str(file))
    said = "There is no room to write a file.\n  found: /a/tracker: No space left on device\n  to fix: make room"
    assert result.returncode == 7 and result.stderr.startswith(f"error: {said}") and "Traceback" not in result.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["exit_code"] == 7 and status["message"].startswith(said)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "full", "/a/tracker")

    monkeypatch.setattr(cli, "launch", full)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--config", str(file)])
    assert caught.value.code == 7 and capsys.readouterr().err.startswith(f"error: {said}")


STOP_IN_THE_IMPORT = """
import importlib.abc, importlib.machinery, os, runpy, signal, sys, types
class Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "fsdp_trainer.training" else None
    def create_module(self, spec):
        os.kill(os.getpid(), signal.SIGTERM)
        return types.SimpleNamespace(finetune=lambda *words, **named: sys.exit("went on"))
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Slow())
sys.exit(runpy.run_path(SCRIPT)["main"](sys.argv[1:]))
"""


def test_a_signal_while_torch_is_imported_is_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"path": "m"}, "data": {"train": "t"}, "output_dir": str(tmp_path / "run")}))
    code = f"SCRIPT = {str(PACKAGE / 'train.py')!r}{STOP_IN_THE_IMPORT}"
    result = light.python(code, "--config", str(file))
    assert (result.returncode, result.stdout) == (75, "")
    assert "Stopped on SIGTERM before the first step.\n  so far: nothing was trained" in result.stderr
    assert "error" not in result.stderr


def test_public_names_load_on_first_use() -> None:
    assert fsdp_trainer.Config is Config
    assert {"Config", "finetune", "ladder", "plan", "simulate", "__version__"} <= set(dir(fsdp_trainer))
    with pytest.raises(AttributeError, match="nosuch"):
        fsdp_trainer.nosuch  # noqa: B018


def test_export_refuses_an_unknown_dtype_before_anything_else(tmp_path: Path) -> None:
    result = command("export", "run", "--out", str(tmp_path / "out"), "--dtype", "int8")
    assert result.returncode == 2
    assert "--dtype int8" in result.stderr and "fp32, bf16 or fp16" in result.stderr


EXPORT = """
import sys
from fsdp_trainer import cli
try:
    cli.main(["export", sys.argv[1], "--out", sys.argv[2]])
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("source", "out", "said", "code"),
    [
        ("nosuch", "new", "nosuch does not exist", 2),
        ("empty", "new", "there is no empty/config.yaml", 2),
        ("run", "new", "has no complete checkpoint", 4),
        ("trained", "full", "exists and is not empty", 2),
        ("trained/checkpoints/step-00000001", "new", ".metadata is missing", 4),
    ],
)
def test_export_refuses_a_bad_path_without_torch(source: str, out: str, said: str, code: int, tmp_path: Path) -> None:
    for name in ("empty", "run", "trained/checkpoints/step-00000001", "full"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("run/config.yaml", "trained/config.yaml", "full/file"):
        (tmp_path / name).write_text("")
    result = light.python(EXPORT, source, out, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, "False\n"), result.stderr
    assert said in result.stderr
    assert not (tmp_path / "new").exists()
