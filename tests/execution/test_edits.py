"""An edit that gives an arm's name other contents: plan and sweep say so, and no number of the old ones stands under the name."""

import json
import sys
from collections import Counter

import pytest
from support.commands import here
from support.experiments import IDLE, Children, ledger, statuses, sweep, tiny, values, write

from ablate.errors import InputError
from ablate.execution.forecast import forecast
from ablate.execution.planned_code import PlannedCode
from ablate.execution.trial_runner import Edited
from ablate.execution.trial_runner import run as run_trial
from ablate.experiment.edits import PlannedTrial, redefined
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger
from ablate.store.records import frame
from ablate.store.trial_store import Store

KEYS = IDLE | {"ablate": None, "seeds": 2}
ARMS = {"a": {"rht": False}, "b": {"sr": False}, "c": {"skip_first": 0, "four_over_six": "mse"}}
SWAPPED = {"a": ARMS["b"], "b": ARMS["a"], "c": ARMS["c"]}
EDITS = {
    "two arms swapped": ({"arms": ARMS}, {"arms": SWAPPED}, ["a", "b"]),
    "the baseline swapped with an arm": (
        {"arms": ARMS, "against": "a"},
        {"arms": SWAPPED, "against": "a"},
        ["a", "b"],
    ),
    "another arm the baseline": ({"arms": ARMS, "against": "a"}, {"arms": ARMS, "against": "b"}, []),
    "a step more for all": (
        {"arms": ARMS},
        {"arms": ARMS, "workload": {"idle": {"steps": 5}}},
        ["bf16", "a", "b", "c"],
    ),
    "an arm taken out and named again": ({"arms": {"a": ARMS["a"]}}, {"arms": SWAPPED}, ["a"]),
}


