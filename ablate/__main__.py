"""The `ablate` command: one verb a file."""

import json

import typer

from ablate import __version__, bench, recipe
from ablate.cli import run
from ablate.doctor import doctor
from ablate.plan import plan
from ablate.recipes import KNOBS
from ablate.surface import json_schema
from ablate.sweep import sweep

app = typer.Typer(
    help="Does this part of my low-precision training recipe matter, for my model, and by how much?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(sweep)
app.command()(plan)
app.add_typer(recipe.app, name="recipe")
app.add_typer(bench.app, name="bench")
app.command()(doctor)


@app.command()
def schema() -> None:
    """Print the JSON Schema of an experiment file, for editors."""
    print(json.dumps(json_schema(), indent=2))


@app.command()
def knobs() -> None:
    """Print the table of short knobs, as Markdown."""
    print("| knob | values | what it turns | full paths |\n|---|---|---|---|")
    for name, knob in KNOBS.items():
        paths = "<br>".join(f"`recipe.{path}`" for path in knob.shown())
        print(f"| `{name}` | {knob.values} | {knob.help} | {paths} |")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """The command line."""
    run(app)


if __name__ == "__main__":
    main()
