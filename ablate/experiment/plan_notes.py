"""Facts about an experiment's arms that a plan prints: layers, memory, and weaknesses that do not stop it."""

import shlex
from collections.abc import Iterator
from contextlib import suppress

from ablate import provenance
from ablate.engines import makes_operands
from ablate.errors import one_line, some_of
from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.load import Experiment
from ablate.experiment.search_space import conditions
from ablate.numerics.own import Own
from ablate.numerics.spec import quants
from ablate.recipes.recipe import Layers
from ablate.recipes.recipe_text import placements
from ablate.training.workloads.memory_estimate import MemoryEstimate, estimate

_LEAST_COVERED = 0.5
"""Fraction of a model's matrix weights in quantisable layers below which a note says so."""


def remarks(experiment: Experiment, device: str = "cpu") -> Iterator[str]:
    """Yield one sentence for each weakness of an experiment that can run all the same."""
    yield from experiment.notes
    yield from filter(None, [on_slow_reference(experiment, device)])
    yield from experiment.base.config.remarks()
    if len(experiment.seeds) == 1 and not (experiment.keys.design or experiment.keys.blame):
        yield "seeds: 1 gives no verdict: the spread between seeds is not known; give 3 seeds or more."
    yield from _idle_knobs(experiment)
    yield from _uncovered(experiment)
    if experiment.base.config.own_code and not experiment.base.config.in_process:
        for file in sorted({str(word.code.path) for _, word in own_functions(experiment)}):
            yield f"recipes that the command reads call {file}: it needs this file, by this path"


def on_slow_reference(experiment: Experiment, device: str) -> str:
    """Return a sentence if compiled quantisers for the experiment's operands are not installed, else ""."""
    config = experiment.base.config
    elsewhere = (config.own_code and not config.in_process) or not makes_operands(experiment.engine)
    if device != "cpu" or elsewhere or all(arm.recipe.plain for arm in experiment.arms):
        return ""
    return "" if provenance.compiled() else provenance.NOT_COMPILED


def _idle_knobs(experiment: Experiment) -> Iterator[str]:
    """Yield a note for each set of knobs without any effect: arms that differ only in them are equal."""
    idle: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for arms in (experiment.arms, *_extremes(experiment)):
        computed: dict[tuple[object, object], Arm] = {}
        for arm in arms:
            twin = computed.setdefault((arm.content[0], arm.config.computed(arm.recipe)), arm)
            if twin.content[:2] != arm.content[:2]:
                every = sorted({*arm.knobs, *twin.knobs})
                knobs = tuple(name for name in every if arm.knobs.get(name) != twin.knobs.get(name))
                idle.setdefault(knobs, []).append((twin.name, arm.name))
    for knobs, pairs in idle.items():
        frozen = "under workload.lora the quantised layers' weights are frozen, so no wgrad is computed"
        first, second = pairs[0]
        more = f" (and {len(pairs) - 1} more such pairs)" if pairs[1:] else ""
        equal = f"arms {first!r} and {second!r} are equal{more}"
        yield f"{' and '.join(knobs)}: only changes wgrad, and {frozen}: {equal}."


def _extremes(experiment: Experiment) -> Iterator[list[Arm]]:
    for knob, dimension in experiment.space.items() if experiment.keys.search else ():
        arms = []
        for value in dimension.ends():
            with suppress(KnobError):  # the value is only valid with one of another knob
                arms.append(experiment.base.arm(conditions(knob, experiment.space) | {knob: value}))
        yield arms


def own_functions(experiment: Experiment) -> dict[tuple[str, Own], dict[str, None]]:
    """Return the functions of the user's in quantisers, by field, with the formats that they round to."""
    arms = (arm for group in (experiment.arms, *_extremes(experiment)) for arm in group)
    functions: dict[tuple[str, Own], dict[str, None]] = {}
    for quant in dict.fromkeys(quant for arm in arms for quant in quants(arm.recipe)):
        grids = {"rounding": quant.element, "scale.rounding": quant.scale and quant.scale.format}
        for own in quant.owned:
            functions.setdefault(own, {})[grids.get(own[0]) or ""] = None
    return functions


def _uncovered(experiment: Experiment) -> Iterator[str]:
    """Yield a note for each model of another library if most of its matrix weights cannot be quantised."""
    configs = dict.fromkeys(
        (experiment.base.config, *(arm.config for arm in experiment.arms if not arm.recipe.plain))
    )
    shares = ((shape.covered, shape.largest_uncovered) for config in configs if (shape := config.outline))
    for covered, largest in dict.fromkeys(shares):
        if covered < _LEAST_COVERED:
            yield (
                f"workload.model: {covered:.0%} of its matrix weights, without embeddings, "
                "are in layers that a recipe quantises. The largest of the others stays in high precision, "
                f"{largest}."
            )


def policies(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of arms whose layer policies select the same layers, and one line for each part of the
    policy; for every quantised arm of the user's own code, why no layer is shown, and what shows them. Other
    arms without a layer policy, checks beside the file's arms, and the cells of a map are left out."""
    if experiment.keys.map:
        return
    unknown = f"a plan does not run your code: `ablate check {experiment.file}` shows the share quantised"
    arms: dict[tuple[str, ...], list[str]] = {}
    for arm in experiment.arms:
        own = arm.config.own_code and arm.config.in_process and not arm.recipe.plain
        if not arm.outside and (own or (arm.layers and arm.recipe.layers != Layers())):
            lines = tuple(placements(arm.recipe, arm.layers)) or (unknown,)
            arms.setdefault(lines, []).append(repr(one_line(arm.name)))
    for lines, names in arms.items():
        yield some_of(names, 3), lines


def commands(experiment: Experiment, device: str) -> tuple[dict[str, str], str]:
    """Return the command of each arm's first seed, by the arm's name, as a shell takes it. Empty unless
    commands get exports. Each begins with the variables that differ between arms; the text has the others."""
    made = {
        arm.name: found
        for arm in experiment.arms
        if arm.config.stacks and (found := arm.config.command(arm.recipe, experiment.seeds[0], device))
    }
    variables = {
        name: {f"{key}={value}" for key, value in each.variables.items() if value is not None}
        for name, each in made.items()
    }
    shared = set.intersection(*variables.values()) if variables else set()
    lines = {
        name: shlex.join([*sorted(variables[name] - shared), *each.words]) for name, each in made.items()
    }
    return lines, shlex.join(sorted(shared))


def memory(experiment: Experiment, device: str) -> tuple[str, MemoryEstimate] | None:
    """Return the name of the arm whose trials need most memory on a GPU, and how much. None for a CPU,
    several ranks, another engine than the emulated one, or where nothing is known."""
    ranks = experiment.keys.resources.layout(device).ranks
    if device != "cuda" or experiment.engine != "emulated" or ranks > 1:
        return None
    needed = [
        (arm.name, size) for arm in experiment.arms if (size := estimate(arm.config, arm.recipe, device))
    ]
    return max(needed, key=lambda each: each[1].total, default=None)
