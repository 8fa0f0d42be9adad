"""A runtime without hardware: one rank of any world size, on fake tensors of a pretended accelerator.

`build_run` and `train_step` run on it unchanged, which is what a plan rests on. Nothing is computed and no memory is
taken; shapes, dtypes, devices, allocations and collectives are those of a real rank.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fsdp_trainer.runtime import Runtime, build_fsdp_plugin

DEVICE = "simgpu"


class _Event:
    """What FSDP2 asks of a device event; time does not pass here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass


class _Stream:
    """A label: the caching allocator of a real device keeps one pool per stream."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _Stream.made += 1
        self.stream_id, self.device_index, self.device_type = _Stream.made, 0, 20

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Device:
    """The module that torch looks up as `torch.simgpu`: the part of `torch.cuda` that FSDP2 and AdamW use."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self._current = _Stream()
        self.capability = (8, 0)

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return self.capability

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 8

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def set_device(self, *args: Any) -> None:
        pass

    def synchronize(self, *args: Any) -> None:
        pass

    def current_stream(self, *args: Any) -> _Stream:
        return self._current

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous


@contextlib.contextmanager
def _integer_reshard_mesh_outside_fake_mode() -> Iterator[None]:
    """Let `fully_shard(reshard_after_forward=k)` build its mesh from real rank numbers.

    It makes a DeviceMesh inside the call (torch 2.14, `_fsdp_init.py`), and a mesh reads its rank table on the host,
    which a fake tensor cannot answer. Can go when torch builds meshes outside the active fake mode itself.
    """
    original = fsdp2._get_post_forward_mesh_info

    def outside(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return original(*args, **kwargs)

    fsdp2._get_post_forward_mesh_info = outside
    try:
        yield
    finally:
        fsdp2._get_post_forward_mesh_info = original


@contextlib.contextmanager
def simulated_runtime(
    *, world_size: int, rank: int = 0, device: str = DEVICE, capability: float = 8.0
) -> Iterator[Runtime]:
    """Yield a `Runtime` for one rank of `world_size` pretended accelerators; leaves no process group or state behind.

    `capability` is the CUDA compute capability that the accelerators pretend to have. `device` cpu gives what a gloo
    rank would do instead, to compare with real ones. Needs a process without a process group or Accelerator of its own,
    and one that has run no backward: autograd knows no kind of device that is registered after its first (torch 2.14,
    engine.cpp). The device name stays registered with torch for the life of the process.
    """
    if dist.is_initialized() or PartialState._shared_state:
        raise AssertionError("a simulated runtime needs a process in which no run is active")
    if device == DEVICE and not hasattr(torch, DEVICE):
        _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Device())
    if device == DEVICE:
        getattr(torch, DEVICE).capability = divmod(round(10 * capability), 10)
    backends = "cpu:fake" if device == "cpu" else f"{DEVICE}:fake,cpu:fake"
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=world_size)
    place = torch.device("cpu") if device == "cpu" else torch.device(device, 0)
    PartialState._shared_state.update(
        _cpu=device == "cpu",
        backend="fake",
        device=place,
        debug=False,
        distributed_type=DistributedType.MULTI_GPU,
        num_processes=world_size,
        process_index=rank,
        local_process_index=rank,
        fork_launched=False,
    )
    # A CPU launch, or an earlier run of this process, left it set; Accelerate then refuses a device that is no CPU.
    use_cpu = os.environ.pop("ACCELERATE_USE_CPU", None)
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        accelerator = Accelerator(mixed_precision="no", fsdp_plugin=build_fsdp_plugin())
        assert accelerator.distributed_type == DistributedType.FSDP
        with _integer_reshard_mesh_outside_fake_mode():
            yield Runtime(
                device=place,
                rank=rank,
                local_rank=rank,
                world_size=world_size,
                accelerator=accelerator,
                fake_mode=FakeTensorMode(allow_non_fake_inputs=True),
            )
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.destroy_process_group()
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if use_cpu is not None:
            os.environ["ACCELERATE_USE_CPU"] = use_cpu
