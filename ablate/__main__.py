"""Entry point of `python -m ablate` and of the command `ablate`."""

from ablate.cli.commands import main

if __name__ == "__main__":
    main()
