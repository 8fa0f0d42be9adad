"""The time of a step: streams by hand, and what each setting does to it in closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.memory.estimate_model import count_parameters, read_model_shape
from fsdp_trainer.memory.estimate_settings import StepSettings
from fsdp_trainer.memory.estimate_time import estimate_step_time
from fsdp_trainer.memory.estimate_work import layer_backward, layer_forward, layer_recomputed
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.rates import causal_pairs, read_rates
from fsdp_trainer.memory.timing import Event, Part, StepTime, run_streams, time_step

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
SHAPE = read_model_shape(MODELS / "llama-3.1-8b.json")
SMALL = read_model_shape(MODELS / "llama-3.2-1b.json")


def settings(ranks: int = 8, **words: Any) -> StepSettings:
    return StepSettings(**{"ranks": ranks, "seq_len": 2048, **words})


def predict(gpus: str | Hardware, *, shape: Any = SHAPE, **words: Any) -> StepTime:
    hardware = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    time = estimate_step_time(shape, settings(hardware.count, **words), hardware)
    assert time is not None
    return time


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_forward_hides_all_gathers_but_the_first() -> None:
    layer = [Event("gather", 1.0, ahead=2), Event("arrive", 0.0), Event("matrices", 2.0)]
    assert run_streams(layer * 4) == 1.0 + 4 * 2.0
    slow = [Event("gather", 3.0, ahead=2), Event("arrive", 0.0), Event("matrices", 2.0)]
    assert run_streams(slow * 4) == 4 * 3.0 + 2.0  # the links are never idle


def test_a_backward_gathers_one_unit_ahead() -> None:
    def backward(gather: float, reduce: float) -> list[Event]:
        events = [Event("gather", gather)]
        for number in range(4):
            events.append(Event("arrive", 0.0))
            events += [Event("gather", gather)] * (number < 3)
            events += [Event("matrices", 4.0), Event("reduce", reduce)]
        return events

    assert run_streams(backward(1.0, 2.0)) == 1.0 + 4 * 4.0 + 2.0  # exposed: the first gather, the last reduction
    # Seven a layer on the links: each layer waits for what the one before it sent.
    assert run_streams(backward(1.0, 6.0)) == pytest.approx(4 * 7.0 + 4.0, abs=1.0)


def test_a_backward_waits_for_the_reduction_before_the_last() -> None:
    """Its buffer is freed before the next one is made; else the last two units would run beside the long reductions."""
    units = [[Event("matrices", 4.0), Event("reduce", seconds)] for seconds in (10.0, 10.0, 0.0, 0.0)]
    assert run_streams([event for unit in units for event in unit]) == 4.0 + 10.0 + 10.0 + 4.0


def test_transfers_run_beside_messages_and_hosts_beside_both() -> None:
    events = [
        Event("matrices", 1.0),
        Event("reduce", 1.0),
        Event("to host", 1.0, "to host"),
        Event("host", 1.0, "host"),
    ]
    assert run_streams(events) == 4.0
    assert run_streams(events * 2) == 5.0
    assert run_streams(events, transfers=False) == 2.0


def test_what_is_hidden_counts_nothing() -> None:
    layer = [Event("gather", 1.0, ahead=2), Event("arrive", 0.0), Event("matrices", 2.0)]
    few, many = (time_step([Part(layer * count)], [], data_seconds=0.0) for count in (2, 20))
    assert few.exposed_communication == many.exposed_communication == 1.0
    late = time_step([Part(layer, times=3)], [], data_seconds=20.0)
    assert late.exposed_data == 20.0 - 9.0 and late.limited_by == "data loader" and late.seconds == 20.0


# --- rates -----------------------------------------------------------------------------------------------------------


def test_small_products_reach_less() -> None:
    rates = read_rates(parse_gpus("A100-80GB"))
    assert rates is not None

    def reached(rows: int, columns: int, inner: int) -> float:
        return 2 * rows * columns * inner / rates.matrix_seconds(rows, columns, inner, element_bytes=2) / 1e12

    assert reached(8192, 8192, 8192) == pytest.approx(230, rel=0.03)  # measured: mli/transformers-benchmarks
    assert reached(256, 4096, 4096) < 0.8 * reached(8192, 4096, 4096)
    assert reached(64, 64, 128) < 1  # moving is what takes the time
    fp32 = rates.matrix_seconds(8192, 8192, 8192, element_bytes=4)
    assert 2 * 8192**3 / fp32 == pytest.approx(19.5e12, rel=0.03)


def test_links_between_machines_are_those_of_all_adapters() -> None:
    rates = read_rates(parse_gpus("2x8xA100-80GB"))
    assert rates is not None
    inside, across = (rates.message_seconds(1e9, ranks) for ranks in (8, 16))
    assert 1 < across / inside < 2  # 8 x 25 GB/s against 300
    alone = rates.message_seconds(1e9, 2, stride=8)  # a pair of ranks has one adapter
    assert alone > 5 * across and rates.lane(2, stride=8) == "network" and rates.lane(8) == "links"


def test_a_window_ends_what_a_query_looks_at() -> None:
    assert causal_pairs(1024) == causal_pairs(1024, 4096) == 512
    counted = sum(min(place, 1024) for place in range(8192)) / 8192
    assert causal_pairs(8192, 1024) == pytest.approx(counted, abs=1)


def test_unknown_rates_give_no_time() -> None:
    hardware = replace(parse_gpus("8xH100"), memory_bandwidth=0.0)
    assert estimate_step_time(SHAPE, settings(), hardware) is None


# --- effects ---------------------------------------------------------------------------------------------------------


def test_checkpointing_runs_the_forward_again_but_for_the_last_product() -> None:
    whole = settings()
    forward, backward = (work(SHAPE, whole, index=0) for work in (layer_forward, layer_backward))
    again = layer_recomputed(SHAPE, whole, index=0)
    last = 2.0 * whole.tokens * SHAPE.hidden * SHAPE.ffn
    assert again.flops == forward.flops - last
    products = sum(2 * m * n * k * count for (m, n, k, _), count in forward.matrices.items())
    assert sum(2 * m * n * k * count for (m, n, k, _), count in backward.matrices.items()) == 2 * products
    assert 0.24 < again.flops / (forward.flops + backward.flops) < 1 / 3  # a third, but for that product
    none, every_2, full = (
        predict("8xH100", checkpointing=mode, every_n=2) for mode in ("none", "every_n_layers", "full")
    )
    assert full.compute / none.compute == pytest.approx(1.19, abs=0.04)  # the head is not run again
    assert every_2.compute == pytest.approx((none.compute + full.compute) / 2, rel=1e-6)


def test_products_are_six_per_parameter_and_token() -> None:
    """Every weight of the layers and the head is multiplied three times; the embedding is looked up."""
    whole, matrices = settings(), 0.0
    for index in range(SHAPE.layers):
        for work in (layer_forward, layer_backward):
            products = work(SHAPE, whole, index=index).matrices
            matrices += sum(2 * m * n * k * count for (m, n, k, _), count in products.items())
    tables = 2 * SHAPE.vocab * SHAPE.hidden
    assert matrices == pytest.approx(6 * (count_parameters(SHAPE) - tables) * whole.tokens, rel=1e-3)


@pytest.mark.parametrize("where", ["offload_params", "offload_optimizer"])
def test_offload_costs_time(where: str) -> None:
    words = {"steps_on_device": False, where: True}
    on_gpu, on_host = predict("4xA100-80GB"), predict("4xA100-80GB", **words)
    assert on_host.seconds > on_gpu.seconds and on_host.optimizer > 10 * on_gpu.optimizer
    assert on_host.limited_by == "host optimizer"
    slower = predict(replace(parse_gpus("4xA100-80GB"), pcie_bandwidth=4e9), **words)
    assert slower.exposed_transfer > on_host.exposed_transfer


def test_streaming_the_state_through_the_gpu_moves_the_cost_to_pcie() -> None:
    words = {"offload_optimizer": True, "zero_stage": 2}
    host, device = (predict("4xA100-80GB", **words, steps_on_device=on) for on in (False, True))
    assert device.optimizer < host.optimizer / 3 and device.exposed_transfer > host.exposed_transfer
    # 16 bytes a parameter come, 12 leave: the larger direction is what counts.
    rates = read_rates(parse_gpus("4xA100-80GB"))
    assert rates is not None
    coming = rates.pcie_seconds(16 * count_parameters(SHAPE) / 4)
    assert device.exposed_transfer + device.optimizer >= coming


def test_slower_links_are_slower_and_faster_ones_stop_to_matter() -> None:
    base = parse_gpus("8xA100-80GB")
    times = [predict(replace(base, link_bandwidth=rate)) for rate in (10e9, 50e9, 300e9, 3000e9)]
    assert [time.seconds for time in times] == sorted((time.seconds for time in times), reverse=True)
    assert times[0].limited_by == "links" and times[0].exposed_communication > times[0].compute
    assert times[2].seconds < 1.05 * times[3].seconds


def test_more_micro_batches_share_the_gathers_of_stage_2() -> None:
    def exposed(stage: int, count: int) -> float:
        return predict("8xRTX4090", zero_stage=stage, micro_batches=count).exposed_communication / count

    assert exposed(2, 8) < 0.8 * exposed(2, 1)
    assert exposed(3, 8) == pytest.approx(exposed(3, 1), rel=0.02)
    assert exposed(1, 8) < 0.2 * exposed(1, 1)  # and the reductions


def test_copies_within_machines_spare_the_network() -> None:
    hardware = replace(parse_gpus("4x8xA100-80GB"), node_bandwidth=1e9)
    flat, hybrid = predict(hardware), predict(hardware, replicate=4)
    assert flat.limited_by == "network" and hybrid.seconds < flat.seconds


def test_bf16_rounding_and_8_bit_updates_cost_what_they_move() -> None:
    from fsdp_trainer.memory.estimate import ADAMW_8BIT_STATE, RECIPES, Recipe

    fp32 = predict("H100-80GB", shape=SMALL)
    in_8bit = predict("H100-80GB", shape=SMALL, recipe=Recipe(4, 4, ADAMW_8BIT_STATE, 0, 2, vector_state=8))
    pure = predict("H100-80GB", shape=SMALL, recipe=RECIPES["bf16_pure_fp32_state"], piece_bytes=14)
    assert fp32.optimizer < in_8bit.optimizer < pure.optimizer < 4 * fp32.optimizer


def test_times_are_positive_and_add_up() -> None:
    for gpus in ("T4", "2xRTX3090", "8xH100", "2x8xB200"):
        time = predict(gpus, micro_batches=3)
        parts = (time.compute, time.exposed_communication, time.exposed_transfer, time.optimizer, time.exposed_data)
        assert min(parts) >= 0 and time.compute > 0 and sum(parts) == time.seconds
