"""Plans by the closed form: what they must obey whatever the model, the GPUs and the settings that are held."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import setting
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.candidate_estimates import ClosedForm, Limits
from fsdp_trainer.memory.candidates import SEARCHED, enumerate_candidates
from fsdp_trainer.memory.estimate_model import read_model_shape
from fsdp_trainer.memory.estimate_step import estimate_peaks, estimate_step, phase_peaks
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.plan import GIB, QUALITIES, Plan, quality_of
from fsdp_trainer.memory.planner import plan
from fsdp_trainer.memory.quick import simulate_quick

MODELS = Path(__file__).resolve().parents[3] / "benchmarks" / "models"
# A few examples of each property: a plan takes a tenth of a second and more.
few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
GPUS = ("1xRTX4090", "2xRTX4090", "2xA100-80GB", "1xT4", "2x2xA100-40GB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama 3.1 8B's sizes with two layers: a tenth of the time, and 1.5 billion parameters."""
    values = json.loads((MODELS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 2}), encoding="utf-8")
    return str(folder)


def make_config(model: str, **sections: Any) -> Config:
    sections.setdefault("data", {"seq_len": 1024})
    sections.setdefault("batch", {"global_batch_size": 16})
    return Config.from_dict({"model": {"path": model}, **sections})


def shrink(gpus: str, usable_gib: float) -> Hardware:
    return replace(parse_gpus(gpus), usable_bytes=int(usable_gib * GIB))


def place(found: Plan) -> tuple[int, float]:
    """How good the chosen combination is: the quality's place and the time."""
    assert found.chosen is not None
    seconds = found.chosen.step_seconds
    assert seconds is not None
    return list(QUALITIES).index(found.chosen.quality), seconds


@settings(few, max_examples=5)
@given(
    gpus=st.sampled_from(GPUS),
    usable_gib=st.floats(8, 60),
    more=st.floats(0.1, 40),
    prefer=st.sampled_from(("quality", "speed")),
)
def test_more_memory_never_plans_slower(model: str, gpus: str, usable_gib: float, more: float, prefer: Any) -> None:
    config = make_config(model)
    small = plan(config, shrink(gpus, usable_gib), quick=True, prefer=prefer)
    large = plan(config, shrink(gpus, usable_gib + more), quick=True, prefer=prefer)
    if small.chosen is None:
        return
    before, after = place(small), place(large)
    if prefer == "quality":
        assert after[0] <= before[0]
    if prefer == "speed" or after[0] == before[0]:  # one per cent is the same time
        assert after[1] <= before[1] * 1.0101


@few
@given(gpus=st.sampled_from(GPUS), seq_len=st.integers(16, 4096), more=st.integers(1, 4096), pick=st.integers(0, 10**6))
def test_longer_rows_never_take_less_memory(model: str, gpus: str, seq_len: int, more: int, pick: int) -> None:
    hardware = parse_gpus(gpus)
    short, long = (
        list(enumerate_candidates(make_config(model, data={"seq_len": length}), hardware))
        for length in (seq_len, seq_len + more)
    )
    candidate = short[pick % len(short)]
    before, after = (simulate_quick(found[pick % len(short)], hardware) for found in (short, long))
    assert before["config"] | {"data": None} == after["config"] | {"data": None} == candidate.to_dict() | {"data": None}
    assert after["allocated_gib"] >= before["allocated_gib"]
    assert max(after["host_node_gib"].values()) >= max(before["host_node_gib"].values())


HELD: dict[str, tuple[Any, ...]] = {
    "sharding.zero_stage": (2, 3),
    "sharding.offload": ("none", "optimizer"),
    "activation_checkpointing.mode": ("none", "full"),
    "batch.micro_batch_size": (1, 2),
    "precision": ("bf16", "bf16_pure"),
    "optim.name": ("adamw", "adamw_8bit"),
    "sharding.reduce_dtype": ("bf16", None),
    "checkpoint.async_save": (True, False),
}


