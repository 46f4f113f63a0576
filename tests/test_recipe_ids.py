"""Trial ids of every preset, of every arm of the shipped experiments and of layer rules in their first spelling: they never change.

`python tests/test_recipe_ids.py` prints them as JSON; tests/golden/recipe_ids.json was written so before layer rules had fields. A preset
or an experiment that is added gets a line there; a line that is there is never altered, since finished trials are found by it.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ablate.experiment.arms import Base
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.training.workloads.idle import Idle

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "recipe_ids.json"
FP8 = PRESETS["fp8_current"]().products.model_dump(mode="json")
RULES = {
    "a name": [{"match": "blocks.*.mlp.down"}],
    "any name": [{"match": "*"}],
    "blocks by name": [{"match": "blocks.[02].*", "use": FP8}],
    "a class": [{"match": "class:Attention"}],
    "classes": [{"match": "class:Att*", "use": FP8}, {"match": "class:SwiGLU", "use": None}],
    "a name that is a word": [{"match": "Attention"}],
    "no rule": [],
}


def recipe_id(recipe: Recipe) -> str:
    """Id of a trial that differs from others in its recipe alone: its workload has no data and no fields set."""
    spec = TrialSpec(workload="idle", config=Idle(), recipe=recipe, seed=0, engine="emulated", device="cpu")
    return f"{spec.id} {hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16]}"


def experiments() -> Iterator[tuple[str, str]]:
    """Every arm of every shipped experiment, with the id of its recipe and a hash of its workload's fields."""
    for path in sorted((ROOT / "experiments").rglob("*.yaml")):
        experiment = load(path)
        for arm in experiment.arms:
            fields = json.dumps(arm.config.identity(), sort_keys=True, separators=(",", ":"))
            yield (
                f"{path.stem}: {arm.name}",
                f"{recipe_id(arm.recipe)} {hashlib.sha256(fields.encode()).hexdigest()[:16]}",
            )


@cache
def ids() -> dict[str, dict[str, str]]:
    """All ids, by what they are of."""
    base = Base("idle", {}, "nvfp4")
    return {
        "presets": {name: recipe_id(preset()) for name, preset in PRESETS.items()},
        "rules": {
            name: recipe_id(base.recipe({"recipe.layers.rules": rules})) for name, rules in RULES.items()
        },
        "experiments": dict(experiments()),
    }


@pytest.mark.parametrize("kind", ["presets", "rules", "experiments"])
def test_every_id_is_the_one_of_earlier_versions(kind):
    assert ids()[kind] == json.loads(GOLDEN.read_text())[kind]


if __name__ == "__main__":
    print(json.dumps(ids(), indent=2))
