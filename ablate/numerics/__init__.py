"""Exact low-precision arithmetic on one tensor and one product, as docs/reference/numerics.md specifies it.

This package depends on torch and nothing above it: no layers, no models, no YAML.
"""
