"""Subject of an answer in words: recipe and knobs, workload, model, size, steps, data, seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablate.experiment.arms import label
from ablate.experiment.recipe_source import recipe_name
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.yaml_document import display, parse
from ablate.results.number_text import counted
from ablate.results.summary import ArmSummary
from ablate.store.judged import FOREIGN, Judged
from ablate.store.ledger import Ledger
from ablate.training.workloads import abilities

_OF_MODEL = ("layers", "width")
_OF_RUN = ("context", "batch", "steps", "lr")
_OF_TENSORS = ("tokens", "inputs", "outputs")
_DEPTHS, _WIDTHS = ("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model")
"""Names of the number of layers and of features in configurations of `transformers`."""
_ADDED = ("null", "bad", "confirmed", "alone", "refused")
"""Roles of arms that a design or a search adds to those that the file compares."""
_MOST_NAMED = 4
"""Largest number of arms that are named."""


def _model(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a configuration of `transformers` and its size as far as it says it; an empty name
    for the workload's own model, which `layers` and `width` describe."""
    model = config.get("model")
    if not model:
        return "", {key: config[key] for key in _OF_MODEL if key in config}
    if not isinstance(model, Mapping):
        return str(model), {}
    sizes = {
        own: next((model[key] for key in keys if key in model), None)
        for own, keys in zip(_OF_MODEL, (_DEPTHS, _WIDTHS), strict=True)
    }
    return str(model.get("model_type", "model")), {key: size for key, size in sizes.items() if size}


def title(spec: RecordedSpec) -> str:
    """Return workload, size and steps of a trial: `gpt with 3 layers of width 96 and 8 experts, 300 steps`,
    `gpt llama with 2 layers of width 64, 60 steps from a checkpoint of a run of 300`."""
    config = spec.config
    name, sizes = _model(config)
    name = name or Path(config.get("file") or "").name or (display(config["run"]) if "run" in config else "")
    whole = len(sizes) == len(_OF_MODEL)
    size = f"with {counted(sizes['layers'], 'layer')} of width {sizes['width']}" if whole else ""
    if experts := config.get("experts"):
        size += f"{' and' if whole else 'with'} {experts['count']} experts"
    steps = f", {config['steps']} steps" if "steps" in config else ""
    if forks := spec.forks:
        steps = f", {max(forks['windows'])} steps from a checkpoint of a run of {config.get('steps', '?')}"
    return " ".join(filter(None, (spec.workload, name, size))) + steps


def source_name(data: object) -> str:
    """Return the name of a data source, or of its first file or folder."""
    if not isinstance(data, Mapping):
        return str(data)
    first = ("train", "text", "dataset", *data)  # of sources that have other fields beside
    return Path(str(next(filter(None, map(data.get, first)), ""))).name


def described(spec: RecordedSpec) -> str:
    """Return the workload with what it trains, for how long and on what: `gpt (layers 2, steps 9, data
    a)`."""
    config = spec.config
    if spec.workload == FOREIGN:
        return subject(spec, None)
    name, sizes = _model(config)
    parts = [f"model {name}"] if name else []
    parts += [f"{key} {size}" for key, size in sizes.items()]
    parts += [f"{key} {config[key]}" for key in _OF_RUN if config.get(key) is not None]
    parts += [f"data {source_name(config['data'])}"] if config.get("data") else []
    return f"{spec.workload or '?'} ({', '.join(parts)})"


def subject(spec: RecordedSpec, covered: float | None) -> str:
    """Return the subject of an answer: `gpt with 3 layers of width 96, 300 steps, data stdlib, 93 % of matrix
    weights quantised`. `covered`: share of the weights in matrices, except embeddings, that a recipe can
    quantise; None if it is not known, as for the workloads' own models, all of whose blocks a recipe can
    quantise."""
    if spec.workload == FOREIGN:
        steps = spec.config["steps"]
        return f"runs from elsewhere, to step {steps:,}" if steps else "final values of runs from elsewhere"
    if not abilities(spec.workload).trains:
        sizes = " x ".join(str(spec.config[key]) for key in _OF_TENSORS if key in spec.config)
        return f"{spec.workload}{f' {sizes}' if sizes else ''}, no model"
    data = f", data {source_name(spec.config['data'])}" if spec.config.get("data") else ""
    share = f", {covered:.0%} of matrix weights quantised" if covered is not None else ""
    return f"{title(spec)}{data}{share.replace('%', ' %')}"


def seeds_text(ledger: Ledger, arms: Sequence[ArmSummary]) -> str:
    """Return the number of seeds of each arm, `8 seeds per arm`, `2 to 4 seeds per arm`; of judged runs, the
    number of runs."""
    seeds = sorted({arm.seeds for arm in arms if arm.role != "refused"}) or [0]
    word = "run" if Judged.alone(ledger) else "seed"
    return f"{f'{seeds[0]} to ' * (len(seeds) > 1)}{counted(seeds[-1], word)} per arm"


def compared(ledger: Ledger, arms: Sequence[ArmSummary]) -> str:
    """Return what a sweep compares as one line: `Compared: nvfp4 (rht and sr varied in 4 arms) against bf16 ·
    gpt with 2 layers of width 64, 300 steps, data stdlib · 8 seeds per arm`."""
    facts, asked = ledger.facts, [arm for arm in arms if not arm.is_baseline and arm.role not in _ADDED]
    names, baselines = [arm.name for arm in asked], sorted({arm.baseline or "" for arm in asked})
    knobs = [*dict.fromkeys(knob.removeprefix("workload.") for arm in asked for knob in arm.knobs)]
    by_knobs = all(arm.role == "searched" or arm.name == label(arm.knobs) for arm in asked)
    count = counted(len(names), "arm")
    what = ", ".join(names) if len(names) <= _MOST_NAMED else count
    if facts.map:
        what = f"one part at a time in {count}"
    elif knobs and by_knobs and "recipe" not in knobs:
        what = f"{' and '.join(knobs)} varied in {count}"
    recipe = parse(facts.text, facts.file).value.get("recipe") if facts.text else None
    recipe = recipe_name(recipe) if isinstance(recipe, Mapping) else recipe
    if recipe and (facts.map or (recipe not in names and "recipe" not in knobs)):
        what = f"{recipe} ({what})"
    if len(baselines) > 1:  # one recipe, with the workload of each arm
        baselines = sorted({name.split()[0] for name in baselines})
    parts = [f"Compared: {what} against {' or '.join(baselines)}"] if asked else []
    parts += [subject(member.resolved, facts.covered) for member in ledger.members()[:1]]
    return " · ".join([*parts, seeds_text(ledger, arms)])
