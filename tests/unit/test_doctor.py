"""`fsdp-trainer doctor`: what is well is said, what is broken is found with its fix, and the ranks really talk."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fsdp_trainer import doctor
from fsdp_trainer.doctor import Finding
from fsdp_trainer.report.findings import format_findings
from fsdp_trainer.self_test import run_self_test
from tests.e2e.commands import environment, executable, run_command

Usage = namedtuple("Usage", "total used free")


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    """No GPU is no fault; two gloo ranks are started and compared."""
    ended = run_command(
        [executable("fsdp-trainer"), "doctor", "--json", "--folder", str(tmp_path / "new")], cwd=tmp_path
    )
    found = json.loads(ended.stdout)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert (found["ok"], ended.returncode) == (True, 0), found
    assert by_name["collectives"]["found"].startswith(("2 ranks over", "3", "4", "8"))
    assert {"torch", "8-bit kernels", "host RAM", "disk"} <= by_name.keys()
    assert not (tmp_path / "new").exists()
    said = [line.split()[2] for line in ended.stderr.splitlines() if line.startswith("looking at ")]
    assert said == ["installed", "8-bit", "GPUs", "host", "disk", "environment", "Accelerate's", "collectives"]


def test_ranks_that_cannot_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable set by hand that gloo cannot follow: the rank's last words are the message."""
    environ = {**environment(), "PATH": "", "GLOO_SOCKET_IFNAME": "no-such-interface"}
    with pytest.raises(RuntimeError, match=r"rank \d ended with 1: .*"):
        run_self_test(environ)
    (finding,) = doctor.check_collectives(lambda: run_self_test(environ))
    assert finding.level == "broken"
    assert "no-such-interface" in finding.found or "gloo" in finding.found.lower()


def test_an_old_or_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "safetensors":
            raise PackageNotFoundError(name)
        return {"torch": "2.3.0"}.get(name, "99.0")

    monkeypatch.setattr(doctor, "version", version)
    broken = {f.name: f for f in doctor.check_versions() if f.level == "broken"}
    assert broken.keys() == {"torch", "safetensors"}
    assert "torch>=2" in broken["torch"].fix


def test_bitsandbytes_works_here() -> None:
    (finding,) = doctor.check_bitsandbytes()
    assert finding.level == "good"


def test_bitsandbytes_that_is_wrong_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsandbytes.functional.dequantize_blockwise", lambda codes, state: codes.float())
    (wrong,) = doctor.check_bitsandbytes()
    assert (wrong.level, "astray" in wrong.means) == ("broken", True)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr("bitsandbytes.functional.quantize_blockwise", fail)
    (failed,) = doctor.check_bitsandbytes()
    assert failed.level == "broken"
    assert "no kernel image" in failed.found


def test_little_shared_memory_and_no_right_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Docker's 64 MiB of /dev/shm: NCCL fails in the middle of a run, with words about something else."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 * 2**20, 0, 64 * 2**20))
    (_, shared) = doctor.check_memory()
    assert (shared.level, "--shm-size" in shared.fix) == ("broken", True)
    (disk,) = doctor.check_disk(tmp_path / "a" / "b")
    assert (disk.level, str(tmp_path) in disk.found) == ("note", True)
    monkeypatch.setattr("os.access", lambda *_: False)
    (disk,) = doctor.check_disk(tmp_path)
    assert disk.level == "broken"


def test_variables_set_by_hand() -> None:
    environ = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    found = {finding.name: finding for finding in doctor.check_variables(environ)}
    assert found.keys() == {"NCCL_P2P_DISABLE", "PYTORCH_ALLOC_CONF"}
    assert all(finding.level == "note" for finding in found.values())
    (fine,) = doctor.check_variables({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert fine.level == "good"


def test_a_default_file_of_accelerate_is_named(tmp_path: Path) -> None:
    assert list(doctor.check_accelerate_file({"HF_HOME": str(tmp_path)})) == []
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text("distributed_type: MULTI_GPU\n")
    (finding,) = doctor.check_accelerate_file({"HF_HOME": str(tmp_path)})
    assert finding.found == str(file)


def test_lines_of_a_person() -> None:
    good, bad = Finding("a", "1"), Finding("disk", "0 B free", "full", "free some", "broken")
    text = format_findings([vars(good), vars(bad)])
    assert text.splitlines() == [
        "ok    a     1",
        "FAIL  disk  0 B free; full",
        "            to fix: free some",
        "1 of 2 would break a run",
    ]
    assert doctor.any_broken([good, bad])
    assert not doctor.any_broken([good])
