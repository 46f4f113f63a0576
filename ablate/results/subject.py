"""Subject of an answer in words: workload, model, size, steps, as a trial's spec has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ablate.experiment.recorded_spec import RecordedSpec
from ablate.store.judged import FOREIGN
from ablate.training.workloads import abilities

_OF_MODEL = ("layers", "width")
_OF_RUN = ("context", "batch", "steps", "lr")
_OF_TENSORS = ("tokens", "inputs", "outputs")
_DEPTHS, _WIDTHS = ("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model")
"""Names of the number of layers and of features in configurations of `transformers`."""


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
    """Return workload, size and steps of a trial: `gpt 3x96 with 8 experts, 300 steps`, `gpt llama 2x64, 60
    steps from a checkpoint of a run of 300`."""
    config = spec.config
    name, sizes = _model(config)
    size = "x".join(str(sizes[key]) for key in _OF_MODEL) if len(sizes) == len(_OF_MODEL) else ""
    if experts := config.get("experts"):
        size += f" with {experts['count']} experts"
    steps = f", {config['steps']} steps" if "steps" in config else ""
    if spec.forks:
        steps = (
            f", {max(spec.forks['windows'])} steps from a checkpoint of a run of {config.get('steps', '?')}"
        )
    return " ".join(filter(None, (spec.workload, name, size))) + steps


def source_name(data: object) -> str:
    """Return the name of a data source, or of its first file or folder."""
    return Path(str(next(iter(data.values())))).name if isinstance(data, Mapping) else str(data)


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
    """Return the subject of an answer: `gpt 3x96, 300 steps, data stdlib, 93 % of matrix weights quantised`.
    `covered`: share of the weights in matrices, except embeddings, that a recipe can quantise; None if it is
    not known, as for the workloads' own models, all of whose blocks a recipe can quantise."""
    if spec.workload == FOREIGN:
        steps = spec.config["steps"]
        return f"runs from elsewhere, to step {steps:,}" if steps else "final values of runs from elsewhere"
    if not abilities(spec.workload).trains:
        sizes = " x ".join(str(spec.config[key]) for key in _OF_TENSORS if key in spec.config)
        return f"{spec.workload}{f' {sizes}' if sizes else ''}, no model"
    data = f", data {source_name(spec.config['data'])}" if spec.config.get("data") else ""
    share = f", {covered:.0%} of matrix weights quantised" if covered is not None else ""
    return f"{title(spec)}{data}{share.replace('%', ' %')}"
