"""Peak bytes of live tensors, traced at the dispatcher: what memory comparisons on CPU rest on.

The resident size of a process is no measure of tensors. Counted are storages: each once, from the operation that made
it to its release, resizes (how FSDP2 frees gathered weights) included. Temporaries inside one kernel are not seen.
"""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Context in which `current` and `peak` follow the bytes of all storages seen; start it with `count(tensors)`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, Any] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage if it is new or has changed its size.

        Fakes, on which DTensor finds shapes, have no memory, nor have meta tensors, with which an export is planned,
        and the wrapper of a collective's result.
        """
        if isinstance(tensor, FakeTensor | AsyncCollectiveTensor) or tensor.device.type == "meta":
            return
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _, key=key: self._release(key))
        self._resize(key, storage.size())

    def _resize(self, key: int, size: int) -> None:
        self.current += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.current)

    def _release(self, key: int) -> None:
        self._alive.pop(key, None)
        self.current -= self._sizes.pop(key, 0)

    def __enter__(self) -> "LiveBytes":
        self._original = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._alive:
                self._resize(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._original  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count every tensor it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result
