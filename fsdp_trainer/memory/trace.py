"""Watch every tensor of a run come and go, with its phase, stream and kind: where the memory ledger comes from.

Counted are storages, once each, from the operation that makes them to their release, resizes (how FSDP2 frees gathered
weights) included. A simulated run on fake tensors and a step of a real one are watched by the same code.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdp_trainer.memory.cuda_kernels import backward_workspaces
from fsdp_trainer.memory.gloo_settling import GlooSettling
from fsdp_trainer.memory.recording import PHASES, Allocation, Event, Recording
from fsdp_trainer.memory.work import Work, count_work
from fsdp_trainer.optim.paged import LABEL as MANAGED

_ENTER, _EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit"
# What an operation of FSDP2 or c10d says about a tensor: name -> (category, which arguments).
_COLLECTIVES: dict[str, tuple[int, ...]] = {
    "c10d::_allgather_base_": (0, 1),
    "c10d::_reduce_scatter_base_": (0, 1),
    "c10d::alltoall_base_": (0, 1),
}


class _Place:
    """One memory, the device's or the host's: its storages alive, and all that came and went."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.alive: dict[int, Allocation] = {}  # by storage
        self.kinds: dict[int, str] = {}  # by storage: a freed and refilled one keeps its kind

    def allocate(self, size: int, *, stream: int, visit: int, recomputed: bool) -> Allocation:
        allocation = Allocation(
            size=size, stream=stream, born=len(self.events), visit=visit, recomputed=recomputed, category=None
        )
        self.events.append((len(self.allocations), size, visit))
        allocation.index = len(self.allocations)
        self.allocations.append(allocation)
        return allocation

    def release(self, allocation: Allocation, *, visit: int, recomputing: bool) -> None:
        allocation.died, allocation.died_visit, allocation.died_recomputing = len(self.events), visit, recomputing
        self.events.append((allocation.index, -allocation.size, visit))


