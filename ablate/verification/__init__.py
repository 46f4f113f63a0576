"""Evidence that numerics and kernels are right and fast.

Checks of this machine for `ablate doctor`, comparisons with other implementations (`peers`) and with
Transformer Engine (`parity`), and timings for `ablate bench`.
"""
