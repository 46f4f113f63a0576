"""Requirements of an image, for the Dockerfiles: from pyproject.toml, constraints.txt and the installation.

requirements EXTRA...        the requirements of the package and these extras, one per line
tests                        the requirements of the tests, without all that is built against torch
kept                         the installed versions of torch and all that is built against it, as constraints
merged FILE                  constraints.txt, with the versions of FILE instead of its own
unchanged FILE               fails if a version of FILE is no longer installed
transformer-engine           fails if Transformer Engine is missing, or older than the engine needs
transformer-engine-packages  the packages of the version that the project pins
complete                     fails if the compiled quantisers or the notebooks are missing
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_TOGETHER = re.compile(
    r"(torch|torchvision|torchaudio|torchao|torch-tensorrt|(pytorch-)?triton"
    r"|transformer-engine.*|flash-attn.*|nvidia-.*|cuda-.*)"
)
"""Names of packages that NVIDIA compiles against one torch: another version of any of them may not load."""
OWN = "ablate-fp4"


def name_of(requirement: str) -> str:
    """Return a requirement's package, normalised as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the package and these extras, with extras of ours that an extra names.

    KeyError if there is no such extra.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = list(project["dependencies"]) if "only" not in extras else []
    for extra in extras:
        for requirement in project["optional-dependencies"][extra] if extra != "only" else ():
            inner = re.fullmatch(rf"{OWN}\[([\w,-]+)\]", requirement)
            packages += requirements("only", *inner[1].split(",")) if inner else [requirement]
    return packages


def tests() -> list[str]:
    """Return the requirements of the tests without those built against torch: the image has its own."""
    return [one for one in requirements("only", "dev") if not BUILT_TOGETHER.fullmatch(name_of(one))]


def constraints() -> dict[str, str]:
    """Return the project's own pins, by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name_of(line): line.partition("==")[2] for line in lines if "==" in line}


def kept() -> dict[str, str]:
    """Return the installed versions of torch and of all that is built against it, by name."""
    versions = {name_of(one.metadata["Name"]): one.version for one in distributions() if one.metadata["Name"]}
    return {name: version for name, version in sorted(versions.items()) if BUILT_TOGETHER.fullmatch(name)}


def read(path: str) -> dict[str, str]:
    """Return the constraints of a file, by name."""
    return dict(line.split("==") for line in Path(path).read_text().split())


def merged(path: str) -> dict[str, str]:
    """Return the project's pins with those of the file instead of its own.

    If the file has any, the project's pins of all that is built against torch are left out, such as Triton.
    """
    theirs = read(path)
    ours = {
        name: version
        for name, version in constraints().items()
        if not (theirs and BUILT_TOGETHER.fullmatch(name))
    }
    return ours | theirs


def unchanged(path: str) -> list[str]:
    """Return a sentence for each package of the file of which another version is installed."""
    return [
        f"{name} is {now}, and was {was}"
        for name, was in read(path).items()
        if (now := installed(name)) != was
    ]


def installed(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def too_old() -> list[str]:
    """Return the reason why the engine refuses the installed Transformer Engine, as a sentence, or []."""
    present = installed("transformer-engine")
    oldest = re.search(r"OLDEST = \((\d+), (\d+)\)", _hardware()).groups()
    if present is None:
        return ["Transformer Engine is not there"]
    number = tuple(map(int, re.match(r"(\d+)\.(\d+)", present).groups()))
    return (
        [f"Transformer Engine {present} is older than {'.'.join(oldest)}"]
        if number < tuple(map(int, oldest))
        else []
    )


def _hardware() -> str:
    """Return the engine's own file, or a line from the pin before the package is copied into the image."""
    path = ROOT / "ablate/engines/hardware.py"
    return (
        path.read_text()
        if path.exists()
        else "OLDEST = ({}, {})".format(*constraints()["transformer-engine"].split(".")[:2])
    )


def transformer_engine_packages() -> list[str]:
    """Return the packages of the pinned Transformer Engine.

    They are its Python, its kernels for CUDA 13, and its extension of torch, which pip compiles.
    """
    pin = constraints()["transformer-engine"]
    return [
        f"{name}=={pin}"
        for name in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    ]


def incomplete() -> list[str]:
    """Return a sentence for each part that this installation lacks."""
    from ablate.numerics.kernels import builds
    from ablate.reports.report_files import NOTEBOOKS, analysis

    missing = [] if builds.build() else ["there are no compiled quantisers: see the warnings of the build"]
    return missing + [
        f"there is no {analysis() / name}.ipynb"
        for name in NOTEBOOKS
        if not (analysis() / f"{name}.ipynb").exists()
    ]


def main(verb: str, *arguments: str) -> None:
    """Print what the verb names; exit status 1, with the reasons, if a check fails."""
    match verb:
        case "requirements" | "tests":
            print(*(requirements(*arguments) if verb == "requirements" else tests()), sep="\n")
        case "kept" | "merged":
            print(
                *(
                    f"{name}=={version}"
                    for name, version in (kept() if verb == "kept" else merged(*arguments)).items()
                ),
                sep="\n",
            )
        case "transformer-engine-packages":
            print(*transformer_engine_packages())
        case "unchanged" | "transformer-engine" | "complete":
            wrong = {"unchanged": unchanged, "transformer-engine": too_old, "complete": incomplete}[verb](
                *arguments
            )
            sys.exit("\n".join(wrong) or 0)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
