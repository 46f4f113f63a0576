"""Order of recipes by `ablate rank`, kept in the cache for plans, which import no torch and cast nothing."""

import json
import math
import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from ablate.cache import key_of, note, noted
from ablate.experiment.arms import RECIPE_FILES
from ablate.experiment.load import Experiment
from ablate.numerics.spec import VERSION
from ablate.recipes import PRESETS, Recipe
from ablate.training.workloads.base import Workload


def keep(
    config: Workload | None, recipes: Collection[Recipe], before: Collection[tuple[Recipe, Recipe]]
) -> None:
    """Keep an order in the place of an earlier one of the same model. `config`: workload whose operands were
    cast; None: the built-in model. `recipes`: all that were compared; `before`: pairs that were ordered, the
    first of them before the second."""
    pairs = [(_digest(first), _digest(second)) for first, second in before]
    with suppress(OSError):  # without a cache, plans name the command
        note(_key(config), json.dumps({"recipes": [*map(_digest, recipes)], "before": pairs}))


def predicted_order(experiment: Experiment) -> Iterator[str]:
    """Yield a line with the kept order of the experiment's recipes, or with the command that finds it.
    Nothing unless two or more presets or recipe files are compared: rank turns no knobs. An order on the
    experiment's own model counts before one on the built-in model."""
    compared = [arm for arm in experiment.arms if not (arm.outside or arm.recipe.plain)]
    arms = [arm.recipe for arm in compared]
    names = {_digest(own): name for name, make in PRESETS.items() if (own := make()) in arms}
    for arm in compared:
        file = Path(experiment.file).parent / str(arm.knobs.get("recipe", ""))
        if [*arm.knobs] == ["recipe"] and file.suffix in RECIPE_FILES:
            names.setdefault(_digest(arm.recipe), os.path.relpath(file))
    config = experiment.base.config
    if len(names) < 2 or any(_digest(recipe) not in names for recipe in arms) or not config.trains:
        return
    for model, of in (("the model of this workload", config), ("rank's built-in model", None)):
        kept = json.loads(noted(_key(of)) or '{"recipes": [], "before": []}')
        if not names.keys() <= {*kept["recipes"]}:
            continue
        pairs = [(a, b) for a, b in kept["before"] if a in names and b in names]
        parts = [
            f"{name} before {', '.join(names[b] for a, b in pairs if a == first)}"
            for first, name in names.items()
            if first in dict(pairs)
        ]
        every = math.comb(len(names), 2)
        parts.append(f"{every - len(pairs)} of {every} pairs not ordered")
        found = f"by the error of operands on {model}: {'; '.join(parts)}"
        unlike = len({recipe.layers for recipe in arms}) > 1
        mind = " They leave different layers in bf16, which lowers an error." * unlike
        yield f"\nPredicted order, {found}.{mind} How often that is right: docs/use/rank.md."
        return
    source = f" --python {shlex.quote(experiment.file)}" if config.in_process else ""
    yield f"\nPredicted order: none yet; `ablate rank {' '.join(names.values())}{source}` finds it."


def _key(config: Workload | None) -> str:
    own = () if config is None else (type(config).__name__, config.identity(), config.fingerprint())
    return key_of("rank", VERSION, own)


def _digest(recipe: Recipe) -> str:
    return key_of(recipe.model_dump(mode="json"))
