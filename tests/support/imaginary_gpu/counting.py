"""Counts of what a program asks of the imaginary GPU: kernels, bytes, copies and waits, by line of ours.

CUDA tensors are FakeTensors, which know shape, dtype and device and refuse mixed devices. An ATen operation
that computes counts as one kernel. Values read from the device are 1, or NaN and False in the files that
`not_finite` names, so no result is a number to compare.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import nan
from operator import itemgetter
from pathlib import Path
from unittest.mock import ANY

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton import JITFunction

import ablate
from ablate.numerics import on_gpu
from ablate.numerics.kernels import cuda

PACKAGE = f"{Path(ablate.__file__).parent}/"
NO_KERNEL = frozenset(
    [
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "slice",
        "select",
        "expand",
        "permute",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "_reshape_alias",
        "unfold",
    ]
)
"""Operations that return a view, or memory that nothing has written."""
READS = frozenset(("_local_scalar_dense", "item", "is_nonzero", "equal"))


class Counts(TorchDispatchMode):
    """Inside this context, counts by place (`file:line`, or `autograd` for torch's own backward passes)."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._results: dict[tuple, Callable[[tuple], object]] = {}
        """Makers of results from arguments, by operation and description of the arguments."""
        self.not_finite: tuple[str, ...] = ()
        """Files of the package, relative to it, that read values which are not finite."""
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.kernels, self.bytes, self.waits = Counter(), Counter(), Counter()
        self.copies, self.strays = Counter(), Counter()

    def __enter__(self):
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` is seen as a copy
        self._run, self._digest = JITFunction.run, cuda.digest
        JITFunction.run = lambda kernel, *args, **options: self.launch(args)
        cuda.digest = lambda *parts: ANY  # the trial launches run; their bits cannot be right
        self._different, on_gpu.different = on_gpu.different, lambda *form: ""  # there are no bits to compare
        cuda.forget_zeros()  # which are tensors of another mode
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        JITFunction.run, cuda.digest = self._run, self._digest
        on_gpu.different = self._different
        cuda.forget_zeros()
        return super().__exit__(*error)

    def launch(self, args: tuple) -> None:
        """Count the launch of a Triton kernel, and check the devices of its arguments."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        place = _place()
        self.strays[place] += sum(x.device.type != "cuda" for x in tensors)
        self.kernels[place] += 1
        self.bytes[place] += sum(x.numel() * x.element_size() for x in tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        torch._C._set_only_lift_cpu_tensors(True)  # of this thread: autograd has one for each device
        if func is torch.ops.prim.device.default:  # a question of Python's, which no device sees
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        tensors = [*_tensors((*args, *kwargs.values()))]
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        here = [x for x in tensors if isinstance(x, FakeTensor)]
        if func.overloadpacket.__name__ in ("pin_memory", "_pin_memory", "is_pinned"):
            return func.overloadpacket.__name__ != "is_pinned" and args[0]
        if not here and device != "cuda":
            return func(*args, **kwargs)
        name, place = func.overloadpacket.__name__, _place()
        if name in READS:
            self.waits[place] += 1
            return self._read(here[0].dtype, place)
        if name == "nonzero":
            self.waits[place] += 1  # for the number of rows: one here
            return here[0].new_zeros((1, here[0].ndim), dtype=torch.int64)
        others = [x for x in tensors if x.device.type == "cpu"]
        if here and device == "cpu":
            self.waits[place] += 1
            dtype = kwargs.get("dtype") or here[0].dtype
            return torch.full(here[0].shape, self._read(dtype, place), dtype=dtype)
        if name == "copy_" and others:
            self.waits[place] += isinstance(args[1], FakeTensor)
            self.copies[place] += not isinstance(args[1], FakeTensor)
        elif device == "cuda" and others:
            self.copies[place] += 1
        elif here and others:
            self.strays[place] += 1
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0]
        if here and len(here) == len(tensors):
            out = self._result(func, args, kwargs)
        else:
            with self.fake:
                args, kwargs = pytree.tree_map_only(Tensor, self._faked, (args, kwargs))
                out = func(*args, **kwargs)
        if name not in NO_KERNEL:
            self.kernels[place] += 1
            self.bytes[place] += sum(x.numel() * x.element_size() for x in (*here, *_tensors((out,))))
        return out

    def _result(self, func: OpOverload, args: tuple, kwargs: dict) -> object:
        """Return an operation's result: from the second call with the same shapes on, without fake kernels.

        Their own cache costs three times as much.
        """
        key = func, _described(args), _described(kwargs.items())
        make = self._results.get(key)
        if make is not None:
            return make(args)
        out = func(*args, **kwargs)  # the mode of the tensors runs it
        schema, several = func._schema, isinstance(out, list | tuple)
        if schema.is_mutable:
            if out is args[0] and _described(args) == key[1]:
                self._results[key] = itemgetter(0)
        elif func.is_view or not any(one.alias_info for one in schema.returns):
            parts = out if several else [out]
            if all(isinstance(part, FakeTensor) for part in parts):
                start = args[0].storage_offset() if func.is_view else None
                new = [
                    (*_description(part), None if start is None else part.storage_offset() - start)
                    for part in parts
                ]
                self._results[key] = lambda args: (
                    [self._made(args, *one) for one in new] if several else self._made(args, *new[0])
                )
        return out

    def _made(
        self,
        args: tuple,
        dtype: torch.dtype,
        device: torch.device,
        shape: torch.Size,
        strides: tuple[int, ...],
        offset: int | None,
    ) -> FakeTensor:
        """Return a tensor of its own memory, or a view of the first argument that begins at this offset in it."""
        if offset is None:
            x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            x, base = torch.empty(0, dtype=dtype, device="meta"), args[0]
            x.set_(base.untyped_storage(), base.storage_offset() + offset, shape, strides)
        return FakeTensor(self.fake, x, device)

    def _read(self, dtype: torch.dtype, place: str) -> float:
        """Return the value of every element that this place reads."""
        finite = not place.startswith(self.not_finite)
        if dtype.is_floating_point:
            return 1.0 if finite else nan
        return finite if dtype == torch.bool else int(finite)

    def _faked(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self.fake.from_tensor(x)

    def totals(self) -> dict[str, int]:
        """Return the sums over all places."""
        return {name: sum(counter.values()) for name, counter in self.by_place().items()}

    def by_place(self) -> dict[str, Counter]:
        """Return the counters by what they count."""
        names = "kernels", "bytes", "waits", "copies", "strays"
        return {name: +getattr(self, name) for name in names}


def _tensors(values: Iterable) -> Iterator[Tensor]:
    """Return the tensors of an operation's arguments, which nest in lists alone; a tenth of the time of pytree."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _description(x: FakeTensor) -> tuple:
    """Return what a result's shape and device depend on."""
    return x.dtype, x.fake_device, x.shape, x.stride()


def _described(values: Iterable) -> tuple:
    """Return arguments as a key, with descriptions of tensors."""
    return tuple(
        [
            _description(value)
            if isinstance(value, FakeTensor)
            else _described(value)
            if isinstance(value, list | tuple)
            else (type(value), value)
            for value in values
        ]
    )


def _place() -> str:
    """Return the innermost line of the package that is being executed, or `transformers` if that is inside it."""
    frame = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        if "/site-packages/transformers/" in frame.f_code.co_filename:
            return "transformers"
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}" if frame else "autograd"
