"""A checkpoint becomes a Hugging Face folder without the processes that made it (reports 42 and 43)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.ranks
from fsdp_trainer.errors import CheckpointError, ConfigError
from tests import architectures, export_runs, models, training_runs
from tests.e2e.commands import run_command
from tests.ranks import run_on_kept_ranks, run_plainly, run_ranks

ModelFolder = Callable[[str], str]


def finished_run(folder: str, tmp_path: Path, /, **sections: Any) -> Path:
    """Train four steps on two ranks, with checkpoints of steps 2 and 4 and an export at the end."""
    data = models.write_jsonl(models.make_records(32, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        folder,
        data,
        tmp_path / "run",
        train={"max_steps": 4},
        schedule={"warmup_steps": 1},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        **{"checkpoint": {"every_steps": 2}, **sections},
    )
    run_on_kept_ranks(training_runs.train, 2, settings)
    return tmp_path / "run"


def export(source: str, out: str, options: dict[str, Any]) -> list[str]:
    """Export and return the log's lines, in a process without any group."""
    import os

    from fsdp_trainer import offline_export

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    lines: list[str] = []
    offline_export.log_line = lambda line, **_: lines.append(str(line))  # type: ignore[assignment]
    offline_export.export_checkpoint(Path(source), Path(out), **options)
    return lines


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2", "mixtral"])
def test_equals_what_the_run_exported_itself(kind: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    if kind in models.KINDS:
        model = model_folder(kind)
    else:
        model = run_plainly(architectures.save_architecture, kind, str(tmp_path / "source"))[0]
    run = finished_run(model, tmp_path, export={"dtype": "fp32"})
    out, again = tmp_path / "out", tmp_path / "again"
    run_ranks(export, 1, str(run), str(out), {"max_file_bytes": 40_000})
    assert len(list(out.glob("*.safetensors"))) > 2
    ours, theirs = training_runs.read_weights(out), training_runs.read_weights(run / "model")
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"):
        assert (out / name).read_text() == (run / "model" / name).read_text(), name
    loaded = run_plainly(export_runs.load_plainly, str(out), str(again))[0]
    assert loaded["info"] == {}
    assert loaded["chat_template"] == models.CHAT_TEMPLATE
    resaved = training_runs.read_weights(again)
    assert resaved.keys() == ours.keys() and all(tensor.equal(ours[name]) for name, tensor in resaved.items())
    if kind == "llama_tied":
        check_command(run, tmp_path)
    card = (out / "README.md").read_text()
    for words in (model, str(tmp_path / "data.jsonl"), "| optimizer steps | 4 ", "| optim.lr | 0.001 |", "torch 2"):
        assert words in card


def check_command(run: Path, tmp_path: Path) -> None:
    """The command does the same, in a process of its own."""
    command = [sys.executable, "-m", "fsdp_trainer", "export", str(run), "--out", str(tmp_path / "by command")]
    ended = run_command(command, cwd=tests.ranks.REPOSITORY)
    assert ended.returncode == 0
    assert "step 4 of" in ended.stdout
    assert "Warning" not in ended.stdout + ended.stderr, "of torch's, about what was meant"
    ours, theirs = training_runs.read_weights(tmp_path / "by command"), training_runs.read_weights(run / "model")
    assert ours.keys() == theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_an_earlier_checkpoint_in_bf16_says_how_much_rounding_keeps(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A frozen part is not counted; a run of tiny steps is mostly rounded away."""
    model = model_folder("llama")
    run = finished_run(
        model,
        tmp_path,
        optim={"lr": 1e-6, "weight_decay": 0.0},
        model={"path": model, "freeze": ["model.embed_tokens"]},
        checkpoint={"every_steps": 2, "keep_latest": 5},
    )
    step = run / "checkpoints" / "step-00000002"
    lines = run_ranks(export, 1, str(step), str(tmp_path / "out"), {"dtype": "bf16"})[0]
    written = training_runs.read_weights(tmp_path / "out")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    source, final = training_runs.read_weights(Path(model)), training_runs.read_weights(run / "model")
    assert torch.equal(written["model.embed_tokens.weight"], source["model.embed_tokens.weight"].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    (line,) = [line for line in lines if line.startswith("bf16 keeps ")]
    assert 0 < float(line.split()[2].rstrip("%")) < 20, line
    kept = sum(int((tensor.bfloat16() != source[name].bfloat16()).sum()) for name, tensor in final.items())
    assert kept > 0
    assert any("step 2 of" in line for line in lines)


def test_what_cannot_be_exported_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    run = finished_run(model_folder("llama"), tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run_ranks(export, 1, str(run), str(full), {})
    assert (full / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="no run folder"):
        run_ranks(export, 1, str(full), str(tmp_path / "out"), {})
    newest = run / "checkpoints" / "step-00000004"
    part = next(newest.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"no complete and intact checkpoint"):
        run_ranks(export, 1, str(newest), str(tmp_path / "out"), {})
    (lines,) = run_ranks(export, 1, str(run), str(tmp_path / "out"), {})
    assert any("step-00000004" in line and line.startswith("skipped") for line in lines)
    assert any("step 3 of" in line for line in lines), "saves in the background begin twice an interval"
    assert not list(tmp_path.glob(".out*"))
