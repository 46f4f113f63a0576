"""Entry point of `python -m ablate` and of the command `ablate`."""

import sys

from ablate.provenance import other_distribution


def main() -> None:
    """Run the command line, unless another distribution has put its files among ours."""
    if why := other_distribution():
        print(why, file=sys.stderr)
        raise SystemExit(2)
    from ablate.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
