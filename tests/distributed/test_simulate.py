"""What `simulate` says of runs on GPUs: the numbers that follow from the model, and the spikes people run into."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from docs.make_readme_table import load_cells, machine_of, model_folder
from fsdp_trainer import Config, cuda_allocator
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.estimate import estimate_deepspeed
from fsdp_trainer.memory.hardware import parse_gpus, read_overheads
from fsdp_trainer.memory.host import WORKER_BYTES
from fsdp_trainer.memory.machine import machine_bytes
from fsdp_trainer.memory.quick import simulate_quick
from tests import simulation_runs
from tests.ranks import run_on_kept_ranks, run_ranks
from tests.simulation_runs import SMALL, settings
from tests.sweeps import share

VOCABULARY, HIDDEN, WIDTH, LAYERS, TOKENS = 4096, 256, 512, 3, 512
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDTH + 2 * HIDDEN
PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * LAYER + HIDDEN
SHARD = 4 * PARAMETERS // 8
PROCESS = read_overheads(8.0)["process"]
WORKSPACES = 2 * (2 * 4096 + 16 * 8) * 1024  # cuBLAS before Hopper: the forward's thread, and the backward's
KEYS = {
    "allocated_gib",
    "reserved_gib",
    "min_capacity_gib",
    "host_gib",
    "phases",
    "breakdown",
    "step_seconds",
    "step_time",
    "tokens_per_second_per_gpu",
    "fits",
    "limit",
    "config",
}
LARGE = {"vocab_size": 248_000}  # a vocabulary of today


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    evaluation = {"data": {"eval": "unused.jsonl", "packing": False, "seq_len": 512}, "eval": {"at_end": True}}
    cases = {
        "base": settings(folder),
        "foreach": settings(folder, optim={"implementation": "foreach"}),
        "checkpointed": settings(folder, activation_checkpointing={"mode": "full"}),
        "plain": settings(folder, model=LARGE, loss={"kind": "plain"}),
        "chunked": settings(folder, model=LARGE, loss={"chunk_tokens": 64}),
        "tied": settings(folder, model={"tie_word_embeddings": True}),
        "offload": settings(folder, sharding={"offload": "params"}),
        "stage0": settings(folder, sharding={"zero_stage": 0}),
        "8bit": settings(folder, sharding={"zero_stage": 0}, optim={"name": "adamw_8bit"}),
        "paged": settings(folder, sharding={"zero_stage": 0}, optim={"name": "paged_adamw_8bit"}),
        "stage2": settings(folder, sharding={"zero_stage": 2}, **evaluation),
        "evaluated": settings(folder, **evaluation),
        "accumulated": settings(folder, batch={"global_batch_size": 800}),
        "packed": settings(folder, data={"packing": True}),
        "grouped": settings(folder, model={"num_key_value_heads": 2}),
        "random": settings(folder, model={"num_hidden_layers": 3, "vocab_size": 64_000}, export={"at_end": False}),
    }
    cases["random"]["model"]["init"] = "random"
    cases["frozen"] = settings(folder)
    cases["frozen"]["model"]["freeze"] = ["model.layers.0"]
    return run_on_kept_ranks(simulation_runs.simulate_all, 1, cases, "8xA100-80GB", timeout=300, group="simulated")[0]


@pytest.fixture(scope="module")
def on_t4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    cases = {
        "base": settings(folder, precision="fp16"),
        "grouped": settings(folder, precision="fp16", model={"num_key_value_heads": 2}),
        "packed": settings(folder, precision="fp16", data={"packing": True}),
    }
    return run_on_kept_ranks(simulation_runs.simulate_all, 1, cases, "8xT4", timeout=300, group="simulated")[0]


def test_cpu_ranks_hold_tensors_and_processes_in_the_machines_memory(tmp_path: Path) -> None:
    """Nothing of a GPU is in it; and the closed form agrees."""
    bf16 = {"precision": "bf16", "activation_checkpointing": {"mode": "full"}}
    plain = {"packing": False, "seq_len": 512, "workers": 0}
    cases = {
        "plain": settings(tmp_path, precision="fp32", data=plain),
        "packed": settings(tmp_path, data={**plain, "packing": True}, **bf16),
        "workers": settings(tmp_path, data={**plain, "workers": 40}, **bf16),
        "random": settings(tmp_path, model={"vocab_size": 64_000}, data=plain, export={"at_end": False}, **bf16),
    }
    cases["random"]["model"]["init"] = "random"
    hardware = parse_gpus("2xCPU")
    for name, found in run_on_kept_ranks(simulation_runs.simulate_all, 1, cases, "2xCPU", group="simulated")[0].items():
        result, phases = found["json"], found["phases"]
        assert (result["reserved_gib"], found["streams"]) == (result["allocated_gib"], 1)
        assert result["limit"] * 2**30 == hardware.usable_bytes == machine_bytes() // 2
        assert result["fits"]
        assert phases["load"] == pytest.approx(found["breakdown"]["parameters"], rel=0.01)
        assert found["host"] >= PROCESS + max(phases.values()) - found["largest"]["temporaries"], name
        if name != "workers":  # both are alike but for rank 0's file
            assert result["min_capacity_gib"] * 2**30 == pytest.approx(found["host"], rel=0.02)
        quick = simulate_quick(Config.from_dict(cases[name]), hardware)
        assert quick["allocated_gib"] == pytest.approx(result["allocated_gib"], rel=0.05), name
        assert quick["host_gib"] == pytest.approx(result["host_gib"], rel=0.06), name
        assert max(quick["host_node_gib"].values()) == pytest.approx(2 * result["min_capacity_gib"], rel=0.06), name
        if name == "workers":
            assert 2 * result["min_capacity_gib"] * 2**30 == 2 * PROCESS + 40 * WORKER_BYTES


def test_json_has_its_keys_and_states_are_exact(runs: dict[str, Any]) -> None:
    result = runs["base"]["json"]
    assert set(result) == KEYS
    assert set(result["phases"]) == {"load", "forward", "backward", "clip", "step", "evaluate", "save"}
    assert result["phases"]["evaluate"] is None
    assert result["fits"]
    assert result["limit"] == pytest.approx(79.15 - 2.0, abs=0.3)
    assert result["step_seconds"] > 0
    states = {name: runs["base"]["breakdown"][name] for name in ("parameters", "optimizer_state")}
    assert states["parameters"] == SHARD
    assert states["optimizer_state"] == pytest.approx(2 * SHARD, abs=1000)  # and a step count for each parameter
    assert sum(runs["base"]["breakdown"].values()) == max(runs["base"]["phases"].values())
    assert runs["base"]["timeline_peak"] == max(runs["base"]["phases"].values())
    assert result["allocated_gib"] <= result["min_capacity_gib"] <= result["reserved_gib"]


def test_an_estimate_of_states_misses_the_step(runs: dict[str, Any]) -> None:
    """Section M, estimates: DeepSpeed's counts 18 bytes a parameter over the ranks, and the ledger names the rest."""
    estimate = estimate_deepspeed(PARAMETERS, largest_layer=VOCABULARY * HIDDEN, gpus_per_node=8, zero_stage=3).gpu
    states = {"parameters", "gradients", "optimizer_state"}
    for name in ("base", "packed"):
        held = runs[name]["breakdown"]
        rest = sum(size for kind, size in held.items() if kind not in states) - WORKSPACES
        assert sum(held.values()) - WORKSPACES > 2 * estimate, name
        assert rest > estimate, name  # what an estimate of states cannot know


