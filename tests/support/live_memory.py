"""Bytes of tensors that are alive, counted operation by operation. tracemalloc does not see torch's memory."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside this context, the storages that operations make: `bytes` now, and `peak` so far."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of the storages that were made inside the context and still live."""
        self._storages = {
            key: (storage, size) for key, (storage, size) in self._storages.items() if not storage.expired()
        }
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {
            StorageWeakRef(t.untyped_storage()).cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in given:
                    self._storages[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return result
