"""Code that comes with a model: run if asked for and pinned, exported with it, compared on resuming (report 44)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.errors import CheckpointError, ConfigError
from tests import models, training_runs
from tests.distributed.test_offline_export import export
from tests.ranks import run_ranks

Folder = Callable[[str], str]
CODE = '''
"""A Llama whose layers say hello to a file beside them."""

from transformers import LlamaConfig, LlamaForCausalLM

from .parts import MARK


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
    mark = MARK
'''
AUTO_MAP = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}


def custom_model(source: str, folder: Path) -> Path:
    """Return a copy of a tiny Llama whose classes come from Python files beside it."""
    shutil.copytree(source, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": AUTO_MAP, "architectures": ["MineForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(CODE)
    (folder / "parts.py").write_text("MARK = 1\n")
    return folder


def with_modules(cache: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with Transformers' copies of code kept in a folder of the test's own."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = cache
    return function(*arguments)


def load_with_its_code(folder: str) -> tuple[str, int, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return type(model).__name__, int(model.mark), weights  # type: ignore[arg-type]


def test_44_train_export_and_resume(model_folder: Folder, tmp_path: Path) -> None:
    model = custom_model(model_folder("llama"), tmp_path / "source")
    data = models.write_jsonl(models.make_records(16, seed=3)[0], tmp_path / "data.jsonl")
    settings = training_runs.settings(
        str(model),
        data,
        tmp_path / "run",
        model={"path": str(model), "trust_remote_code": True},
        train={"max_steps": 2},
        schedule={"warmup_steps": 1},
        batch={"global_batch_size": 8, "micro_batch_size": 2},
        checkpoint={"every_steps": 2, "resume": "auto"},
    )

    def train() -> Any:
        return run_ranks(with_modules, 2, str(tmp_path / "modules"), training_runs.train, settings)[0]

    trained = train()
    exported = tmp_path / "run" / "model"
    assert (exported / "mine.py").read_text() == CODE and (exported / "parts.py").read_text() == "MARK = 1\n"
    fresh = str(tmp_path / "other modules")
    name, mark, weights = run_ranks(with_modules, 1, fresh, load_with_its_code, str(exported))[0]
    assert (name, mark) == ("MineForCausalLM", 1)
    assert all(tensor.equal(trained["weights"][key]) for key, tensor in weights.items())

    # The same weights under other code are another model.
    (model / "parts.py").write_text("MARK = 2\n")
    settings["train"]["max_steps"] = 4
    with pytest.raises(CheckpointError) as caught:
        train()
    assert "model.code: " in caught.value.values and "--resume-anyway=model.code" in caught.value.fix
    with pytest.raises(CheckpointError, match="not the code that trained it"):
        run_ranks(with_modules, 1, fresh, export, str(tmp_path / "run"), str(tmp_path / "out"), {})
    settings["checkpoint"]["resume_anyway"] = ["model.code"]
    assert train()["metrics"][-1]["step"] == 4
    assert (exported / "parts.py").read_text() == "MARK = 2\n"


def read_config(cache: str, path: str, revision: str | None) -> str:
    import huggingface_hub.constants

    from fsdp_trainer.model import load_hf_config

    huggingface_hub.constants.HF_HUB_CACHE = cache
    return type(load_hf_config(path, revision=revision, trust_remote_code=True)).__name__


@pytest.mark.parametrize(
    ("revision", "auto_map", "said"),
    [
        (None, AUTO_MAP, "revision: main"),
        ("v1.0", AUTO_MAP, "revision: v1.0"),
        ("a" * 40, AUTO_MAP | {"AutoModel": "other/repo--mine.Mine"}, "other/repo--mine.Mine"),
        ("a" * 40, {"AutoConfig": ["x/y--mine.Mine", None]}, "x/y--mine.Mine"),
    ],
)
def test_s5_code_that_is_not_pinned_is_refused(
    revision: str | None, auto_map: dict[str, Any], said: str, model_folder: Folder, tmp_path: Path
) -> None:
    """In a copy of the hub's cache, without a network; nothing of the code runs."""
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    custom_model(model_folder("llama"), snapshot)
    settings = json.loads((snapshot / "config.json").read_text()) | {"auto_map": auto_map}
    (snapshot / "config.json").write_text(json.dumps(settings))
    (snapshot / "mine.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    (repository / "refs").mkdir()
    for name in ("main", "v1.0"):
        (repository / "refs" / name).write_text("a" * 40)
    with pytest.raises(ConfigError) as caught:
        run_ranks(with_modules, 1, str(tmp_path / "modules"), read_config, str(tmp_path), "some/model", revision)
    assert said in caught.value.values, str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_s5_pinned_code_is_read_at_its_commit(model_folder: Folder, tmp_path: Path) -> None:
    """The branch has moved on to code that must not run; the commit's is taken for the config and for the model."""
    repository = tmp_path / "models--some--model"
    commits = {"a" * 40: CODE, "b" * 40: f"open({str(tmp_path / 'owned')!r}, 'w')\n"}
    (repository / "snapshots").mkdir(parents=True)
    for commit, code in commits.items():
        snapshot = custom_model(model_folder("llama"), repository / "snapshots" / commit)
        (snapshot / "mine.py").write_text(code)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    built = run_ranks(with_modules, 1, str(tmp_path / "modules"), build, str(tmp_path), "some/model", "a" * 40)[0]
    assert built == "MineForCausalLM"
    assert not (tmp_path / "owned").exists()


def build(cache: str, path: str, revision: str) -> str:
    import huggingface_hub.constants
    import torch

    from fsdp_trainer.model import build_meta_model, load_hf_config

    huggingface_hub.constants.HF_HUB_CACHE = cache
    config = load_hf_config(path, revision=revision, trust_remote_code=True)
    return type(build_meta_model(config, attention="auto", dtype=torch.float32, trust_remote_code=True)).__name__


def load_all(folder: str) -> tuple[list[str], list[str]]:
    """Load config, tokenizer and generation config without trust; return what was said and what was executed."""
    import sys

    from fsdp_trainer.config import ModelConfig
    from fsdp_trainer.errors import FsdpTrainerError
    from fsdp_trainer.model import load_hf_config
    from fsdp_trainer.training_data import load_generation_config, load_tokenizer

    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        inside = event == "open" and str(arguments[0]).startswith(folder) and str(arguments[0]).endswith(".py")
        if inside or (event == "exec" and folder in str(arguments[0])):
            seen.append(f"{event} {arguments!r}")

    sys.addaudithook(hook)
    said = []
    section = ModelConfig(path=folder)
    for action in (
        lambda: load_hf_config(folder),
        lambda: load_tokenizer(section),
        lambda: load_generation_config(section),
    ):
        try:
            said.append(type(action()).__name__)
        except FsdpTrainerError as error:
            said.append(str(error))
    return said, seen


@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_nobody_asked_for_the_code(model_type: str, model_folder: Folder, tmp_path: Path) -> None:
    """An auto_map on every file: Transformers' own classes are taken where they are known, the rest is refused."""
    folder = custom_model(model_folder("llama"), tmp_path / "model")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        maps = AUTO_MAP | {"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoGenerationConfig": "mine.Mine"}
        settings |= {"auto_map": maps, "custom_generate": "mine.py"}
        if name == "config.json":
            settings["model_type"] = model_type
        (folder / name).write_text(json.dumps(settings))
    (folder / "custom_generate").mkdir()
    for file in ("mine.py", "custom_generate/generate.py", "tokenization_mine.py"):
        (folder / file).write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    said, seen = run_ranks(load_all, 1, str(folder))[0]
    assert not seen and not (tmp_path / "owned").exists()
    assert said[2] == "GenerationConfig"
    if model_type == "mine":
        assert "trust_remote_code: true" in said[0]
    else:
        assert said[0] == "LlamaConfig"
