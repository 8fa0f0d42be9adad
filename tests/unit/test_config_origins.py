"""Every complaint about a value says where that value was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.config_origins import Origins, find_lines
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch_profile import read_profile

TEXT = "# a comment\noptim:\n  lr: -1\n\ndata: {seq_len: 64, train: a.jsonl}\n"


def message(overrides: Any, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_lines_of_nested_keys() -> None:
    assert find_lines(TEXT) == {
        "optim": 2,
        "optim.lr": 3,
        "data": 5,
        "data.seq_len": 5,
        "data.train": 5,
    }
    assert find_lines("") == {}


def test_a_wrong_value_of_the_file_is_named_with_its_line(file: Path) -> None:
    assert f"found: optim.lr: -1 (from {file}, line 3)" in message([], file)


@pytest.mark.parametrize("word", ["--optim.lr=abc", "optim.lr=abc", "--optim={lr: abc}"])
def test_a_wrong_value_of_a_flag_is_not_blamed_on_the_file(word: str, file: Path) -> None:
    text = message([word], file)
    flag = "--optim" if "{" in word else "--optim.lr"
    assert f"found: optim.lr: 'abc' (from the flag {flag})" in text
    assert "run.yaml" not in text


def test_an_unknown_key_is_named_where_it_was_written(file: Path) -> None:
    assert "optim.lrr: 1 (from the flag --optim.lrr)" in message(["--optim.lrr=1", "--optim.lr=1"], file)
    file.write_text("optim:\n  lrr: 1\n")
    assert f"optim.lrr: 1 (from {file}, line 2)" in message([], file)


def test_values_that_contradict_each_other_are_each_named(file: Path) -> None:
    file.write_text("sharding:\n  replicate: 2\n")
    text = message(["--sharding.zero_stage=1"], file)
    assert f"sharding.replicate from {file}, line 2; sharding.zero_stage from the flag --sharding.zero_stage" in text
    file.write_text("schedule:\n  warmup_steps: 3\n  warmup_ratio: 0.5\n")
    assert f"(schedule.warmup_ratio from {file}, line 3; schedule.warmup_steps from {file}, line 2)" in message(
        [], file
    )


def test_a_default_that_contradicts_is_named_as_one() -> None:
    text = message(["--batch.micro_batch_size=3"])
    assert "(batch.global_batch_size by default; batch.micro_batch_size from the flag --batch.micro_batch_size)" in text


def test_a_section_says_nothing_where_its_settings_are_named(file: Path) -> None:
    file.write_text("sharding: {zero_stage: HYBRID_SHARD}\n")
    text = message([], file)
    assert f"(sharding.zero_stage from {file}, line 1; sharding.replicate by default)" in text


def test_each_of_several_problems_has_its_own_place(file: Path) -> None:
    text = message(["--data.seq_len=1"], file)
    assert text.startswith("2 settings are wrong\n")
    assert f"optim.lr: -1 (from {file}, line 3)" in text
    assert "data.seq_len: 1 (from the flag --data.seq_len)" in text


def test_a_world_that_does_not_divide_names_where_its_numbers_stand(file: Path) -> None:
    file.write_text("batch:\n  global_batch_size: 7\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(file).check_world(2)
    assert f"(batch.global_batch_size from {file}, line 2; batch.micro_batch_size by default)" in str(caught.value)


def test_values_made_in_python_have_no_place() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"optim": {"lr": -1}})
    assert "  found: optim.lr: -1\n" in str(caught.value)


def test_where_values_were_written_does_not_make_configurations_unequal(file: Path) -> None:
    file.write_text("optim: {lr: 1e-4}\n")
    assert Config.load(file) == Config.load(None, ["--optim.lr=1e-4"]) == Config.from_dict({"optim": {"lr": 1e-4}})
    assert Origins("a") == Origins("b") and hash(Origins("a")) == hash(Origins("b"))
    assert "origins" not in Config.load(file).to_yaml()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optim:\n\tlr: 1\n", "a tab where only spaces may stand"),
        ("optim:\n  lr: 1\n  lr: 2\n", 'found: duplicate key "lr"'),
        ("hello\n", "holds only text"),
        ("5\n", "holds a single value"),
    ],
)
def test_a_file_that_is_no_settings_says_why(text: str, part: str, file: Path) -> None:
    file.write_text(text)
    assert part in message([], file)


def test_a_dotted_name_in_a_file_is_told_about_sections(file: Path) -> None:
    file.write_text("train.max_steps: 5\n")
    text = message([], file)
    assert "train.max_steps is written with a dot" in text
    assert "write it in its section: `train: {max_steps: 5}`" in text


def test_a_folder_and_a_file_of_bytes_are_no_settings_file(tmp_path: Path, file: Path) -> None:
    assert (
        f"the settings file is a folder\n  found: {tmp_path}\n  to fix: give a file in it, such as {file}"
        in message([], tmp_path)
    )
    file.write_bytes(b"\xff\xfe\x00")
    assert "to fix: save it as UTF-8" in message([], file)


def test_a_flag_that_is_not_yaml_is_told_about_quotes() -> None:
    text = message(["--data.train=[a.jsonl"])
    assert text.startswith("the value of a flag is not valid YAML")
    assert "--data.train=[a.jsonl" in text and "in quotes for the shell" in text


def test_a_profile_and_a_settings_file_in_each_others_place(file: Path) -> None:
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    assert message([], file).endswith(f"found: {file}\n  to fix: give it as --profile")
    file.write_text("model: {path: a}\noptim: {lr: 1e-5}\n")
    with pytest.raises(ConfigError, match="to fix: give it as --config"):
        read_profile(file)


def test_a_large_bound_is_written_out() -> None:
    assert "below 4294967296" in message(["--train.seed=-1"])
    assert "set data.train to a path" in message(["--data.train="])


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--data.columns={promt: q}"], "from the flag --data.columns"),
        (["--data.columns.promt=q"], "from the flag --data.columns.promt"),
        (
            ["--data.columns.promt=q", "--data.columns.text=t"],
            "from the flags --data.columns.promt, --data.columns.text",
        ),
    ],
)
def test_a_mapping_is_where_its_parts_were_written(words: list[str], place: str) -> None:
    assert f"({place})" in message(words)
