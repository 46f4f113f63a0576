"""Functions of the user's in experiments: swept, forked, killed and continued, edited, failing, and in a training loop of one's own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import every
from support.commands import here
from support.experiments import Children, content, problems, statuses, sweep, tiny, values
from torch import nn

import ablate
from ablate.errors import InputError
from ablate.execution.workers import Inline
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.trial_store import Store

SOURCES = Path(__file__).parents[1] / "support" / "own_numerics"
KNOB = "recipe.wgrad.g.rounding"
PREDICTED = ("_expected", "_margin", "_beyond")
"""Ends of the metrics that a user's draws, whose size is not known, leave at the measured values."""
DESIGN = {"trunk": "bf16", "positions": [0.5], "window": 0.25, "horizons": [1, 2], "bad": "mxfp4"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an experiment's data, and the functions in a folder of it."""
    shutil.copytree(SOURCES, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def experiment(folder: Path, *functions: str, **keys):
    """Return an experiment with an arm `ours`, and one of each function, named after it."""
    arms = {"ours": {KNOB: "stochastic"}} | {name: {KNOB: f"own/functions.py:{name}"} for name in functions}
    return tiny(folder, ablate=None, arms=arms, against="bf16", **keys)


@pytest.mark.slow
def test_a_swept_function_trains_to_the_bits_of_the_word_and_one_that_raises_fails_in_one_sentence(folder):
    """In processes of their own, whose working directory is not the experiment's."""
    _, news = sweep(experiment(folder, "stochastic", "raises", seeds=1), folder / "state", connect=Children)
    found = values(folder / "state")
    assert found["stochastic", 0] == found["ours", 0] != found["bf16", 0]
    assert statuses(folder / "state")["raises", 0] == "failed"
    line = (SOURCES / "functions.py").read_text().splitlines().index('    raise KeyError("nothing here")') + 1
    sentence = (
        f"rounding functions.py:raises raised KeyError: 'nothing here' ({folder}/own/functions.py:{line})"
    )
    assert any(sentence in text for text in news), news
    logs = [path.read_text() for path in (folder / "state").glob("trials/*/log-*.txt")]
    assert {log.strip() for log in logs} == {"", sentence}
    assert sum(bool(log) for log in logs) == 2  # the second attempt failed as the first, so there is no third


def test_a_broken_contract_ends_a_trial_at_its_first_attempt_and_names_operand_and_layer(folder):
    _, news = sweep(experiment(folder, "off_grid", seeds=1), folder / "state", connect=Children)
    assert statuses(folder / "state")["off_grid", 0] == "failed"
    (log,) = filter(
        None, (path.read_text().strip() for path in (folder / "state").glob("trials/*/log-*.txt"))
    )
    assert log.startswith("rounding functions.py:off_grid returned 0.300000012 for ")
    assert "outside the grid, in wgrad.g of blocks." in log
    line = (SOURCES / "functions.py").read_text().splitlines().index("def off_grid(y, grid):") + 1
    assert sum(f"{log} ({folder}/own/functions.py:{line})" in text for text in news) == 1, news


@every(command=("plan", "sweep"))
def test_a_function_that_breaks_its_contract_is_refused_before_any_trial(folder, command):
    experiment(folder, "stochastic", "without_sign", seeds=1)
    state = ("--state", folder / "state", "--device", "cpu")
    refused = here(command, folder / "tiny.yaml", *state)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "rounding functions.py:without_sign fails 'rounds to a neighbour'" in refused.stderr
    assert ".copysign(y)" in refused.stderr
    assert "stochastic" not in refused.stderr
    assert not (folder / "state" / "trials").exists()


def test_a_function_is_tried_with_the_formats_of_its_recipe_alone(folder):
    """Written for E2M1, and for a grid of its own, it need not be right for others."""
    with (folder / "own" / "functions.py").open("a") as file:
        file.write(
            "\n\ndef of_four_bits(y, grid):\n    assert grid.bits in (3, 4), grid\n    return toward_zero(y, grid)\n"
            "\n\nODD = (0, 1, 3)\n"
        )
    knob = "own/functions.py:of_four_bits"
    arms = {"ours": {KNOB: knob}, "odd": {KNOB: knob, "recipe.wgrad.g.element": "own/functions.py:ODD"}}
    tiny(folder, ablate=None, arms=arms, against="bf16", seeds=1)
    planned = ("plan", folder / "tiny.yaml", "--state", folder / "state", "--device", "cpu")
    here(*planned, checked=True)
    arms["eight"] = {KNOB: knob, "recipe.wgrad.g.element": "e4m3"}
    tiny(folder, ablate=None, arms=arms, against="bf16", seeds=1)
    refused = here(*planned)
    assert refused.returncode == 2
    assert "raised AssertionError" in refused.stderr
    assert "with e4m3" in refused.stderr


def test_forks_of_a_trunk_take_functions(folder):
    made = experiment(folder, "stochastic", "away", shape={"steps": 8, "eval_every": 4}, design=DESIGN)
    sweep(made, folder / "state")
    found = values(folder / "state")
    assert found["stochastic", 0] == found["ours", 0] != found["away", 0]


KILLED = """
import os, signal
from pathlib import Path
from functions import stochastic

CALLS = []

def once(y, grid, bits, width):
    CALLS.append(1)
    flag = Path(__file__).with_name("flag")
    if len(CALLS) == 70 and not flag.exists():
        flag.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return stochastic(y, grid, bits, width)
"""
"""A function whose process is killed at its 70th call, the first time."""


@pytest.mark.slow
def test_a_trial_that_is_killed_continues_to_the_bits_of_one_that_is_not(folder):
    (folder / "own" / "killed.py").write_text(KILLED)
    shape = {"steps": 40, "eval_every": 10}
    arms = {"own": {KNOB: "own/killed.py:once"}, "plain": {"recipe": "bf16"}}
    telemetry = {"every": 2, "checkpoint": 0.001}

    def records(state: str, connect: Callable) -> tuple[list[str], list[int]]:
        made = tiny(
            folder, ablate=None, arms=arms, against="plain", seeds=1, shape=shape, telemetry=telemetry
        )
        sweep(made, folder / state, connect=connect)
        trial = made.spec(next(arm for arm in made.arms if arm.name == "own"), 0, "cpu").id
        assert statuses(folder / state)["own", 0] == "done"
        events = [*Store(folder / state).events(trial)]
        kept = [own(event) for event in events]
        return kept, [event["resumed"] for event in events if "resumed" in event]

    interrupted, resumed = records("killed", Children)
    assert (folder / "own" / "flag").exists()
    assert resumed
    assert resumed[0] > 0
    undisturbed, never = records("undisturbed", Inline)
    assert never == []
    assert interrupted == undisturbed


def own(event: dict) -> str:
    """Return what an event records of the training itself: not its speed."""
    names = sorted(name for name in event["metrics"] if not name.startswith(("throughput/", "memory/")))
    return json.dumps([event["step"], {name: event["metrics"][name] for name in names}])


def ids(folder: Path) -> dict[str, str]:
    made = load(folder / "tiny.yaml")
    return {arm.name: made.spec(arm, 0, "cpu").id for arm in made.arms}


def test_an_edit_changes_the_ids_of_the_arms_that_use_the_function_and_a_planned_trial_is_refused(folder):
    made = experiment(folder, "stochastic")
    first = ids(folder)
    arm = next(arm for arm in made.arms if arm.name == "stochastic")
    spec = made.spec(arm, 0, "cpu")
    assert str(folder) in spec.wire
    assert TrialSpec.parse(spec.wire).unchanged
    (folder / "own" / "notes.py").write_text("A = 1\n")
    assert ids(folder) == first
    assert spec.unchanged
    (folder / "own" / "halves.py").write_text("HALF = 0.5  # edited\n")
    changed = {name for name, id in ids(folder).items() if id != first[name]}
    assert changed == {"stochastic"}
    assert not spec.unchanged
    with pytest.raises(ValueError, match=r"functions.py:stochastic was edited"):
        TrialSpec.parse(spec.wire)


def test_an_edit_while_the_sweep_runs_ends_it_by_name(folder):
    edits = (
        "\n\ndef edits(y, grid):\n    from pathlib import Path\n    file = Path(__file__)\n"
        "    file.write_text(file.read_text() + '# edited')\n    return away(y, grid)\n"
    )
    with (folder / "own" / "functions.py").open("a") as file:
        file.write(edits)
    with pytest.raises(InputError, match=r"own/functions.py was edited while the sweep ran"):
        sweep(experiment(folder, "edits", seeds=1), folder / "state")


def test_a_mistake_has_its_place_in_the_file(folder):
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(content(folder, ablate={KNOB: ["nearest", "own/functions.py:awayy"]})))
    (problem,) = problems(path)
    assert "own/functions.py has no function 'awayy'" in problem.message
    assert problem.line == 1


def test_a_recipe_file_names_functions_relative_to_itself(folder):
    (folder / "own" / "mine.yaml").write_text("{from: nvfp4, wgrad: {g: {rounding: 'functions.py:away'}}}")
    made = tiny(folder, recipe="own/mine.yaml", ablate={"rht": [True]}, against="bf16")
    assert made.arms[-1].recipe.wgrad.g.rounding.files


def test_a_quantiser_in_a_recipe_file_replaces_its_operand_and_as_a_knob_is_shown_its_form(folder):
    """A part of an operand beside it, such as its bits, is kept; ours, which the preset had, are not."""
    (folder / "own" / "mine.yaml").write_text(
        "{from: nvfp4, wgrad: {g: {own: 'functions.py:as_bf16_drawn', bits: 16}}}"
    )
    g = ablate.recipe(folder / "own" / "mine.yaml").wgrad.g
    assert (g.own.label, g.bits, g.scale, g.outer) == ("functions.py:as_bf16_drawn", 16, None, None)
    knob = {"recipe.wgrad.g.own": f"{folder}/own/functions.py:as_bf16"}
    with pytest.raises(ValueError, match=r"set recipe.wgrad.g to \{own: .*functions.py:as_bf16\}"):
        ablate.recipe("nvfp4", knob)


def test_a_function_itself_is_refused_where_its_file_is_named():
    def mine(y): ...

    for knobs in ({KNOB: mine}, {"recipe.wgrad.g": {"own": mine}}):
        with pytest.raises(ValueError, match=r"name the function by its file: 'FILE.py:mine'"):
            ablate.recipe("nvfp4", knobs)


def test_a_word_with_the_digest_of_another_content_is_refused_at_its_recipe(folder):
    """As of a recipe that was exported, whose function was edited afterwards."""
    word = f"{folder}/own/functions.py:away"
    digest = ablate.recipe("nvfp4", {KNOB: word}).wgrad.g.rounding.digest
    (folder / "mine.yaml").write_text(f"{{from: nvfp4, wgrad: {{g: {{rounding: '{word}#{digest}'}}}}}}")
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(content(folder, recipe="mine.yaml", ablate={"rht": [True]}), indent=1))
    assert not problems(path)
    (folder / "own" / "halves.py").write_text("HALF = 0.25\n")
    (problem,) = problems(path)
    assert f"delete #{digest}" in problem.message
    assert '"recipe"' in path.read_text().splitlines()[problem.line - 1]


