"""Options that several commands share, and their groups: name, help and type of each stand here once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from ablate.cli.settings import Settings, find_settings

LOCATIONS = "Locations"
"""Panel of the help page for options that say where data, servers and devices are."""


def sweep_names(state: Path) -> list[str]:
    """Return the names of the sweeps in a state folder that have a ledger."""
    return sorted(path.parent.name for path in state.glob("sweeps/*/ledger.db"))


def complete_sweeps(incomplete: str) -> list[str]:
    """Return the sweeps of the state folder whose names begin so, for the shell's completion."""
    names = sweep_names(Path(os.environ.get("ABLATE_STATE") or "runs"))
    return [name for name in names if name.startswith(incomplete)]


ExperimentFile = Annotated[Path, typer.Argument(help="Experiment file (YAML).")]
Sweeps = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[X]...",
        help="Sweeps, by name or by YAML file; default: all in the state folder.",
        autocompletion=complete_sweeps,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000, help="Number of seeds, as if the file said so; finished runs are reused."
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Device on which trials compute; default: auto, a GPU if there is one."),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        help="Address of MLflow; default: a store in the state folder; none: no MLflow. (ABLATE_MLFLOW)"
    ),
]
Capability = Annotated[
    str | None,
    typer.Option(
        help="Plan for another machine: one with a GPU of this compute capability, such as 10.0 for a "
        "B200, and with the engines that need one (transformer_engine, scaled_mm with FlashInfer).",
        rich_help_panel=LOCATIONS,
    ),
]
CheckCommand = Annotated[
    str | None, typer.Option(hidden=True, help="Command that checks the numerics; default: `ablate doctor`.")
]


@dataclass(frozen=True)
class Flags:
    """Options that set fields of `Settings`, under the names of these fields; None: not given.

    Args:
        state: Folder of trials, ledgers and the local MLflow store; default: runs. (ABLATE_STATE)
        profile: Profile of ablate.toml to read settings from; default: default. (ABLATE_PROFILE)
    """

    panel: ClassVar = LOCATIONS
    state: Path | None = None
    profile: str | None = None

    def settings(self, **more: Any) -> Settings:
        """Return the settings: these options before environment, profile and defaults. `more`: values of
        further options, by field of `Settings`."""
        return find_settings(**vars(self) | more)


@dataclass(frozen=True)
class MlflowFlags(Flags):
    """State folder, profile and MLflow."""

    mlflow: Mlflow = None


@dataclass(frozen=True)
class DeviceFlags(Flags):
    """State folder, profile and device."""

    device: Device = None


@dataclass(frozen=True)
class SweepFlags(Flags):
    """All options that set fields of `Settings`, but `notify`, which stands in another panel.

    Args:
        executor: ray: parallel, the default; inline: one trial after another in this process.
        ray: Ray cluster to use: auto, host:port, ray://...; local, the default, starts Ray here.
          (ABLATE_RAY_ADDRESS)
        workers: Trials to run at once; default: one for each core or GPU.
        price: Cost of one worker-hour, for `budget.cost`.
        tracker: Trackers beside MLflow: tensorboard, module:class, none; commas between. (ABLATE_TRACKER)
        shared_state: Give a new state folder the permissions of the umask; default: access for this user
          only. (ABLATE_SHARED_STATE)
    """

    executor: Literal["ray", "inline"] | None = None
    ray: Annotated[str | None, typer.Option("--address")] = None
    workers: Annotated[int | None, typer.Option(min=1)] = None
    device: Device = None
    price: Annotated[float | None, typer.Option(min=0)] = None
    mlflow: Mlflow = None
    tracker: str | None = None
    shared_state: Annotated[bool | None, typer.Option("--shared-state")] = None
