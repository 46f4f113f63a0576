"""Write docker/.env from env.example, with a fresh random value for every line without one.

A file that exists is not replaced.
"""

import os
import secrets
import sys
from pathlib import Path

HERE = Path(__file__).parent


def filled(example: str) -> str:
    """Return the example with 192 random bits for each missing value.

    They are hexadecimal digits, which need no quoting in an address.
    """
    return "".join(
        f"{line}{secrets.token_hex(24)}\n" if line.endswith("=") else f"{line}\n"
        for line in example.splitlines()
    )


def main(path: Path = HERE / ".env") -> None:
    """Make the file, readable by its owner alone.

    Exit status 1 if it exists: the services' volumes keep the passwords that they were made with.
    """
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
