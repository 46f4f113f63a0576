"""`python -m ablate.sweep X.yaml`: the same as `ablate sweep X.yaml`."""

from ablate.cli.common import run_program
from ablate.cli.sweep import sweep

if __name__ == "__main__":
    run_program(sweep)
