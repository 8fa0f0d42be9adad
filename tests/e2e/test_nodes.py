"""Two machines of one rank each, here two agents on loopback: the same run as two ranks on one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.launch import Machines, free_port, launch_command, plan_processes
from tests.e2e.commands import environment, executable, write_settings
from tests.e2e.tiny_run import assert_same_run, tiny
from tests.fault_runs import run
from tests.ranks import REPOSITORY

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_two_machines_are_the_same_run(model_folder: Callable[[str], str], tmp_path: Path) -> None:
    settings = tiny(model_folder("qwen3_tied"), tmp_path, "quiet")
    assert run(settings, 2) == [0, 0]
    other = {**settings, "output_dir": str(tmp_path / "two")}
    words = [executable("fsdp-trainer"), "train", "--config", write_settings(other, tmp_path), "--processes", "2"]
    words += ["--nodes", "2", "--address", f"127.0.0.1:{free_port()}"]
    started = [
        subprocess.Popen(
            [*words, "--node-rank", str(rank)],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (1, 0)  # a machine may come before the first one
    ]
    said = [process.communicate(timeout=280)[0] for process in started]
    print(*said, sep="\n----\n")
    assert [process.returncode for process in started] == [0, 0]
    assert_same_run(settings, other)
    assert "finished: " in said[1] and "finished: " not in said[0]


@pytest.mark.parametrize(
    ("rank", "address", "part"),
    [
        (None, "host", "--node-rank 0 on the first machine"),
        (2, "host", "up to 1 on the last"),
        (-1, "host", "--node-rank"),
        (1, None, "--address 10.0.0.1:29500"),
        (1, "", "--address"),
        (1, "host:port", "--address"),
        (1, "host:99999", "--address"),
        (1, ":29500", "--address"),
    ],
)
def test_machines_that_cannot_meet(rank: int | None, address: str | None, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machines.parse(2, rank=rank, address=address)
    assert part in str(caught.value)


def test_machines_by_name() -> None:
    assert Machines.parse(2, rank=1, address="first") == Machines(2, 1, "first", 29500)
    assert Machines.parse(3, rank=2, address="10.0.0.1:123") == Machines(3, 2, "10.0.0.1", 123)


def test_processes_are_those_of_all_machines(tmp_path: Path) -> None:
    from fsdp_trainer import Config

    config = Config.from_dict({"batch": {"global_batch_size": 12}})
    assert plan_processes(config, profile=None, processes=4, machines=2)[0] == 4
    with pytest.raises(ConfigError, match="multiple of 2"):
        plan_processes(config, profile=None, processes=3, machines=2)
    profile = tmp_path / "p.yaml"
    profile.write_text("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n")
    assert plan_processes(config, profile=profile, processes=None, machines=2)[0] == 4
    with pytest.raises(ConfigError, match="num_machines: 2"):
        plan_processes(config, profile=profile, processes=None, machines=3)
    command = launch_command(profile, {"num_machines": 2}, arguments=[], machines=Machines(2, 1, "first", 29500))
    assert command[0] == sys.executable
    assert command[command.index("--machine_rank") + 1] == "1"
    assert command[command.index("--main_process_ip") + 1] == "first"


def test_examples_can_be_read() -> None:
    """Neither SLURM nor a cloud is here: the shell and the YAML reader take them, and the flags exist."""
    folder = REPOSITORY / "examples" / "multinode"
    subprocess.run(["bash", "-n", str(folder / "slurm.sh")], check=True)
    task = YAML(typ="safe").load((folder / "skypilot.yaml").read_text(encoding="utf-8"))
    help_text = subprocess.run(
        [executable("fsdp-trainer"), "train", "--help"], capture_output=True, text=True, check=True, env=environment()
    ).stdout
    for text in (task["run"], (folder / "slurm.sh").read_text(encoding="utf-8")):
        flags = {"--nodes", "--node-rank", "--address"}
        assert all(flag in text and flag in help_text for flag in flags)
