"""Functions of `torch.cuda` for the imaginary GPU: a CPU build of torch has them, and each raises.

They keep what matters to a program that forks: the first call that needs the device initialises CUDA, and no
fork of a process that did so can use it.
"""

import ctypes
import os
from contextlib import nullcontext
from types import SimpleNamespace

import torch

NAME, CAPABILITY = "Imaginary GPU", (9, 0)
MEMORY = 80 * 2**30


class State:
    """Initialisation of CUDA in this process, and in the process that it is a fork of."""

    initialised_by: int | None = None


def initialise() -> None:
    """Initialise CUDA, as any use of the device does.

    Raises:
        RuntimeError: there is no device, or the process is a fork of one that initialised CUDA.
    """
    if State.initialised_by == os.getpid():
        return
    if State.initialised_by is not None:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use"
            " the 'spawn' start method"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("No CUDA GPUs are available")
    State.initialised_by = os.getpid()


def imitate(library: ctypes.CDLL) -> None:
    """Let `torch.cuda` answer for the imaginary GPU."""

    def needs(result):
        """Return a function of any arguments that initialises CUDA and returns `result()`."""

        def answer(*args: object, **kwargs: object) -> object:
            initialise()
            return result()

        return answer

    def state() -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY,
        multi_processor_count=132, L2_cache_size=50 * 2**20, uuid="imaginary",
    )  # fmt: skip

    def counted() -> int:
        """Return as torch 2.13 does: before CUDA starts, the driver is not asked, but NVML and the variable."""
        if State.initialised_by == os.getpid():
            return library.imaginary_devices()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return int(first == "0" or first.startswith(("GPU-", "MIG-")))

    def available() -> bool:
        """Return as torch 2.13 does: the driver's number of devices, or that of `counted` if so told."""
        by_nvml = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1"
        return (counted() if by_nvml else library.imaginary_devices()) > 0

    answers = {
        "is_available": available,
        "device_count": counted,
        "is_initialized": lambda: State.initialised_by == os.getpid(),
        "_lazy_init": initialise,
        "init": initialise,
        "get_device_name": needs(lambda: NAME),
        "get_device_capability": needs(lambda: CAPABILITY),
        "get_device_properties": needs(lambda: properties),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "mem_get_info": needs(lambda: (MEMORY, MEMORY)),
        "current_stream": needs(lambda: SimpleNamespace(cuda_stream=0)),
        "is_current_stream_capturing": needs(lambda: False),
        "get_rng_state": needs(state),
        "get_rng_state_all": needs(lambda: [state()]),
    }
    answers |= {name: needs(lambda: 0) for name in ("current_device", "memory_allocated", "memory_reserved")}
    answers |= {name: needs(lambda: 0) for name in ("max_memory_allocated", "max_memory_reserved")}
    answers |= {name: needs(lambda: None) for name in ("set_device", "set_rng_state", "set_rng_state_all")}
    answers |= {name: needs(lambda: None) for name in ("synchronize", "reset_peak_memory_stats")}
    answers |= {"device_of": needs(nullcontext)}
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
