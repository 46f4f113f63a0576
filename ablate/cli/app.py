"""The `ablate` command. Each subcommand has its own file, except for those here, which print a few lines."""

import json

from rich.table import Table
from rich.text import Text

from ablate import __version__
from ablate.cli import bench, data, recipe, recipe_targets
from ablate.cli.calibrate import calibrate
from ablate.cli.check import check
from ablate.cli.common import Device, Mlflow, Profile, State, console
from ablate.cli.compare import compare
from ablate.cli.doctor import doctor
from ablate.cli.export import evidence, export_tables
from ablate.cli.export_model import export_model
from ablate.cli.init import init
from ablate.cli.jobs import collect, run_task
from ablate.cli.leaderboard import leaderboard
from ablate.cli.plan import plan
from ablate.cli.rebuild import rebuild
from ablate.cli.report import report
from ablate.cli.settings import find_settings
from ablate.cli.start import new_app
from ablate.cli.status import status
from ablate.cli.stop import stop, workers
from ablate.cli.sweep import sweep
from ablate.cli.sync import sync
from ablate.cli.ui import ui
from ablate.experiment.schema import json_schema
from ablate.recipes import KNOBS
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

app = new_app()
_SWEEPS, _FILES, _MACHINE = "Sweeps", "Recipes and files", "This machine"
_VERBS = (sweep, plan, calibrate, report, status, ui, compare, evidence, export_tables, export_model)
for command in (*_VERBS, leaderboard, collect, stop, workers, sync, rebuild):
    app.command(rich_help_panel=_SWEEPS)(command)
app.command(hidden=True)(run_task)
app.command(rich_help_panel=_FILES)(init)
app.command(rich_help_panel=_FILES)(check)
recipe.app.command()(recipe_targets.export)
recipe.app.command("import")(recipe_targets.import_recipe)
recipe.app.command()(recipe_targets.audit)
app.add_typer(recipe.app, name="recipe", rich_help_panel=_FILES)
app.add_typer(data.app, name="data", rich_help_panel=_FILES)
app.command(rich_help_panel=_MACHINE)(doctor)
app.add_typer(bench.app, name="bench", rich_help_panel=_MACHINE)


@app.command(rich_help_panel=_FILES)
def schema() -> None:
    """Print the JSON Schema of an experiment file, for editors."""
    print(json.dumps(json_schema(), indent=2))


@app.command(rich_help_panel=_FILES)
def knobs() -> None:
    """Print the table of short knobs, as Markdown."""
    print(knob_table())


def knob_table() -> str:
    """Return the short knobs of recipes and workloads as a Markdown table."""
    rows = ["| knob | values | what it turns | full paths |", "|---|---|---|---|"]
    for name, knob in KNOBS.items():
        paths = "<br>".join(f"`recipe.{path}`" for path in knob.shown())
        rows.append(f"| `{name}` | {knob.values} | {knob.help} | {paths} |")
    for name, text in WORKLOAD_KNOBS.items():
        rows.append(f"| `{name}` | those of the field | {text} | `workload.{name}` |")
    return "\n".join(rows)


@app.command(rich_help_panel=_MACHINE)
def place(state: State = None, profile: Profile = None, device: Device = None, mlflow: Mlflow = None) -> None:
    """Print the settings in use and the origin of each: a flag, the environment, a profile or the default."""
    settings = find_settings(profile, state=state, device=device, mlflow=mlflow)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for key, value in settings.shown().items():
        table.add_row(key, Text(value, overflow="fold"), Text(settings.origins[key], "dim"))
    console().print(table)


@app.command(rich_help_panel=_MACHINE)
def version() -> None:
    """Print the version."""
    print(__version__)
