"""Evidence that numerics, kernels and platform are right and fast.

Checks of this machine for `ablate doctor`, comparisons with other implementations (`peers`) and with
Transformer Engine (`parity`), timings for `ablate bench`, and sweeps that are killed and damaged on purpose
(`fault_injection`), audited afterwards (`audit`).
"""
