"""Simulate small models on pretended GPUs on a forked rank, and hand back numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def settings(folder: Path, *, model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Write a config.json alone, and return the settings of a run on eight ranks, with `sections` merged over them."""
    values = {**SMALL, **(model or {})}
    path = folder / f"model-{abs(hash(json.dumps(values, sort_keys=True)))}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    base: dict[str, Any] = {
        "model": {"path": str(path)},
        "data": {"packing": False, "seq_len": 512},
        "activation_checkpointing": {"mode": "none"},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def simulate_all(cases: dict[str, Any], gpus: str) -> dict[str, dict[str, Any]]:
    """Simulate each of the settings; return their JSON and, in bytes, the facts of the ledger that tests ask for."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.hardware import parse_gpus
    from fsdp_trainer.memory.simulate import simulate

    found = {}
    for name, values in cases.items():
        result = simulate(Config.from_dict(values), parse_gpus(gpus))
        ledger = result.ledger
        assert ledger is not None
        found[name] = {
            "json": result.to_json(),
            "phases": dict(result.phases),
            "breakdown": dict(result.breakdown),
            "host": result.host,
            "largest": {
                category: max((a.size for a in ledger.allocations if ledger.category(a) == category), default=0)
                for category in result.breakdown
            },
            "kept": sorted((a.size for a in ledger.allocations if ledger.category(a) == "activations"), reverse=True),
            "streams": len({a.stream for a in ledger.allocations}),
            "timeline_peak": max(sum(kinds.values()) for _, _, kinds in ledger.timeline),
        }
    return found


def extrapolate_and_simulate(cases: dict[str, Any], gpus: str) -> dict[str, tuple[Any, Any, bool]]:
    """Return each phase's peak as extrapolated and as simulated in full, and whether the lines were straight."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.extrapolate import extrapolate
    from fsdp_trainer.memory.hardware import parse_gpus
    from fsdp_trainer.memory.simulate import simulate

    found = {}
    for name, values in cases.items():
        config, hardware = Config.from_dict(values), parse_gpus(gpus)
        guessed = extrapolate(config, hardware)
        found[name] = dict(guessed.phases), dict(simulate(config, hardware).phases), guessed.linear
    return found


def reserved(values: Any, gpus: str) -> tuple[int, int, int]:
    """Return what is reserved by default, and what the allocator's replay says of both kinds of segments."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.allocator import replay
    from fsdp_trainer.memory.hardware import parse_gpus
    from fsdp_trainer.memory.simulate import allocator_events, simulate

    found = simulate(Config.from_dict(values), parse_gpus(gpus))
    assert found.ledger is not None
    events = allocator_events(found.ledger)
    return found.reserved, replay(events, expandable=True).reserved, replay(events, expandable=False).reserved


def both_targets(values: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Return each phase's peak as on a GPU of capability 8.0 and as on a CPU, which real ranks are compared with; and
    the bytes of the rows, which lie on the host of a GPU."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.traced_run import full_window, tensors_of, trace_run

    config = Config.from_dict(values)
    gpu, cpu = (trace_run(config, world_size=8, compute_capability=target).device.phases for target in (8.0, None))
    return gpu, cpu, sum(tensor.nbytes for tensor in tensors_of(full_window(config, 8)))


def accumulated(values: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return each phase's peak with the micro-batches that a simulation takes, and with all of a window."""
    from dataclasses import replace

    from fsdp_trainer import Config
    from fsdp_trainer.memory.traced_run import full_window, trace_run

    config = Config.from_dict(values)
    few = full_window(config, 8)
    whole = replace(few, micro_batches=few.micro_batches[:1] * config.check_world(8))
    assert len(few.micro_batches) < len(whole.micro_batches)
    return (
        dict(trace_run(config, world_size=8, compute_capability=8.0).device.phases),
        dict(trace_run(config, world_size=8, compute_capability=8.0, windows=[whole, whole]).device.phases),
    )


def command(words: list[str], cache: str) -> list[tuple[str, float]]:
    """Run `fsdp-trainer simulate` twice; return what it printed and the seconds it took, each time."""
    import contextlib
    import io
    import os
    import time

    from fsdp_trainer import cli

    os.environ["XDG_CACHE_HOME"] = cache
    found = []
    for _ in range(2):
        printed, started = io.StringIO(), time.process_time()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main(["simulate", *words])
        found.append((printed.getvalue(), time.process_time() - started))
    return found


def keys(cases: dict[str, tuple[Any, str]]) -> dict[str, str]:
    """Return the cache's key of each (settings, GPUs)."""
    from fsdp_trainer import Config
    from fsdp_trainer.memory.hardware import parse_gpus
    from fsdp_trainer.memory.simulation_cache import content_key

    return {n: content_key(Config.from_dict(s), parse_gpus(gpus), True) for n, (s, gpus) in cases.items()}


def time_both(cases: dict[str, tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a step's time as traced and in closed form, the FLOPs of both, and an update's bytes a parameter."""
    from dataclasses import asdict

    from fsdp_trainer import Config
    from fsdp_trainer.memory.estimate_model import count_parameters, read_model_shape
    from fsdp_trainer.memory.estimate_time import estimate_step_time
    from fsdp_trainer.memory.estimate_work import layer_backward, layer_forward, layer_recomputed, loss_forward
    from fsdp_trainer.memory.hardware import parse_gpus
    from fsdp_trainer.memory.quick import step_settings
    from fsdp_trainer.memory.rates import Stretch
    from fsdp_trainer.memory.traced_run import trace_run
    from fsdp_trainer.memory.traced_time import time_traced

    def whole(parts: Any) -> Stretch:
        total = Stretch()
        for part in parts:
            total = total.add(part) if isinstance(part, Stretch) else total
        return total

    found = {}
    for name, (gpus, values) in cases.items():
        config, hardware = Config.from_dict(values), parse_gpus(gpus)
        work = trace_run(config, world_size=hardware.count, compute_capability=hardware.capability).work
        shape = read_model_shape(config.model.path)
        step = step_settings(config, shape, ranks=hardware.count, capability=hardware.capability)
        assert work is not None
        traced, closed = time_traced(work, hardware), estimate_step_time(shape, step, hardware)
        assert traced is not None and closed is not None
        parts = [layer_forward, layer_backward, layer_recomputed]
        flops = sum(part(shape, step, index=index).flops for part in parts for index in range(shape.layers))
        forward, backward, _ = work.micro_batches[0]
        found[name] = {
            "traced": asdict(traced),
            "closed": asdict(closed),
            "traced_flops": whole(forward).flops + whole(backward).flops,
            "closed_flops": flops + loss_forward(shape, step).flops,
            "update_bytes": whole(work.update).moved * step.shards / count_parameters(shape),
        }
    return found