def test_first_step_spike_of_foreach(runs: dict[str, Any]) -> None:
    """Report 99: foreach needs one more copy of its larger group of shards where the states appear, fused none."""
    fused, foreach = (runs[name]["phases"]["step"] for name in ("base", "foreach"))
    assert fused == pytest.approx(4 * SHARD + WORKSPACES, rel=0.001)
    embedding = 4 * VOCABULARY * HIDDEN // 8  # is not decayed, so it is stepped apart
    assert foreach - fused == pytest.approx(SHARD - embedding, rel=0.002)


def test_26_a_frozen_layer_saves_its_gradients_and_states(runs: dict[str, Any]) -> None:
    """Also in a model whose other layers train: a unit is a layer, and the frozen one has no gradient memory."""
    all_trained, frozen = (runs[name]["phases"]["step"] for name in ("base", "frozen"))
    assert all_trained - frozen == pytest.approx(3 * 4 * LAYER // 8, rel=0.01)
    assert runs["frozen"]["breakdown"]["parameters"] == SHARD


def test_97_loading_takes_the_shards_alone(runs: dict[str, Any]) -> None:
    """The public case has the whole model on each GPU for a moment."""
    assert SHARD <= runs["base"]["phases"]["load"] < SHARD + 4 * LAYER


def test_logits_spike(runs: dict[str, Any]) -> None:
    """Report 100. Plain: bf16 and fp32 logits and a gradient of each at once; chunked: one chunk of them."""
    plain, chunked = (max(runs[name]["phases"].values()) for name in ("plain", "chunked"))
    logits = TOKENS * LARGE["vocab_size"]
    assert runs["plain"]["largest"]["temporaries"] >= 4 * logits
    assert plain - chunked > 7 * logits
    assert max(runs["chunked"]["kept"][0], runs["chunked"]["largest"]["temporaries"]) <= max(
        4 * 64 * LARGE["vocab_size"], 4 * LARGE["vocab_size"] * HIDDEN
    )


def test_reduction_buffer_holds_one_table(runs: dict[str, Any]) -> None:
    """Report 101: untied, embedding and head are units of their own: no buffer for both."""
    table = 4 * VOCABULARY * HIDDEN
    assert runs["base"]["largest"]["communication_buffers"] == pytest.approx(table, rel=0.01)
    assert runs["tied"]["largest"]["communication_buffers"] == pytest.approx(table, rel=0.01)


def test_saving_and_evaluation_spikes(runs: dict[str, Any]) -> None:
    """Saving gathers one whole table; an evaluation gathers weights and keeps nothing for a backward."""
    rest = 3 * SHARD + WORKSPACES
    table = 2 * VOCABULARY * HIDDEN
    assert rest + table < runs["base"]["phases"]["save"] < rest + 2.6 * table
    assert runs["base"]["host"] > 3 * SHARD  # the copy that is written in the background
    gathered = 2 * PARAMETERS
    assert runs["stage2"]["phases"]["evaluate"] > rest + 0.99 * gathered
    assert rest < runs["evaluated"]["phases"]["evaluate"] < runs["evaluated"]["phases"]["forward"]


def test_checkpointing_offload_and_accumulation(runs: dict[str, Any]) -> None:
    base, checkpointed, offload = (runs[name] for name in ("base", "checkpointed", "offload"))
    assert checkpointed["phases"]["forward"] < base["phases"]["forward"]
    assert checkpointed["phases"]["step"] == base["phases"]["step"]
    for kind in ("parameters", "gradients", "optimizer_state"):
        assert offload["breakdown"][kind] == 0
    assert offload["host"] - base["host"] >= SHARD  # so small a model takes most of the host while it is loaded
    assert runs["accumulated"]["json"]["step_seconds"] > 50 * base["json"]["step_seconds"]


def test_paged_codes_count_on_the_host(runs: dict[str, Any]) -> None:
    """Two bytes of every parameter of a matrix: not on the GPU, which they may leave, but where they may come to."""
    codes = 2 * (VOCABULARY * HIDDEN + LAYERS * (LAYER - 2 * HIDDEN))
    for phase in ("load", "clip", "step", "save"):
        assert runs["8bit"]["phases"][phase] - runs["paged"]["phases"][phase] == codes
    state = {name: runs[name]["breakdown"]["optimizer_state"] for name in ("8bit", "paged")}
    assert state["8bit"] - state["paged"] == codes
    assert runs["paged"]["host"] - runs["8bit"]["host"] == codes


def test_new_weights_are_drawn_on_the_host(runs: dict[str, Any]) -> None:
    whole = 4 * (PARAMETERS + 2 * HIDDEN * (64_000 - VOCABULARY))
    assert whole < runs["random"]["host"] < 1.05 * whole + 800 * 2**20


def test_streams_are_kept_apart(runs: dict[str, Any]) -> None:
    """The allocator pools by stream: compute, gathering in, gathering, reducing."""
    assert runs["base"]["streams"] >= 3


def test_attention_keeps_no_scores_on_ampere_and_does_on_turing(runs: dict[str, Any], on_t4: dict[str, Any]) -> None:
    """Flash where it runs, the memory-efficient kernel before; that one knows no grouped heads, so torch takes math."""
    scores = 4 * 4 * TOKENS * TOKENS  # fp32 even in a half-precision run, one layer
    inputs = 2 * TOKENS * WIDTH  # the widest thing a layer keeps
    for fused in (runs["base"], runs["grouped"], on_t4["base"]):
        assert fused["kept"].count(scores) == 0
        assert max(size for size in fused["kept"] if size < scores) >= inputs
    assert on_t4["grouped"]["kept"].count(scores) >= LAYERS
    mask = 2 * TOKENS * TOKENS  # packed rows without a kernel for documents: an additive mask a layer
    assert on_t4["packed"]["kept"].count(mask) - on_t4["base"]["kept"].count(mask) >= LAYERS
    assert runs["packed"]["kept"].count(mask) <= runs["base"]["kept"].count(mask)
    assert runs["packed"]["largest"]["temporaries"] == runs["base"]["largest"]["temporaries"]


def test_whole_weights_are_named_where_nothing_is_gathered(runs: dict[str, Any]) -> None:
    """At stage 0 each rank copies its own masters to the compute dtype: weights, not activations."""
    assert runs["stage0"]["largest"]["unsharded_parameters"] == 2 * VOCABULARY * HIDDEN
    assert runs["stage0"]["breakdown"]["unsharded_parameters"] >= 2 * VOCABULARY * HIDDEN


LINEAR: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": {"mode": "full"}},
    "stage2": {"sharding": {"zero_stage": 2}},
}