def trained(word: str) -> tuple[torch.Tensor, dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([nn.Linear(32, 32)])[0], nn.Sequential(nn.Linear(32, 32)))
    run = ablate.convert(model, "nvfp4", set={KNOB: word}, blocks="*", measure_every=1)
    x = torch.randn(16, 32)
    with run.step():
        model(x).square().mean().backward()
    return model[0].weight.grad, run.metrics()


def test_convert_takes_a_function_relative_to_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder / "own")
    grads, metrics = trained("functions.py:stochastic")
    same, same_metrics = trained("stochastic")
    assert torch.equal(grads, same)
    assert metrics.keys() == same_metrics.keys()
    shared = {name: same_metrics[name] for name in metrics if not name.endswith(PREDICTED)}
    assert {name: metrics[name] for name in shared} == pytest.approx(shared, nan_ok=True)  # another order
    assert not torch.equal(grads, trained("functions.py:away")[0])
    with pytest.raises(InputError, match="raised KeyError"):
        trained("functions.py:raises")


@every(name=("own_generator", "counts"))
def test_numbers_that_come_from_elsewhere_are_refused_in_training(name):
    with pytest.raises(InputError, match=r"returned other numbers for the same arguments.*in wgrad.g of "):
        trained(f"{SOURCES}/functions.py:{name}")


