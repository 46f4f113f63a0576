"""`python -m ablate.doctor`: the same as `ablate doctor`."""

from ablate.cli.common import run_program
from ablate.cli.doctor import doctor

if __name__ == "__main__":
    run_program(doctor)
