"""What this machine's GPUs are said to be, against what torch says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fsdp_trainer.memory.hardware import card_names, detect, parse_gpus


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
