"""Write the end of docs/run/tensor_cores.md: every preset and operand, on tensor cores or emulated.

`python docs/generate_tensor_cores.py [--check]`. With `--check` nothing is written: exit status 1 if the page
differs from what would be written.
"""

import sys
from pathlib import Path

from ablate.reports.tensor_cores import HEADING, presets

PAGE = Path(__file__).parent / "run" / "tensor_cores.md"

if __name__ == "__main__":
    page = PAGE.read_text()
    by_hand = page.partition(f"{HEADING}\n")[0].rstrip()
    text = f"{by_hand}\n\n{presets()}"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page == text else f"{PAGE.name} is stale: run make pages")
    PAGE.write_text(text)
