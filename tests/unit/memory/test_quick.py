"""`simulate --quick`: against the traced run, in its time limit, with the full simulation's keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer import cli
from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.hardware import parse_gpus
from fsdp_trainer.memory.quick import quick_timeline, simulate_quick
from fsdp_trainer.memory.recording import CATEGORIES, PHASES
from fsdp_trainer.memory.simulation import Simulation
from tests import light_imports as light
from tests.ranks import run_on_kept_ranks

ROOT = Path(__file__).parents[3]
KEYS = set(
    Simulation(
        **dict.fromkeys(("allocated", "reserved", "min_capacity", "host", "limit"), 0),
        phases={},
        breakdown={},
        step_time=None,
        tokens_per_rank=0,
        config={},
    ).to_json()
)


def make_config(model: str, folder: Path, *, layers: int | None = None, **settings: Any) -> Config:
    shape = json.loads((ROOT / "benchmarks" / "models" / f"{model}.json").read_text(encoding="utf-8"))
    if layers:
        shape["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    words = {key.replace("__", "."): value for key, value in settings.items()}
    return Config.from_dict({"model.path": str(folder), "batch.global_batch_size": 8, **words})


def test_keys_are_the_full_simulations(tmp_path: Path) -> None:
    result = simulate_quick(make_config("llama-3.1-8b", tmp_path), parse_gpus("8xH100"))
    assert set(result) > KEYS and len(KEYS) == 12 and result["estimate"] is True
    assert set(result["phases"]) == set(PHASES) and set(result["breakdown"]) == set(CATEGORIES)
    for unknown in ("reserved_gib", "min_capacity_gib"):
        assert result[unknown] is None
    assert result["phases"]["evaluate"] is None  # no data.eval
    assert sum(result["breakdown"].values()) == pytest.approx(result["allocated_gib"], abs=0.01)
    assert max(size for size in result["phases"].values() if size) == result["allocated_gib"]
    json.dumps(result)


def test_timeline_peaks_where_the_result_does(tmp_path: Path) -> None:
    config, hardware = make_config("qwen3-4b", tmp_path, data__eval=0.1), parse_gpus("8xA100-80GB")
    timeline, result = quick_timeline(config, hardware), simulate_quick(config, hardware)
    top = max(sum(alive.values()) for _, _, alive in timeline) / 2**30
    assert top == pytest.approx(result["allocated_gib"], abs=1e-3)
    assert [index for index, _, _ in timeline] == list(range(len(timeline)))
    assert {phase for _, phase, _ in timeline} == set(PHASES)
    assert min(min(alive.values()) for _, _, alive in timeline) >= -1  # rounding


def test_verdicts(tmp_path: Path) -> None:
    """8B: at home on eight 80 GB GPUs, out of the question on two 24 GB ones, and undecided in between."""
    config = make_config("llama-3.1-8b", tmp_path)
    assert simulate_quick(config, parse_gpus("8xH100"))["fits"] is True
    assert simulate_quick(config, parse_gpus("2x4090"))["fits"] is False
    assert simulate_quick(config, parse_gpus("8xA10G"))["fits"] is None


@pytest.mark.parametrize(
    ("settings", "larger"),
    [
        ({"activation_checkpointing__mode": "none"}, True),
        ({"sharding__zero_stage": 2}, True),
        ({"data__seq_len": 8192}, True),
        ({"loss__kind": "plain", "batch__micro_batch_size": 1, "data__seq_len": 16384}, True),
        ({"optim__implementation": "foreach", "data__seq_len": 128}, True),
        ({"sharding__reshard_after_forward": 2}, True),
        ({"batch__global_batch_size": 32}, True),
        ({"sharding__replicate": 2}, True),
        ({"sharding__offload": "params"}, False),
        ({"sharding__offload": "optimizer"}, False),
        ({"sharding__reduce_dtype": "bf16"}, False),
        ({"model__attention": "eager", "data__seq_len": 4096}, True),
        ({"precision": "fp32"}, True),
        ({"precision": "bf16_pure"}, False),
        ({"optim__state_dtype": "bf16"}, False),
        ({"optim__name": "adamw_8bit"}, False),
    ],
)
def test_settings_move_the_peak_the_right_way(tmp_path: Path, settings: dict[str, Any], larger: bool) -> None:
    hardware = parse_gpus("8xH100")
    short = {"data__seq_len": 128} if settings.get("data__seq_len") == 128 else {}
    before = simulate_quick(make_config("llama-3.1-8b", tmp_path, **short), hardware)["allocated_gib"]
    after = simulate_quick(make_config("llama-3.1-8b", tmp_path, **settings), hardware)["allocated_gib"]
    assert after > before if larger else after < before


# What differs from make_config's, and the card: every branch of the closed form that a traced run can follow.
TRACED = {
    "untied": ("llama-3.1-8b", 6, "8xA100-80GB", {"data__seq_len": 2048, "data__packing": False}),
    "packed": ("llama-3.1-8b", 6, "8xA100-80GB", {"batch__global_batch_size": 16, "data__eval": 0.1}),
    "tied_one_gpu": ("qwen3-0.6b", 6, "A100-80GB", {"data__packing": False, "optim__implementation": "foreach"}),
    "stage_1": ("qwen3-0.6b", 6, "4xA100-80GB", {"data__packing": False, "sharding__zero_stage": 1}),
    "no_checkpoints": (
        *("llama-2-7b", 6, "8xA100-80GB"),
        {"data__packing": False, "activation_checkpointing__mode": "none"},
    ),
    "masks": ("qwen3-0.6b", 6, "4xT4", {"precision": "fp16", "data__seq_len": 8192}),
    "masks_kept": (
        *("qwen3-0.6b", 6, "4xA100-80GB"),
        {"precision": "fp32", "data__seq_len": 4096, "activation_checkpointing__mode": "none"},
    ),
    "pure_bf16": ("llama-2-7b", 6, "4xA100-80GB", {"data__packing": False, "precision": "bf16_pure"}),
    "pure_bf16_all": (
        *("qwen3-0.6b", 6, "A100-80GB"),
        {
            "data__packing": False,
            "precision": "bf16_pure",
            "sharding__reduce_dtype": "bf16",
            "optim__state_dtype": "bf16",
        },
    ),
    "offload_optimizer": (
        *("llama-3.1-8b", 6, "2xA100-80GB"),
        {"data__packing": False, "data__seq_len": 2048, "sharding__offload": "optimizer"},
    ),
    "offload_optimizer_alone": (
        *("llama-3.1-8b", 6, "A100-80GB"),
        {"data__packing": False, "data__seq_len": 2048, "sharding__offload": "optimizer"},
    ),
    "8bit": ("llama-2-7b", 6, "4xA100-80GB", {"data__packing": False, "optim__name": "adamw_8bit"}),
    "paged_pure_bf16": (
        *("qwen3-0.6b", 6, "A100-80GB"),
        {"data__packing": False, "precision": "bf16_pure", "optim__name": "paged_adamw_8bit"},
    ),
    "offload": ("llama-2-7b", 6, "4xA100-80GB", {"data__packing": False, "sharding__offload": "params"}),
}


def traced_peaks(settings: dict[str, Any], gpus: str) -> tuple[int, dict[str, int], int]:
    """Return the traced run's peak and that of each phase, in bytes of the device, and the peak of the host."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.simulate import simulate

    found = simulate(Config.from_dict(settings), parse_gpus(gpus))
    return found.allocated, dict(found.phases), found.host


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.slow
def test_peak_of_the_traced_run(tmp_path: Path, name: str) -> None:
    """The run itself on fake tensors, at the real width: within 2 %."""
    model, layers, gpus, settings = TRACED[name]
    config, hardware = make_config(model, tmp_path, layers=layers, **settings), parse_gpus(gpus)
    # In a process of its own: autograd takes no new kind of device after its first backward.
    peak, phases, host = run_on_kept_ranks(traced_peaks, 1, config.to_dict(), gpus, timeout=200, group="simulated")[0]
    result = simulate_quick(config, hardware)
    assert result["allocated_gib"] * 2**30 == pytest.approx(peak, rel=0.02)
    assert result["host_gib"] * 2**30 == pytest.approx(host, rel=0.06)
    for phase in ("load", "forward", "clip", "step", "evaluate", "save"):
        if (expected := phases.get(phase)) is None:
            continue
        assert result["phases"][phase] * 2**30 == pytest.approx(expected, rel=0.05, abs=2**26), phase


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model__freeze": ["model.embed_tokens"]}, "frozen"),
        ({"batch__global_batch_size": 9}, "9"),
    ],
)
def test_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate_quick(make_config("llama-3.1-8b", tmp_path, **settings), parse_gpus("8xH100"))
    with pytest.raises(ConfigError, match="no bf16 arithmetic"):
        simulate_quick(make_config("llama-3.1-8b", tmp_path), parse_gpus("8xT4"))


