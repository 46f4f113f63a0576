"""Results of forks of a process with the imaginary GPU, as JSON: of one process, since importing torch is slow."""

import json
import os
from collections.abc import Callable

import torch

VISIBLE = {None: 1, "0": 1, "GPU-8a56": 1, "": 0, "-1": 0, "1": 0}
"""Numbers of devices by the value of CUDA_VISIBLE_DEVICES."""


def nothing() -> None:
    """Leave the device alone."""


def backward() -> None:
    """Run a backward pass, on the CPU."""
    (torch.ones(2, requires_grad=True) * 2).sum().backward()


FORKS = {
    ("backward", "backward", "0"): "autograd's threading in combination with fork",
    ("backward", "backward", ""): "",
    ("nothing", "backward", "0"): "",
    ("get_device_name", "get_device_name", "0"): "re-initialize CUDA in forked subprocess",
    ("nothing", "get_device_name", "0"): "",
}
"""Part of the error of a fork, by the action before the fork, that in it, and the device's variable."""
ACTIONS = {"nothing": nothing, "backward": backward, "get_device_name": torch.cuda.get_device_name}


def in_fork(action: Callable[[], object], visible: str | None = None) -> str:
    """Return the text of what `action` returns in a fork that has this CUDA_VISIBLE_DEVICES, or its error."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        try:
            text = str(action())
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(process, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def forked(before: str, after: str) -> str:
    """Return the error of an action in a fork of a process that did `before`; empty if there is none."""
    ACTIONS[before]()
    return in_fork(lambda: (ACTIONS[after](), "")[1])


def seen() -> str:
    """Return the number of devices, and the type of the accelerator."""
    return f"{torch.cuda.device_count()} {torch.accelerator.current_accelerator(True)}"


if __name__ == "__main__":
    counts = [[visible, in_fork(seen, visible)] for visible in VISIBLE]
    forks = [[case, in_fork(lambda case=case: forked(*case[:2]), case[2])] for case in map(list, FORKS)]
    print(json.dumps({"visible": counts, "forks": forks}))
