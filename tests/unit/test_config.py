"""The settings file: defaults, strictness, precedence, and messages that say what to set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from fsdp_trainer.config import Config
from fsdp_trainer.config_reading import FOREIGN_NAMES, dotted_names
from fsdp_trainer.errors import ConfigError

DESIGN = Path(__file__).with_name("design_defaults.yaml")


def error_of(overrides: Any = (), path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- defaults and the contract


def test_every_default_is_the_one_of_the_design() -> None:
    contract = YAML(typ="safe", pure=True).load(DESIGN.read_text(encoding="utf-8"))
    ours = Config().to_dict()
    assert list(ours) == list(contract)
    for section, values in contract.items():
        if isinstance(values, dict):
            assert list(ours[section]) == list(values), section
    assert ours == contract


def test_design_file_loads_to_the_defaults() -> None:
    assert Config.load(DESIGN) == Config()


def test_every_setting_is_documented_in_the_schema() -> None:
    schema = Config.model_json_schema()
    for definition in [schema, *schema["$defs"].values()]:
        assert definition["additionalProperties"] is False
        for name, entry in definition["properties"].items():
            if "$ref" in entry:  # a section: its own definition says what it is for
                entry = schema["$defs"][entry["$ref"].rsplit("/", 1)[-1]]
            assert len(entry["description"]) > 20, f"{definition['title']}.{name}"


def test_schema_accepts_strategy_names_and_zero_as_off() -> None:
    schema = Config.model_json_schema()
    stage = schema["$defs"]["ShardingConfig"]["properties"]["zero_stage"]
    assert {"enum": ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]} in stage["anyOf"]
    norm = schema["$defs"]["OptimConfig"]["properties"]["max_grad_norm"]
    assert {"minimum": 0, "type": "number"} in norm["anyOf"]


def test_config_is_frozen_to_the_leaves() -> None:
    config = Config.from_dict({"data": {"train": ["a.jsonl", "b.jsonl"]}})
    with pytest.raises(ValidationError):
        config.optim.lr = 1.0  # type: ignore[misc]
    assert isinstance(config.data.train, tuple)
    assert isinstance(config.optim.betas, tuple)


# --- reading


def test_numbers_follow_yaml_1_2(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path, "optim: {lr: 1e-5, eps: 1E-6, weight_decay: 1e-1}\ndata: {seq_len: 1_024}\n"))
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (1e-5, 1e-6, 0.1)
    assert config.data.seq_len == 1024


def test_flag_wins_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, "optim: {lr: 2e-5, eps: 1e-6}\n")
    config = Config.load(path, ["--optim.lr=3e-5", "--optim.lr=4e-5"])
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (4e-5, 1e-6, 0.0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--optim.lr=3e-5", "--precision=fp32"],
        ["optim.lr=3e-5", "precision=fp32"],
        ["--optim.lr", "3e-5", "--precision", "fp32"],
        ["--optim={lr: 3e-5}", "--precision=fp32"],
        {"optim.lr": 3e-5, "precision": "fp32"},
        {"optim": {"lr": 3e-5}, "precision": "fp32"},
    ],
)
def test_forms_of_overrides(overrides: Any) -> None:
    config = Config.load(None, overrides)
    assert (config.optim.lr, config.precision) == (3e-5, "fp32")


def test_values_of_flags_are_yaml() -> None:
    config = Config.load(
        None,
        ["--data.train=[a.jsonl, b.jsonl]", "--data.eval=0.1", "--model.revision=null", "--data.packing=false"],
    )
    assert config.data.train == ("a.jsonl", "b.jsonl")
    assert config.data.eval == 0.1
    assert config.model.revision is None
    assert config.data.packing is False


@pytest.mark.parametrize("commit", ["1234567", "1e10", "0012345", "2024-01-01"])
def test_a_revision_that_looks_like_a_number_stays_text(commit: str) -> None:
    assert Config.load(None, [f"--model.revision={commit}"]).model.revision == commit


def test_empty_file_and_empty_section_mean_defaults(tmp_path: Path) -> None:
    assert Config.load(write(tmp_path, "")) == Config()
    assert Config.load(write(tmp_path, "data:\n  # seq_len: 128\noptim: {}\n")) == Config()


def test_override_into_an_empty_section(tmp_path: Path) -> None:
    assert Config.load(write(tmp_path, "data:\n"), ["--data.seq_len=64"]).data.seq_len == 64


# 306 bytes, which took minutes and memory to be cut to 200 letters for a message.
ANCHORS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(9 * ['*' + chr(97 + i)])}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optim: {lr: 1e-5, lr: 2e-5}", "lr"),
        ("optim:\n  lr: 1e-5\n wrong", "line 3"),
        ("- a\n- b", "holds a list"),
        ("optim: [", "not valid YAML"),
        ("optim: !!python/name:os.system x", "not valid YAML"),
        (ANCHORS, "with its anchors written out it has more than 100,000 values"),
        ("optim: &a {lr: [*a]}", "with its anchors written out it has more than 100,000 values"),
        ("optim: " + 3000 * "[" + 3000 * "]", "within one another, too many to be read"),
        ("# " + 2**20 * "x", "1,048,578 bytes, at most 1,048,576 are read"),
    ],
    ids=lambda text: text[:40],
)
def test_broken_file(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    message = error_of(path=path)
    assert part in message
    assert "run.yaml" in message
    assert "to fix:" in message


@pytest.mark.parametrize(
    "settings",
    [
        {"output_dir": "a\0b"},
        {"output_dir": "runs/" + 256 * "x"},
        {"output_dir": "runs/" + 128 * "ä"},
        {"model": {"path": "a\0b"}},
        {"data": {"train": "a\0b"}},
        {"data": {"cache_dir": "a\0b"}},
        {"data": {"chat_template": "a\0b"}},
        {"data": {"chat_template": 256 * "x"}},
        {"train": {"timeout_minutes": 1e300}},
    ],
    ids=lambda settings: repr(settings)[:40],
)
def test_values_that_the_system_cannot_take(settings: dict[str, Any]) -> None:
    ((section, value),) = settings.items()
    name = section if isinstance(value, str) else f"{section}.{next(iter(value))}"
    with pytest.raises(ConfigError, match=f"{name} (cannot be|is not a file)"):
        Config.from_dict(settings)


def test_missing_file_names_a_near_one(tmp_path: Path) -> None:
    write(tmp_path, "")
    assert "run.yaml" in error_of(path=tmp_path / "run.yml")


@pytest.mark.parametrize("word", ["--optim.lr", "optim.lr", "--=3", "foo"])
def test_flag_without_a_value(word: str) -> None:
    assert "--section.key=value" in error_of([word])
    assert "--section.key=value" in error_of([word, "--precision=fp32"])


# --- unknown keys


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        ({"optim": {"lrr": 1}}, "optim.lrr", "optim.lr"),
        ({"optim": {"learning_rate": 1}}, "optim.learning_rate", "optim.lr"),
        ({"train": {"epoch": 1}}, "train.epoch", "train.epochs"),
        ({"seq_len": 1}, "seq_len", "data.seq_len"),
        ({"optim": {"seq_len": 1}}, "optim.seq_len", "data.seq_len"),
        ({"model": {"packing": True}}, "model.packing", "data.packing"),
        ({"shardin": {"zero_stage": 1}}, "shardin", "sharding"),
        ({"batch": {"per_device_train_batch_size": 1}}, "batch.per_device_train_batch_size", "batch.micro_batch_size"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "batch.global_batch_size"),
        ({"optim.max_norm": 1}, "optim.max_norm", "optim.max_grad_norm"),
    ],
)
def test_unknown_key_names_the_nearest(overrides: Any, key: str, nearest: str) -> None:
    message = error_of(overrides)
    assert f"{key} is not a setting" in message
    assert f"did you mean {nearest}?" in message


def test_unknown_key_with_nothing_near_lists_the_section() -> None:
    message = error_of({"loss": {"qqqq": 1}})
    assert "section loss has: kind, chunk_tokens" in message


def test_key_of_several_sections_names_all() -> None:
    assert "eval.every_steps or checkpoint.every_steps" in error_of({"optim": {"every_steps": 1}})


def test_key_below_a_value_is_refused() -> None:
    assert "optim.lr" in error_of(["--optim.lr.x=1"])


def test_foreign_names_point_at_settings_that_exist() -> None:
    assert set(FOREIGN_NAMES.values()) <= set(dotted_names(Config))


# --- wrong values


@pytest.mark.parametrize(
    "overrides",
    [
        {"optim.lr": 0},
        {"optim.lr": -1e-5},
        {"optim.lr": "1e-5x"},
        {"optim.lr": float("nan")},
        {"optim.lr": float("inf")},
        {"optim.lr": True},
        {"optim.betas": [0.9, 1.0]},
        {"optim.betas": [0.9]},
        {"optim.betas": 0.9},
        {"optim.eps": 0},
        {"optim.weight_decay": -0.1},
        {"optim.max_grad_norm": -1},
        {"optim.max_grad_norm": False},
        {"data.seq_len": 1},
        {"data.seq_len": 10.0},
        {"data.seq_len": True},
        {"data.train": ""},
        {"data.train": []},
        {"data.train": [""]},
        {"data.train": None},
        {"data.eval": 0},
        {"data.eval": 1.0},
        {"data.eval": 2},
        {"data.workers": -1},
        {"sharding.zero_stage": 4},
        {"sharding.zero_stage": -1},
        {"sharding.zero_stage": True},
        {"sharding.zero_stage": "ZERO3"},
        {"sharding.zero_stage": 2.0},
        {"sharding.replicate": 0},
        {"sharding.reshard_after_forward": True},
        {"sharding.reshard_after_forward": 1},
        {"precision": "tf32"},
        {"precision": "BF16"},
        {"precision": None},
        {"loss.chunk_tokens": 0},
        {"activation_checkpointing.every_n": 0},
        {"schedule.warmup_ratio": 1.0},
        {"schedule.warmup_steps": -1},
        {"schedule.min_lr_ratio": 1.5},
        {"batch.micro_batch_size": 0},
        {"train.epochs": 0},
        {"train.epochs": 0.5},
        {"train.max_steps": 0},
        {"train.seed": -1},
        {"train.timeout_minutes": 0},
        {"checkpoint.keep_latest": 0},
        {"checkpoint.every_steps": 0},
        {"checkpoint.resume": True},
        {"log.trackers": ["nosuch"]},
        {"log.trackers": "tensorboard"},
        {"model.path": ""},
        {"output_dir": ""},
    ],
    ids=str,
)
def test_wrong_value_names_setting_value_and_fix(overrides: dict[str, Any]) -> None:
    (path,) = overrides
    message = error_of(overrides)
    assert f"{path} cannot be" in message
    assert f"to fix: set {path} to" in message
    for noise in ("pydantic", "Input should", "validation error", "http"):
        assert noise not in message


# Kind: "false" read as true.
@pytest.mark.parametrize("text", ["False", "false", "“false”", "'false'", "0", "no", "off", "yes", "true", ""])
@pytest.mark.parametrize("path", ["checkpoint.async_save", "data.packing", "rehearse"])
def test_text_is_never_a_boolean(path: str, text: str) -> None:
    message = error_of({path: text})
    assert f"{path} cannot be" in message
    assert "true" in message


@pytest.mark.parametrize("number", [0, 1, 0.0])
def test_a_number_is_never_a_boolean(number: float) -> None:
    assert "data.packing cannot be" in error_of({"data.packing": number})


@pytest.mark.parametrize("word", ["no", "off", "yes", "on", "'false'", "0"])
def test_boolean_flags_follow_yaml_1_2(word: str) -> None:
    assert "data.packing cannot be" in error_of([f"--data.packing={word}"])


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), ("TRUE", True)])
def test_boolean_flags(word: str, value: bool) -> None:
    assert Config.load(None, [f"--data.packing={word}"]).data.packing is value


def test_bounds_are_said_in_words() -> None:
    assert "a number of at least 0 and below 1" in error_of({"schedule.warmup_ratio": 2.0})
    assert "a whole number of at least 2" in error_of({"data.seq_len": "long"})
    assert "none, full, every_n_layers or selective" in error_of({"activation_checkpointing.mode": "on"})
    assert "a list of 2, each a number of at least 0 and below 1" in error_of({"optim.betas": [1]})


@pytest.mark.parametrize("value", [3, "text", [1], True])
def test_a_section_cannot_be_a_value(value: Any) -> None:
    assert "data is a section" in error_of({"data": value})


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    text = "optim: {lr: -1, lrr: 3}\ndata: {seq_len: no}\ncompile: {enabled: true}\n"
    text += "sharding: {zero_stage: 1, replicate: 2}\n"
    message = error_of(["--train.max_steps=0"], path=write(tmp_path, text))
    assert message.startswith("6 settings are wrong")
    assert "run.yaml" in message
    for part in ("optim.lr ", "optim.lrr", "data.seq_len", "compile.enabled", "sharding.replicate", "train.max_steps"):
        assert part in message
    assert message.count("to fix:") == 6


def test_a_wrong_value_causes_no_second_complaint() -> None:
    # With its default in place of the wrong stage, replicate would be fine; with stage 1 it would not.
    message = error_of({"sharding": {"zero_stage": "x", "replicate": 2}})
    assert message.count("to fix:") == 1


# --- stages and strategies


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *((n, n) for n in range(4)),
        *((str(n), n) for n in range(4)),
        *(("NO_SHARD", 0), ("shard_opt", 1), ("Shard_Grad_Op", 2), ("FULL_SHARD", 3)),
    ],
)
def test_stage_names(name: Any, stage: int) -> None:
    assert Config.from_dict({"sharding": {"zero_stage": name}}).sharding.zero_stage == stage
    assert Config.load(None, [f"--sharding.zero_stage={name}"]).sharding.zero_stage == stage


def test_hybrid_shard_needs_copies() -> None:
    message = error_of({"sharding": {"zero_stage": "HYBRID_SHARD"}})
    assert "sharding.replicate: 2 or more" in message
    config = Config.from_dict({"sharding": {"zero_stage": "hybrid_shard", "replicate": 2}})
    assert (config.sharding.zero_stage, config.sharding.replicate) == (3, 2)


def test_hybrid_shard_in_a_file_takes_copies_from_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "sharding: {zero_stage: HYBRID_SHARD}\n")
    assert Config.load(path, ["--sharding.replicate=2"]).sharding.replicate == 2


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_clipping_off(value: Any) -> None:
    assert Config.from_dict({"optim": {"max_grad_norm": value}}).optim.max_grad_norm is None


# --- writing

NAMES = st.text(min_size=1, max_size=30).filter(lambda text: "\x00" not in text and text.isprintable())


@settings(deadline=None)  # the time of one example says how busy the machine is
@given(
    lr=st.floats(1e-12, 1e3, allow_subnormal=False),
    eps=st.floats(1e-30, 1.0),
    path=NAMES,
    train=st.one_of(NAMES, st.lists(NAMES, min_size=1, max_size=3)),
    share=st.one_of(st.none(), st.floats(1e-6, 0.999), NAMES),
    stage=st.integers(0, 3),
    steps=st.one_of(st.none(), st.integers(1, 10**9)),
)
def test_written_file_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    eps: float,
    path: str,
    train: Any,
    share: Any,
    stage: int,
    steps: Any,
) -> None:
    config = Config.from_dict(
        {
            "model": {"path": path, "revision": path},
            "data": {"train": train, "eval": share},
            "optim": {"lr": lr, "eps": eps},
            "sharding": {"zero_stage": stage},
            "train": {"max_steps": steps},
        }
    )
    file = tmp_path_factory.getbasetemp() / "written.yaml"
    file.unlink(missing_ok=True)  # ext4 waits for the disk where a file is emptied and written again
    config.save(file)
    assert Config.load(file) == config
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_resolved_file_of_a_run_with_unused_defaults_loads_back() -> None:
    config = Config.from_dict({"schedule": {"name": "constant", "warmup_steps": 3}, "loss": {"kind": "plain"}})
    assert Config.from_dict(config.to_dict()) == config


def test_written_numbers_are_numbers_to_yaml_1_1_too() -> None:
    import yaml

    settings = yaml.safe_load(Config().to_yaml())
    assert settings == Config().to_dict()


# Kind: something is wrong with one part of one source, and the message says only that no kind of source fits.
@pytest.mark.parametrize("name", ["data.train", "data.eval"])
@pytest.mark.parametrize(
    ("value", "says", "fix"),
    [
        ([], "an empty list names no data", "set {name} to a file"),
        ({"path": "a", "weight": 0}, "0 is no weight", "above 0"),
        ([{"path": "a", "weight": -1}, {"path": "b", "weight": 1}], "-1 is no weight", "above 0"),
        ([{"path": "a", "weight": "2"}], "'2' is no weight", "without quotes"),
        ([{"path": "a", "weight": True}], "true is no weight", "above 0"),
        ([{"path": "a", "weight": float("inf")}], "inf is no weight", "above 0"),
        ([{"path": "a", "wheight": 2}], "no setting wheight", "did you mean weight?"),
        ([{"file": "a"}], "no setting file", "a source has path, weight, split, subset"),
        ([{"weight": 2}], "names no path", "give path"),
        ([{"path": ""}], "names no path", "give path"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_source_is_said(name: str, value: Any, says: str, fix: str) -> None:
    message = error_of({name: value})
    assert f"{name} cannot be used: " in message
    assert says in message
    wrong = value if isinstance(value, dict) else value[0] if value else []
    assert f"found: {name}: {wrong} (from the flag --{name})" in message
    assert fix.format(name=name) in message.split("to fix: ")[1]


def test_sources_are_shown_as_they_are_written() -> None:
    message = error_of({"data.train": [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]})
    assert "found: data.train: [{'path': 'a.jsonl', 'weight': 2.0}, 'b.jsonl']" in message


# Kind: of several flags for the parts of one mapping only the last one counts.
def test_a_flag_for_one_column_keeps_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {columns: {completion: answer}}\n")
    columns = Config.load(path, ["--data.columns.prompt=question"]).data.columns
    assert columns == {"completion": "answer", "prompt": "question"}
    assert Config.load(None, ["--data.columns.prompt=q", "--data.columns.completion=a"]).data.columns == {
        "prompt": "q",
        "completion": "a",
    }
    assert Config.load(path, ["--data.columns={prompt: q, completion: a}"]).data.columns == {
        "prompt": "q",
        "completion": "a",
    }