@few
@given(
    held=st.sets(st.sampled_from(sorted(HELD)), min_size=1), pick=st.integers(0, 1), host=st.sampled_from((None, 64))
)
def test_what_is_fixed_is_kept_and_host_ram_never_exceeded(
    model: str, held: set[str], pick: int, host: int | None
) -> None:
    values = {name: HELD[name][pick] for name in held}
    config = Config.from_dict({"model": {"path": model}, "data": {"seq_len": 1024}, **values})
    host_bytes = host * GIB if host is not None else None
    found = plan(config, shrink("2xRTX4090", 23.5), fixed=held, host_bytes=host_bytes, quick=True)
    assert found.candidates
    for candidate in found.candidates:
        assert {name: setting(candidate.config, name) for name in held} == values
        if candidate.fits and host is not None:
            assert candidate.host_node_gib <= host
        assert candidate.quality == quality_of(candidate.config)


@few
@given(
    gpus=st.sampled_from(("1xT4", "8xT4", "2xV100-SXM-16GB", "4xV100-SXM-32GB")),
    prefer=st.sampled_from(("quality", "speed")),
)
def test_no_bf16_where_it_is_only_emulated(model: str, gpus: str, prefer: Any) -> None:
    found = plan(make_config(model), parse_gpus(gpus), quick=True, prefer=prefer)
    assert found.chosen is not None
    assert {candidate.config.precision for candidate in found.candidates} == {"fp16"}


def test_bf16_that_is_fixed_on_such_a_card_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="bf16"):
        plan(make_config(model), parse_gpus("1xT4"), fixed=("precision",), quick=True)


@pytest.mark.parametrize(
    ("gpus", "host_gib", "quality", "offload"),
    [
        ("8xH100-80GB", None, "masters", "none"),
        ("2xRTX4090", 256, "masters", {"optimizer", "params"}),
        ("2xRTX4090", 64, "pure, 8-bit", {"optimizer", "params"}),
    ],
)
def test_plans_of_an_8b_model(gpus: str, host_gib: int | None, quality: str, offload: Any) -> None:
    config = Config.from_dict({"model": {"path": str(MODELS / "llama-3.1-8b.json")}, "train": {"max_steps": 10}})
    host_bytes = host_gib * GIB if host_gib is not None else None
    found = plan(config, parse_gpus(gpus), host_bytes=host_bytes, quick=True)
    chosen = found.chosen
    assert chosen is not None and chosen is found.candidates[0]
    assert (chosen.quality, chosen.source) == (quality, "closed form")
    assert chosen.config.sharding.offload in ({offload} if isinstance(offload, str) else offload)
    assert chosen.step_seconds is not None and chosen.run_seconds == pytest.approx(10 * chosen.step_seconds)
    assert chosen.config == Config.from_dict(chosen.config.to_dict())
    values = json.loads(json.dumps(found.to_json()))
    assert values["chosen"] == 0
    assert values["candidates"][0]["config"]["sharding"]["offload"] == chosen.config.sharding.offload
    # What does not fit says by how much, and nothing that fits lacks anything.
    assert all(bool(candidate.lacks) == (candidate.fits is False) for candidate in found.candidates)


