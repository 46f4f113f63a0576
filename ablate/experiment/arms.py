"""Set knobs: resolve a base and values of short names or full paths to one workload and recipe, or give every
reason why not."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from ablate.errors import nearest
from ablate.experiment.phases import never_begins, shortest_cooldown
from ablate.experiment.yaml_document import display
from ablate.files import Json, user_path
from ablate.numerics.own import FOLDER
from ablate.numerics.spec import Spec, own_words
from ablate.numerics.words import NEAR
from ablate.recipes import KNOBS, PRESETS, Recipe, Turn
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe import Layers
from ablate.training.data import located
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.base import Workload
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

_LONGEST_VALUE = 40
_MOST_PATHS = 3
"""Largest number of paths that a hint names."""
RECIPE_FILES = (".yaml", ".yml", ".json")
"""Endings of recipe files."""
_WORD, _RESERVED = re.compile(r"(?!-?\d+(\.\d+)?$)[\w.:-]+"), ("true", "false", "null")
"""Strings that need no quotes."""

Knobs = Mapping[str, Json]
"""Values by knob: by short names or full paths."""
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Arm:
    """One point of an experiment: the knobs that were set, the workload and recipe they resolve to, and the
    baseline's name."""

    name: str
    knobs: Knobs
    config: Workload
    recipe: Recipe
    baseline: str | None = None
    twin: bool = False
    """True for a second run of the baseline, which differs in nothing that matters."""
    known_bad: bool = False
    """True for an arm that was added as the design's known-bad one."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers that the arm's recipe applies to, as it divides them."""
        return self.recipe.experts.matrices(self.config.linear_layers)

    @property
    def outside(self) -> bool:
        """Return True for an arm that is run beside the question's own, as a check."""
        return self.twin or self.known_bad

    @property
    def content(self) -> tuple[Spec, Recipe, bool]:
        """Workload, recipe and twin by which two arms are the same: fields that change no number have their
        defaults."""
        fields = type(self.config).model_fields
        same = {name: fields[name].default for name in self.config.SAME_BITS}
        return self.config.model_copy(update=same), self.recipe, self.twin


class NoSuchKnob(str):
    """Reason against a knob that does not exist, whatever its value."""


