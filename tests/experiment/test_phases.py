"""Phases and rules that change nothing: refused at their place, noted for a preset's own, or told after the runs."""

import json
import math
from contextlib import closing

import pytest
from support.cases import every
from support.experiments import ledger, problems, statuses, sweep, tiny

from ablate.cli.recipe import resolve
from ablate.errors import InputError
from ablate.experiment.arms import KnobError
from ablate.experiment.phases import never_begins, shortest_cooldown
from ablate.recipes.recipe import Phase, Run
from ablate.reports.answer import Answer
from ablate.results.unmet_phases import never_began
from ablate.store.ledger import Ledger

STEPS = {"steps": 20, "eval_every": 10}


def holds(phase: Phase, run: Run) -> bool:
    """Return True if the phase is in force in any step, by asking each."""
    return any(phase.active(step, run) for step in range(run.steps))


STARTS = [
    "step:0",
    "step:19",
    "step:20",
    "tokens:133",
    "tokens:134",
    "fraction:0.95",
    "fraction:0.951",
    "decay",
]


@every(start=STARTS, run=[Run(20, 7), Run(20, 7, 15), Run(1), Run(3)])
def test_a_phase_that_never_begins_is_one_that_no_step_sees_and_what_is_said_to_be_right_is(start, run):
    phase = Phase(start=start)
    why = never_begins(phase, run)
    assert (why is None) == holds(phase, run)
    if why and start != "decay":
        assert holds(Phase(start=why.split()[-1]), run)


@pytest.mark.parametrize("steps", [1, 3, 7, 20, 300, 1536])
def test_the_shortest_cooldown_that_is_named_holds_in_one_step(steps):
    shortest = shortest_cooldown(steps)
    phase = resolve("nvfp4", [f"cooldown={shortest}"]).schedule[0]
    assert [step for step in range(steps) if phase.active(step, Run(steps))] == [steps - 1]