KINDS = {
    "rounding": "away",
    "rounding, drawn": "stochastic",
    "scale.rounding": "ceil",
    "scale.rounding, drawn": "ceil_or_floor",
    "range.statistic": "half_amax",
    "outer.statistic": "fixed",
    "element": "E2M1",
    "own": "as_bf16",
    "own, drawn": "as_bf16_drawn",
}


@every(kind=KINDS, slot=("fprop.x", "wgrad.g"), ours=("nearest", "stochastic"))
def test_every_kind_trains_and_is_measured(kind, slot, ours):
    """On operands of products that draw and of those that do not, in a layer that telemetry measures."""
    field = kind.partition(",")[0]
    word = f"{SOURCES}/functions.py:{KINDS[kind]}"
    turned = {f"recipe.{slot}.{field}": word}
    if field == "own":
        turned = {f"recipe.{slot}": {"own": word}}
    elif field != "rounding":
        turned[f"recipe.{slot}.rounding"] = ours
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    run = ablate.convert(model, "nvfp4", set=turned, blocks="*", measure_every=1)
    with run.step():
        model(torch.randn(16, 32)).square().mean().backward()
    metrics = run.metrics()
    assert metrics[f"quant/{slot}/rel_mse"] < 0.3
    product = slot.partition(".")[0]
    assert 0.5 < metrics[f"gemm/{product}/gain"] < 1.5
    assert not any("half-widths" in str(alarm) for alarm in run.alarms())


