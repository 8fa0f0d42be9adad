"""The rungs of a ladder: each is checked or says why not, adds one technique, and leaves the work the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import setting
from fsdp_trainer.config_reading import dotted_names
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.ladder_rungs import Rung, choose_rungs, make_rungs, read_rungs, usual_techniques

NAMES = ("baseline", "checkpointing", "stage1", "stage2", "stage3", "chunked_loss", "8bit", "optimizer_offload")
NAMES += ("parameter_offload",)
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "bf16_pure"),
    "sharding.zero_stage": (0, 1, 2, 3),
    "sharding.replicate": (1, 2),
    "sharding.reshard_after_forward": (None, 2),
    "sharding.offload": ("none", "optimizer", "params"),
    "sharding.reduce_dtype": (None, "bf16", "fp16"),
    "activation_checkpointing.mode": ("none", "full", "every_n_layers"),
    "activation_checkpointing.every_n": (1, 2),
    "loss.kind": ("plain", "chunked"),
    "loss.chunk_tokens": (None, 64),
    "optim.name": ("adamw", "adamw_8bit", "paged_adamw_8bit"),
    "optim.implementation": ("fused", "foreach"),
    "optim.state_dtype": ("fp32", "bf16"),
    "optim.offload_step": ("host", "device"),
    "schedule.name": ("constant", "cosine"),
    "schedule.warmup_steps": (None, 0, 500),
    "schedule.total_steps": (None, 900),
    "train.on_nonfinite": ("error", "skip"),
    "train.max_steps": (None, 1000),
    "data.eval": (None, 0.1),
    "eval.every_steps": (None, 7),
    "checkpoint.keep_best": (False, True),
    "checkpoint.enabled": (True, False),
    "data.streaming": (False, True),
    "batch.micro_batch_size": (1, 2),
}
# What every rung does in its own way; all else is as in the settings of the run.
OF_THE_LADDER = ("schedule.", "checkpoint.", "eval.", "log.", "profile.", "export.at_end", "data.eval", "rehearse")
OF_THE_LADDER += ("train.max_steps", "output_dir")
TECHNIQUES = {name for _, _, changes in usual_techniques(Config()) for name in changes}


def rungs_of(config: Config, *, processes: int = 2, out: Path = Path("out"), own: Any = None) -> tuple[Rung, ...]:
    return make_rungs(config, processes=processes, steps=5, out=out, own=own)


@settings(max_examples=150, deadline=None)
@given(picked=st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in CHOICES.items()}), data=st.data())
def test_every_rung_is_checked_or_says_why_not(picked: dict[str, Any], data: Any) -> None:
    processes = data.draw(st.sampled_from((1, 2, 4)))
    try:
        config = Config.from_dict(picked)
        config.check_world(processes)
    except ConfigError:
        return
    rungs = rungs_of(config, processes=processes)
    assert tuple(rung.name for rung in rungs) == NAMES
    below: dict[str, Any] | None = None
    for rung in rungs:
        assert (rung.config is None) == bool(rung.refusal), rung
        if rung.config is None:
            continue
        rung.config.check_world(processes)
        assert rung.config.output_dir == f"out/{rung.folder}"
        assert (rung.config.checkpoint.enabled, rung.config.checkpoint.resume) == (False, "never")
        assert not rung.config.export.at_end and rung.config.data.eval is None
        now = {name: setting(rung.config, name) for name in dotted_names(Config)}
        changed = {name for name in now if now[name] != setting(config, name)}
        assert all(name.startswith(OF_THE_LADDER) or name in TECHNIQUES for name in changed), changed
        if below is not None and processes > 1:
            differs = {name for name in now if now[name] != below[name]} - {"output_dir"}
            assert differs and differs == set(rung.settings), (rung.name, differs)
        below = now
    assert processes == 1 or rungs[0].config is not None


def test_one_rank_has_nothing_to_shard_with_and_offloads_all_the_same() -> None:
    rungs = {rung.name: rung for rung in rungs_of(Config(), processes=1)}
    assert [rungs[name].refusal for name in ("stage1", "stage2", "stage3")] == [
        "one rank has nothing to shard with"
    ] * 3
    offloaded = rungs["parameter_offload"].config
    assert offloaded is not None and offloaded.sharding.zero_stage == 3


def test_what_collides_is_left_out_of_the_rungs_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of today refuse a usual rung: a technique that would, in place of the third."""
    usual = list(usual_techniques(Config()))
    usual[2] = ("stage1", "a table of pages", {"optim.name": "paged_adamw_8bit", "sharding.zero_stage": 1})
    monkeypatch.setattr("fsdp_trainer.ladder_rungs.usual_techniques", lambda config: tuple(usual))
    rungs = rungs_of(Config())
    assert rungs[2].config is None
    assert "paged moments are for a process that owns whole parameters" in rungs[2].refusal
    assert "left out of the rungs above" in rungs[2].refusal
    assert rungs[3].config is not None
    assert (rungs[3].config.optim.name, rungs[3].config.sharding.zero_stage) == ("adamw", 2)


