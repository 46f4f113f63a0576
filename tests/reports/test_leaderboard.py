"""The leaderboard: every arm of every sweep, by what was measured on what, the best first, and no word less where a ledger is damaged."""

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
from support import made_up
from support.commands import here
from support.experiments import ablate, ledger, shards, sweep, tiny

from ablate.reports.leaderboard import collect
from ablate.results.summary import summaries
from ablate.results.verdict_text import verdict_document
from ablate.store.checked_ledger import folders
from ablate.store.ledger import Ledger

MAXIMIZE = {"name": "throughput/tokens_per_s", "direction": "maximize"}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Three sweeps: two by the same metric on the same model, one by another metric; leave them as they are."""
    folder = tmp_path_factory.mktemp("board")
    sweep(tiny(folder, "one"), folder)
    sweep(tiny(folder, "two", ablate={"sr": [True, False]}), folder)
    sweep(tiny(folder, "fast", metric=MAXIMIZE, shape={"steps": 6}), folder)
    return folder


def listed(state, *words) -> list[dict]:
    done = here("show", "--json", "--state", state, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_every_compared_arm_is_listed_with_what_its_sweeps_table_says(state):
    found = {(entry["sweep"], entry["arm"]): entry for entry in listed(state)}
    for name in ("one", "two", "fast"):
        book = ledger(state, name)
        arms = [arm for arm in summaries(book) if arm.baseline]
        seconds = {row.name: 0.0 for row in book.members()}
        for row in book.members():
            seconds[row.name] += json.loads((state / "trials" / row.id / "result.json").read_text())[
                "seconds"
            ]
        book.close()
        assert {key[1] for key in found if key[0] == name} == {arm.name for arm in arms}
        for arm in arms:
            entry = found[name, arm.name]
            assert (entry["gap"], entry["low"], entry["high"]) == (
                arm.gap.mean,
                None,
                None,
            )  # two seeds: no interval
            assert (entry["seeds"], entry["against"], entry["mean"]) == (2, "bf16", arm.mean)
            assert entry["verdict"] == verdict_document(arm.verdict)
            assert (entry["verdict"]["kind"], entry["verdict"]["reason"]) == ("unjudged", "few_values")
            assert entry["seconds"] == pytest.approx(seconds[arm.name])


def test_they_stand_by_workload_and_metric_the_best_gap_first(state):
    entries = listed(state)
    groups = list(dict.fromkeys((entry["workload"], entry["metric"]) for entry in entries))
    assert groups == [("gpt 1x32, 4 steps", "val/loss"), ("gpt 1x32, 6 steps", "throughput/tokens_per_s")]
    losses = [entry["gap"] for entry in entries if entry["metric"] == "val/loss"]
    speeds = [entry["gap"] for entry in entries if entry["metric"] != "val/loss"]
    assert (len(losses), len(speeds)) == (4, 2)
    assert losses == sorted(losses)
    assert speeds == sorted(speeds, reverse=True)


def test_it_can_be_asked_for_a_workload_or_a_metric_alone(state):
    assert {entry["sweep"] for entry in listed(state, "--metric", "val/loss")} == {"one", "two"}
    assert {entry["sweep"] for entry in listed(state, "--workload", "6 steps")} == {"fast"}


def test_what_is_not_there_is_told_with_what_is(state):
    done = here("show", "--state", state, "--metric", "val/los")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "no arm was compared for metric 'val/los'; there are gpt 1x32, 4 steps by val/loss; gpt 1x32, 6 steps by throughput/tokens_per_s\n"
    )


def test_the_table_has_a_line_an_arm_and_says_which_way_is_better(state):
    lines = ablate("show", "--state", state).stdout.splitlines()
    assert "gpt 1x32, 4 steps: val/loss (lower is better)" in lines
    assert "gpt 1x32, 6 steps: throughput/tokens_per_s (higher is better)" in lines
    assert sum(line.startswith(("rht=", "sr=")) for line in lines) == 6
    assert all(
        line.rstrip().endswith(("one", "two", "fast")) for line in lines if line.startswith(("rht=", "sr="))
    )


def test_means_have_the_digits_that_their_gaps_resolve_and_a_shared_trunk_is_named(tmp_path):
    """Two arms that differ by 0.00003 on each seed, with a spread of 0.000003: four decimals would be equal."""
    random = np.random.default_rng(0)
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(metric='{"name": "val/loss"}')
    spec = json.loads(made_up.SPEC) | {
        "recipe": {},
        "data": "",
        "engine": "emulated",
        "device": "cpu",
        "forks": {"trunk": {"fprop": {}}},
    }
    base = None
    for name, effect in (("bf16", 0.0), ("one", 0.00102), ("other", 0.00105)):
        arm = book.add_arm(name, {}, base, None)
        base = base or arm
        for seed in range(6):
            losses = {"val/loss": 2.84 + 0.01 * seed + effect + 3e-6 * random.normal()}
            made_up.member(book, arm, seed, [(9, losses)], spec=json.dumps(spec))
    book.close()
    out = here("show", "--to", "md", "--state", tmp_path).stdout
    means = [line.split("|")[3].strip() for line in out.splitlines() if line.startswith(("| one", "| other"))]
    assert [round(float(mean), 5) for mean in means] == [2.86602, 2.86605]
    assert out.count("a trunk that arms share") == 1


def test_a_shared_trunk_is_named_where_there_is_one(state):
    assert "trunk" not in here("show", "--to", "md", "--state", state).stdout


def test_markdown_is_a_table_of_as_many_cells_in_every_line(state):
    lines = [
        line
        for line in here("show", "--to", "md", "--state", state).stdout.splitlines()
        if line.startswith("|")
    ]
    assert len(lines) == 2 * 2 + 6
    assert {line.replace("\\|", "").count("|") for line in lines} == {10}


def test_a_damaged_and_a_foreign_ledger_are_named_in_a_line_each_and_left_out(state, tmp_path):
    shutil.copytree(state, tmp_path / "state")
    sweeps = tmp_path / "state" / "sweeps"
    damaged = (sweeps / "two" / "ledger.db").read_bytes()
    (sweeps / "two" / "ledger.db").write_bytes(damaged[:100] + b"x" * (len(damaged) - 100))
    for part in ("-wal", "-shm"):
        (sweeps / "two" / f"ledger.db{part}").unlink(missing_ok=True)
    for name, content in (("foreign", b""), ("other", b"a text file, and no database")):
        (sweeps / name).mkdir()
        (sweeps / name / "ledger.db").write_bytes(content)
    Ledger(sweeps / "empty" / "ledger.db").close()
    done = here("show", "--json", "--state", tmp_path / "state")
    assert {entry["sweep"] for entry in json.loads(done.stdout)} == {"one", "fast"}
    said = done.stderr.splitlines()
    assert [next(name for name in ("two", "foreign", "other") if f"/{name}/" in line) for line in said] == [
        "foreign",
        "other",
        "two",
    ]
    assert all("left out" in line for line in said)


def test_an_arm_without_a_pair_stands_last_and_is_json(state, tmp_path):
    shutil.copytree(state, tmp_path / "state")
    book = Ledger(tmp_path / "state" / "sweeps" / "one" / "ledger.db")
    for member in book.members():
        if member.name == "rht=true":
            book.settle(member.trial, "pending")
    book.close()
    found, unreadable = collect(folders(tmp_path / "state", ["one"]))
    assert unreadable == []
    assert [(entry.arm, entry.gap is None) for entry in found] == [("rht=false", False), ("rht=true", True)]
    assert listed(tmp_path / "state", "--metric", "val/loss")[-1]["gap"] is None


@pytest.mark.parametrize("made", [True, False])
def test_where_nothing_has_been_run_that_is_one_sentence(made, tmp_path):
    if made:
        (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    done = here("show", "--state", tmp_path / "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"{tmp_path / 'runs'}: no sweep has been run there yet;"
        f" `ablate sweep X.yaml --state {tmp_path / 'runs'}` runs one\n"
    )


# Tasks


def recorded(experiment, state) -> None:
    """A ledger as a sweep of this experiment leaves it, with losses that are made up."""
    with closing(Ledger(state / "sweeps" / experiment.name / "ledger.db")) as book:
        book.describe(metric=experiment.metric.model_dump_json(), interval="t", search="")
        numbers: dict[str, int] = {}
        for arm in experiment.arms:
            numbers[arm.name] = book.add_arm(arm.name, arm.knobs, numbers.get(arm.baseline), None)
            for seed in experiment.seeds:
                spec = experiment.spec(arm, seed, "cpu")
                trial = book.add_member(numbers[arm.name], seed, spec.id, spec.wire)
                book.record(
                    trial, [{"step": 4, "time": 0.0, "metrics": {"val/loss": int(spec.id, 16) / 2**64}}]
                )
                book.settle(trial, "done", seconds=1.0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Sweeps that differ from the first in one thing each that changes what is measured, or in nothing of it."""
    folder = tmp_path_factory.mktemp("mixed")
    few = {"ablate": {"rht": [True]}, "seeds": 2}
    for name, shape, keys in (
        ("first", {}, {}),
        ("same", {}, {"ablate": {"sr": [True]}, "seeds": [4, 5]}),
        ("told otherwise", {"recompute": True}, {"seeds": [6, 7]}),
        ("context", {"context": 8}, {}),
        ("batch", {"batch": 1}, {}),
        ("rate", {"lr": 1e-4}, {}),
        ("baseline", {}, {"against": "mxfp4"}),
        ("turned", {}, {"ablate": {"workload.lr": [3e-3, 1e-2]}}),
        ("data", {"data": shards(folder / "other", 6_000)}, {}),
    ):
        recorded(tiny(folder, name, shape, **few | keys), folder)
    (folder / "elsewhere").mkdir()
    recorded(tiny(folder / "elsewhere", "moved", **few | {"seeds": [8, 9]}), folder)
    return folder