FILE = """schema: 1
question: Does it matter?
workload: {{gpt: {{layers: 1, width: 32, heads: 2, context: 16, batch: 2, steps: 20}}}}
{}
"""
REFUSED = {
    "a cooldown of less than a step": ("ablate: {cooldown: [0.5, 0.01]}", "4:26: ablate.cooldown.1: 0.01: "),
    "a phase from a step that is not run": (
        "arms: {a: {recipe.schedule: [{start: 'step:20'}]}}",
        "4:12: arms.a.recipe.schedule: ",
    ),
    "a phase from a token that is not seen": (
        "ablate: {recipe.schedule: [[], [{start: 'tokens:640'}]]}",
        "4:32: ablate.recipe.schedule.1: ",
    ),
    "a phase from a decay that there is not": (
        "ablate:\n  recipe.schedule: [[{start: decay}]]\n  workload.decay: [none]",
        "5:21: ablate.recipe.schedule.0: ",
    ),
    "a condition that is measured too late": (
        "ablate: {recipe.schedule: [[{start: 'noise_ratio:1:20'}]]}",
        "4:28: ablate.recipe.schedule.0: ",
    ),
    "a class that no layer is in": (
        "ablate: {recipe.layers.rules: [[{match: 'class:Foo'}]]}",
        "4:32: ablate.recipe.layers.rules.0: ",
    ),
    "a name that no layer has": (
        "ablate:\n  recipe.layers.rules:\n    - []\n    - [{match: {name: '*.mlp.up'}}, {match: {blocks: 'last:1', name: 'blocks.1.*'}}]",
        "7:7: ablate.recipe.layers.rules.1: ",
    ),
    "blocks that the model has not": (
        "ablate: {recipe.layers.rules: [[{match: {blocks: '1-3'}}]]}",
        "4:32: ablate.recipe.layers.rules.0: ",
    ),
    "every layer kept by a class": (
        "ablate: {recipe.layers.rules: [[{match: 'class:Block'}]]}",
        "4:32: ablate.recipe.layers.rules.0: ",
    ),
    "a baseline's": ("ablate: {rht: [true]}\nagainst: {cooldown: 0.01}", "5:11: against.cooldown: 0.01: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_arm_asks_for_and_never_happens_is_refused_at_its_place(case, tmp_path):
    lines, expected = REFUSED[case]
    path = tmp_path / "x.yaml"
    path.write_text(FILE.format(lines))
    (problem,) = problems(path)
    assert str(problem).removeprefix(f"{path}:").startswith(expected)


ACCEPTED = {
    "no cooldown": {"ablate": {"cooldown": [0, 0.05]}},
    "the last step alone": {"ablate": {"recipe.schedule": [[{"start": "step:19"}]]}},
    "a class of its own model": {"ablate": {"recipe.layers.rules": [[{"match": "class:Atten*"}]]}},
    "a class in the last block": {
        "ablate": {"recipe.layers.rules": [[{"match": {"blocks": "last:1", "within": "SwiGLU"}}]]}
    },
    "a condition that may hold": {"ablate": {"recipe.schedule": [[{"start": "noise_ratio:1:19"}]]}},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_happens_at_least_once_is_not(case, tmp_path):
    assert tiny(tmp_path, shape=STEPS, **ACCEPTED[case]).notes == ()


def test_a_presets_own_phase_that_a_run_is_too_short_for_is_noted(tmp_path):
    found = tiny(tmp_path, ablate={"recipe": ["healing", "fp4_all_the_way", "nvfp4"]})  # of 4 steps
    assert [name in note for name, note in zip(("healing", "fp4_all_the_way"), found.notes, strict=True)] == [
        True,
        True,
    ]
    assert tiny(tmp_path, shape=STEPS, ablate={"recipe": ["healing"]}).notes == ()


def test_values_of_a_range_that_leave_a_phase_without_a_step_are_refused_when_they_are_drawn(tmp_path):
    found = tiny(tmp_path, shape=STEPS, ablate={"cooldown": {"uniform": [0.0, 0.5]}}, search={"trials": 4})
    with pytest.raises(KnobError) as refusal:
        found.propose({"cooldown": 0.01})
    assert [knob for knob, _ in refusal.value.reasons] == ["cooldown"]
    assert found.propose({"cooldown": 0.05})[0].recipe.schedule


@pytest.mark.parametrize("word", ["workload.lr=1", "workload.layers=2", "recipe=bf16"])
def test_a_recipe_is_shown_without_a_workload(word):
    with pytest.raises(InputError) as refusal:
        resolve("nvfp4", [word])
    assert word.partition("=")[0] in str(refusal.value)


def test_a_recipe_is_shown_whatever_a_workload_of_it_would_leave_without_effect():
    assert resolve("nvfp4", ["cooldown=0.0001"]).schedule
    assert resolve("nvfp4", ["skip_first=100"]).layers.skip_first == 100


@pytest.mark.parametrize(
    ("ratios", "lowest"),
    [
        ([3.0, 2.0], "in 2 runs is 2"),
        ([3.0, 0.9], None),
        ([math.nan, 2.0], "in 2 runs is 2"),
        ([math.inf, math.nan], "no finite value was measured in 2 runs"),
    ],
)
def test_a_condition_that_no_run_met_is_told_when_the_runs_are_over(ratios, lowest, tmp_path):
    path = tmp_path / "sweeps" / "x" / "ledger.db"
    spec = {
        "workload": {"gpt": {"steps": 9}},
        "recipe": {"schedule": [{"start": "noise_ratio:1.0:4", "slots": "all"}]},
    }
    with closing(Ledger(path)) as book:
        arm = book.add_arm("late", {"sr": True}, None, None)
        for seed, ratio in enumerate(ratios):
            trial = book.add_member(arm, seed, f"{seed}", json.dumps(spec))
            # Step 6 is a probe's, not the condition's.
            values = {0: math.nan, 4: ratio, 6: 0.1, 8: 5.0 if math.isfinite(ratio) else math.inf}
            book.record(
                trial,
                [{"step": s, "time": 0.0, "metrics": {"grad/noise_ratio": v}} for s, v in values.items()],
            )
            book.settle(trial, "done")
        found = list(never_began(book))
        assert [
            all(part in line for part in ("late", "noise_ratio:1.0:4", str(lowest))) for line in found
        ] == ([True] if lowest else [])
        assert [part.text for part in Answer(book).losses() if "late, noise_ratio" in part.text] == found


def test_a_sweep_goes_on_after_values_that_were_refused(tmp_path):
    search = {"trials": 6, "sampler": "random", "seed": 1}
    experiment = tiny(
        tmp_path, seeds=1, ablate={"cooldown": {"uniform": [0.0, 0.5]}}, search=search
    )  # of 4 steps
    assert sweep(experiment, tmp_path)[0].status == "done"
    with closing(ledger(tmp_path)) as book:
        drawn = {point.role: 0 for point in book.points()}
        for point in book.points():
            drawn[point.role] += 1
            assert (point.role == "refused") == (json.loads(point.knobs)["cooldown"] < 0.25)
    assert set(drawn) == {"refused", "searched"}
    assert set(statuses(tmp_path).values()) == {"done"}
