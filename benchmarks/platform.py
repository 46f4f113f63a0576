"""What the platform itself costs, in one run on this machine, beside Ray Tune and plain Optuna: a row a figure, with its goal.

`python benchmarks/platform.py` measures all, in about half an hour; `python benchmarks/platform.py ROW ...` some. The rows are functions in
platform_rows/figures.py. `make platform` makes the environment: Ray Tune asks for a package more than we do.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    # This file is named like a module of Python's own, so its folder must not be where modules are looked for.
    sys.path[:] = [str(HERE / "platform_rows"), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]
    from figures import measure

    measure()