def told(state, name: str = "tiny") -> dict:
    """All that a sweep says of its arms, in numbers."""
    book = ledger(state, name)
    records = frame(book)
    rows = records[~records["metric"].str.startswith(("throughput/", "memory/"))]
    found = {
        arm.name: (arm.baseline, arm.knobs, arm.values, arm.gap and (arm.gap.mean, arm.gap.low, arm.gap.high))
        for arm in summaries(book)
    }
    book.close()
    return {
        "arms": found,
        "records": Counter(
            map(tuple, rows[["arm", "seed", "metric", "step", "value"]].astype(str).to_numpy())
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_sweep_says_which_arms_changed_what_they_mean_and_shows_what_a_new_sweep_shows(
    edit, tmp_path
):
    before, after, names = EDITS[edit]
    sweep(tiny(tmp_path, **KEYS | before), tmp_path)
    experiment = tiny(tmp_path, **KEYS | after)
    assert forecast(experiment, tmp_path, "cpu").redefined == names
    _, news = sweep(experiment, tmp_path)
    lines = [line for line in news if "other contents" in line]
    assert [line.partition(": ")[2].split(": ")[1].partition(";")[0].split(", ") for line in lines] == (
        [names] if names else []
    )
    assert forecast(experiment, tmp_path, "cpu").redefined == []
    assert not any("other contents" in line for line in sweep(experiment, tmp_path)[1])
    sweep(tiny(tmp_path, **KEYS | after), tmp_path / "new")
    assert told(tmp_path) == told(tmp_path / "new")


def test_a_plan_names_them(tmp_path):
    sweep(tiny(tmp_path, **KEYS, arms=ARMS), tmp_path)
    shown = here("plan", write(tmp_path, **KEYS, arms=SWAPPED), "--state", tmp_path).stdout
    assert (
        "\nNote: the file or its data changed: 2 arms with the same name but other contents than before: a, b; "
        in shown
    )
    assert "Note" not in here("plan", write(tmp_path, **KEYS, arms=ARMS), "--state", tmp_path).stdout


@pytest.mark.parametrize("key", ["numerics_version", "workload_version", "engine", "device"])
def test_other_code_and_another_machine_are_no_edit(key):
    spec = {
        "workload": {"gpt": {"lr": 1}},
        "data": "d",
        "recipe": {},
        "numerics_version": 1,
        "workload_version": 1,
        "engine": "e",
    }
    then = {("a", 0): PlannedTrial("x", json.dumps(spec))}
    assert redefined(then, {("a", 0): PlannedTrial("y", json.dumps(spec | {key: "other"}))}) == []
    assert redefined(then, {("a", 0): PlannedTrial("y", json.dumps(spec | {"data": "other"}))}) == ["a"]


@pytest.mark.services
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_mlflow_has_one_run_of_each_member_with_its_present_contents_and_gap(tmp_path):
    """Through edits and back again, with records, gaps and baselines of the present file."""
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(store)
    for before, after, _ in (EDITS["the baseline swapped with an arm"], EDITS["another arm the baseline"]):
        for keys in (before, after, before):
            sweep(tiny(tmp_path, **KEYS | keys), tmp_path, store)
            book = ledger(tmp_path)
            gaps = {
                arm.name: arm.baseline and {s: v - by[arm.baseline][s] for s, v in arm.values.items()}
                for by, arm in _by_name(book)
            }
            expected = {
                (m.name, m.seed, m.id, json.dumps(json.loads(m.knobs))): gaps[m.name] for m in book.members()
            }
            assert book.discarded() == []
            assert {m.mlflow for m in book.members()} == {run.info.run_id for run in _runs(client)}
            book.close()
            shown = {}
            for run in _runs(client):
                tags, metrics = run.data.tags, run.data.metrics
                key = (
                    tags["ablate.arm"],
                    int(tags["ablate.seed"]),
                    tags["ablate.trial"],
                    tags["ablate.knobs"],
                )
                assert key not in shown
                shown[key] = metrics["val/loss_gap"]
            assert shown == {
                key: pytest.approx(gap[key[1]], abs=1e-12) if gap else 0 for key, gap in expected.items()
            }


def _by_name(book: Ledger) -> list:
    arms = summaries(book)
    by_name = {arm.name: arm.values for arm in arms}
    return [(by_name, arm) for arm in arms]


def _runs(client) -> list:
    experiment = client.get_experiment_by_name("tiny")
    return client.search_runs([experiment.experiment_id], "tags.`ablate.kind` = 'trial'", max_results=1000)


LATE = """
import json, os, pathlib
here = pathlib.Path(__file__).parent
if not (here / "edited").exists():
    (here / "edited").touch()
    (here / "value.py").write_text("VALUE = 0.25\\n")
import value
print(json.dumps({"step": 1, "val/loss": value.VALUE}))
"""
"""A program that imports a module late, after an editor has saved another version of it."""


def late(folder) -> dict:
    """Keys of an experiment over the program, which is written to the folder."""
    (folder / "late.py").write_text(LATE)
    (folder / "value.py").write_text("VALUE = 0.5\n")
    program = {"run": f"{sys.executable} late.py {{rate}}", "folder": str(folder), "steps": 1}
    return {
        "workload": {"command": program | {"sources": [str(folder / "late.py")], "config": {"rate": 1}}},
        "recipe": "bf16",
        "ablate": {"workload.config.rate": [1, 2]},
        "metric": {"name": "val/loss"},
        "seeds": 1,
        "retry": 0,
    }


def test_a_trial_that_no_controller_watches_resolves_its_code_again_before_it_has_a_result(tmp_path):
    experiment, store = tiny(tmp_path, **late(tmp_path)), Store(tmp_path / "state")
    spec = experiment.spec(experiment.arms[0], 0, "cpu")
    with pytest.raises(Edited):
        list(run_trial(spec, store, store.begin(spec.id), {}))
    assert store.result(spec.id) is None
    assert not list(store.folder(spec.id).glob("events-*"))


def test_a_trial_whose_code_was_edited_while_it_ran_has_no_result(tmp_path):
    keys, state = late(tmp_path), tmp_path / "state"
    with pytest.raises(InputError, match=f"{tmp_path / 'value.py'} was edited while the sweep ran"):
        sweep(tiny(tmp_path, **keys), state, connect=Children)
    assert set(statuses(state).values()) == {"pending"}
    assert set(values(state).values()) == {None}
    sweep(tiny(tmp_path, **keys), state, connect=Children)
    assert set(values(state).values()) == {0.25}


LONG = """
import os, pathlib, time

def train(trial):
    here = pathlib.Path(__file__).parent
    for step in trial.steps():
        with trial.step():
            pass
        trial.log({"val/loss": float(trial.seed)})
        if trial.seed == 1 and step == 2:
            edited = here / here.joinpath("edit").read_text()
            stand_in = edited.with_name("stand_in")
            stand_in.write_text(edited.read_text() + here.joinpath("added").read_text())
            os.replace(stand_in, edited)
        if trial.seed == 1 and step >= 2:
            time.sleep(5)
"""
"""A function that takes hours at seed 1, while somebody edits a file of the experiment's folder."""


def long(folder, edit: str, added: str):
    (folder / "train.py").write_text(LONG)
    (folder / "data.txt").write_text("1")
    (folder / "notes.txt").write_text("1")
    (folder / "edit").write_text(edit)
    (folder / "added").write_text(added)
    function = {"file": str(folder / "train.py"), "steps": 2000, "data": [str(folder / "data.txt")]}
    return tiny(
        folder,
        workload={"python": function | {"config": {"a": 1}}},
        recipe="bf16",
        ablate={"workload.config.a": [1, 2]},
        metric={"name": "val/loss"},
        seeds=[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["train.py", "data.txt"])
def test_a_sweep_whose_code_or_data_are_edited_ends_at_once_and_the_next_run_begins_those_trials_again(
    edit, tmp_path
):
    state, experiment = tmp_path / "state", long(tmp_path, edit, "\n# edited")
    began = {path: (tmp_path / path).read_text() for path in ("train.py", "data.txt")}
    with pytest.raises(InputError) as raised:
        sweep(experiment, state, connect=Children)
    (sentence,) = raised.value.problems
    assert f"{tmp_path / edit} was edited" in sentence
    assert set(statuses(state).values()) == {"pending"}
    book = ledger(state)
    assert book.db.execute("SELECT count(*) FROM records").fetchone()[0] == 0
    book.close()
    assert list(state.glob("retired/*/events-1.jsonl"))
    assert not list(state.glob("trials/*/events-*.jsonl"))
    assert {path: (tmp_path / path).read_text() for path in began} == began | {
        edit: began[edit] + "\n# edited"
    }


def test_files_that_are_saved_without_a_change_or_not_read_end_nothing(tmp_path):
    arms = long(tmp_path, "", "").arms
    code = PlannedCode(arms)
    (tmp_path / "train.py").write_text(LONG)
    (tmp_path / "notes.txt").write_text("2")
    assert code.edited(now=True) == ()
    (tmp_path / "data.txt").write_text("2")
    assert code.edited() == ()  # it has looked a moment ago
    assert code.edited(now=True) == (tmp_path / "data.txt",)
    (tmp_path / "data.txt").write_text("1")
    code = PlannedCode(arms)
    (tmp_path / "train.py").unlink()
    assert code.edited(now=True) == (tmp_path / "train.py",)