def test_nothing_fits_and_each_remedy_does(model: str) -> None:
    config = make_config(model, data={"seq_len": 8192}, sharding={"offload": "none"})
    hardware, fixed = shrink("2xRTX4090", 12.0), {"sharding.offload"}
    found = plan(config, hardware, fixed=fixed, host_bytes=64 * GIB, quick=True)
    assert found.chosen is None
    assert found.nearest in found.candidates and found.nearest.lacks
    assert [candidate.fits for candidate in found.candidates] == [False] * len(found.candidates)
    remedies = dict(remedy.split(" (", 1) for remedy in found.remedies)
    assert any(remedy.startswith("leave sharding.offload to the plan") for remedy in remedies)
    more = next(remedy for remedy in remedies if " GPUs: " in remedy)
    count = int(more.split()[0])
    doubled = replace(hardware, count=count, gpus_per_node=count)
    assert plan(config, doubled, fixed=fixed, host_bytes=64 * GIB, quick=True).chosen is not None
    halved = replace(hardware, count=count // 2, gpus_per_node=count // 2)
    assert plan(config, halved, fixed=fixed, host_bytes=64 * GIB, quick=True).chosen is None


def test_too_little_host_ram_names_how_much_is_enough(model: str) -> None:
    config, hardware = make_config(model), shrink("1xRTX4090", 12.0)
    found = plan(config, hardware, host_bytes=8 * GIB, quick=True, fixed={"optim.name"})
    assert found.chosen is None
    enough = next(remedy for remedy in found.remedies if remedy.startswith("host RAM"))
    gib = int(enough.split()[2])
    assert plan(config, hardware, host_bytes=gib * GIB, quick=True, fixed={"optim.name"}).chosen is not None


def test_peaks_without_their_timeline_are_the_same(model: str) -> None:
    hardware = parse_gpus("2xRTX4090")
    closed = ClosedForm(read_model_shape(model), hardware, Limits.of(hardware, None))
    for sketch in closed.sketch_all(make_config(model, data={"seq_len": 512, "eval": 0.1}))[::37]:
        whole = phase_peaks(estimate_step(closed.shape, sketch.settings))
        assert estimate_peaks(closed.shape, sketch.settings) == pytest.approx(whole, abs=32)


def test_every_combination_is_one_that_a_run_would_take(model: str) -> None:
    config, hardware = make_config(model), parse_gpus("2x2xA100-40GB")
    found = list(enumerate_candidates(config, hardware))
    seen = {tuple(setting(candidate, name) for name in SEARCHED) for candidate in found}
    assert len(seen) == len(found) > 500
    for candidate in found[::23]:
        assert Config.from_dict(candidate.to_dict()) == candidate
        candidate.check_world(hardware.count)
    assert {candidate.sharding.replicate for candidate in found} == {1, 2}
    assert {candidate.sharding.reshard_after_forward for candidate in found} == {None, 2}


def test_a_finished_run_moves_time_and_what_fits(model: str) -> None:
    config, hardware = make_config(model), shrink("1xRTX4090", 23.5)
    plain = plan(config, hardware, quick=True)
    moved = plan(config, hardware, quick=True, calibration={"memory": 1.0, "seconds": 2.0})
    assert place(moved)[1] == pytest.approx(2 * place(plain)[1])
    larger = plan(config, hardware, quick=True, calibration={"memory": 1.5})
    assert larger.chosen is not None
    assert larger.chosen.prediction["allocated_gib"] < 23.5
    assert place(larger) >= place(plain)


def test_paged_moments_are_planned_where_they_are_asked_for(model: str) -> None:
    """On several GPUs with whole copies, which is for the plan to choose; beside shards that are held they are not."""
    held = {"optim": {"name": "paged_adamw_8bit"}}
    config = make_config(model, **held)
    for gpus in ("1xA100-80GB", "2xA100-80GB"):
        found = plan(config, parse_gpus(gpus), fixed=config.given, quick=True)
        assert found.chosen is not None
        assert found.chosen.quality == "8-bit"
        assert {candidate.config.optim.name for candidate in found.candidates} == {"paged_adamw_8bit"}
    free = make_config(model)
    assert all("paged" not in made.optim.name for made in enumerate_candidates(free, parse_gpus("1xA100-80GB")))
    sharded = make_config(model, **held, sharding={"zero_stage": 2})
    with pytest.raises(ConfigError, match=r"paged moments[\s\S]*zero_stage: 2"):
        plan(sharded, parse_gpus("2xA100-80GB"), fixed=sharded.given, quick=True)


def test_settings_that_leave_no_combination_are_refused_with_the_reason(model: str) -> None:
    """Not as what does not fit: more memory would not help."""
    config = make_config(model, optim={"implementation": "foreach"})
    assert plan(config, parse_gpus("2xA100-80GB"), fixed=config.given, quick=True).chosen is not None
    with pytest.raises(ConfigError, match=r"only optim\.implementation: fused can do"):
        plan(config, parse_gpus("2xT4"), fixed=config.given, quick=True)


def test_what_the_system_needs_counts_as_lacking() -> None:
    """With 1 GiB of RAM, of which 2 are the system's, a plan of 3 GiB lacks 4."""
    limits = Limits.of(parse_gpus("2xRTX4090"), 1 * GIB)
    assert limits.lacking(0, 3 * GIB) == ("4.0 GiB of host RAM",)
