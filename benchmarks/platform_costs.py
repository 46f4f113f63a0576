"""Cost of the platform itself, compared with Ray Tune and plain Optuna in one run on this machine.

Each row is a figure with its goal. `python benchmarks/platform_costs.py` measures all, in about half an hour;
`python benchmarks/platform_costs.py ROW ...` measures some. The rows are functions in
platform_rows/figures.py. `make platform` makes the environment: Ray Tune needs one package more than we do.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "platform_rows"))
    from figures import measure

    measure()