def traced_refusal(settings: dict[str, Any], gpus: str) -> str:
    """On a rank of its own: the whole simulation of settings that it refuses."""
    from fsdp_trainer.memory.simulate import simulate

    with pytest.raises(ConfigError) as caught:
        simulate(Config.from_dict(settings), parse_gpus(gpus))
    return str(caught.value)


def test_rows_beyond_learned_positions_are_refused_by_both_simulations(tmp_path: Path) -> None:
    """As a run refuses them. GPT-2 names its table n_positions; OPT's has two rows more than positions."""
    shape = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 100}
    (tmp_path / "config.json").write_text(
        json.dumps(shape | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    settings = {"model": {"path": str(tmp_path), "init": "random"}, "data": {"seq_len": 100}}
    simulate_quick(Config.from_dict(settings), parse_gpus("1xH100"))
    settings["data"] = {"seq_len": 101}
    with pytest.raises(ConfigError, match=r"data\.seq_len: 101, max_position_embeddings 100") as quick:
        simulate_quick(Config.from_dict(settings), parse_gpus("1xH100"))
    assert run_on_kept_ranks(traced_refusal, 1, settings, "1xH100", group="simulated")[0] == str(quick.value)
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
    shape |= {"max_position_embeddings": 100, "word_embed_proj_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"model_type": "opt"}))
    with pytest.raises(ConfigError, match=r"data\.seq_len: 101, max_position_embeddings 100"):
        simulate_quick(Config.from_dict(settings), parse_gpus("1xH100"))


def command(config: Config, *words: str) -> list[str]:
    return ["simulate", "--quick", f"--model.path={config.model.path}", "--batch.global_batch_size=8", *words]


def test_command_answers_in_time_without_torch(tmp_path: Path) -> None:
    words = command(make_config("llama-3.1-70b", tmp_path), "--gpus=8xH100", "--json")
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "fsdp_trainer", *words], capture_output=True, text=True, check=True)
    after = os.times()
    # CPU seconds, which other work on the machine does not stretch; the command waits for nothing.
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert json.loads(done.stdout)["parameters"] == 70_553_706_496
    assert seconds < 1.5
    code = f"import sys; from fsdp_trainer import cli\ntry: cli.main({words})\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert light.python(code).returncode == 0


def run(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code in (0, None)
    return capsys.readouterr().out


def test_command_text_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("llama-3.1-8b", tmp_path)
    text = run(capsys, command(config, "--gpus=8xH100", "--picture=-"))
    assert "8.03B parameters on 8xH100-80GB" in text and "fits" in text
    assert re.search(r"v peak|peak [\d.]+ GiB in \w+ v", text)
    assert "host, a node:" in text
    assert re.search(r"a step: \d+\.\d\d s predicted, [\d,]+ tokens/s a GPU, limited by \w+", text)
    text = run(capsys, command(config, "--gpus=2x4090", f"--picture={tmp_path / 'm.png'}"))
    assert "does not fit" in text and (tmp_path / "m.png").stat().st_size > 10_000
    text = run(capsys, command(config, "--gpus=8xH100", "--host-ram=16GiB"))
    assert re.search(r"RAM of one machine: does not fit: [\d.]+ GiB needed by its 8 ranks of 16.0 GiB", text)


def test_command_refuses_an_allocator_in_closed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(command(make_config("llama-3.1-8b", tmp_path), "--gpus=8xH100", "--classic-segments"))
    assert caught.value.code == 2 and "leave out one of them" in capsys.readouterr().err
