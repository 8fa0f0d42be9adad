"""What a run refuses at its start, on every rank and before data or weights are touched, and in whose words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.config_sections import Tracker
from fsdp_trainer.errors import ConfigError, OutputError
from fsdp_trainer.launch import launch
from tests import fault_runs, models, training_runs
from tests.ranks import run_ranks

ModelFolder = Callable[[str], str]
BERT = {"model_type": "bert", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**BERT, "model_type": "llama", "vocab_size": 160, "intermediate_size": 96, "num_key_value_heads": 4}


def tiny(model: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Settings of a short run that saves every second step."""
    records, _ = models.make_records(16, seed=30)
    base: dict[str, Any] = {
        "data": {"cache_dir": str(folder / "cache"), **sections.pop("data", {})},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"max_steps": 6},
        "checkpoint": {"every_steps": 2, "keep_latest": 100, "resume": "auto"},
        "export": {"at_end": False},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return training_runs.settings(model, models.write_jsonl(records, folder / "train.jsonl"), folder / "run", **base)


# --- the model's folder

# name: what its config.json holds (None: no such file), the first line of the message, and a part of the rest
MODELS: dict[str, tuple[Any, str, str]] = {
    "encoder": (BERT, "This model is an encoder: its tokens see", "BertSelfAttention is not causal"),
    "encoder and decoder": ({"model_type": "t5"}, "This is not a causal language model.", "model_type t5"),
    "pictures": ({"model_type": "vit"}, "This is not a causal language model.", "name a decoder-only causal"),
    "heads do not divide": (
        {**LLAMA, "hidden_size": 50},
        "The model's config.json cannot be used.",
        "The hidden size (50) is not a multiple of the number of attention heads (4)",
    ),
    "wrong type": ({**LLAMA, "hidden_size": "48"}, "The model's config.json cannot be used.", "expected int, got str"),
    "negative size": ({**LLAMA, "hidden_size": -48}, "The model's config.json describes no model", "-48"),
    "no model_type": ({"hidden_size": 48}, "The model's config.json cannot be used.", "`model_type` key"),
    "unknown model_type": ({"model_type": "nosuch"}, "The model's config.json cannot be used.", "a newer Transformers"),
    "broken": ("{", "The model's config.json cannot be used.", "line 1 column 2"),
    "empty": ("", "The model's config.json cannot be used.", "take it anew"),
    "only weights": (None, "The model folder has no config.json.", "holds model.safetensors"),
}
PATHS = {
    "./nosuch": ("The model folder does not exist.", "./nosuch (looked in "),
    "/nosuch/model": ("The model folder does not exist.", "model.path: /nosuch/model\n"),
    "~/model": ("The model folder does not exist.", "only a shell reads ~"),
    __file__: ("model.path is a file.", "give a Hugging Face folder"),
    "some-owner/some-model": ("The model is no folder here, and the hub cannot be asked", "HF_HUB_OFFLINE is set"),
}


def messages_of(paths: list[str]) -> list[str]:
    from fsdp_trainer.model import build_meta_model, load_hf_config

    def message(path: str) -> str:
        import torch

        try:
            build_meta_model(load_hf_config(path), attention="auto", dtype=torch.float32)
        except ConfigError as error:
            return str(error)
        return "accepted"

    return [message(path) for path in paths]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each model folder and path is told."""
    paths = []
    for name, (content, *_) in MODELS.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        if content is None:
            (folder / "model.safetensors").touch()
        else:
            (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(str(folder))
    told = run_ranks(messages_of, 1, [*paths, *PATHS])[0]
    return dict(zip([*MODELS, *PATHS], told, strict=True))


@pytest.mark.parametrize("name", [*MODELS, *PATHS])
def test_a_model_that_cannot_be_trained_is_told_why(name: str, messages: dict[str, str]) -> None:
    first, part = MODELS[name][1:] if name in MODELS else PATHS[name]
    message = messages[name]
    assert message.startswith(first)
    assert part in message
    assert message.count("\n  found: ") == message.count("\n  to fix: ") == 1


# --- before any rank is started


def refused_at_once(settings: dict[str, Any], tmp_path: Path, **changes: Any) -> str:
    with pytest.raises((ConfigError, OutputError)) as caught:
        launch(Config.from_dict({**settings, **changes}), arguments=["--never-read"], processes=1)
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run" / "status.json").exists()
    return str(caught.value)


def plan_and_train(settings: dict[str, Any], folders: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Start with --plan auto, with each of the changes; return exit codes and messages. No plan may be begun."""
    from fsdp_trainer.memory import planning

    def begun(*_: Any, **__: Any) -> None:
        raise AssertionError("it plans")

    planning.plan_for_ranks = begun
    main, told = fault_runs._load_main(), []
    for changes in folders:
        output = Path(settings["output_dir"])
        file = output.with_name("auto.yaml")
        file.write_text(json.dumps(settings | {key: {**settings[key], **value} for key, value in changes.items()}))
        told.append((main(["--plan", "auto", "--config", str(file)]), fault_runs.read_status(output)["message"]))
    return told