def board(state) -> list[dict]:
    return json.loads(here("show", "--json", "--state", state).stdout)


def test_gaps_are_ranked_together_only_where_the_baseline_computes_the_same(mixed):
    groups: dict[str, set[str]] = {}
    for entry in board(mixed):
        groups.setdefault(entry["workload"], set()).add(entry["sweep"])
    together = {
        "first",
        "same",
        "told otherwise",
        "moved",
        "turned",
    }  # the arm at the rate of the others, too
    alone = [{name} for name in ("context", "batch", "rate", "baseline", "data", "turned")]
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, [together, *alone]))
    assert len({entry["task"] for entry in board(mixed)}) == len(groups)


def test_a_task_is_named_by_what_tells_it_from_the_others(mixed):
    titles = {entry["sweep"]: entry["workload"] for entry in board(mixed) if entry["sweep"] != "turned"}
    words = {
        name: dict(word.rsplit(" ", 1) for word in title.split(", ")[2:]) for name, title in titles.items()
    }
    usual = words["first"]
    assert usual.keys() == {"context", "batch", "lr", "data content", "against"}
    changed = {name: {key for key in usual if found[key] != usual[key]} for name, found in words.items()}
    expected = {name: {name} for name in ("context", "batch")}
    expected |= {"rate": {"lr"}, "baseline": {"against"}, "data": {"data content"}}
    assert changed == expected | {key: set() for key in ("first", "same", "told otherwise", "moved")}
    assert (usual["against"], words["baseline"]["against"]) == ("bf16", "mxfp4")


def test_the_printed_tables_are_as_many_as_there_are_tasks(mixed):
    lines = here("show", "--to", "md", "--state", mixed).stdout.splitlines()
    assert sum(line.startswith("### ") for line in lines) == 7


def test_arms_that_are_each_on_a_workload_of_their_own_are_listed_without_a_rank(tmp_path):
    knobs = {"workload.lr": [1e-4, 3e-4, 1e-3], "rht": [True]}
    recorded(tiny(tmp_path, ablate=knobs, seeds=2), tmp_path)
    assert len({entry["task"] for entry in board(tmp_path)}) == 3
    lines = here("show", "--to", "md", "--state", tmp_path).stdout.splitlines()
    assert [line for line in lines if line.startswith("### ")] == [
        "### tiny: val/loss (lower is better), each arm on a workload of its own: not ranked"
    ]
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
    assert names == sorted(names)
    assert len(names) == 3
