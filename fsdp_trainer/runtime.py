"""The one object that knows device, ranks, process group and Accelerator.

A run is built and stepped through a `Runtime`; whether it is real or simulated is decided here and nowhere else.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_trainer.cuda_allocator import use_expandable_segments
from fsdp_trainer.errors import ConfigError, DistributedError, Interrupted
from fsdp_trainer.patches import promote_cpu_ranks_to_fsdp
from fsdp_trainer.phases import Phases
from fsdp_trainer.progress import log_line
from fsdp_trainer.units import format_number

Result = TypeVar("Result")


@dataclass(frozen=True)
class Runtime:
    """Where a run lives: real ranks on GPU or CPU, or one simulated rank of many.

    `launched_with` holds the launcher's FSDP_* variables, which a profile sets. `fake_mode` is set only on the
    simulated runtime; tensors made inside `tensors()` are fake then. `phases` knows which part of a step a rank is in.
    `timeout` is how long a collective waits for a missing rank.
    """

    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    accelerator: Accelerator
    launched_with: Mapping[str, str] = field(default_factory=dict)
    fake_mode: Any = None
    phases: Phases = field(default_factory=Phases)
    timeout: timedelta | None = None

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and log lines."""
        return self.rank == 0

    @property
    def simulated(self) -> bool:
        """True when no tensor holds values, so nothing may be loaded or read."""
        return self.fake_mode is not None

    def tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which device tensors are made."""
        return self.fake_mode if self.fake_mode is not None else contextlib.nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` on this device (a fake of the same shape and dtype when simulated)."""
        if self.fake_mode is not None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.to(self.device, non_blocking=True)

    def mesh(self, *shape: int, names: tuple[str, ...]) -> DeviceMesh:
        """Build a device mesh; outside the fake mode, in which rank tables cannot be computed."""
        with self._outside_fake_mode():
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def limit_waiting(self) -> None:
        """Give every process group of this rank the timeout of the run: a mesh makes its own with torch's default."""
        if self.timeout is None:
            return
        # `set_timeout` where there is one: the older name warns then (torch 2.14).
        limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in list(dist.distributed_c10d._world.pg_map):
            limit(self.timeout, group)

    def _outside_fake_mode(self) -> contextlib.AbstractContextManager[Any]:
        if self.fake_mode is None:
            return contextlib.nullcontext()
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        return unset_fake_temporarily()

    def main_first(self, key: str, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank of each node, then on the others; return what it returned here.

        The others wait on the store, not in a collective: the first may prepare data for hours without tripping the
        process group's timeout. When it fails they end at once. `key` names the work in the error message.
        """
        if self.world_size == 1:
            return work()
        store = dist.distributed_c10d._get_default_store()
        # A process may train twice, and what the first run left in the store must not release the second.
        turn = store.add(f"{key}/turns of rank {self.rank}", 1)
        key = f"{key}/{turn}/{self.rank - self.local_rank}"  # the store is shared by all nodes
        if self.local_rank == 0:
            outcome = "failed"
            try:
                result = work()
                outcome = "done"
                return result
            except Interrupted as stopped:
                outcome = f"{stopped}"
                raise
            finally:
                store.set(key, outcome)
        store.wait([key], timedelta(days=7))
        if (outcome := store.get(key).decode()).startswith("Stopped"):
            interrupted = Interrupted(outcome)
            interrupted.heard = True
            raise interrupted
        if outcome != "done":
            error = DistributedError(
                "Another rank failed while this one waited for it.",
                values=f"rank {self.rank - self.local_rank} in {key.split('/')[0]}",
                fix="its own message says why",
            )
            error.heard = True
            raise error
        return work()


def join_process_group(*, timeout_minutes: float) -> bool:
    """Join the process group that `accelerate launch` described, if this process has not; return whether on CPU."""
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.cuda.is_available()
    _describe_single_process()
    if dist.is_initialized():  # by a run before in this process, or by the user's own code in a notebook
        check_backends(dist.get_backend_config())
    else:
        _init_process_group(use_cpu=use_cpu, timeout_minutes=timeout_minutes)
    return use_cpu


def check_backends(backends: str) -> None:
    """Refuse a process group that cannot reduce what lies in host memory; `backends` such as "cpu:gloo,cuda:nccl"."""
    if "cpu:" not in backends:
        raise DistributedError(
            "The process group that this process has already cannot reduce what lies in host memory.",
            values=f"its backends: {backends}",
            fix='make it with init_process_group("cuda:nccl,cpu:gloo"), or in a notebook call '
            "finetune(config, processes=N), which starts processes of its own",
        )


def build_runtime(
    *, timeout_minutes: float = 30.0, trackers: Sequence[str] = (), tracker_dir: str | Path | None = None
) -> Runtime:
    """Join the process group that `accelerate launch` described and build the Accelerator on it.

    Without launch variables this is a run of one process. Raises DistributedError when fewer ranks are up than were
    launched or when FSDP did not become active.
    """
    if use_expandable_segments(os.environ) and torch.cuda.is_initialized():
        log_line(
            "warning: CUDA was in use in this process before, so its allocator has no expandable segments, which "
            "plans count on; finetune(config, processes=N) starts processes of its own"
        )
    use_cpu = join_process_group(timeout_minutes=timeout_minutes)
    # Accelerate finds the group initialised and joins it. Made by us because params offload needs a CPU backend beside
    # NCCL for clipping, which Accelerate adds only for some environment variables (accelerate/state.py).
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    if use_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if PartialState._shared_state == {}:
        PartialState(cpu=use_cpu)
    if use_cpu:
        promote_cpu_ranks_to_fsdp()
    accelerator = Accelerator(
        # Precision acts through FSDP2's MixedPrecisionPolicy (sharding.py); autocast on top would change the loss.
        mixed_precision="no",
        fsdp_plugin=build_fsdp_plugin(),
        log_with=list(trackers) or None,
        project_dir=str(tracker_dir) if tracker_dir else None,
    )
    _check_ranks(accelerator)
    kept = {getattr(tracker, "value", str(tracker)) for tracker in accelerator.log_with}
    if missing := [name for name in trackers if name not in kept]:
        raise ConfigError(
            "A tracker is not installed, and Accelerate would leave it out.",
            values=f"log.trackers: {list(trackers)}, not installed: {missing}",
            fix=f"install {', '.join(missing)}, or take it out of log.trackers",
        )
    return Runtime(
        device=accelerator.device,
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
        world_size=accelerator.num_processes,
        accelerator=accelerator,
        launched_with={name: value for name, value in os.environ.items() if name.startswith("FSDP_")},
        timeout=timedelta(minutes=timeout_minutes),
    )


def _describe_single_process() -> None:
    """Give a process that nobody launched the variables of a world of one: FSDP2 needs a process group even then."""
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    # Told to use the CPU, `accelerate launch` starts one process whatever number it was given. All that is left of the
    # number is MASTER_ADDR, which it then sets (accelerate 1.15, utils/launch.py, prepare_simple_launcher_cmd_env).
    if "ACCELERATE_DYNAMO_BACKEND" in os.environ and "MASTER_ADDR" in os.environ:
        raise DistributedError(
            "`accelerate launch` started one process where several were asked for.",
            values="MASTER_ADDR is set, RANK and WORLD_SIZE are not",
            fix="use `fsdp-trainer train --processes N` or a profile from configs/accelerate/; for one process on "
            "purpose, unset MASTER_ADDR",
        )
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _init_process_group(*, use_cpu: bool, timeout_minutes: float) -> None:
    timeout = timedelta(minutes=timeout_minutes)
    if use_cpu:
        dist.init_process_group("gloo", timeout=timeout)
        return
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise ConfigError(
            "There are more processes than GPUs.",
            values=f"process {local + 1} on this machine, {format_number(gpus, 'GPU')} visible to it",
            fix=f"start {gpus} here, or set ACCELERATE_USE_CPU=true to train on CPU",
        )
    torch.cuda.set_device(local)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timeout)


def build_fsdp_plugin() -> FullyShardedDataParallelPlugin:
    """Build a plugin that only tells Accelerate "this is FSDP2": we shard, load and checkpoint ourselves.

    Every field is given, since Accelerate reads the ones left None from the environment.
    """
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="no_wrap",
        cpu_offload=False,
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
    )


def _check_ranks(accelerator: Accelerator) -> None:
    launched = int(os.environ["WORLD_SIZE"])
    if accelerator.num_processes != launched:
        raise DistributedError(
            "Fewer processes joined than were launched, so each would train alone.",
            values=f"{launched} launched, {accelerator.num_processes} in the process group",
            fix="start with `fsdp-trainer train --processes N` or a profile from configs/accelerate/",
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        raise DistributedError(
            "FSDP is not active although this trainer shards every model with it.",
            values=f"Accelerate says distributed_type={accelerator.distributed_type}",
            fix="use a profile with `distributed_type: FSDP`, such as those in configs/accelerate/, and make no "
            "Accelerator in this process before; in a notebook that has one, finetune(config, processes=N)",
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse bf16 on a GPU that only emulates it (T4, V100); CPUs are exempt.

    `torch.cuda.is_bf16_supported()` counts emulation unless told not to (torch/cuda/__init__.py).
    """
    if device.type != "cuda" or not precision.startswith("bf16"):
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            "This GPU has no bf16 arithmetic; it would be emulated and slow.",
            values=f"precision: {precision} on {torch.cuda.get_device_name(device)}",
            fix="set `precision: fp16`",
        )
