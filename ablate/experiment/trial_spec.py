"""Specification of a trial: one workload, one recipe, one seed, one engine. Its id is the hash of exactly
these: trials with the same id have the same numbers, and are run once."""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from ablate.files import Json
from ablate.numerics import spec as numerics
from ablate.numerics.spec import Spec, own_words
from ablate.recipes import Recipe
from ablate.training.fork_design import Forks
from ablate.training.trial_run import Telemetry, TrialRun
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.base import Workload

if TYPE_CHECKING:
    from ablate.training.checkpoints import Checkpoints
    from ablate.training.loop import Record


_TRIAL, _STATE = "ablate trial 1", "ablate state 1"
"""First words of what is hashed for the id of a trial and for the name of a checkpoint. Under other words, no
trial has an id that a trial had before."""


class TrialSpec(Spec):
    """Everything that determines a trial's numbers, resolved: with defaults, the fingerprint of the data, and
    the versions of numerics and workload, which are raised by hand.

    Commit, library versions and hardware are recorded with the result but are not part of the identity;
    neither is telemetry.
    """

    workload: str
    config: Workload
    recipe: Recipe
    seed: int
    engine: str
    device: str
    forks: Forks | None = None
    """Windows that the trial trains from a trunk; None: one run of `config.steps` steps."""
    twin: bool = False
    """True for a second trial of the same recipe and seed, which differs in nothing that matters."""

    @property
    def steps(self) -> int:
        """Steps that the trial counts."""
        return self.forks.steps if self.forks else self.config.steps

    def records(self, telemetry: Telemetry, checkpoints: "Checkpoints | None" = None) -> Iterator["Record"]:
        """Run the trial and yield its records; see `Workload.records`. `checkpoints` are the trial's
        checkpoint files, on rank 0."""
        return self.config.records(self.trial_run(telemetry, checkpoints))

    def trial_run(self, telemetry: Telemetry, checkpoints: "Checkpoints | None" = None) -> TrialRun:
        """Return the arguments of the trial's computation."""
        own = self.recipe, self.seed, self.engine, self.device
        return TrialRun(*own, telemetry, checkpoints, self.forks, self.twin)

    @cached_property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of everything that determines the trial: `content` without the paths
        of its data."""
        return _hash(
            _TRIAL,
            self._origin(self._identity)
            | {"recipe": self.recipe.canonical()}
            | {"forks": self.forks and self.forks.canonical(), "twin": self.twin},
        )

    @property
    def unchanged(self) -> bool:
        """True if code and data on disk are still those that the id stands for; False if they cannot be
        read."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            same = type(self).model_construct(**fields).id == self.id
            return same and all(word.unchanged for _, word in own_words(self))
        except (OSError, SyntaxError, ValueError):
            return False

    @cached_property
    def segments(self) -> tuple[tuple[int, str], ...]:
        """Recipes in the order in which they apply: the first step of each, and the recipe as JSON; empty if
        the workload cannot be forked. The first step of a measured phase is not known before the run, so a
        schedule with such phases is part of the recipe from step 0."""
        if self.config.training is None:
            return ()
        if self.forks:
            return self._forked_segments(self.forks)
        run = self.config.length
        excluded = {"schedule"} if not self.recipe.triggers else set()
        starts = {
            bisect_left(range(run.steps), True, key=partial(phase.active, run=run))
            for phase in self.recipe.schedule
        }
        segments: list[tuple[int, str]] = []
        for start in sorted({0} | {start for start in starts if start < run.steps}):
            recipe = to_json(self.recipe.at(start, run).canonical(excluded)).decode()
            recipe = f'["twin",{recipe}]' if self.twin else recipe
            if not segments or segments[-1][1] != recipe:
                segments.append((start, recipe))
        return tuple(segments)

    def _forked_segments(self, forks: Forks) -> tuple[tuple[int, str], ...]:
        """Return the segments of the trunk up to the last position, and all windows as one segment."""
        if forks.trunk is None:
            return ()
        trunk = self.model_copy(update={"recipe": forks.trunk, "forks": None, "twin": False})
        windows = [forks.canonical({"trunk"}), self.recipe.canonical(), self.twin]
        own = json.dumps(windows, sort_keys=True, separators=(",", ":"))
        before = tuple(point for point in trunk.segments if point[0] < forks.trunk_steps)
        return (*before, (forks.trunk_steps, own))

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps of the trunk after which the trial's windows begin, so that their states are kept."""
        return self.forks.positions if self.forks and self.forks.trunk else ()

    def history(self, step: int) -> str:
        """Return the name of a checkpoint after `step` steps: 16 hex digits of the SHA-256 of everything that
        determined the state."""
        points: list[Json] = [list(point) for point in self.segments if point[0] < step]
        return _hash(_STATE, self._origin(self._identity) | {"recipe": points, "step": step})

    def alike(self, other: "TrialSpec") -> int:
        """Return the number of steps for which two trials that start in the same state stay in the same
        state."""
        starts = sorted({start for start, _ in (*self.segments, *other.segments)})
        return next(
            (start for start in starts if self._recipe_at(start) != other._recipe_at(start)),
            self.steps,
        )

    def _recipe_at(self, step: int) -> str:
        return next(recipe for start, recipe in reversed(self.segments) if start <= step)

    @cached_property
    def wire(self) -> str:
        """Whole spec as JSON, with its id: as it is sent to a worker and stored in the trial's folder."""
        return json.dumps(self.content, sort_keys=True)

    @property
    def content(self) -> dict[str, Json]:
        """Whole spec as JSON data, with its id."""
        fields = self.model_dump(mode="json", include={"recipe", "forks", "twin"})
        return {"id": self.id} | self._origin(self.config.model_dump(mode="json")) | fields

    @property
    def _identity(self) -> dict[str, Json]:
        """Return the workload's fields that determine the numbers on this device. `deterministic` changes
        none on a CPU."""
        fields: dict[str, Json] = self.config.identity()
        if self.device == "cpu" and self.config.training:
            del fields["deterministic"]
        return fields

    def _origin(self, config: dict[str, Json]) -> dict[str, Json]:
        """Return what determines the trial beside its recipe. `config`: the workload's fields."""
        return {
            "workload": {self.workload: config},
            "workload_version": self.config.VERSION,
            "data": self.config.fingerprint(),
            "numerics_version": numerics.VERSION,
            "seed": self.seed,
            "engine": self.engine,
            "device": self.device,
        }

    @classmethod
    def parse(
        cls, wire: str, loads: Callable[[str], Any] = json.loads, *, id: str | None = None
    ) -> "TrialSpec":
        """Return the spec that `wire` describes; `loads` reads JSON and is called once. ValueError if `wire`
        was written by other versions of the code, or for other data, or a function of the user's was edited
        since.

        JSON has lists in place of tuples, so types are not checked strictly; instead the id is compared with
        `id`, or with the one in `wire` if that is None.
        """
        content = loads(wire)
        ((name, config),) = content["workload"].items()
        spec = cls(
            workload=name,
            config=WORKLOADS[name].model_validate(config, strict=False),
            recipe=Recipe.model_validate(content["recipe"], strict=False),
            forks=content["forks"] and Forks.model_validate(content["forks"], strict=False),
            **{key: content[key] for key in ("seed", "engine", "device", "twin")},
        )
        if spec.id != (id or content["id"]):
            raise ValueError(
                "this process resolves the trial differently: "
                "its code or its data differ from those of the process that planned it"
            )
        for path, word in own_words(spec):
            if not word.unchanged:
                raise ValueError(f"{path} {word} was edited, or is gone, since this trial was planned")
        return spec


def _hash(domain: str, content: Mapping[str, object]) -> str:
    """Return 16 hex digits of the SHA-256 of a domain and the JSON data that it is followed by."""
    text = json.dumps([domain, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
