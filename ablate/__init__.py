"""ablate: does this part of my low-precision recipe matter, for my model, and by how much?"""

__version__ = "0.1.0"