@pytest.mark.parametrize("name", share(LINEAR, ["full"]))
def test_extrapolation_is_exact_where_it_is_linear(name: str, tmp_path: Path) -> None:
    cases = {name: settings(tmp_path, model={"num_hidden_layers": 11, "vocab_size": 512}, **LINEAR[name])}
    found = run_on_kept_ranks(
        simulation_runs.extrapolate_and_simulate, 1, cases, "8xA100-80GB", timeout=300, group="simulated"
    )[0]
    for name, (guessed, full, linear) in found.items():
        assert linear, name
        assert guessed == full, name


def test_a_gpu_holds_what_a_cpu_rank_holds_where_kernels_are_the_same(tmp_path: Path) -> None:
    """So what is shown of CPU ranks to the byte holds for the GPU's numbers: eager attention has no kernel of its own.

    The backward of the CPU may be higher: there a reduction sums in a buffer of its own.
    """
    values = settings(tmp_path, model={"num_hidden_layers": 2}, activation_checkpointing={"mode": "full"})
    values["model"]["attention"] = "eager"
    values["data"]["eval"], values["eval"] = "unused.jsonl", {"at_end": True}
    gpu, cpu, rows = run_on_kept_ranks(simulation_runs.both_targets, 1, values, group="simulated")[0]
    for phase in ("forward", "clip", "step", "evaluate"):
        assert gpu[phase] + rows - cpu[phase] == WORKSPACES, phase
    assert gpu["backward"] + rows - WORKSPACES <= cpu["backward"]


