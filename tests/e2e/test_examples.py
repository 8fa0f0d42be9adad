"""The notebooks in examples/ run from top to bottom, offline, and show what they say they do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.commands import environment
from tests.fault_runs import read_status
from tests.ranks import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Run a notebook in a copy of examples/; return what each code cell showed, by the cell's text."""
    monkeypatch.chdir(folder)
    for key, value in {**environment(), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(key, value)
    copy = shutil.copytree(EXAMPLES, folder / "examples")
    notebook = nbformat.read(copy / name, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(copy)}})
    client.execute()
    return {cell.source: "\n".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


def text_of(output: Any) -> str:
    data = output.get("data", {})
    return output.get("text") or data.get("text/html") or data.get("text/plain", "")


def shown_by(cells: dict[str, str], text: str) -> str:
    (found,) = [shown for source, shown in cells.items() if text in source]
    return found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS == ["from_deepspeed.ipynb", "plan_and_train.ipynb"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plan_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = execute("plan_and_train.ipynb", tmp_path, monkeypatch)
    assert 'class="chosen"' in shown_by(cells, "found = plan(")
    assert "offload: optimizer" in shown_by(cells, "found.chosen.config")
    assert "400 records gave 400 documents" in shown_by(cells, "preview_data")
    run = shown_by(cells, "result = finetune")
    assert run.count('<div class="fsdp') == 1, "one display, updated in its place"
    assert "<svg" in run and "finished" in run
    assert "finished, 60 steps" in shown_by(cells, "print(result)")
    assert "Memory at the peak by kind" in shown_by(cells, "result.ledger")
    right = re.search(r"right: (\d+) of 10", shown_by(cells, "right +="))
    assert right is not None and int(right[1]) >= 8, "it has learned the language; 10 of 10 when this was written"
    assert read_status(tmp_path / "examples/tiny_run/run")["state"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = execute("from_deepspeed.ipynb", tmp_path, monkeypatch)
    assert "2 not needed, 13 mapped" in shown_by(cells, "format_report(imported)")
    memory = shown_by(cells, "compare_memory")
    assert "does not fit" in memory
    assert "DeepSpeed's own estimator" in memory and "best combination" in memory
    assert "<svg" in shown_by(cells, "finetune(config")
    assert read_status(tmp_path / "examples/deepspeed_run/run")["step"] == 10
