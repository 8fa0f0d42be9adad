"""configs/recipes: what the generator's table asks for, each loads, and keeps the memory that it promises.

Of every recipe the closed form is compared; one is simulated in full, another with few layers, which lead to the peak.
`python -m benchmarks.sweeps.recipes` simulates all.
"""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from benchmarks.sweeps.recipes import difference_in_full, difference_of_peak
from configs import make_recipes
from configs.make_recipes import FOLDER, HAND_WRITTEN, MODELS, RECIPES, name_of, read_promise
from fsdp_trainer.config import Config
from fsdp_trainer.memory.estimate_model import count_parameters, read_model_shape
from fsdp_trainer.memory.hardware import parse_gpus
from tests.ranks import run_ranks

# As the models' own pages say, or their weights' files hold.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "gemma-3-1b": 999_885_952,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
}
# The one with the least to simulate: one GPU, fp16.
FULL = (("smollm2-135m", "1xT4"),)
# What that one lacks: bf16, ZeRO 3, an optimizer in host memory.
FEW_LAYERS = (("qwen3-4b", "4xA100-40GB"),)
each = pytest.mark.parametrize(("model", "gpus", "host_gib"), RECIPES, ids=lambda value: str(value))


def test_the_folder_holds_the_table() -> None:
    names = [name_of(model, gpus) for model, gpus, _ in RECIPES]
    assert len(set(names)) == len(names)
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*names, *HAND_WRITTEN}, "run configs/make_recipes.py"
    assert {model for model, _, _ in RECIPES} == set(MODELS) == set(PARAMETERS)


@pytest.mark.parametrize("model", MODELS)
def test_shapes_have_the_models_parameters(model: str) -> None:
    with make_recipes.local_model(model) as folder:
        assert count_parameters(read_model_shape(folder)) == PARAMETERS[model]


@each
def test_a_recipe_asks_for_what_the_table_says(model: str, gpus: str, host_gib: int) -> None:
    path = FOLDER / f"{name_of(model, gpus)}.yaml"
    config, asked = Config.load(path), make_recipes.base_settings(model, gpus)
    assert config.check_world(parse_gpus(gpus).count) >= 1
    for section in ("model", "data", "batch"):
        assert asked[section].items() <= config.to_dict()[section].items()
    assert config.output_dir == asked["output_dir"]
    assert config.precision == asked.get("precision", config.precision)


@each
def test_the_closed_form_is_as_promised(model: str, gpus: str, host_gib: int) -> None:
    promise = read_promise(FOLDER / f"{name_of(model, gpus)}.yaml")
    found = make_recipes.check_closed_form(model, gpus)
    assert found["allocated_gib"] == pytest.approx(promise.quick, abs=6e-4), "make it anew: --again NAME"
    assert max(found["host_node_gib"].values()) == pytest.approx(promise.host, abs=0.06)
    assert found["fits"] is not False
    assert promise.allocated <= promise.least <= promise.limit <= found["limit"]
    assert promise.host <= promise.host_limit == host_gib
    assert promise.quick == pytest.approx(promise.allocated, rel=0.05)


@each
def test_a_recipe_is_as_the_generator_writes_it(model: str, gpus: str, host_gib: int) -> None:
    path = FOLDER / f"{name_of(model, gpus)}.yaml"
    settings, closed = YAML(typ="safe").load(path), make_recipes.check_closed_form(model, gpus)
    made = make_recipes.format_recipe(model, gpus, settings, promise=read_promise(path), closed=closed)
    assert path.read_text(encoding="utf-8") == made


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpus"), FULL)
def test_the_full_simulation_is_as_promised(model: str, gpus: str) -> None:
    assert run_ranks(difference_in_full, 1, model, gpus, timeout=240) == [""]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpus"), FEW_LAYERS)
def test_simulations_lead_to_the_promised_peak(model: str, gpus: str) -> None:
    assert run_ranks(difference_of_peak, 1, model, gpus, timeout=240) == [""]
