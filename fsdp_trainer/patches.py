"""Every place where another library is changed from outside, one function each.

Each names the upstream reason, the versions it was needed on, and when it can go.
"""

from accelerate import PartialState
from accelerate.utils import DistributedType


def promote_cpu_ranks_to_fsdp() -> None:
    """Let Accelerate treat gloo ranks on CPU as FSDP ranks.

    Accelerate promotes a process to `DistributedType.FSDP` only from one of its MULTI_<accelerator> types
    (accelerate/state.py, `AcceleratorState.__init__`); MULTI_CPU is not among them, so on CPU the FSDP plugin is
    dropped in silence. Needed on accelerate 1.15.0; can go when MULTI_CPU is in that list
    (tests/distributed/test_runtime.py fails then). Must run after `PartialState()` and before `Accelerator()`.
    """
    state = PartialState()
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
