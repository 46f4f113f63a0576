"""Give the imaginary GPU to every Python process that has this folder on its PYTHONPATH."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # tests/, for `support`
from support.imaginary_gpu.plugin import plug_in

plug_in()
