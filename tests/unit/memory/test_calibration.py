"""A finished run's measurements as factors: up only for memory, both ways for time, refused where they say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory.calibration import calibrate_from, describe_run
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.planning import plan
from fsdp_trainer.memory.quick import simulate_quick
from tests.plans import model_folder

ROWS, SEQ_LEN = 16, 2048


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.from_dict(
        {
            "model": {"path": model_folder(tmp_path)},
            "data": {"seq_len": SEQ_LEN},
            "batch": {"global_batch_size": ROWS},
            "output_dir": str(tmp_path / "run"),
        }
    )


HARDWARE = parse_gpus("8xH100-80GB")


def leave_run(
    config: Config,
    *,
    hardware: Hardware = HARDWARE,
    device: str = "NVIDIA H100 80GB HBM3",
    memory: float = 1.0,
    time: float = 1.0,
    filled: float = 1.0,
    steps: int = 9,
) -> Path:
    """Leave what a run would that took `memory` and `time` as often as is predicted of it."""
    folder = Path(config.output_dir)
    folder.mkdir(exist_ok=True)
    config.save(folder / "config.yaml")
    devices = {"device": device, "memory_bytes": None, "ranks": hardware.count, "ranks_per_node": hardware.count}
    (folder / "devices.json").write_text(json.dumps(devices))
    predicted = simulate_quick(config, hardware)
    seconds = (predicted["step_seconds"] or 1.0) * time
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        slow = 50.0 if step <= 3 else 1.0  # the first steps load kernels
        on_gpu = device != "CPU"
        rows.append(
            {
                "step": step,
                "loss": 1.0,
                "tokens": int(ROWS * SEQ_LEN * filled),
                "step_seconds": seconds * slow * filled,
                "max_allocated_gib": predicted["allocated_gib"] * memory if on_gpu else None,
                "max_reserved_gib": predicted["allocated_gib"] * memory * 1.1 if on_gpu else None,
            }
        )
    rows.append({"step": steps, "eval_loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(("memory", "time"), [(1.08, 1.3), (1.02, 0.7)])
def test_factors_are_measured_by_predicted(config: Config, memory: float, time: float) -> None:
    factors = calibrate_from(leave_run(config, memory=memory, time=time), HARDWARE, quick=True)
    assert factors == pytest.approx({"memory": memory, "seconds": time}, rel=1e-3)


def test_less_memory_than_predicted_promises_nothing(config: Config) -> None:
    assert calibrate_from(leave_run(config, memory=0.8), HARDWARE, quick=True)["memory"] == 1.0


def test_predictions_move_by_the_factors(config: Config) -> None:
    run = leave_run(config, memory=1.08, time=1.3)
    first = plan(config, "8xH100-80GB", quick=True).to_json()
    moved = plan(config, "8xH100-80GB", quick=True, calibrate=run).to_json()
    assert moved["calibration"] == pytest.approx({"memory": 1.08, "seconds": 1.3}, rel=1e-3)
    by_settings = {json.dumps(found["config"], sort_keys=True): found for found in first["candidates"]}
    pairs = [(by_settings.get(json.dumps(found["config"], sort_keys=True)), found) for found in moved["candidates"]]
    both = [(before, after) for before, after in pairs if before is not None]
    assert both
    for before, after in both:
        assert after["allocated_gib"] == pytest.approx(1.08 * before["allocated_gib"], rel=1e-3)
        assert after["step_seconds"] == pytest.approx(1.3 * before["step_seconds"], rel=1e-3)


def test_a_run_on_other_gpus_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="other hardware") as caught:
        calibrate_from(leave_run(config), parse_gpus("2xRTX4090"), quick=True)
    assert "H100" in caught.value.values
    assert "RTX4090" in caught.value.values


def test_another_number_of_the_same_gpus_will_do(config: Config) -> None:
    assert calibrate_from(leave_run(config, time=1.2), parse_gpus("2xH100-80GB"), quick=True)["seconds"] > 1.1


def test_the_run_is_named_with_its_model_and_gpus(config: Config) -> None:
    run = leave_run(config)
    line = describe_run(run, model=config.model.path)
    assert line == f"calibrated by {run}: {config.model.path} on 8 x NVIDIA H100 80GB HBM3, 6 logged steps"
    assert describe_run(run, model="another").endswith("of other shapes than the model that is planned")


def test_on_cpu_no_memory_is_measured_and_no_time_predicted(config: Config) -> None:
    run = leave_run(config, hardware=parse_gpus("2xCPU"), device="CPU")
    with pytest.raises(ConfigError, match="measured nothing that is predicted") as caught:
        calibrate_from(run, parse_gpus("2xCPU"), quick=True)
    assert "on GPUs only" in caught.value.values


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"filled": 0.5}, "rows were too empty"), ({"steps": 3}, "too short to calibrate by")],
    ids=str,
)
def test_a_run_that_says_nothing_is_refused(config: Config, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        calibrate_from(leave_run(config, **changes), HARDWARE, quick=True)


def test_what_is_no_run_is_refused_by_what_it_lacks(config: Config, tmp_path: Path) -> None:
    run = leave_run(config)
    (run / "devices.json").unlink()
    with pytest.raises(ConfigError, match="no run that can be compared") as caught:
        calibrate_from(run, HARDWARE, quick=True)
    assert "has no devices.json" in caught.value.values
    (run / "devices.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        calibrate_from(run, HARDWARE, quick=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_seconds", float("nan")),
        ("step_seconds", 0),
        ("step_seconds", None),
        ("tokens", 0),
        ("max_allocated_gib", float("inf")),
        ("max_reserved_gib", "12"),
    ],
)
def test_a_measurement_that_is_no_number_is_named(config: Config, name: str, value: Any) -> None:
    run = leave_run(config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[-2][name] = value
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"cannot be read[\\s\\S]*{name}: {value}"):
        calibrate_from(run, HARDWARE, quick=True)


@pytest.mark.parametrize("changed", [{"ranks_per_node": 0}, {"ranks": 3, "ranks_per_node": 2}, {"memory_bytes": "x"}])
def test_devices_that_no_run_has_are_refused(config: Config, changed: dict[str, Any]) -> None:
    run = leave_run(config)
    devices = json.loads((run / "devices.json").read_text(encoding="utf-8"))
    (run / "devices.json").write_text(json.dumps(devices | changed), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        calibrate_from(run, HARDWARE, quick=True)


@pytest.mark.parametrize("line", ["1", "null", "[]"])
def test_lines_that_are_no_rows_are_refused(config: Config, line: str) -> None:
    run = leave_run(config)
    (run / "metrics.jsonl").write_text("\n".join([line] * 9), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read|too short"):
        calibrate_from(run, HARDWARE, quick=True)