class MemoryTrace(TorchDispatchMode):
    """Context that records the allocations of one device and, apart, of the host.

    What the driver may move off the GPU (optim/paged.py) counts on the host. Of a simulated run only fake tensors are
    counted: what it does with real ones (a plan of its mesh, say) takes no memory of the run. Of a `real` one, begun in
    the phase `began`, only real ones are: on fakes DTensor finds shapes. On a pretended GPU the streams are recorded
    too, what CUDA kernels allocate inside themselves, and `workspace` bytes for each thread that multiplies matrices;
    None for every other device, whose own allocator knows such things better.
    """

    def __init__(
        self, device: torch.device, *, workspace: int | None = None, real: bool = False, began: str = "load"
    ) -> None:
        super().__init__()
        self._device = device.type
        self._real = real
        self._settling = GlooSettling() if real and device.type == "cpu" else None
        self._as_cuda = workspace is not None
        # cuBLAS keeps one for each thread and stream: the forward runs in this thread, the backward in autograd's.
        self._workspaces: dict[str, int] = dict.fromkeys(("forward", "backward"), workspace or 0)
        self._device_module = getattr(torch, device.type)
        self._places = {"device": _Place(), "host": _Place()}
        self._watched: dict[int, tuple[Any, _Place]] = {}
        self.visits = [began]
        self.work: list[Work] = [[]]  # of each visit
        self._hidden = 0
        self._in_managed_memory = False

    def __enter__(self) -> "MemoryTrace":
        self._resize, self._propagate = torch.UntypedStorage.resize_, _get_propagation()
        trace, resize, propagate = self, self._resize, self._propagate

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            trace._resized(storage)
            return result

        def hidden(*args: Any, **kwargs: Any) -> Any:
            """DTensor finds shapes by running each operation at full size on the same fake mode: no memory of a run."""
            trace._hidden += 1
            try:
                return propagate(*args, **kwargs)
            finally:
                trace._hidden -= 1

        self._init_outputs = FSDPParam.init_all_gather_outputs
        init_outputs = self._init_outputs

        def named(parameter: FSDPParam, *args: Any, **kwargs: Any) -> None:
            """A unit on one rank is copied, not gathered: no operation of FSDP2 says what the copy is."""
            init_outputs(parameter, *args, **kwargs)
            trace.mark(parameter.all_gather_outputs, "unsharded_parameters")

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        FSDPParam.init_all_gather_outputs = named  # type: ignore[method-assign]
        _set_propagation(hidden)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        FSDPParam.init_all_gather_outputs = self._init_outputs  # type: ignore[method-assign]
        _set_propagation(self._propagate)
        super().__exit__(*error)

    def enter(self, phase: str) -> None:
        """Begin a phase; it lasts until the next one begins."""
        assert phase in PHASES, phase
        self.visits.append(phase)
        self.work.append([])
        if workspace := self._workspaces.pop(phase, 0):
            made = self._allocate(self._places["device"], workspace)
            made.category = "temporaries"

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Say what the storages of these tensors are, from their allocation on."""
        for tensor in tensors:
            self._see(tensor, category)

    def ledgers(self) -> tuple[Recording, Recording]:
        """Return what was recorded: of the device, and of the host."""
        visits = tuple(self.visits)
        device, host = (
            Recording(tuple(place.allocations), tuple(place.events), visits) for place in self._places.values()
        )
        return device, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record every storage it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        if self._settling is not None:
            self._settling.before(name, args)
        if name == "_c10d_functional::wait_tensor" and not self._real:
            result = args[0]  # on fakes it makes a new tensor; a real one waits and hands back what it was given
        else:
            result = _run(func, name, args, kwargs)
        if self._settling is not None:
            self._settling.after(name)
        if self._hidden:
            return result
        if self._as_cuda:
            count_work(self.work[-1], func, args, kwargs, result)
        if name == _ENTER and args[0] in PHASES:
            self.enter(args[0])
        if name in (_ENTER, _EXIT):
            self._in_managed_memory = name == _ENTER and args[0] == MANAGED  # nothing is labelled inside it
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self._name_kinds(name, args, kwargs)
        if self._as_cuda and name.endswith("_backward"):
            self._take_inside(backward_workspaces(name, args))
        return result

    def _name_kinds(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _COLLECTIVES:
            tensors = [leaf for index in _COLLECTIVES[name] for leaf in tree_iter(args[index])]
            self.mark((leaf for leaf in tensors if isinstance(leaf, torch.Tensor)), "communication_buffers")
        elif name == "fsdp::all_gather_copy_in":
            self.mark([args[1]], "communication_buffers")
        elif name == "fsdp::split_with_sizes_copy":
            self.mark(kwargs["out"], "unsharded_parameters")
        elif name == "fsdp::chunk_cat":
            self.mark(args[0], "unsharded_gradients")
            self.mark([kwargs["out"]], "communication_buffers")

    def _stream(self) -> int:
        return self._device_module.current_stream().stream_id if self._as_cuda else 0

    def _recomputing(self) -> bool:
        """Inside a backward, gradients are on only while checkpointing runs a layer's forward again."""
        return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()

    def _allocate(self, place: _Place, size: int) -> Allocation:
        visit = len(self.visits) - 1
        return place.allocate(size, stream=self._stream(), visit=visit, recomputed=self._recomputing())

    def _release(self, place: _Place, allocation: Allocation) -> None:
        place.release(allocation, visit=len(self.visits) - 1, recomputing=self._recomputing())

    def _take_inside(self, sizes: list[int]) -> None:
        """Record what a kernel allocates inside itself: all of it alive at once, and gone when it is done."""
        place = self._places["device"]
        made = [self._allocate(place, size) for size in sizes]
        for allocation in made:
            allocation.category = "temporaries"
            self._release(place, allocation)

    def _see(self, tensor: torch.Tensor, category: str | None = None) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        wrong = (FakeTensor, AsyncCollectiveTensor) if self._real else ()
        if isinstance(tensor, wrong) or isinstance(tensor, FakeTensor) is self._real or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._watched:
            on_device = tensor.device.type == self._device and not self._in_managed_memory
            place = self._places["device" if on_device else "host"]
            self._watched[key] = weakref.ref(storage, lambda _, key=key: self._gone(key)), place
        place = self._watched[key][1]
        if category is not None:
            place.kinds[key] = category
        self._resized(storage)
        if category is not None and key in place.alive:
            place.alive[key].category = category

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.size()
        if key not in self._watched:
            return
        place = self._watched[key][1]
        before = place.alive.get(key)
        if (before.size if before is not None else 0) == size:
            return
        if before is not None:
            self._release(place, place.alive.pop(key))
        if size:
            made = self._allocate(place, size)
            made.category = place.kinds.get(key)
            place.alive[key] = made

    def _gone(self, key: int) -> None:
        _, place = self._watched.pop(key)
        place.kinds.pop(key, None)
        allocation = place.alive.pop(key, None)
        if allocation is not None:
            self._release(place, allocation)


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "aten::_grouped_mm" and args[0].dtype == torch.float32 and isinstance(args[0], FakeTensor):
        return _grouped_product(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offs: Any = None, **_: Any) -> torch.Tensor:
    """Make the result of a grouped product in fp32, which kernels compute and torch's shape function refuses.

    torch 2.14, _meta_registrations.py `_meta_grouped_mm_common`; rows are padded to 16 bytes as it pads them.
    """
    groups = (offs.shape[0],) if left.ndim == right.ndim == 2 else ()
    if left.ndim == right.ndim == 3:
        groups = (left.shape[0],)
    shape = (*groups, left.shape[-2], right.shape[-1])
    padded = left.new_empty((*shape[:-1], -(-shape[-1] // 4) * 4))
    return padded[..., : shape[-1]]


def _get_propagation() -> Any:
    return ShardingPropagator._propagate_tensor_meta_non_cached


def _set_propagation(function: Any) -> None:
    ShardingPropagator._propagate_tensor_meta_non_cached = function
