"""What every rank and every warm command of a test has imported before it starts. Imported by zygotes, by nothing else.

It must leave nothing behind that a fork cannot carry: no thread, no process group, no tensor operation.
"""

# ruff: noqa: E402, F401

import gc
import importlib
import pkgutil
import sys
import tempfile
import threading

gc.disable()  # while nothing but imports is made, its looks cost a second
import accelerate.commands.launch
import bitsandbytes
import fsspec.core
import matplotlib.backends.backend_svg
import matplotlib.pyplot
import numpy.ctypeslib
import numpy.ma
import torch
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor.debug
import torch.utils._sympy.reference
import torch.utils.tensorboard
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import fsdp_trainer
from fsdp_trainer.config import Config
from fsdp_trainer.decoder_probe import check_decoder
from fsdp_trainer.run import _build_meta
from tests import models

# All of the package but what is a program, which runs what it holds when it is imported, and what simulates: a test
# looks whether that came into a process that trains.
for module in pkgutil.walk_packages(fsdp_trainer.__path__, "fsdp_trainer."):
    if module.name.rpartition(".")[2] not in (
        *("__main__", "train", "launch_agent"),
        *("simulated", "simulate", "traced_run", "extrapolate", "traced_time"),
    ):
        importlib.import_module(module.name)

# A table that Transformers makes at its first use, in 0.2 s, and keeps.
get_checkpoint_conversion_mapping("llama")

# DTensor finds out how operations shard by running them on fakes; the first fake operation sets that machinery up.
with FakeTensorMode():
    torch.empty(2, 2).mul_(2.0)

# What the first look at a decoder fills: caches of fake operations, of Transformers and of Pydantic.
for kind in ("llama", "qwen3_tied", "gpt2"):
    with tempfile.TemporaryDirectory() as folder:
        models.model_config(kind).save_pretrained(folder)
        config = Config.from_dict({"model": {"path": folder, "init": "random"}, "data": {"seq_len": 64}})
        _, model, parts = _build_meta(config)
        check_decoder(model, parts, packing=True, seq_len=64)
        del model, parts

assert threading.active_count() == 1, f"imports started threads: {threading.enumerate()}"
assert not torch.distributed.is_initialized()
assert "fsdp_trainer.simulated" not in sys.modules
gc.collect()
gc.enable()
gc.freeze()  # forks then share these pages instead of copying them at the first collection
