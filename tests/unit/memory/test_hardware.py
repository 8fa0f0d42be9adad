"""Names of GPUs as people type them, files of one's own, and what is refused; no torch."""

import json
from pathlib import Path

import psutil
import pytest

from fsdp_trainer.errors import ConfigError
from fsdp_trainer.memory import hardware
from fsdp_trainer.memory.hardware import CPU_RANKS, card_names, detect, parse_gpus
from fsdp_trainer.memory.machine import machine_bytes
from tests import light_imports as light

GIB = 2**30


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("4090", "1xRTX4090"),
        ("rtx 4090", "1xRTX4090"),
        ("2xRTX4090", "2xRTX4090"),
        ("4090x2", "2xRTX4090"),
        ("2 x 4090", "2xRTX4090"),
        ("NVIDIA GeForce RTX 4090", "1xRTX4090"),
        ("3090", "1xRTX3090"),
        ("8xA100-80GB", "8xA100-80GB"),
        ("A100 80GB", "1xA100-80GB"),
        ("a100-40g", "1xA100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "1xA100-80GB"),
        ("NVIDIA A100 80GB PCIe", "1xA100-PCIe-80GB"),
        ("h100", "1xH100-80GB"),
        ("H100-SXM", "1xH100-80GB"),
        ("H100x8", "8xH100-80GB"),
        ("NVIDIA H100 80GB HBM3", "1xH100-80GB"),
        ("NVIDIA H100 NVL", "1xH100-NVL-94GB"),
        ("2x8xH100", "2x8xH100-80GB"),
        ("1x1x4090", "1xRTX4090"),
        ("64xH100-80GB", "8x8xH100-80GB"),
        ("L40S", "1xL40S"),
        ("L40", "1xL40"),
        ("A10G", "1xA10G"),
        ("A10", "1xA10"),
        ("Tesla V100-SXM2-16GB", "1xV100-SXM-16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "1xRTX-6000-Ada"),
        ("NVIDIA GH200 480GB", "1xGH200-96GB"),
        ("AMD Instinct MI300X", "1xMI300X"),
        ("H100 80GB SXM5", "1xH100-80GB"),
        ("RTX 4090 24GB", "1xRTX4090"),
        ("4x T4 16 GB", "4xT4"),
        ("8 x h100", "8xH100-80GB"),
        ("８×H100", "8xH100-80GB"),
        ("A100-80", "1xA100-80GB"),
        ("80gb a100", "1xA100-80GB"),
        ("mi300x", "1xMI300X"),
        ("CPU", "1xCPU"),
        ("2xCPU", "2xCPU"),
        ("cpu x2", "2xCPU"),
        ("16xcpu", "16xCPU"),
    ],
)
def test_names_people_type(typed: str, understood: str) -> None:
    hardware = parse_gpus(typed)
    assert str(hardware) == understood
    assert hardware.count == hardware.nodes * hardware.gpus_per_node


