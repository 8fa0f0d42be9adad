"""The pages under docs/ and the README say what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from docs import make_combinations, make_configuration, make_resuming
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.resume_rules import RULES

ROOT = Path(__file__).resolve().parents[2]

BY_RANKS = ("offloading the optimizer at stage 0", "paged moments are for")


def test_configuration_page_is_up_to_date() -> None:
    expected = make_configuration.format_page(Config.model_json_schema())
    assert make_configuration.PAGE.read_text(encoding="utf-8") == expected, "run python docs/make_configuration.py"


def test_configuration_page_names_every_setting() -> None:
    page = make_configuration.PAGE.read_text(encoding="utf-8")
    for section, values in Config().to_dict().items():
        for name in values if isinstance(values, dict) else [section]:
            assert f"| `{name}` |" in page


def test_resuming_page_is_up_to_date() -> None:
    expected = make_resuming.format_page(RULES)
    assert make_resuming.PAGE.read_text(encoding="utf-8") == expected, "run python docs/make_resuming.py"


@pytest.fixture(scope="module")
def combinations() -> dict[make_combinations.Combination, frozenset[str]]:
    """Return what the checks say against every combination."""
    return make_combinations.find_all_problems()


def test_combinations_page_is_up_to_date(combinations: dict[make_combinations.Combination, frozenset[str]]) -> None:
    expected = make_combinations.format_page(combinations)
    assert make_combinations.PAGE.read_text(encoding="utf-8") == expected, "run python docs/make_combinations.py"


def test_combinations_are_refused_as_a_settings_file_is(
    combinations: dict[make_combinations.Combination, frozenset[str]],
) -> None:
    """Every 23rd one, written down as a user would: refused with those reasons, or accepted."""
    chosen = list(combinations.items())[::23]
    assert {bool(problems) for _, problems in chosen} == {True, False}
    for combination, problems in chosen:
        settings = {}
        for name, choice in zip(make_combinations.NAMES, combination, strict=True):
            settings |= make_combinations.DIMENSIONS[name][choice]
        said = ""
        try:
            Config.from_dict(settings).check_world(make_combinations.RANKS)
        except ConfigError as error:
            said = str(error)
        assert bool(said) == bool(problems), (combination, said)
        # What depends on the number of ranks is asked only where nothing else is wrong.
        assert all(problem in said or problem.startswith(BY_RANKS) for problem in problems)


def yaml_blocks(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", yaml_blocks("README.md"))
def test_readme_settings_load(block: str) -> None:
    assert Config.from_dict(YAML(typ="safe").load(block))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_linked_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    linked += re.findall(r"`((?:configs|examples|docs|tests|fsdp_trainer)/[\w./-]*)`", text)
    assert all((ROOT / name).exists() for name in linked), [name for name in linked if not (ROOT / name).exists()]
