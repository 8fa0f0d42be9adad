"""The pages under docs/ and the README say what the program says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from docs import (
    make_claims,
    make_combinations,
    make_configuration,
    make_data,
    make_planning,
    make_readme_table,
    make_resuming,
)
from docs.claim_cases import Case, Claim
from docs.claims import find_claims
from fsdp_trainer import cli
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.resume_rules import RULES
from tests.plans import model_folder

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


def test_data_page_is_up_to_date() -> None:
    assert make_data.PAGE.read_text(encoding="utf-8") == make_data.format_page(), "run python docs/make_data.py"


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


def test_planning_page_is_up_to_date() -> None:
    page = make_planning.PAGE.read_text(encoding="utf-8")
    assert make_planning.format_page(page) == page, "run python docs/make_planning.py"


def planning_example(folder: Path, text: str) -> str:
    """The example about a model of this machine, answered by the closed form."""
    return text.replace("Qwen/Qwen2.5-7B", model_folder(folder)).replace(
        'host_ram="128GiB"', 'host_ram="128GiB", quick=True'
    )


PLANNING = (ROOT / "docs/planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"```bash\n(.*?)\n```", PLANNING, flags=re.DOTALL))
def test_planning_commands_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(f"model: {{path: {model_folder(tmp_path)}}}\ndata: {{seq_len: 512}}\nprecision: bf16\n")
    name, *words = shlex.split(planning_example(tmp_path, line))
    assert name == "fsdp-trainer"
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--quick"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert ">1 " in printed
    assert ("fsdp-trainer train --config planned/run.yaml" in printed) == ("--write planned" in line)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PLANNING, flags=re.DOTALL))
def test_planning_code_runs(block: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(planning_example(tmp_path, block), "planning.md", "exec"), {})
    assert "zero_stage=3" in capsys.readouterr().out


def test_planning_page_names_every_flag_and_key(tmp_path: Path) -> None:
    from fsdp_trainer.cli_plan import FLAGS
    from tests.plans import make_plan

    for flag in set(FLAGS) - {"--config"}:
        assert f"| `{flag}" in PLANNING, flag
    found = make_plan(tmp_path).to_json()
    own = set(found["candidates"][0]) - set(found["candidates"][0]["phases"])
    for name in {*found, *(own & {"quality", "gives_up", "source", "host_node_gib", "run_seconds", "fits", "lacks"})}:
        assert f"`{name}`" in PLANNING or f"`candidates[].{name}`" in PLANNING, name


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
