"""The pages under docs/ and the README say what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from docs import make_claims, make_combinations, make_configuration, make_readme_table, make_resuming
from docs.claim_cases import Case, Claim
from docs.claims import find_claims
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.resume_rules import RULES

ROOT = Path(__file__).resolve().parents[2]


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
        assert all(problem in said or "offloading the optimizer at stage 0" in problem for problem in problems)


def test_claims_page_is_up_to_date() -> None:
    expected = make_claims.format_page(find_claims())
    assert make_claims.PAGE.read_text(encoding="utf-8") == expected, "run python -m docs.make_claims"


@pytest.mark.parametrize(
    ("holds", "verdict", "conditions"),
    [
        ([True, True, True], "right", ""),
        ([False, False, False], "wrong", ""),
        ([True, True, False], "right only when", "small"),
        ([True, False, False], "right only when", "small (A)"),
        ([False, False, None], "right only when", "large (A perhaps)"),
    ],
)
def test_a_verdict_follows_from_the_cases(holds: list[bool | None], verdict: str, conditions: str) -> None:
    places = [("small", "A"), ("small", "B"), ("large", "A")]
    cases = [Case(what, "1 GB", found, model) for (what, model), found in zip(places, holds, strict=True)]
    claim = Claim(said="It fits.", rule="at most 1 GB", cases=cases, advice="")
    assert (claim.verdict, claim.conditions) == (verdict, conditions)


@pytest.fixture(scope="module")
def plans() -> make_readme_table.Plans:
    """Return the kept plans; whether they are still the best is not asked here, that takes minutes."""
    return make_readme_table.find_plans(make_readme_table.load_cells())


def test_what_fits_is_up_to_date(plans: make_readme_table.Plans) -> None:
    readme = make_readme_table.README.read_text(encoding="utf-8")
    how = "run python -m docs.make_readme_table"
    assert make_readme_table.PAGE.read_text(encoding="utf-8") == make_readme_table.format_page(plans), how
    assert readme == make_readme_table.replace_between(readme, make_readme_table.format_table(plans)), how


def test_every_plan_of_the_readme_fits(plans: make_readme_table.Plans) -> None:
    fitting = [found for found in plans.values() if isinstance(found, make_readme_table.Plan)]
    assert fitting
    for found in fitting:
        assert (found.least or found.allocated) < found.limit
        assert found.host < found.machine.host_gib


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