def test_every_card_is_found_by_its_own_name() -> None:
    unknown_usable = {"B300", "GB200", "GB300", "MI325X"}
    assert len(card_names()) > 30 and unknown_usable < set(card_names())
    for name in card_names():
        if name in unknown_usable:
            with pytest.raises(ConfigError, match="not known"):
                parse_gpus(name)
            continue
        hardware = parse_gpus(name)
        assert hardware.name == name
        assert 0.9 * hardware.memory_bytes < hardware.usable_bytes < hardware.memory_bytes
        assert 50e12 < hardware.fp16_flops < 3e15 and hardware.source
        assert 3e11 <= hardware.memory_bandwidth <= 8e12


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("A100", r"several GPUs[\s\S]*A100-40GB[\s\S]*A100-80GB"),
        ("8xV100", r"several GPUs[\s\S]*V100-SXM-32GB"),
        ("RTX 4090 48GB", "not in the catalogue"),
        ("RTX 3090 Ti", r"not in the catalogue[\s\S]*RTX3090"),
        ("RTX 4080", r"not in the catalogue[\s\S]*RTX4090"),
        ("8x", "not in the catalogue"),
        ("", "not in the catalogue"),
        ("2x2x2xH100", "not in the catalogue"),
        ("12xA100-80GB", "NODESxGPUS"),
        ("0xH100", "at least one"),
        ("0xCPU", "at least one"),
        ("rtx 4090 ti", r"not in the catalogue[\s\S]*RTX4090"),
        ("99999xH100", "NODESxGPUS"),
        ("2x3x4xA100", "not in the catalogue"),
        ("8хH100", "not in the catalogue"),  # a letter of another alphabet
        ("0x8xH100", "at least one"),
        ("nowhere.yaml", r"cannot be used[\s\S]*nowhere\.yaml"),
    ],
)
def test_refused_names(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_gpus(typed)


def test_links() -> None:
    """Bridges join two cards, so a ring through four goes over PCIe; the 4090's driver has no peer access."""
    pair, four = parse_gpus("2xRTX3090"), parse_gpus("4xRTX3090")
    assert (pair.link_bandwidth, pair.p2p) == (56.25e9, True)
    assert (four.link_bandwidth, four.p2p) == (32e9, False)
    assert not parse_gpus("2xRTX4090").p2p
    assert parse_gpus("8xH100").link_bandwidth == 450e9
    assert parse_gpus("T4").bf16_flops == 0  # emulated only


def test_cpu_ranks_share_the_machine() -> None:
    two, one = parse_gpus("2xCPU"), parse_gpus("CPU")
    assert two.is_cpu and two.usable_bytes == one.usable_bytes // 2 and one.usable_bytes == machine_bytes()
    assert (two.outside_bytes, two.compute_capability) == (0, "")
    assert not parse_gpus("4090").is_cpu


def test_without_a_driver_the_cpu_is_described_and_torch_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as `train` starts there."""
    monkeypatch.setattr(hardware, "may_have_gpus", lambda: False)
    monkeypatch.setattr(hardware, "_QUESTION", "raise SystemExit(3)")
    assert str(detect()) == f"{CPU_RANKS}xCPU"
    monkeypatch.setattr(hardware, "may_have_gpus", lambda: True)
    with pytest.raises(ConfigError, match=r"cannot be described[\s\S]*exit code 3"):
        detect()


def test_detected_gpus_come_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would print there of two cards that are not equal."""
    said = [["NVIDIA GeForce RTX 4090", 25 * 10**9, False], ["NVIDIA GeForce RTX 4090", 24 * 10**9, False]]
    monkeypatch.setattr(hardware, "may_have_gpus", lambda: True)
    monkeypatch.setattr(hardware, "_QUESTION", f"print('a warning of a driver'); print({json.dumps(json.dumps(said))})")
    found = detect()
    assert (str(found), found.usable_bytes, found.p2p) == ("2xRTX4090", 24 * 10**9, False)


def groups(root: Path, lines: str, limits: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": lines, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "limits"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "5000\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}),
        ("0::/of/the/host\n", {"sys/fs/cgroup/memory.max": "5000\n"}),
        ("5:cpu:/x\n4:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "5000\n"}),
    ],
)
def test_memory_of_a_container(tmp_path: Path, lines: str, limits: dict[str, str]) -> None:
    """The least limit of the process's control groups counts."""
    assert machine_bytes(root=groups(tmp_path, lines, limits)) == 5000


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    whole = psutil.virtual_memory().total
    assert machine_bytes(root=tmp_path) == whole
    unlimited = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "9223372036854771712\n"}
    assert machine_bytes(root=groups(tmp_path, "0::/a\n", unlimited)) == whole


def write(folder: Path, text: str) -> Path:
    path = folder / "gpus.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_changes_a_card(tmp_path: Path) -> None:
    path = write(tmp_path, "like: B300\nname: our-b300\nusable_gib: 267.5\ngpus_per_node: 4\nnodes: 2\nnode_gbs: 80\n")
    hardware = parse_gpus(str(path))
    assert str(hardware) == "2x4xour-b300" and hardware.count == 8
    assert hardware.usable_bytes == int(267.5 * GIB) and hardware.node_bandwidth == 80e9
    assert hardware.bf16_flops == 2250e12 and "gpus.yaml" in hardware.source


def test_file_describes_a_card_of_its_own(tmp_path: Path) -> None:
    text = "name: X1\nusable_gib: 30\nbf16_tflops: 100\nmemory_gbs: 1000\nlink_gbs: 25\np2p: true\n"
    hardware = parse_gpus(write(tmp_path, text))
    assert (hardware.usable_bytes, hardware.bf16_flops, hardware.p2p) == (30 * GIB, 1e14, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: X1\n", "usable_gib, bf16_tflops"),
        ("like: H100-80GB\nmemory: 3\n", "unknown keys memory"),
        ("like: H100-80GB\nusable_gib: many\n", "usable_gib: many"),
        ("like: H100-80GB\nusable_gib: -1\n", "usable_gib: -1"),
        ("like: H100-80GB\nusable_gib: 90\n", "more than memory_gib"),
        ("like: H100-80GB\nnodes: 0\n", "nodes: 0"),
        ("like: H100-80GB\np2p: maybe\n", "p2p: maybe"),
        ("like: B300\n", "not known"),
        ("- H100\n", "not a mapping"),
        ("a: [", "cannot be used"),
        ("like: H100-80GB\nusable_gib: 1.0e+300\n", "usable_gib: 1e\\+300"),
        ("like: H100-80GB\ncompute_capability: 99\n", "compute_capability: 99"),
        ('like: H100-80GB\nname: "two\\nlines"\n', "name: 'two"),
        ("like: H100-80GB\nname: cpu\n", "2xCPU"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_gpus(write(tmp_path, text))


def test_catalogue_answers_without_torch() -> None:
    code = "import sys, fsdp_trainer.memory.hardware as h; h.parse_gpus('8xH100'); sys.exit('torch' in sys.modules)"
    assert light.python(code).returncode == 0
