"""Write docker/.env from env.example: a fresh random value for every line without one. Replaces nothing that is there."""

import os
import secrets
import sys
from pathlib import Path

HERE = Path(__file__).parent


def filled(example: str) -> str:
    """The example with 192 random bits in the place of each missing value: letters and digits, which mean nothing in an address."""
    return "".join(
        f"{line}{secrets.token_hex(24)}\n" if line.endswith("=") else f"{line}\n"
        for line in example.splitlines()
    )


def main(path: Path = HERE / ".env") -> None:
    """Make the file, for its owner's eyes. Exit status 1 where there is one: the services remember the passwords that they began with."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.exit(
            f"{path}: is there already, and was left as it is; the services' volumes remember its passwords"
        )
    with os.fdopen(file, "w") as out:
        out.write(filled((HERE / "env.example").read_text()))
    print(f"{path}: written, with random secrets; keep it to yourself")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