@pytest.mark.parametrize("stage", [1, 3])
def test_three_micro_batches_stand_for_all(stage: int, tmp_path: Path) -> None:
    values = settings(tmp_path, model={"num_hidden_layers": 2}, sharding={"zero_stage": stage})
    values["batch"] = {"global_batch_size": 48, "micro_batch_size": 1}
    few, whole = run_on_kept_ranks(simulation_runs.accumulated, 1, values, group="simulated")[0]
    assert few == whole


def test_segments_are_those_of_a_run(tmp_path: Path) -> None:
    said, expandable, classic = run_on_kept_ranks(
        simulation_runs.reserved, 1, settings(tmp_path), "8xA100-80GB", group="simulated"
    )[0]
    assert cuda_allocator.SETTING == "expandable_segments:True"
    assert said == expandable != classic
    words = ["--gpus=8xA100-80GB", f"--model.path={settings(tmp_path)['model']['path']}", "--data.packing=false"]
    words += ["--data.seq_len=512", "--batch.global_batch_size=8", "--activation_checkpointing.mode=none", "--json"]
    commands = [words, [*words, "--classic-segments"]]
    found = [run_ranks(simulation_runs.command, 1, w, str(tmp_path))[0][0][0] for w in commands]
    assert [round(json.loads(text)["reserved_gib"] * 2**30) for text in found] == [expandable, classic]


