"""An imaginary GPU: torch's CPU build sees `cuda:0`, in processes of their own.

It makes visible, without a GPU, what only a machine with one would show: forks that autograd refuses, tensors
left on the CPU, waits for the device. `plugin.py` makes the device exist, without importing torch, and
`cuda_module.py` lets `torch.cuda` answer for it.

    python -c "from support.imaginary_gpu import plug_in; plug_in(); import torch; ..."    with tests/ on the path
    subprocess.run(..., env=environment())            for a program as it is, and the processes that it starts

A process that has it sees it until it ends, so only child processes of the tests do.
"""

from support.imaginary_gpu.plugin import environment, plug_in, printed, why_not

__all__ = ["environment", "plug_in", "printed", "why_not"]
