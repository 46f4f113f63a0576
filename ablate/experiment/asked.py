"""Check `answer`: the comparison that the question of an experiment file is about.

    question: Does stochastic rounding still pay once wgrad is rotated?
    answer: {knob: sr, given: {rht: true}}

It is fixed before anything runs, so that an answer is never picked among comparisons by its size. Also
checked here: that weights which are to be kept exist.
"""

from collections.abc import Iterable, Mapping

from ablate.errors import nearest
from ablate.experiment.arms import Arm
from ablate.experiment.schema import Asked, ExperimentFile
from ablate.experiment.search_space import Dimension
from ablate.experiment.yaml_document import Document, display
from ablate.training.workloads.trained import Trained


def check_asked(
    file: ExperimentFile, knobs: Mapping[str, Dimension], arms: Iterable[Arm], document: Document
) -> Asked | None:
    """Return the comparison that a file asks for, if it can be made; note what stands against it.

    Args:
        file: the file's top level.
        knobs: the knobs under `ablate`.
        arms: every arm.
        document: the file, which problems are noted in.
    """
    asked = file.answer
    if asked is None:
        return None
    if file.search:
        document.problem(
            ("answer",),
            "a search answers by its winner on fresh seeds (search.confirm); leave it out",
        )
        return None
    if asked.knob is not None:
        _check_knobs(asked, knobs, document)
        return asked
    by_name = {arm.name: arm for arm in arms}
    for field, name in (("arm", asked.arm), ("against", asked.against)):
        if name is not None and name not in by_name:
            document.problem(("answer", field), f"no arm has this name; {nearest(name, by_name)}", name)
    arm = by_name.get(asked.arm or "")
    if arm and asked.against is None and arm.baseline is None:
        document.problem(
            ("answer", "arm"), "is a baseline; name the arm that it is compared with as against", arm.name
        )
    if asked.against == asked.arm:
        document.problem(("answer", "against"), "is the arm itself", asked.against)
    return asked


def _check_knobs(asked: Asked, knobs: Mapping[str, Dimension], document: Document) -> None:
    named = [(("answer", "knob"), asked.knob or ""), *((("answer", "given", k), k) for k in asked.given)]
    for path, knob in named:
        if knob not in knobs:
            listed = nearest(knob, knobs) if knobs else "the file has no `ablate`"
            document.problem(path, f"is not turned by this file; {listed}", knob)
        elif len(knobs[knob].choices) < 2 and path[1] == "knob":
            document.problem(path, "has one value, so that there is nothing to compare", knob)
        elif knob == asked.knob and path[1] == "given":
            document.problem(path, "is the knob that is asked for; hold other knobs", knob)
    for knob, value in asked.given.items():
        if knob in knobs and not knobs[knob].holds(value):
            values = ", ".join(map(display, knobs[knob].choices))
            document.problem(("answer", "given", knob), f"is not among its values: {values}", value)


def check_kept(file: ExperimentFile, arms: Iterable[Arm], document: Document) -> None:
    """Refuse to keep weights of trials that have no one model at their end."""
    if not file.telemetry.keep_weights:
        return
    if file.design is not None:
        why = "forked trials end in a model for each window; leave it out"
    elif not all(isinstance(arm.config, Trained) for arm in arms):
        why = "needs a workload that trains a model of its own (gpt, mae, finetune); your code saves its own"
    else:
        return
    document.problem(("telemetry", "keep_weights"), why)
