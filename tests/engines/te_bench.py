"""`ablate bench linear --engine transformer_engine` over the double of TE's native part; a program, since the double changes torch."""

import sys
import warnings

import te_double

warnings.simplefilter("ignore")  # TE's, of a machine without its native part
te_double.install()

from ablate.cli import bench  # noqa: E402
from ablate.cli.common import run  # noqa: E402
from ablate.engines.hardware import ASSUMED, Machine  # noqa: E402
from ablate.experiment.arms import StartingPoint  # noqa: E402
from ablate.recipes import PRESETS  # noqa: E402
from ablate.verification import linear_layers  # noqa: E402

ASSUMED.set(Machine("2.20.2", native=True, capability=(10, 0)))
linear_layers.GPU = "cpu"  # where the double computes
NEAREST = StartingPoint("gpt", {}, "nvfp4").arm({"sr": False}).recipe
PRESETS["nvfp4"] = lambda: NEAREST  # TE's reference rounds to nearest alone

if __name__ == "__main__":
    run(lambda: bench.app(sys.argv[1:], standalone_mode=False))
