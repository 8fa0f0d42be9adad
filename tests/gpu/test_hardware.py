"""What this machine's GPUs are said to be, against what torch says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp_trainer.memory.hardware import card_names, detect, parse_gpus
from tests import simulation_runs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_detected_gpus_are_those_of_the_machine() -> None:
    found = detect()
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    assert (found.count, found.nodes, found.usable_bytes) == (len(sizes), 1, min(sizes))
    assert found.name in card_names()
    # The catalogue's own figure is what torch reports of such a card, the lower end of what was seen.
    assert found.usable_bytes >= 0.99 * parse_gpus(found.name).usable_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_detecting_makes_no_context_here() -> None:
    """A process that will simulate must be able to hide the GPUs afterwards."""
    code = "import torch; from fsdp_trainer.memory.hardware import detect; detect(); print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_the_cpu() -> None:
    assert detect().is_cpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_simulating_this_machine_touches_none_of_its_gpus(tmp_path: Path) -> None:
    """The command describes the GPUs by itself, and its own process never sees them."""
    words = ["simulate", f"--model.path={simulation_runs.settings(tmp_path)['model']['path']}", "--json"]
    words += [f"--batch.global_batch_size={torch.cuda.device_count()}", "--data.seq_len=64"]
    code = (
        f"from fsdp_trainer import cli\ntry: cli.main({words})\nexcept SystemExit as end: assert not end.code\n"
        "import torch; assert (torch.cuda.is_initialized(), torch.cuda.device_count()) == (False, 0)"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    assert 0 < total - json.loads(done.stdout)["limit"] * 2**30 < 3 * 2**30