def test_a_whole_quantiser_replaces_an_operand(folder):
    own = {"own": f"{SOURCES}/functions.py:as_bf16"}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    run = ablate.convert(model, "bf16", set={"recipe.fprop.x": own}, blocks="*", measure_every=1)
    with run.step():
        model(torch.randn(16, 32)).square().mean().backward()
    metrics = run.metrics()
    assert metrics["quant/fprop.x/rel_mse"] == 0.0
    assert "quant/fprop.x/clipped_frac" not in metrics


def test_recipe_show_and_diff_print_functions_with_the_beginning_of_their_digest(folder):
    (folder / "mine.yaml").write_text("{from: nvfp4, wgrad: {g: {rounding: 'own/functions.py:away'}}}")
    shown = here("recipe", "show", folder / "mine.yaml", COLUMNS="200").stdout
    digest = ablate.recipe(folder / "mine.yaml").wgrad.g.rounding.digest[:8]
    assert f"functions.py:away ({digest})" in shown
    assert str(folder / "own") not in shown
    different = here("recipe", "diff", "nvfp4", folder / "mine.yaml", COLUMNS="200").stdout
    assert "wgrad.g.rounding" in different
    assert digest in different


@every(form=("yaml", "json"))
def test_an_exported_recipe_names_functions_relative_to_itself_and_says_so(folder, form):
    shutil.copytree(folder / "own", folder / form / "own")
    folder /= form
    (folder / "mine.yaml").write_text("{from: nvfp4, wgrad: {g: {rounding: 'own/functions.py:away'}}}")
    (folder / "out").mkdir()
    made, original = folder / "out" / f"made.{form}", folder / "mine.yaml"
    said = here("recipe", "export", original, "--to", form, "--out", made, checked=True)
    word = ablate.recipe(original).wgrad.g.rounding
    assert f"../own/functions.py:away, with digest {word.digest}" in said.stderr
    assert str(folder) not in made.read_text()
    assert ablate.recipe(made) == ablate.recipe(original)
    shutil.copytree(folder, folder / "copy")
    copy = folder / "copy" / "out" / made.name
    moved = ablate.recipe(copy).wgrad.g.rounding
    assert (moved.identity, moved.unchanged) == (word.identity, True)
    assert moved != word
    assert "field" not in here("recipe", "diff", original, copy, checked=True).stdout
    (folder / "own" / "halves.py").write_text("HALF = 0.25\n")
    note = f"functions.py:away ({word.digest[:8]}) was edited since"
    assert note in here("recipe", "diff", made, copy, COLUMNS="300").stdout
    edited = here("recipe", "diff", original, copy, COLUMNS="300").stdout
    assert "wgrad.g.rounding" in edited
    assert note not in edited
    shown = here("recipe", "show", original, f"--{form}", checked=True).stdout
    assert f"/own/functions.py:away#{ablate.recipe(original).wgrad.g.rounding.digest}" in shown
