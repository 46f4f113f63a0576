"""Compiled quantisers: bit for bit the reference, for the forms that NVIDIA's recipe uses."""
