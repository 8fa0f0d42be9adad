"""A run that starts from an exported model looks at its checksums by itself, before anything of it is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoint_runs as runs
from tests import fault_runs, models, training_runs
from tests.export_runs import train_and_export
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.training_runs import settings

ModelFolder = Callable[[str], str]
REFUSED = "The model to start from is not as it was exported."


def flip(file: Path) -> None:
    """Flip one bit in the middle: of a weight, of a word in the vocabulary."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def build_from(config: dict[str, Any]) -> str:
    from fsdp_trainer.errors import FsdpTrainerError

    try:
        runs.build(config)
    except FsdpTrainerError as error:
        return str(error)
    return "built"


@pytest.fixture(scope="module")
def exported(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files of weights, as `export` leaves it."""
    folder = tmp_path_factory.mktemp("exported")
    config = settings(model_folder("llama"), "unused.jsonl", folder)
    run_on_kept_ranks(train_and_export, 2, config, str(folder / "model"), {"max_file_bytes": 100_000})
    assert len(list((folder / "model").glob("*.safetensors"))) == 2
    return folder / "model"


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def start(model: Path, folder: Path) -> list[str]:
    return run_ranks(build_from, 2, settings(str(model), "unused.jsonl", folder / "run"))


def test_an_intact_export_is_taken(copy: Path, tmp_path: Path) -> None:
    (copy / "notes.txt").write_text("added later")
    (copy / "README.md").write_text("# Edited by hand\n")
    assert start(copy, tmp_path) == ["built"] * 2


def read_configs(copy: str, names: list[str]) -> list[str]:
    """Read the model's config once for each of the names, with a bit of that file flipped."""
    from fsdp_trainer.errors import CheckpointError
    from fsdp_trainer.model import load_hf_config

    said = []
    for name in names:
        file = Path(copy) / name
        kept = file.read_bytes()
        flip(file)
        try:
            load_hf_config(copy)
            said.append("taken")
        except CheckpointError as error:
            said.append(str(error))
        file.write_bytes(kept)
    return said


def test_a_flipped_bit_in_a_small_file_is_refused_with_the_config(copy: Path) -> None:
    listed = json.loads((copy / "checksums.json").read_text())["files"].keys() - {"README.md"}
    names = sorted(name for name in listed if not name.endswith(".safetensors"))
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(names)
    *sides, sums = run_ranks(read_configs, 1, str(copy), [*names, "checksums.json"])[0]
    for name, message in zip(names, sides, strict=True):
        assert message.startswith(REFUSED)
        assert f"{copy}: {name} is damaged: its bytes hash to" in message
        assert "delete checksums.json" in message
    assert sums.startswith(REFUSED) and "checksums.json cannot be read" in sums


def test_a_flipped_bit_in_any_file_of_weights_is_refused_on_all_ranks(copy: Path, tmp_path: Path) -> None:
    """Each rank hashes a share, so both must be heard."""
    for weights in sorted(copy.glob("*.safetensors")):
        kept = weights.read_bytes()
        flip(weights)
        for message in start(copy, tmp_path):
            assert message.startswith(REFUSED)
            assert f"{copy}: {weights.name} is damaged" in message
        weights.write_bytes(kept)


def test_without_checksums_nothing_is_asked(copy: Path, tmp_path: Path) -> None:
    flip(next(copy.glob("model-00002*")))
    for content in (None, '{"files": "of another tool"}'):
        (copy / "checksums.json").unlink(missing_ok=True)
        if content:
            (copy / "checksums.json").write_text(content)
        assert start(copy, tmp_path) == ["built"] * 2


def test_what_is_cut_short_or_missing_is_found_before_the_data_are_read(copy: Path, tmp_path: Path) -> None:
    """And so is a tokenizer that is not the exported one; nothing is prepared and nothing trained."""
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    config = training_runs.settings(str(copy), data, tmp_path / "run", schedule={"warmup_steps": 0})
    weights = next(copy.glob("model-00002*"))
    kept = weights.read_bytes()
    for name, damage in (
        (weights.name, lambda: weights.write_bytes(kept[:-1])),
        (weights.name, weights.unlink),
        ("tokenizer.json", lambda: (weights.write_bytes(kept), flip(copy / "tokenizer.json"))),
    ):
        damage()
        first, second = fault_runs.run(config, 2)
        assert first == 4 and second != 0  # which only hears that the first rank of its machine has failed
        message = fault_runs.read_status(tmp_path / "run")["message"]
        assert message.startswith(REFUSED) and name in message
    assert not list((tmp_path / "run").glob("**/*.arrow")) and not (tmp_path / "run" / "metrics.jsonl").exists()


def export_offline(run: str, out: str) -> list[str]:
    import os

    from fsdp_trainer import offline_export

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    lines: list[str] = []
    offline_export.log_line = lambda line, **_: lines.append(str(line))  # type: ignore[assignment]
    offline_export.export_checkpoint(Path(run), Path(out), dtype="bf16")
    return lines


def test_an_export_is_not_compared_with_a_source_that_has_changed(copy: Path, tmp_path: Path) -> None:
    """The trained weights are in the checkpoint, so they are written all the same, and why is said."""
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    config = training_runs.settings(
        str(copy), data, tmp_path / "run", train={"max_steps": 1}, schedule={"warmup_steps": 0}
    )
    assert fault_runs.run(config, 1) == [0]
    flip(next(copy.glob("model-00002*")))
    lines = run_ranks(export_offline, 1, str(tmp_path / "run"), str(tmp_path / "out"))[0]
    assert "not compared with the model before training" in lines[0] and "model-00002-of-00002" in lines[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
