"""`python -m ablate.bench`: the same as `ablate bench`."""

from ablate.cli.bench import app
from ablate.cli.common import run

if __name__ == "__main__":
    run(app)
