"""`ablate init`: write an experiment and, on request, a training file to start from. Templates are files."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ablate.cli.common import console, filled
from ablate.errors import InputError
from ablate.files import no_folder_name

STACKS = {"torchtitan": "_job.sh", "megatron": "_job.sh", "hf": "_train.py"}
"""End of the name of the job's file, by the option that chooses a training stack.

Each experiment on a job passes `ablate plan` as it is. The options of torchtitan's and Megatron's jobs are
those that the parsers of torchtitan 0.3.0 and megatron-core 0.19.1 accept.
"""


def init(
    name: Annotated[str, typer.Argument()] = "experiment",
    training: bool = False,
    torchtitan: bool = False,
    megatron: bool = False,
    hf: bool = False,
    rounding: bool = False,
    images: bool = False,
    forks: bool = False,
    by_map: Annotated[bool, typer.Option("--map")] = False,
    schema: bool = False,
    folder: Path = Path(),
) -> None:
    """Write NAME.yaml, a commented experiment to start from. Existing files are never overwritten.

    Args:
        name: Name of the experiment.
        training: Also write a training file of your own, NAME_train.py.
        torchtitan: Sweep a job of torchtitan, which NAME_job.sh starts.
        megatron: Sweep a job of Megatron-LM, which NAME_job.sh starts.
        hf: Sweep a script with transformers' Trainer, NAME_train.py.
        rounding: Compare a rounding of your own, NAME_rounding.py, with nearest.
        images: Sweep a masked autoencoder of images, NAME_train.py.
        forks: Compare short windows from a bf16 run, with less noise.
        by_map: Map which layers a recipe's damage comes from.
        schema: Print the JSON Schema of an experiment, for editors; write nothing.
        folder: Folder to write to.
    """
    if schema:
        from ablate.experiment.schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    if why := no_folder_name(name):
        raise InputError(f"{why}; give a name such as rht_sr, and the folder with --folder")
    kinds = {"torchtitan": torchtitan, "megatron": megatron, "hf": hf, "training": training, "images": images}
    kinds |= {"rounding": rounding, "forks": forks, "map": by_map}
    named = [word for word, on in kinds.items() if on]
    if len(named) > 1 and named != ["training", "forks"]:
        raise InputError(f"--{' and --'.join(named)} write different files; give one of them")
    values = {"name": name, "training": training, "rounding": rounding, "forks": forks}
    if stack := next(iter(STACKS.keys() & named), None):
        if not name.translate(str.maketrans("-_.", "aaa")).isalnum() or not name.isascii():
            why = "is part of the job's command; use letters, digits, '-', '_' and '.'"
            raise InputError(f"{name!r}: the name {why}")
        files = {f"{name}.yaml": filled("job.yaml", name=name, stack=stack)}
        files[f"{name}{STACKS[stack]}"] = filled(f"{stack}{Path(STACKS[stack]).suffix}", name=name)
    elif images:
        files = _image_files(name)
    else:
        files = {f"{name}.yaml": filled("map.yaml" if by_map else "experiment.yaml", **values)}
        files |= {f"{name}_train.py": filled("training.py", **values)} if training else {}
        files |= {f"{name}_rounding.py": filled("rounding.py")} if rounding else {}
    screen = console()
    _write(folder, files, screen)
    subject = f"{name}_rounding.py:mine" if rounding else f"{name}.yaml"
    if training and forks:
        start = f"{folder / name}_start.pt, the bf16 checkpoint that every arm continues"
        screen.print(f"Next: python {folder / name}_train.py writes {start}; or save yours there")
    screen.print(f"Next: ablate {'check' if training or rounding or images else 'plan'} {folder / subject}")


def _write(folder: Path, files: dict[str, str], screen: Console) -> None:
    """Write files by name, and print their paths; InputError if one exists, or cannot be written."""
    if there := [folder / file for file in files if (folder / file).exists()]:
        raise InputError(*[f"{file}: exists already; give another name" for file in there])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None
    screen.print(*(f"wrote {folder / file}" for file in files), sep="\n")


def _image_files(name: str) -> dict[str, str]:
    """Return the example of images; it is in an installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    examples = package / "examples"
    folder = examples if examples.exists() else package.parent / "experiments"
    text = (folder / "mae_masking.yaml").read_text(encoding="utf-8")
    text = text.partition("\n")[2]  # without the checkout's schema
    training = f"{name}_train.py"
    return {
        f"{name}.yaml": text.replace("file: mae.py", f"file: {training}"),
        training: (folder / "mae.py").read_text(encoding="utf-8"),
    }
