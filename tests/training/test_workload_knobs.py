"""Short names of workload fields are their full paths: in every place that names knobs, with the same arms, trials and mistakes."""

import json
import textwrap

import pytest
from support.cases import every
from support.experiments import SHAPE, problems, tiny, write

from ablate.recipes import KNOBS
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

VALUES = {
    name: (Gpt.model_fields[name].default if name in Gpt.model_fields else None) for name in WORKLOAD_KNOBS
} | SHAPE
OF_GPT = [name for name in WORKLOAD_KNOBS if name in Gpt.model_fields]


def full(content):
    """The content of a file with full paths in place of short names."""
    if not isinstance(content, dict):
        return content
    return {
        f"workload.{key}" if key in WORKLOAD_KNOBS else key: full(value) for key, value in content.items()
    }


def resolved(experiment) -> list:
    """All that makes the arms of an experiment what they are."""
    ids = [experiment.spec(arm, seed, "cpu").id for arm in experiment.arms for seed in experiment.seeds]
    return [
        [(arm.name, arm.knobs, arm.baseline) for arm in experiment.arms],
        ids,
        experiment.space,
        experiment.against.knobs,
    ]


PLACES = {
    "ablate": {"ablate": {"lr": [0.001, 0.01], "rht": [True, False]}},
    "arms and against": {
        "ablate": None,
        "arms": {"a": {"lr": 0.01}, "b": {"lr": 0.001, "width": 64}},
        "against": {"lr": 0.01, "sr": False},
    },
    "a condition": {
        "ablate": {
            "optimizer": ["adamw", "muon"],
            "lr": {"choice": [0.001, 0.01], "when": {"optimizer": "muon"}},
        }
    },
    "a search": {
        "ablate": {"lr": {"uniform": [0.001, 0.01]}, "batch": {"int": [1, 3]}},
        "search": {"trials": 2},
    },
    "a preset beside it": {"ablate": {"recipe": ["bf16", "mxfp4"], "steps": [2, 4]}},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_short_name_is_its_full_path_wherever_knobs_are_named(place, tmp_path):
    keys = PLACES[place]
    assert keys != full(keys)
    assert resolved(tiny(tmp_path, **keys)) == resolved(tiny(tmp_path, **full(keys)))


@every(knob=OF_GPT)
def test_every_short_name_is_the_field_of_its_name(knob, tmp_path):
    keys = {"ablate": {knob: [VALUES[knob]], "rht": [True]}}
    experiment = tiny(tmp_path, **keys)
    assert resolved(experiment) == resolved(tiny(tmp_path, **full(keys)))
    assert experiment.arms[-1].knobs == {f"workload.{knob}": VALUES[knob], "rht": True}


def test_short_names_are_fields_of_some_workload_and_no_knobs_of_recipes():
    fields = {name for workload in WORKLOADS.values() for name in workload.model_fields}
    assert WORKLOAD_KNOBS.keys() <= fields
    assert not WORKLOAD_KNOBS.keys() & {*KNOBS, "recipe"}
    assert not fields & KNOBS.keys()  # or `workload.<field>` would be all that can name it
    assert all(text.endswith(".") for text in WORKLOAD_KNOBS.values())


WRONG = {
    "no such field": ("idle: {steps: 3}", "ablate:\n  lr: [0.1]", ["5:3: ablate.lr: no such knob; "]),
    "no such field of an arm": (
        "idle: {steps: 3}",
        "arms:\n  a: {steps: 4}\n  b: {lr: 0.1}",
        ["6:7: arms.b.lr: 0.1: no such knob; "],
    ),
    "no such field of the baseline": (
        "idle: {steps: 3}",
        "ablate: {sr: [true]}\nagainst: {lr: 0.1}",
        ["5:11: against.lr: 0.1: "],
    ),
    "a value that the field does not take": (
        "gpt: {steps: 4}",
        "ablate: {lr: [0.1, -1.0]}",
        ["4:20: ablate.lr.1: -1.0: input should be "],
    ),
    "beside its full path": (
        "gpt: {steps: 4}",
        "ablate: {lr: [0.1], workload.lr: [0.2]}",
        ["4:10: ablate.lr: is short for workload.lr, "],
    ),
    "an empty list": ("gpt: {steps: 4}", "ablate: {lr: []}", ["4:10: ablate.lr: []: is an empty list"]),
    "a condition on no choice": (
        "gpt: {steps: 4}",
        "ablate: {rht: {choice: [true, false], when: {lr: 3}}, lr: [0.1]}",
        ["4:46: ablate.rht.when.lr: 3: is none of workload.lr's choices"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_refused_at_its_place_by_the_name_that_was_written(case, tmp_path):
    workload, lines, expected = WRONG[case]
    path = tmp_path / "x.yaml"
    path.write_text(f"schema: 1\nquestion: Why?\nworkload: {{{workload}}}\n{textwrap.dedent(lines)}\n")
    found = [str(problem).removeprefix(f"{path}:") for problem in problems(path)]
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected)), found


SHAPES = [
    {"ablate": ["lr"]},
    {"ablate": {"lr": 1}},
    {"arms": {"a": ["lr"]}},
    {"arms": 3},
    {"ablate": {"x": {"when": 1}}},
]


@every(
    against=[None, "bf16", ["lr"], {"lr": 0.01}, 3],
    keys=[
        {"ablate": ["lr"]},
        {"ablate": {"lr": 1}},
        {"arms": {"a": ["lr"]}},
        {"arms": 3},
        {"ablate": {"x": {"when": 1}}},
    ],
)
def test_a_file_of_another_shape_is_refused_and_no_traceback(keys, against, tmp_path):
    path = write(tmp_path, **{"ablate": None} | keys)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"against": against}))
    assert problems(path)
