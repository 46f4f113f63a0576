"""What an image installs, for the Dockerfiles: read from pyproject.toml and constraints.txt, and compared with what is there.

requirements EXTRA...        what the package and these extras stand on, one a line
kept                         the installed versions of torch and all that is built against it, as constraints
merged FILE                  constraints.txt, with the versions of FILE in the place of its own
unchanged FILE               fails where a version of FILE is no longer what Python finds
transformer-engine           fails where Transformer Engine is missing, or older than the engine takes
transformer-engine-packages  the packages of the version that the project pins
complete                     fails where the compiled quantisers or the notebooks are missing
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_TOGETHER = re.compile(
    r"(torch|torchvision|torchaudio|torchao|torch-tensorrt|(pytorch-)?triton|transformer-engine.*|flash-attn.*|nvidia-.*|cuda-.*)"
)
"""Names of what NVIDIA compiles against one torch: another version of any of them may not load."""
OWN = "ablate-fp4"


def name_of(requirement: str) -> str:
    """A requirement's package, spelled as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def requirements(*extras: str) -> list[str]:
    """What the package and these extras stand on; one that names another of ours, on what that does. KeyError: no such extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"]) if "only" not in extras else []
    for extra in extras:
        for requirement in project["optional-dependencies"][extra] if extra != "only" else ():
            inner = re.fullmatch(rf"{OWN}\[([\w,-]+)\]", requirement)
            found += requirements("only", *inner[1].split(",")) if inner else [requirement]
    return found


def constraints() -> dict[str, str]:
    """The project's own pins, by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name_of(line): line.partition("==")[2] for line in lines if "==" in line}


def kept() -> dict[str, str]:
    """What this environment has of torch and its kin."""
    found = {name_of(one.metadata["Name"]): one.version for one in distributions() if one.metadata["Name"]}
    return {name: version for name, version in sorted(found.items()) if BUILT_TOGETHER.fullmatch(name)}


def read(path: str) -> dict[str, str]:
    """Constraints of a file, by name."""
    return dict(line.split("==") for line in Path(path).read_text().split())


def merged(path: str) -> dict[str, str]:
    """The project's pins, where the file has none of its own; a torch of its own has its own Triton."""
    theirs = read(path)
    ours = {
        name: version
        for name, version in constraints().items()
        if not (theirs and BUILT_TOGETHER.fullmatch(name))
    }
    return ours | theirs


def unchanged(path: str) -> list[str]:
    """Packages of the file that are there in another version now, in words."""
    return [
        f"{name} is {now}, and was {was}"
        for name, was in read(path).items()
        if (now := installed(name)) != was
    ]


def installed(name: str) -> str | None:
    """The version that Python finds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def too_old() -> list[str]:
    """Why the engine refuses the Transformer Engine that is here, in words."""
    found, oldest = (
        installed("transformer-engine"),
        re.search(r"OLDEST = \((\d+), (\d+)\)", _hardware()).groups(),
    )
    if found is None:
        return ["Transformer Engine is not there"]
    number = tuple(map(int, re.match(r"(\d+)\.(\d+)", found).groups()))
    return (
        [f"Transformer Engine {found} is older than {'.'.join(oldest)}"]
        if number < tuple(map(int, oldest))
        else []
    )


def _hardware() -> str:
    """The engine's own file where it is there, which it is not before the package is copied: then the pin says what is new enough."""
    path = ROOT / "ablate/engines/hardware.py"
    return (
        path.read_text()
        if path.exists()
        else "OLDEST = ({}, {})".format(*constraints()["transformer-engine"].split(".")[:2])
    )


def transformer_engine_packages() -> list[str]:
    """Its Python, its kernels for CUDA 13, and its extension of torch, which is compiled where it is installed."""
    pin = constraints()["transformer-engine"]
    return [
        f"{name}=={pin}"
        for name in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    ]


def incomplete() -> list[str]:
    """What this installation lacks, in words."""
    from ablate.cli.report import NOTEBOOKS, analysis
    from ablate.numerics.kernels import cpu

    missing = [] if cpu.build() else ["there are no compiled quantisers: see the warnings of the build"]
    return missing + [
        f"there is no {analysis() / name}.ipynb"
        for name in NOTEBOOKS
        if not (analysis() / f"{name}.ipynb").exists()
    ]


def main(verb: str, *words: str) -> None:
    """Print what is asked for; exit status 1, with the reasons, where something is not as it should be."""
    match verb:
        case "requirements":
            print(*requirements(*words), sep="\n")
        case "kept" | "merged":
            print(
                *(
                    f"{name}=={version}"
                    for name, version in (kept() if verb == "kept" else merged(*words)).items()
                ),
                sep="\n",
            )
        case "transformer-engine-packages":
            print(*transformer_engine_packages())
        case "unchanged" | "transformer-engine" | "complete":
            wrong = {"unchanged": unchanged, "transformer-engine": too_old, "complete": incomplete}[verb](
                *words
            )
            sys.exit("\n".join(wrong) or 0)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
