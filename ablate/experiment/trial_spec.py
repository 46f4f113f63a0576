"""A trial as its specification: one workload, one recipe, one seed, one engine. Its id is the hash of exactly
that."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from ablate.numerics import spec as numerics
from ablate.numerics.spec import Spec
from ablate.recipes import Recipe
from ablate.recipes.recipe import Run
from ablate.training.hyperparameters import Training
from ablate.training.workloads import WORKLOADS


class TrialSpec(Spec):
    """Everything that determines a trial's numbers, resolved: defaults included, the data by its fingerprint,
    versions by hand.

    Commit, library versions and hardware are recorded with the result but are not identity; nor is telemetry.
    """

    workload: str
    if TYPE_CHECKING:
        config: Any  # of a class in WORKLOADS; what all of them must have is tests/workloads/test_contract.py
    else:
        config: Spec
    recipe: Recipe
    seed: int
    engine: str
    device: str

    @cached_property
    def id(self) -> str:
        """16 hex digits of the hash of what determines the trial: `content` without the places where its data
        lies."""
        content = self._content(self.config.identity(), self.recipe.canonical())
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()[:16]

    @cached_property
    def segments(self) -> tuple[tuple[int, str], ...]:
        """The first step of each recipe that is in force in turn, and that recipe as JSON; none where the
        workload cannot be forked.

        What is measured starts a phase at no step known before, so such a schedule is part of its recipe from
        the beginning.
        """
        if not isinstance(self.config, Training):
            return ()
        run = Run(self.config.steps, self.config.tokens_per_step, self.config.decay_start)
        told = {"schedule"} if not self.recipe.triggers else set()
        starts = {
            bisect_left(range(run.steps), True, key=partial(phase.active, run=run))
            for phase in self.recipe.schedule
        }
        found: list[tuple[int, str]] = []
        for start in sorted({0} | {start for start in starts if start < run.steps}):
            recipe = to_json(self.recipe.at(start, run).canonical(told)).decode()
            if not found or found[-1][1] != recipe:
                found.append((start, recipe))
        return tuple(found)

    def history(self, step: int) -> str:
        """16 hex digits of the hash of everything that determined the state after `step` steps: what a
        checkpoint there is named by."""
        points = [point for point in self.segments if point[0] < step]
        version = numerics.version((json.loads(recipe) for _, recipe in points), self.device)
        content = self._content(self.config.identity(), {}) | {
            "recipe": points,
            "numerics_version": version,
            "step": step,
        }
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()[:16]

    def alike(self, other: "TrialSpec") -> int:
        """Steps after which the two are still in the same state, where they begin alike."""
        starts = sorted({start for start, _ in (*self.segments, *other.segments)})
        return next(
            (start for start in starts if self._recipe_at(start) != other._recipe_at(start)),
            self.config.steps,
        )

    def _recipe_at(self, step: int) -> str:
        return next(recipe for start, recipe in reversed(self.segments) if start <= step)

    @cached_property
    def wire(self) -> str:
        """The whole spec as JSON, with its id: what crosses to a worker, and what the trial's folder
        keeps."""
        return json.dumps(self.content, sort_keys=True)

    @property
    def content(self) -> dict[str, Any]:
        """The whole spec as JSON data, with its id."""
        return {"id": self.id} | self._content(
            self.config.model_dump(mode="json"), self.recipe.model_dump(mode="json")
        )

    def _content(self, config: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
        return {
            "workload": {self.workload: config},
            "workload_version": self.config.VERSION,
            "data": self.config.fingerprint(),
            "recipe": recipe,
            "numerics_version": numerics.version([recipe], self.device),
            "seed": self.seed,
            "engine": self.engine,
            "device": self.device,
        }

    @classmethod
    def parse(cls, wire: str, loads: Callable[[str], Any] = json.loads) -> "TrialSpec":
        """Return the spec that `wire` describes. ValueError where it was written by other versions, or for
        other data.

        `loads` reads JSON, and is called once: what it returns has lists for tuples, so types are not checked
        strictly here. The id is.
        """
        content = loads(wire)
        ((name, config),) = content["workload"].items()
        spec = cls(
            workload=name,
            config=WORKLOADS[name].model_validate(config, strict=False),
            recipe=Recipe.model_validate(content["recipe"], strict=False),
            **{key: content[key] for key in ("seed", "engine", "device")},
        )
        if spec.id != content["id"]:
            raise ValueError(
                "this process resolves the trial differently: other versions of the code, or other data, than the planner's"
            )
        return spec