def test_sizes_that_the_settings_name_are_kept() -> None:
    config = Config.from_dict(
        {"loss.chunk_tokens": 64, "sharding.offload": "optimizer", "optim.offload_step": "device"}
    )
    rungs = {rung.name: rung.config for rung in rungs_of(config)}
    chunked, offloaded = rungs["chunked_loss"], rungs["optimizer_offload"]
    assert chunked is not None and chunked.loss.chunk_tokens == 64
    assert offloaded is not None and offloaded.optim.offload_step == "device"


def test_only_keeps_place_and_what_is_below() -> None:
    (rung,) = choose_rungs(rungs_of(Config()), ["stage3"])
    assert rung.folder == "05-stage3"
    assert rung.config is not None and rung.config.activation_checkpointing.mode == "full"


def test_only_names_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no rung of this name[\s\S]*chekpointing[\s\S]*did you mean checkpointing"):
        choose_rungs(rungs_of(Config()), ["baseline", "chekpointing"])


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError, match=r"too few steps[\s\S]*steps: 2[\s\S]*give 3"):
        make_rungs(Config(), processes=2, steps=2, out=Path("out"))


# --- one's own


def own_rungs(tmp_path: Path, text: str) -> tuple[Rung, ...]:
    file = tmp_path / "rungs.yaml"
    file.write_text(text)
    return rungs_of(Config(), own=read_rungs(file))


def test_own_rungs_are_over_the_settings(tmp_path: Path) -> None:
    text = (
        "- {name: as it is}\n"
        "- {name: bf16 sums, settings: {sharding: {reduce_dtype: bf16}, optim.state_dtype: bf16}}\n"
        "- {name: 2 rows, what: two rows at once, settings: {batch.micro_batch_size: 2}}\n"
    )
    first, second, third = own_rungs(tmp_path, text)
    assert first.config is not None and second.config is not None and third.config is not None
    assert (first.settings, first.what) == ({}, "as the settings are")
    assert second.settings == {"sharding.reduce_dtype": "bf16", "optim.state_dtype": "bf16"}
    assert (second.config.sharding.reduce_dtype, second.config.sharding.zero_stage) == ("bf16", 3)
    assert (third.config.sharding.reduce_dtype, third.folder) == (None, "03-2-rows")
    assert third.what == "two rows at once"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "- {name: a, settings: {sharding: {zero_stag: 1}}}",
            r"rung a: [\s\S]*zero_stag[\s\S]*did you mean sharding.zero_",
        ),
        ("- {name: a, settings: {shardin.zero_stage: 1}}", r"rung a: [\s\S]*shardin[\s\S]*did you mean sharding"),
        ("- {name: a, settings: {sharding.zero_stage: 7}}", r"rung a: [\s\S]*zero_stage: 7"),
        (
            "- {name: a}\n- {name: b, settings: {sharding.zero_stage: 0, sharding.offload: params}}",
            r"rung b: offloading parameters needs sharding",
        ),
        ("- {name: a, settings: {optim.name: paged_adamw_8bit}}", r"rung a: paged moments are for"),
        ("- {name: a, settings: {batch.global_batch_size: 8}}", r"rung a: [\s\S]*same work[\s\S]*global_batch_size: 8"),
        (
            "- {name: a, settings: {train.seed: 8, data: {seq_len: 8}}}",
            r"same work[\s\S]*train.seed: 8, data.seq_len: 8",
        ),
        ("- {nam: a}", r"no such key[\s\S]*rung 1: nam[\s\S]*did you mean name"),
        ("- {settings: {precision: fp32}}", r"needs a name"),
        ("- {name: a}\n- {name: a}", r"Two rungs have one name[\s\S]*rungs 1 and 2: a"),
        ("- baseline", r"A rung is a name with settings[\s\S]*'baseline'"),
        ("name: a", r"no list of rungs"),
        ("", r"no list of rungs[\s\S]*nothing"),
        ("- {name: a", r"the rungs are not valid YAML"),
    ],
)
def test_own_rungs_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own_rungs(tmp_path, text)
