"""`ablate export-model RUN`: the trained model of a finished trial as packed NVFP4 weights."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.cli.common import console
from ablate.cli.options import DeviceFlags, complete_sweeps
from ablate.errors import InputError
from ablate.execution.finished_trial import FinishedTrial, Form
from ablate.store.trial_store import Store


def export_model(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Trial: SWEEP:ARM with --seed, or the trial's id.",
            autocompletion=complete_sweeps,
        ),
    ],
    flags: DeviceFlags,
    form: Annotated[
        Form,
        typer.Option("--format", help="Layout: vLLM's compressed-tensors, or NVIDIA's modelopt."),
    ] = "compressed-tensors",
    seed: Annotated[int | None, typer.Option(help="Seed of the arm; needed if it has several.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the files; default: TRIAL_FORMAT here.")
    ] = None,
    calibrate: Annotated[
        int,
        typer.Option(min=0, help="Validation batches whose largest inputs become static scales; 0: none."),
    ] = 0,
    train: Annotated[
        bool, typer.Option("--train", help="Train the trial again if it keeps no weights.")
    ] = False,
) -> None:
    """Write the weights of a finished trial as its recipe's forward pass quantises them, packed for serving.

    The trial must have kept its weights (`telemetry: {keep_weights: true}`), or is trained again by --train.
    """
    trial = FinishedTrial.of(run, seed, Store(flags.settings().state))
    if reasons := trial.refusals():
        raise InputError(*[f"{run}: {reason}" for reason in reasons])
    made = trial.export(out or Path(f"{trial.spec.id}_{form}"), form, calibrate, train)
    screen = console()
    kept = f", {len(made.high_precision)} linear layers stay in bf16" if made.high_precision else ""
    screen.print(f"{len(made.packed)} layers packed{kept}.")
    if made.rounded_otherwise:
        screen.print(
            f"{made.rounded_otherwise:,} of {made.elements:,} weights differ in their last bits of fp32 when"
            f" {form} dequantises them; codes and block scales are the training's (docs/use/export.md).",
            soft_wrap=True,
        )
    for path in made.files:
        screen.print(str(path), soft_wrap=True)
