"""What this machine's GPUs are said to be, against what torch says."""

from __future__ import annotations

import pytest
import torch

from fsdp_trainer.errors import ConfigError
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no GPU here[\s\S]*--gpus"):
        detect()
