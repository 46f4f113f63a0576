"""Ids of trials: those of presets, layer rules and shipped experiments never change, and a recipe's field that is added later changes none."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from regenerate_golden import TABLES, stored_ids

import ablate
from ablate.numerics.spec import Spec
from ablate.recipes import PRESETS, Recipe

DESCRIPTIONS = ("numerics/spec.py", "recipes/recipe.py")
IDS = """
import json, tempfile
from pathlib import Path
import regenerate_golden as golden
from ablate.recipes import PRESETS
with tempfile.TemporaryDirectory() as folder:
    shards = golden.write_shards(Path(folder))
    changed = PRESETS["nvfp4"]()
    changed = changed.model_copy(update={"fprop": changed.fprop.model_copy(update={"x": type(changed.fprop.x)(added=2)})})
    every = {name: make() for name, make in PRESETS.items()} | {"changed": changed}
    print(json.dumps({name: golden.ids(recipe, shards) for name, recipe in every.items()}))
"""


def ids_with_a_new_field(folder: Path, later: str) -> dict[str, dict[str, str]]:
    """Return the ids that a copy of the package computes in which every part of a recipe has a further field."""
    shutil.copytree(
        Path(ablate.__file__).parent, folder / "ablate", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in DESCRIPTIONS:
        path = folder / "ablate" / name
        header = re.compile(r"^class \w+\((?!BaseModel|NamedTuple).*\):\n", re.MULTILINE)
        text, count = header.subn(rf"\g<0>    added: int = 1\n{later}", path.read_text())
        if later:  # a class with fields of its own there names this one, too
            text = text.replace(
                " LATER: ClassVar[frozenset[str]] = frozenset({",
                " LATER: ClassVar[frozenset[str]] = frozenset({'added', ",
            )
        assert count > 5
        path.write_text(text.replace("\nfrom ", "\nimport typing\nfrom ", 1))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parents[1])))}
    done = subprocess.run(
        [sys.executable, "-c", IDS], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def parts(value: Any, data: Any) -> list[tuple[Spec, dict[str, Any]]]:
    """Return every description inside a value, at any depth, with its JSON data."""
    if isinstance(value, tuple):
        return [pair for part, content in zip(value, data, strict=True) for pair in parts(part, content)]
    if not isinstance(value, Spec) or not isinstance(data, dict):  # a layer rule may be written as one word
        return []
    return [(value, data), *(pair for name in data for pair in parts(getattr(value, name), data[name]))]


def classes(annotation: Any) -> set[type[Spec]]:
    """Return the classes of descriptions that a field can hold, and those that their fields can."""
    if not (isinstance(annotation, type) and issubclass(annotation, Spec)):
        return set().union(*(classes(argument) for argument in get_args(annotation)))
    return {annotation}.union(*(classes(field.annotation) for field in annotation.model_fields.values()))


FIELDS = sorted(((kind, name) for kind in classes(Recipe) for name in kind.model_fields), key=str)


@pytest.mark.parametrize("table", TABLES)
def test_every_id_is_the_golden_one(table):
    assert TABLES[table]() == stored_ids()[table], (
        "for ids that are new: python tests/regenerate_golden.py ids"
    )


@pytest.mark.slow
def test_a_field_added_to_every_part_of_a_recipe_changes_no_id_where_later_names_it(tmp_path):
    later = "    LATER: typing.ClassVar[frozenset[str]] = frozenset({'added'})\n"
    found = ids_with_a_new_field(tmp_path / "named", later)
    changed = found.pop("changed")
    golden = stored_ids()["gpt"]
    assert found == golden
    assert not set(changed.values()) & set(golden["nvfp4"].values())
    forgotten = ids_with_a_new_field(tmp_path / "forgotten", "")
    assert all(not set(forgotten[name].values()) & set(golden[name].values()) for name in PRESETS)


def test_later_leaves_out_the_field_where_it_has_its_default_and_nothing_else(monkeypatch):
    wrong, recipes = [], {preset: make() for preset, make in PRESETS.items()}
    for kind, name in FIELDS:
        with monkeypatch.context() as patched:
            patched.setattr(kind, "LATER", frozenset({name}))
            for preset, recipe in recipes.items():
                whole, expected = recipe.model_dump(mode="json"), recipe.model_dump(mode="json")
                for part, data in reversed(parts(recipe, expected)):
                    for field in type(part).LATER:
                        usual = type(part).model_fields[field].get_default(call_default_factory=True)
                        if getattr(part, field) == usual:
                            del data[field]
                if recipe.canonical() != expected or whole != recipe.model_dump(mode="json"):
                    wrong.append((kind.__name__, name, preset))
    assert wrong == []
