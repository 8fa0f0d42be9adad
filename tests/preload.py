"""What every rank of a test has imported before it starts. Imported by the fork server, and by nothing else.

It must leave nothing behind that a fork cannot carry: no thread, no process group, no tensor operation.
"""

import gc
import threading

import accelerate  # noqa: F401
import bitsandbytes  # noqa: F401
import numpy  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.utils._sympy.reference
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

import fsdp_trainer.training  # noqa: F401

# DTensor finds out how operations shard by running them on fakes; the first fake operation sets that machinery up.
with FakeTensorMode():
    torch.empty(2, 2).mul_(2.0)

assert threading.active_count() == 1, f"imports started threads: {threading.enumerate()}"
assert not torch.distributed.is_initialized()
gc.collect()
gc.freeze()  # forks then share these pages instead of copying them at the first collection
