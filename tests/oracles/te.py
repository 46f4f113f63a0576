"""Transformer Engine's pure-Python NVFP4 reference, on CPU tensors: an oracle that shares no line with this project."""

from ablate.verification.peers import te_quantizer as quantizer
from ablate.verification.peers import te_reference as reference
from ablate.verification.peers import te_values as values

__all__ = ["quantizer", "reference", "values"]
