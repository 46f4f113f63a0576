"""Write tests/golden/imaginary_gpu.json anew: what a training step of each recipe asks of a GPU.

    python tests/regenerate_imaginary_gpu.py

Only after a change that is meant to ask more of the device, or that asks less.
"""

import json
from pathlib import Path

from support.imaginary_gpu import printed

TABLE = Path(__file__).parent / "golden" / "imaginary_gpu.json"
COUNTED = ("kernels", "bytes", "waits", "copies")


def main() -> None:
    """Count every recipe's step, and write the sums of a block and of the rest."""
    steps = printed("preset_cases")
    rows = (
        f'  {json.dumps(name)}: {{"block": {json.dumps(step["block"])},\n    "rest": {json.dumps(step["rest"])}}}'
        for name, step in steps.items()
    )
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
