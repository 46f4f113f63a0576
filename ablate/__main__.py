"""Entry point of `python -m ablate` and of the command `ablate`."""

from ablate.cli.start import main

if __name__ == "__main__":
    main()