def test_a_plan_is_not_begun_for_weights_or_data_that_are_missing(model_folder: ModelFolder, tmp_path: Path) -> None:
    empty = tmp_path / "no-weights"
    empty.mkdir()
    (empty / "config.json").write_text((Path(model_folder("llama")) / "config.json").read_text())
    changes = [
        {"data": {"train": "nosuch.jsonl"}},
        {"data": {"eval": "nosuch.jsonl"}, "eval": {"at_end": True}},
        {"model": {"path": str(empty)}},
    ]
    told = run_ranks(plan_and_train, 1, tiny(model_folder("llama"), tmp_path), changes)[0]
    assert [code for code, _ in told] == [3, 3, 4]
    assert all("the data file does not exist" in message for _, message in told[:2])
    assert "The model folder holds no weights." in told[2][1]


def missing_tracker() -> str:
    from importlib.util import find_spec

    for name in get_args(Tracker):
        if name != "tensorboard" and find_spec(name) is None:
            return name
    pytest.skip("every tracker is installed")


def test_the_launcher_refuses_what_cannot_start(model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = tiny(model_folder("llama"), tmp_path)
    tracker = missing_tracker()
    assert f"not installed: {tracker}" in refused_at_once(settings, tmp_path, log={"trackers": [tracker]})
    assert "The model folder does not exist." in refused_at_once(settings, tmp_path, model={"path": "/nosuch/model"})
    assert "/proc/run: No such file" in refused_at_once(settings, tmp_path, output_dir="/proc/run")


# --- on the ranks


def outcome(settings: dict[str, Any]) -> tuple[str, str, bool]:
    """Train on this rank; return the kind of error, its text, and whether it is another rank's."""
    from fsdp_trainer import finetune
    from fsdp_trainer.errors import FsdpTrainerError

    try:
        finetune(Config.from_dict(settings))
    except FsdpTrainerError as error:
        return type(error).__name__, str(error), error.heard
    return "", "", False


def test_a_tracker_that_is_not_installed_is_refused_before_the_data(model_folder: ModelFolder, tmp_path: Path) -> None:
    tracker = missing_tracker()
    settings = tiny(model_folder("llama"), tmp_path, log={"trackers": ["tensorboard", tracker]})
    answers = run_ranks(outcome, 2, settings)
    assert [kind for kind, *_ in answers] == ["ConfigError"] * 2
    assert all(f"not installed: ['{tracker}']" in text for _, text, _ in answers)
    assert not (tmp_path / "cache").exists()


def test_rows_beyond_a_table_of_positions_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    settings = tiny(model_folder("gpt2"), tmp_path, data={"seq_len": 129})
    (kind, text, heard), (other_kind, _, other_heard) = run_ranks(outcome, 2, settings)
    assert kind == "ConfigError"
    assert "data.seq_len: 129, max_position_embeddings 128" in text and "at most 128" in text
    assert (other_kind, heard, other_heard) == ("DistributedError", False, True)
    assert not (tmp_path / "cache").exists()


def test_a_document_beyond_rotary_positions_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    records, _ = models.make_records(16, seed=3, shortest=140, longest=150)
    settings = tiny(model_folder("llama"), tmp_path, data={"seq_len": 256})
    models.write_jsonl(records, settings["data"]["train"])
    kind, text, _ = run_ranks(outcome, 2, settings)[0]
    assert kind == "ConfigError"
    assert "max_position_embeddings 128" in text and "to fix: set data.seq_len to at most 128" in text


# --- ranks that are not of one run, as two machines with files of their own can be


def outcome_with_changes(settings: dict[str, Any], changes: dict[str, dict[str, Any]]) -> tuple[str, str, bool]:
    if os.environ["RANK"] == "1":
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # the first rank of another machine
        settings = {**settings, **{name: {**settings.get(name, {}), **values} for name, values in changes.items()}}
    return outcome(settings)


def test_ranks_of_different_settings_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    changes = {"optim": {"lr": 0.5}, "train": {"max_steps": 9}, "data": {"cache_dir": str(tmp_path / "elsewhere")}}
    answers = run_ranks(outcome_with_changes, 2, tiny(model_folder("llama"), tmp_path), changes)
    assert [kind for kind, *_ in answers] == ["ConfigError"] * 2
    for _, text, _ in answers:
        assert "optim.lr: 0.001 on rank 0, 0.5 on rank 1; train.max_steps: 6 on rank 0, 9 on rank 1\n" in text


def test_ranks_of_different_rows_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    records, _ = models.make_records(16, seed=31)
    data = {"train": models.write_jsonl(records, tmp_path / "other.jsonl"), "cache_dir": str(tmp_path / "elsewhere")}
    answers = run_ranks(outcome_with_changes, 2, tiny(model_folder("llama"), tmp_path), {"data": data})
    assert [kind for kind, *_ in answers] == ["ConfigError"] * 2
    assert all("rank 1 has other rows than rank 0" in text for _, text, _ in answers)


# --- resuming


@pytest.fixture(scope="module")
def finished(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a finished run of six steps whose checkpoints are all there."""
    settings = tiny(model_folder("llama"), tmp_path_factory.mktemp("finished"))
    assert fault_runs.run(settings, 2) == [0, 0]
    return settings


def test_fewer_steps_than_the_checkpoint_has_are_refused_with_both_numbers(finished: dict[str, Any]) -> None:
    before = fault_runs.checkpoints(Path(finished["output_dir"]))
    answers = run_ranks(outcome, 2, {**finished, "train": {**finished["train"], "max_steps": 4}})
    assert [kind for kind, *_ in answers] == ["ConfigError"] * 2
    for _, text, _ in answers:
        assert "the checkpoint is at step 6, the settings make 4 steps" in text
        assert "to fix: raise train.max_steps" in text
    assert fault_runs.checkpoints(Path(finished["output_dir"])) == before


def test_a_run_goes_on_from_a_checkpoint_elsewhere(finished: dict[str, Any], tmp_path: Path) -> None:
    start = Path(finished["output_dir"]) / "checkpoints" / "step-00000002"
    checkpoint = {**finished["checkpoint"], "resume": str(start)}
    settings = {**finished, "output_dir": str(tmp_path / "run"), "checkpoint": checkpoint}
    assert fault_runs.run(settings, 2) == [0, 0]
    rows = fault_runs.comparable_metrics(Path(finished["output_dir"]))
    assert fault_runs.comparable_metrics(tmp_path / "run") == rows[2:]
    begun = [f"step-{step:08d}" for step in (3, 4, 5, 6)]  # in the background: twice an interval of two
    assert fault_runs.checkpoints(tmp_path / "run") == begun
    assert start.is_dir(), "the other run's checkpoint is its own"
    # The same command again goes on with this folder's run, not from where it once began.
    assert fault_runs.run(settings, 2) == [0, 0]
    assert fault_runs.comparable_metrics(tmp_path / "run") == rows[2:]


# --- files of the run that rank 0 cannot write


def block(name: str, output: Path) -> None:
    output.mkdir(parents=True)
    if name == "metrics.jsonl":
        (output / name).symlink_to("/dev/full")
    else:
        (output / name).mkdir()


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl", ".lock-owner.json"])
def test_a_file_that_cannot_be_written_ends_every_rank_alike(
    name: str, finished: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 alone writes them: its raw OSError would leave the others waiting for it in a collective."""
    settings = {**finished, "output_dir": str(tmp_path / "run")}
    block(name, tmp_path / "run")
    (kind, text, heard), other = run_ranks(outcome, 2, settings, timeout=30.0)
    assert (kind, heard) == ("OutputError", False)
    assert text.startswith("A file of the run cannot be written.\n  found: ")
    assert f"{tmp_path}/run/{name}: " in text
    assert "\n  to fix: " in text
    assert other == (kind, text, True)


# --- what the agent of `accelerate launch` is told


def what_the_agent_reads(path: str, text: str) -> list[tuple[Any, bool]]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from fsdp_trainer.launch_agent import tell_agent

    tell_agent(text)  # nobody listens
    assert not Path(path).exists()
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    answers = []
    for secondary in (False, True):
        tell_agent(text, secondary=secondary)
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=path)
        answers.append((failure.message, failure.timestamp))
    assert answers[1][1] > answers[0][1], "the cause comes first"
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    return [ChildFailedError("train.py", {0: ProcessFailure(0, 1, 2, path)}).format_msg()]  # type: ignore[list-item]


def test_the_agents_report_ends_with_the_message(tmp_path: Path) -> None:
    text = "A setting is wrong.\n  found: a\n  to fix: b"
    report = run_ranks(what_the_agent_reads, 1, str(tmp_path / "error.json"), text)[0][0]
    cause = report[report.index("Root Cause") :]
    for line in text.splitlines():
        assert line in cause
