"""configs/accelerate: what the generator writes, what Accelerate reads, and nothing that it does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_trainer.config import Config
from fsdp_trainer.interop.gpu_profile import Profile, format_profile, shipped_profiles
from fsdp_trainer.launch_profile import check_profile, read_profile
from fsdp_trainer.memory.hardware import parse_gpus

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "accelerate"


def test_the_folder_is_what_the_generator_writes() -> None:
    made = {f"{profile.name}.yaml": format_profile(parse_gpus(profile.gpus)) for profile in shipped_profiles()}
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")}
    assert found == made, "run configs/make_profiles.py"


@pytest.mark.parametrize("profile", shipped_profiles(), ids=lambda profile: profile.name)
def test_accelerate_takes_every_profile_and_every_key(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers get is exactly what the profile says, and the trainer's own check agrees with it."""
    path, hardware = FOLDER / f"{profile.name}.yaml", parse_gpus(profile.gpus)
    read = load_config_from_file(str(path))
    assert isinstance(read, ClusterConfig)
    assert (read.num_processes, read.num_machines) == (hardware.count, hardware.nodes)
    assert read.distributed_type == "FSDP"
    assert read.fsdp_config == {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False}
    assert read.mixed_precision == "no"
    assert bool(read.use_cpu) == (profile.name.startswith("cpu"))
    assert ("precision: fp16" in path.read_text(encoding="utf-8")) == profile.name.startswith(("t4", "v100"))
    known = {field.name for field in dataclasses.fields(type(read))}
    content = read_profile(path)
    assert content.keys() <= known
    check_profile(content, Config.load(None, {"precision": "bf16" if hardware.bf16_flops else "fp16"}))
    for name, value in environment_of(path, content).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.activation_checkpointing is False
    assert plugin.reshard_after_forward is True
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def environment_of(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """Return what `accelerate launch` exports to the workers that concerns FSDP."""
    words = ["--config_file", str(path), "script.py"]
    if content["num_machines"] > 1:
        words[2:2] = ["--machine_rank", "1", "--main_process_ip", "127.0.0.1"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.num_processes == content["num_processes"]
    environ = prepare_multi_gpu_env(arguments)
    if content["num_machines"] > 1:
        assert (arguments.machine_rank, arguments.main_process_ip) == (1, "127.0.0.1")
        assert arguments.nproc_per_node == str(content["num_processes"] // content["num_machines"])
    return {name: value for name, value in environ.items() if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))}


def test_a_card_without_bf16_says_so() -> None:
    assert "precision: fp16" in format_profile(parse_gpus("2xT4"))
    assert "precision: fp16" not in format_profile(parse_gpus("2xL4"))


def test_profiles_are_plain_yaml_of_one_machine_or_more() -> None:
    one, two = (yaml.safe_load(format_profile(parse_gpus(gpus))) for gpus in ("8xH100", "2x8xH100"))
    assert one.keys() - two.keys() == {"machine_rank"}
    assert (one["main_process_port"], two["main_process_port"]) == (0, 29500)
