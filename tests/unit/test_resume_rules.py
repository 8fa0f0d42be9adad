"""Every setting has a rule for a resume, and each, changed alone, does what the table says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_trainer import cli
from fsdp_trainer.config import Config, Section
from fsdp_trainer.errors import CheckpointError, ConfigError
from fsdp_trainer.resume_rules import CODE, ROWS, RULES, VERSIONS, check_resume, describe, find_changes

NAMES_OF_FACTS = {ROWS, VERSIONS, CODE}


def setting_names(model: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def facts(**changed: Any) -> dict[str, Any]:
    """The facts of a run on default settings, as they come back from state.json."""
    found = describe(Config().to_dict(), rows="a1", versions={"torch": "2.14.1"})
    return json.loads(json.dumps(found | changed))


def with_change(name: str) -> dict[str, Any]:
    """The same with one entry changed; the value need not be valid, since it is only compared."""
    found = facts()
    *path, last = [name] if name in NAMES_OF_FACTS else ["config", *name.split(".")]
    place = found
    for part in path:
        place = place[part]
    assert last in place
    place[last] = ["something else", place[last]]
    return found


def test_every_setting_has_a_rule_and_every_rule_a_setting() -> None:
    assert sorted(RULES) == sorted([*setting_names(), *NAMES_OF_FACTS])
    assert all(rule.reason for rule in RULES.values())


def test_nothing_changed_says_nothing() -> None:
    assert check_resume(facts(), facts()) == []


@pytest.mark.parametrize("name", RULES)
def test_a_change_alone_does_what_the_table_says(name: str) -> None:
    saved, now, verdict = facts(), with_change(name), RULES[name].verdict
    if verdict == "free":
        assert check_resume(saved, now) == []
    elif verdict == "allowed":
        (line,) = check_resume(saved, now)
        assert f"{name}: " in line and " saved, " in line and "something else" in line and RULES[name].reason in line
    else:
        with pytest.raises(CheckpointError) as caught:
            check_resume(saved, now, source="checkpoints/step-00000004")
        assert caught.value.exit_code == 4
        assert f"step-00000004: {name}: " in caught.value.values and "something else" in caught.value.values
        assert caught.value.fix.endswith(f"--resume-anyway={name}")
        (line,) = check_resume(saved, now, anyway=[name])
        assert "(as asked)" in line and f"{name}: " in line


def test_all_refusals_stand_in_one_message() -> None:
    now = facts(**{ROWS: "b2"})
    now["config"]["train"] |= {"seed": 8, "max_steps": 5}
    now["config"]["optim"]["lr"] = 3e-5
    now["config"]["data"]["train"] = "other.jsonl"
    with pytest.raises(CheckpointError) as caught:
        check_resume(facts(), now, anyway=["optim.lr"])
    assert "train.seed: 0 saved, 8 now" in caught.value.values
    # A person cannot read a digest, so the setting that may have changed the rows stands with it.
    assert "data.rows: 'a1' saved, 'b2' now (with data.train: 'data/train.jsonl' saved, 'other.jsonl' now)" in str(
        caught.value
    )
    assert "optim.lr" not in str(caught.value) and "max_steps" not in str(caught.value)
    lines = check_resume(facts(), now, anyway=["optim.lr", "train.seed", "data.rows"])
    assert sum("(as asked)" in line for line in lines) == 3
    assert any("train.max_steps: null saved, 5 now" in line for line in lines)


def test_a_setting_newer_than_the_checkpoint_is_no_change() -> None:
    saved = facts()
    del saved["config"]["optim"]["state_dtype"], saved["config"]["schedule"]
    assert find_changes(saved, facts()) == []


def test_paged_moments_are_those_of_8_bits() -> None:
    saved, now = facts(), facts()
    saved["config"]["optim"]["name"], now["config"]["optim"]["name"] = "adamw_8bit", "paged_adamw_8bit"
    assert find_changes(saved, now) == find_changes(now, saved) == []
    with pytest.raises(CheckpointError, match=r"optim\.name: 'adamw' saved, 'adamw_8bit' now"):
        check_resume(facts(), now)


def test_rows_that_the_checkpoint_does_not_know_are_other_rows() -> None:
    saved = facts()
    del saved[ROWS]
    with pytest.raises(CheckpointError, match=r"data\.rows: null saved, 'a1' now"):
        check_resume(saved, facts())


@pytest.mark.parametrize(
    ("word", "hint"), [("optim.learning", "optim.lr"), ("train.max_steps", "leave it out"), ("xyz", "leave it out")]
)
def test_a_waiver_of_what_is_never_refused_is_an_error(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(None, [f"--checkpoint.resume_anyway=[optim.lr,{word}]"])
    assert word in caught.value.values and "optim.lr," not in caught.value.values
    assert hint in caught.value.fix


def test_waivers_are_read_from_a_flag() -> None:
    config = Config.load(None, ["--checkpoint.resume_anyway=[optim.lr,data.rows]"])
    assert config.checkpoint.resume_anyway == ("optim.lr", "data.rows")


def test_the_command_passes_the_waivers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def launch(config: Config, **options: Any) -> int:
        started.update(options, config=config)
        return 0

    monkeypatch.setattr(cli, "launch", launch)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--resume-anyway=optim.lr,data.rows", "--optim.lr=3e-5"])
    assert ended.value.code == 0
    assert started["config"].checkpoint.resume_anyway == ("optim.lr", "data.rows")
    assert Config.load(None, started["arguments"]) == started["config"], "the ranks read other settings"