def test_command_answers_from_the_cache_the_second_time(tmp_path: Path) -> None:
    values = settings(tmp_path, model={"num_hidden_layers": 1})
    words = ["--gpus", "8xA100-80GB", f"--model.path={values['model']['path']}", "--data.packing=false"]
    words += ["--data.seq_len=64", "--batch.global_batch_size=8"]
    (first, slow), (second, quick) = run_ranks(simulation_runs.command, 1, [*words, "--json"], str(tmp_path))[0]
    assert set(json.loads(first)) == KEYS
    assert json.loads(first) == json.loads(second)
    assert quick < slow / 3
    assert len(list((tmp_path / "fsdp_trainer" / "simulations").glob("*.json"))) == 1
    table = run_ranks(simulation_runs.command, 1, words, str(tmp_path))[0][0][0]
    assert "fits" in table
    assert "highest in each phase" in table


def test_cache_key_follows_the_content(tmp_path: Path) -> None:
    base = settings(tmp_path)
    elsewhere = {**base, "output_dir": "elsewhere"}
    cases = {
        "base": (base, "8xA100-80GB"),
        "same": (elsewhere, "8xA100-80GB"),
        "gpus": (base, "8xH100-80GB"),
        "stage": ({**base, "sharding": {"zero_stage": 2}}, "8xA100-80GB"),
        "model": (settings(tmp_path, model={"num_hidden_layers": 5}), "8xA100-80GB"),
    }
    found = run_on_kept_ranks(simulation_runs.keys, 1, cases, group="simulated")[0]
    assert found["base"] == found["same"]
    assert len(set(found.values())) == 4


def test_bf16_is_refused_where_a_run_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bf16"):
        run_on_kept_ranks(simulation_runs.simulate_all, 1, {"base": settings(tmp_path)}, "2xT4", group="simulated")


def test_ranks_that_do_not_divide_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    apart = settings(tmp_path, sharding={"reshard_after_forward": 3}, batch={"global_batch_size": 16})
    with pytest.raises(ConfigError, match="must be a divisor"):
        run_on_kept_ranks(simulation_runs.simulate_all, 1, {"it": apart}, "2x8xA100-80GB", group="simulated")


def test_small_model_is_what_the_numbers_say() -> None:
    assert (SMALL["vocab_size"], SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_hidden_layers"]) == (
        VOCABULARY,
        HIDDEN,
        WIDTH,
        LAYERS,
    )


def test_plans_of_the_readme_are_what_simulate_says() -> None:
    """Two of small models and few micro-batches, which a simulation takes a few seconds for."""
    places = [("Qwen3 0.6B", "8x80"), ("Llama 3.2 1B", "8x80")]
    cells = {cell["model"]: cell for cell in load_cells() if (cell["model"], cell["machine"]) in places}
    assert len(cells) == len(places)
    with contextlib.ExitStack() as folders:
        values = {
            model: {**cell["settings"], "model.path": folders.enter_context(model_folder(model))}
            for model, cell in cells.items()
        }
        gpus = machine_of(cells["Qwen3 0.6B"]).gpus
        said = run_on_kept_ranks(simulation_runs.simulate_all, 1, values, gpus, timeout=180, group="simulated")[0]
    for model, cell in cells.items():
        assert said[model]["json"]["allocated_gib"] == pytest.approx(cell["simulated"]["allocated_gib"], abs=0.001)
        assert said[model]["json"]["min_capacity_gib"] == pytest.approx(
            cell["simulated"]["min_capacity_gib"], abs=0.001
        )
        assert said[model]["json"]["fits"]