class KnobError(ValueError):
    """Knobs whose values are not possible: (knob or None, reason) for each."""

    def __init__(self, reasons: list[tuple[str | None, str]]) -> None:
        super().__init__("; ".join(f"{knob}: {reason}" for knob, reason in reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class StartingPoint:
    """Starting point of every arm: a workload by name with the values given for it, and a preset."""

    workload: str
    values: Mapping[str, Json]
    preset: str
    folder: Path | None = None
    """Folder to which paths of data, models and functions are relative: the experiment file's; None: the
    working directory."""
    own: Recipe | None = None
    """Recipe that `preset` names if it is no preset's name: of a file, or written in the experiment."""
    read: Callable[[Path], Recipe] | None = None
    """Reads the recipe file that an arm names; None: arms name presets alone."""

    @cached_property
    def _of_files(self) -> dict[str, Recipe]:
        """Recipes of files that arms have named: a file that is edited during a search is not read again."""
        return {}

    @cached_property
    def config(self) -> Workload:
        """Workload as the file gives it, without any knob."""
        return self.arm({"recipe": "bf16"}).config

    def arm(self, knobs: Knobs, name: str | None = None, *, at_end: bool = False) -> Arm:
        """Build the arm with these knobs set. KnobError with every reason if that is not possible. `at_end`:
        the values are ends of ranges, not proposals; a phase that never begins with them is then accepted."""
        start, recipe, paths = self._turned(knobs)
        config = paths.apply("workload", deepcopy(dict(self.values)), WORKLOADS[self.workload], None)
        if config is not None and self.folder is not None:
            config = located(config, self.folder)
        if config is not None and recipe is not None:
            paths.reasons += _contradictions(config, recipe, paths)
            if not at_end and not paths.reasons:
                paths.reasons += _never_begun(config, recipe, start, paths)
        for path, word in own_words(recipe) if recipe is not None else ():
            if not word.unchanged:  # written with a digest
                why = f"{path} {word} was edited, or is gone, since its digest {word.digest} was taken"
                why += f"; to take it as it is now, delete #{word.digest} and what follows it in the word"
                paths.reasons.append((paths.knob_of(f"recipe.{path}") or "recipe", why))
        if config is None or recipe is None or paths.reasons:
            raise KnobError(paths.reasons)
        name = name if name is not None else label(knobs) or self._preset(knobs)
        return Arm(name, dict(knobs), config, recipe)

    def recipe(self, knobs: Knobs) -> Recipe:
        """Build the preset with these knobs set, without a workload. KnobError with every reason if that is
        not possible."""
        _, recipe, paths = self._turned(knobs)
        if recipe is None or paths.reasons:
            raise KnobError(paths.reasons)
        return recipe

    def _preset(self, knobs: Knobs) -> str:
        return str(knobs.get("recipe", self.preset))

    def _turned(self, knobs: Knobs) -> tuple[Recipe, Recipe | None, "_Paths"]:
        """Return the preset without and with the knobs set (None, with the reasons in the paths, if not
        possible)."""
        preset = self._preset(knobs)
        if self.own is not None and preset == self.preset:
            start = self.own
        elif preset in PRESETS:
            start = PRESETS[preset]()
        elif self.read and Path(preset).suffix in RECIPE_FILES:
            if preset not in self._of_files:
                self._of_files[preset] = self.read((self.folder or Path()) / user_path(preset))
            start = self._of_files[preset]
        else:
            names = [*PRESETS, *([self.preset] if self.own else [])]
            why = f"no such preset; {nearest(preset, names)}; a recipe file ends in .yaml"
            if not isinstance(knobs["recipe"], str):
                why = "an arm takes a preset's name or a recipe file: write its fields to mine.yaml"
            raise KnobError([("recipe", why)])
        paths = _Paths([], Turn(start, {knob: value for knob, value in knobs.items() if knob in KNOBS}))
        for knob, value in knobs.items():
            paths.add(knob, value)
        return start, paths.apply("recipe", start.model_dump(mode="json"), Recipe, self.folder), paths


class _Paths:
    """Full paths to set, and the knob that sets each."""

    def __init__(self, reasons: list[tuple[str | None, str]], turn: Turn) -> None:
        self.reasons, self.turn = reasons, turn
        self.values: dict[str, Json] = {}
        self.knobs: dict[str, str] = {}

    def add(self, knob: str, value: Json) -> None:
        for path, content in self._expand(knob, value):
            overlapping = (
                rival
                for other, rival in self.knobs.items()
                if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
            )
            if rival := next((rival for rival in overlapping if rival != knob), None):
                self.reasons.append((knob, f"sets {path}, which {rival} sets too; keep one of them"))
            else:
                self.values[path], self.knobs[path] = content, knob

    def _expand(self, knob: str, value: Json) -> Iterator[tuple[str, Json]]:
        if knob == "recipe":
            return
        if knob in KNOBS:
            try:
                paths = KNOBS[knob].paths(KNOBS[knob].check(value), self.turn)
            except ValidationError as error:
                first = error.errors()[0]
                listed = first["type"] == "literal_error"  # whose message has the values
                takes = "" if listed else f"; it takes {KNOBS[knob].values}"
                self.reasons.append((knob, f"{reason(first)}{takes}"))
            except ValueError as error:
                self.reasons.append((knob, str(error)))
            else:
                yield from ((f"recipe.{path}", content) for path, content in paths.items())
        elif knob.startswith(("recipe.", "workload.")):
            yield knob, value
        else:
            names = [*KNOBS, *WORKLOAD_KNOBS, "recipe", "recipe.<path>", "workload.<field>"]
            near = get_close_matches(knob, names, 1, NEAR)
            hint = nearest(knob, names) if near else elsewhere(knob.split(".")) or nearest(knob, names)
            self.reasons.append((knob, NoSuchKnob(f"no such knob; {hint}")))

    def apply(
        self, root: str, content: dict[str, Json], model: type[Model], folder: Path | None
    ) -> Model | None:
        """Return `model` from `content` with all paths under `root` set; None, with the reasons noted, if
        that fails. `folder`: that of functions' files."""
        before = len(self.reasons)
        for path, value in self.values.items():
            if path.startswith(f"{root}."):
                wrong = assign(content, path.split(".")[1:], value, model)
                if wrong:
                    self.reasons.append((self.knobs[path], wrong))
        if len(self.reasons) > before:
            return None
        try:
            return model.model_validate_json(json.dumps(content), context={FOLDER: folder})
        except ValidationError as error:
            for problem in error.errors():
                where = ".".join((root, *map(str, problem["loc"])))
                self.reasons.append((self.knob_of(where) or where, reason(problem, model)))
            return None

    def knob_of(self, path: str) -> str | None:
        """Return the knob that set `path` or a path that contains it."""
        return next((knob for other, knob in self.knobs.items() if f"{path}.".startswith(f"{other}.")), None)


def assign(content: dict[str, Json], parts: list[str], value: Json, model: type[BaseModel]) -> str | None:
    """Set one path of nested dictionaries shaped like `model`. Return the reason if it cannot be set, else
    None."""
    for depth, part in enumerate(parts):
        here, rest = ".".join(parts[: depth + 1]), parts[depth + 1 :]
        if part not in model.model_fields:
            config = content.get("config")  # of a user's own code
            if isinstance(config, dict) and part in config:
                return NoSuchKnob(f"no such knob; {part} is a key of config: write workload.config.{part}")
            if part in WORKLOADS and rest:
                return NoSuchKnob(f"no such knob; write workload.{'.'.join(rest)}, without the name")
            near = get_close_matches(part, model.model_fields, 1, NEAR)
            hint = "" if near else elsewhere(parts)
            return NoSuchKnob(f"no such knob; {hint or nearest(part, model.model_fields)}")
        if not rest:
            if part == "own" and value is not None and content.get("scale"):
                operand = f"recipe.{'.'.join(parts[:-1])}"
                return f"a quantiser of your own stands alone: set {operand} to {{own: {value}}}"
            content[part] = value
            return None
        annotation = model.model_fields[part].annotation
        children = models_of(annotation).values()
        if get_origin(annotation) is dict:
            config = content.setdefault(part, {})
            return _assign_key(config if isinstance(config, dict) else {}, rest, value, part)
        if not children:
            return f"{part} has no parts; set {here} itself"
        if content.get(part) is None and part in content:
            return f"{here} is off (null) in this arm, so it has no {rest[0]}"
        child = content.setdefault(part, {})
        if not isinstance(child, dict):
            return f"{here} is {display(child)} in this arm, which has no {rest[0]}"
        content = child
        wanted = {*content, rest[0]}
        model = next((child for child in children if wanted <= set(child.model_fields)), next(iter(children)))
    return None


def elsewhere(parts: Sequence[str]) -> str:
    """Return a hint with the paths of a recipe that end in the last of these parts, and have all others in
    this order if there are any; empty if there is none."""
    ending = [path for path in _recipe_paths() if path[-1] == parts[-1]]
    paths = [path for path in ending if _in_order(parts, path)] or ending
    least = min(map(len, paths), default=0)
    named = [".".join(path) for path in paths if len(path) == least]
    more = f", or {len(named) - _MOST_PATHS} more" * (len(named) > _MOST_PATHS)
    return f"write {' or '.join(named[:_MOST_PATHS])}{more}" if named else ""


def _in_order(parts: Sequence[str], path: Sequence[str]) -> bool:
    rest = iter(path)
    return all(part in rest for part in parts)


@lru_cache(maxsize=1)
def _recipe_paths() -> tuple[tuple[str, ...], ...]:
    return tuple(below(("recipe",), Recipe))


def below(prefix: tuple[str, ...], model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys of a model below a path, without those of the items of lists."""
    for key in keys(model):
        yield (*prefix, key)
    for name, info in model.model_fields.items():
        if get_origin(info.annotation) is not tuple:
            for child in models_of(info.annotation).values():
                yield from below((*prefix, name), child)


def _assign_key(content: dict[str, Json], keys: list[str], value: Json, where: str) -> str | None:
    """Set one value of a user's own configuration. Only a key that it has can be turned: another would be a
    misspelt one, which the user's code ignores."""
    for depth, key in enumerate(keys):
        if key not in content:
            near = nearest(key, content)
            return NoSuchKnob(f"{where} has no {key}, so it cannot be turned; {near}, or add it to {where}")
        if depth == len(keys) - 1:
            content[key] = value
            return None
        inner = content[key]
        if not isinstance(inner, dict):
            return f"{where}.{key} is {display(inner)}, which has no {keys[depth + 1]}"
        content, where = inner, f"{where}.{key}"
    return None


def models_of(annotation: object) -> dict[str, type[BaseModel]]:
    """Return the models of a field by tag, which is part of an error's location; the first one without a tag
    by ""."""
    models: dict[str, type[BaseModel]] = {}
    for candidate in (annotation, *get_args(annotation)):
        tag = next((word.tag for word in getattr(candidate, "__metadata__", ()) if isinstance(word, Tag)), "")
        kind = get_args(candidate)[0] if tag else candidate
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            models.setdefault(tag, kind)
    return models


def _contradictions(config: Workload, recipe: Recipe, paths: _Paths) -> Iterator[tuple[str | None, str]]:
    problems = list(config.problems())
    for name, why in problems:
        yield paths.knob_of(f"workload.{name}") or f"workload.{name}", why
    if problems:  # the checks below need the layers of a model that may not exist
        return
    ruled = paths.knob_of("recipe.layers.rules") or "recipe.layers.rules"
    layers = recipe.experts.matrices(config.linear_layers) if recipe.layers != Layers() else ()
    for number, rule in enumerate(recipe.layers.rules):
        if layers and (unmatched := select(rule.match, layers).reason):
            yield ruled, f"{number}.match: {unmatched}"
    for name, why in config.contradictions(recipe):
        path = name if name.startswith("recipe.") else f"workload.{name}"
        yield paths.knob_of(path) or path, why
    placements = recipe.placements(layers)
    if (
        layers
        and not recipe.plain
        and not any(recipe.ever_quantises(placement.products) for placement in placements)
    ):
        counted = (
            paths.knob_of("recipe.layers.skip_last")
            or paths.knob_of("recipe.layers.skip_first")
            or "workload.layers"
        )
        knob = counted if any(placement.decider == "skipped" for placement in placements) else ruled
        yield (
            knob,
            f"keeps all {len(layers)} layers in {config.blocks} blocks in high precision: "
            "nothing is quantised, as in preset bf16",
        )


def _never_begun(
    config: Workload, recipe: Recipe, preset: Recipe, paths: _Paths
) -> Iterator[tuple[str | None, str]]:
    """Yield the knob and the reason for each phase that no step reaches, except for phases of the preset
    itself."""
    knob = paths.knob_of("recipe.schedule")
    for phase in (phase for phase in recipe.schedule if phase not in preset.schedule):
        why = never_begins(phase, config.length)
        if why and knob == "cooldown":
            right = f"give {shortest_cooldown(config.steps)} or more, or 0 for no cooldown"
            why = f"begins after the last of {config.steps} steps, so it has no effect; {right}"
        if why:
            yield knob or "recipe.schedule", why


def siblings(problem: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """Return the valid keys at the place of one of pydantic's errors; none if that place has no model."""
    models = {"": model}
    for parent in (parent for parent in problem["loc"][:-1] if not isinstance(parent, int)):
        if parent in models:
            models = {"": models[parent]}
        else:
            field = models[""].model_fields.get(parent) if "" in models else None
            models = models_of(field.annotation) if field else {}
    return keys(models[""]) if "" in models else []


def reason(problem: ErrorDetails, model: type[BaseModel] | None = None) -> str:
    """Return one of pydantic's errors as a reason, with the nearest key or value if there is one."""
    if problem["type"] == "extra_forbidden":
        valid = siblings(problem, model) if model else []
        return f"no such key; {nearest(str(problem['loc'][-1]), valid)}" if valid else "no such key"
    if problem["type"] == "missing":
        return "is missing"
    if problem["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return "should be a mapping"
    message = problem["msg"].removeprefix("Value error, ")
    near = []
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        near = get_close_matches(problem["input"], re.findall("'(.*?)'", problem["ctx"]["expected"]), 1, NEAR)
    return message[0].lower() + message[1:] + "".join(f"; {word!r} is the nearest" for word in near)


def keys(model: type[BaseModel]) -> list[str]:
    """Return the keys of a model as a file writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def label(knobs: Knobs) -> str:
    """Return an arm's name, made of its knobs: `rht=true lr=0.001`; a preset by its own name alone."""
    return " ".join(
        value
        if knob == "recipe" and isinstance(value, str)
        else f"{knob.removeprefix('workload.')}={_short(value)}"
        for knob, value in knobs.items()
    )


def _short(value: Json) -> str:
    """Return a value as YAML writes it. A long one is cut and ends in digits of its hash, so that names stay
    distinct."""
    bare = isinstance(value, str) and _WORD.fullmatch(value) and value not in _RESERVED
    text = str(value) if bare else json.dumps(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}...{hashlib.sha256(text.encode()).hexdigest()[:6]}"
