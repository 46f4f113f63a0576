"""A sample of `make chaos`, and tests that its audit and its oracles see what they are for."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from support import foreign_files
from support.cases import Tier, every
from support.clusters import end_family
from support.experiments import environment, ledger, sweep, tiny
from support.services import MARK

from ablate.execution import controller
from ablate.execution.sweep_control import damage as damage_of
from ablate.execution.sweep_control import put_aside
from ablate.execution.workers import Inline
from ablate.store.trial_store import Store
from ablate.store.verify import verify
from ablate.verification import passed_checks
from chaos import mutants_runs
from chaos.audit import Finding, audit
from chaos.copies import COMMANDS, kill_commands
from chaos.corruptions import KINDS, LIVE, TEXT, damage
from chaos.kills import KILLS, MIGRATION, Live, deck, excess_attempts
from chaos.report import Fault, Report

RUN = Path(__file__).with_name("run.py")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


# What the audit sees


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished sweep and a second run of it in another state folder."""
    folder = tmp_path_factory.mktemp("finished")
    for state in ("ours", "theirs"):
        sweep(tiny(folder, seeds=1), folder / state)
    return folder


DAMAGE = {
    "a record is lost": ("DELETE FROM records WHERE trial = 1 AND step = 4", "lost"),
    "a value is another": ("UPDATE records SET value = value + 1e-9 WHERE trial = 1 AND step = 4", "silent"),
    "a record is too many": (
        "INSERT INTO records SELECT trial, name, 3, value, time FROM records WHERE step = 4",
        "wrong",
    ),
    "a trial is not done": ("UPDATE trials SET status = 'running' WHERE trial = 2", "lost"),
    "a member is lost": ("DELETE FROM members WHERE arm = 2", "lost"),
    "an attempt never ended": ("UPDATE attempts SET ended = NULL WHERE trial = 1", "wrong"),
    "a trial was run twice": (
        "INSERT INTO attempts SELECT trial, 2, started, ended, outcome, reason FROM attempts",
        "twice",
    ),
}


def examine(folder: Path) -> list[Finding]:
    mine, theirs = (folder / state / "sweeps" / "tiny" for state in ("ours", "theirs"))
    return [*audit(folder / "ours", mine, theirs)]


def test_nothing_is_found_in_a_sweep_that_nothing_disturbed(finished):
    assert examine(finished) == []


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_ledger_is_found(what, finished, tmp_path):
    statement, kind = DAMAGE[what]
    folder = shutil.copytree(finished, tmp_path / "copy")
    with contextlib.closing(sqlite3.connect(folder / "ours" / "sweeps" / "tiny" / "ledger.db")) as db:
        db.execute(statement)
        db.commit()
    assert kind in {found.kind for found in examine(folder)}


@pytest.mark.parametrize("what", ["result.json", "events-1.jsonl"])
def test_a_damaged_trial_folder_is_found(what, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "copy")
    next((folder / "ours" / "trials").iterdir()).joinpath(what).unlink()
    assert {found.kind for found in examine(folder)} == {"lost"}


@pytest.mark.parametrize(
    ("kinds", "counts", "found"),
    [
        (["trial killed", "Ctrl-C"], {"failed": 1, "interrupted": 2, "done": 9}, 0),
        (["trial killed"], {"failed": 2}, 1),
        (["trial killed"], {"orphaned": 1}, 1),
        (["raylet killed"], {"failed": 4, "orphaned": 2}, 0),
    ],
)
def test_attempts_that_no_fault_explains_are_found(kinds, counts, found):
    faults = [Live(Fault("kills", kind), 0, KILLS[kind]) for kind in kinds]
    assert len([*excess_attempts(faults, counts)]) == found


def test_findings_are_counted_and_each_fault_has_a_line_of_json(tmp_path):
    shown = []
    report = Report({"kills": 2}, tmp_path, shown.append)
    report.add(Fault("kills", "trial killed"))
    report.add(
        Fault("kills", "Ctrl-C", findings=[Finding("lost", "3 records", 3), Finding("silent", "a value")])
    )
    assert report.total() == "faults 2, lost 3, twice 0, silent 1, wrong 0"
    assert [line.startswith("BROKEN") for line in shown] == [False, False, True, True]
    lines = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [(line["kind"], len(line["findings"])) for line in lines] == [("trial killed", 0), ("Ctrl-C", 2)]


# Corruptions


@every(way=sorted({*TEXT}))
def test_every_corruption_of_a_file_changes_it_as_its_seed_says(way, tmp_path):
    left = []
    for name in ("one", "two"):
        path, other = tmp_path / way / name / "events-1.jsonl", tmp_path / way / "events-2.jsonl"
        path.parent.mkdir(parents=True)
        for file, number in ((path, 1), (other, 2)):
            file.write_text("".join(f'{{"step": {number * step}}}\n' for step in range(9)))
            os.utime(file, (5, 5))
        before = path.read_bytes()
        assert damage(way, path, [other], Random(7))
        content = path.read_bytes() if path.is_file() else None
        left.append((content, path.is_dir(), path.is_symlink(), os.path.lexists(path)))
        assert content != before or way in ("mode", "time")
        if way in ("mode", "time"):
            assert (path.stat().st_mode & 0o777 in (0o444, 0), path.stat().st_mtime != 5).count(True) == 1
    assert left[0] == left[1]


@pytest.mark.parametrize("kind", ["trial", "stray", "cell", "spec", "result", "ledger"])
def test_every_corruption_of_a_state_folder_says_what_it_did(kind, finished, tmp_path):
    state, draw = shutil.copytree(finished / "ours", tmp_path / "state"), Random(3)
    assert any(KINDS[kind](state, state / "sweeps" / "tiny", draw) for _ in range(9))


LOGGED = {"seeds": 1, "telemetry": {"checkpoint": 0, "log": 1}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a finished sweep, with its file two folders above."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sweep(tiny(folder, "tiny", {"steps": 8}, **LOGGED), folder)
    return folder / "sweeps" / "tiny"


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The state folder of the same sweep, ended within its second trial."""
    folder = tmp_path_factory.mktemp("left")
    experiment = tiny(folder, "tiny", {"steps": 8}, **LOGGED)
    steps = controller.Controller(experiment, folder / "state", "cpu", Inline, None).run()
    for step in steps:
        if step.done == 1 and any(running.step >= 5 for running in step.running):
            break
    steps.close()
    return folder / "state"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), [pair for pair in LIVE if pair[0] != "shared checkpoint"])
def test_what_is_corrupted_is_made_again_with_the_values_of_an_undisturbed_run(
    kind, way, left, undisturbed, tmp_path
):
    """First in a sweep that was left and then in the finished one; without Ray and MLflow."""
    experiment = tiny(tmp_path, "tiny", {"steps": 8}, **LOGGED)
    state, draw = tmp_path / "ours", Random(17)
    shutil.copytree(left, state)
    folder = state / "sweeps" / "tiny"
    for _ in range(2):
        done = KINDS[kind](state, folder, draw, way)
        if damage_of(folder / "ledger.db"):
            put_aside(folder / "ledger.db")  # as `rebuild` does
        assert sweep(experiment, state)[0].status == "done"
        assert done or kind == "checkpoint"
    assert [*audit(state, folder, undisturbed)] == []
    book = ledger(state)
    assert (verify(book, Store(state)).verified, verify(book, Store(state)).mismatches) == (3, ())
    book.close()


# Mutants


def test_mutants_of_every_source_are_refused_or_read_rightly(tmp_path):
    faults = [mutants_runs.outcome(30_000 + n, tmp_path) for n in range(25 * len(foreign_files.SOURCES))]
    assert [finding.what for fault in faults for finding in fault.findings] == []
    counts = Counter((fault.kind, fault.outcome) for fault in faults)
    assert all(counts[name, "read"] and counts[name, "refused"] for name in foreign_files.SOURCES)


@pytest.mark.parametrize("name", foreign_files.SOURCES)
def test_a_wrong_or_missing_value_would_be_seen(name):
    files, values = foreign_files.SOURCES[name](), foreign_files.expected(name)
    key = next(iter(values))
    less = {other: value for other, value in values.items() if other != key}
    assert mutants_runs.judge(name, files, next(iter(files.contents)), values, []) is None
    for wrong in (values | {key: values[key] + 0.5}, less):
        assert mutants_runs.judge(name, files, next(iter(files.contents)), wrong, [])


@pytest.mark.slow
def test_mutated_experiments_load_or_are_refused_at_a_place(tmp_path):
    """In a process of its own: its peak memory is counted."""
    first, count = (2000, 12) if Tier.whole else (2006, 6)
    words = ("--kills", "0", "--corruptions", "0", "--mutants", count, "--first", first, "--out", tmp_path)
    done = subprocess.run(
        [sys.executable, RUN, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["family"] == "experiments"]
    assert [line["what"] for line in mine] == [f"mutant {number}" for number in range(first, first + count)]
    assert {"problems", "arms"} <= {key for line in mine for key in line["detail"]}


# Kills


def test_the_same_seed_draws_the_same_kills_and_leaves_no_kind_out():
    drawn = [list(islice(deck(Random(seed)), 100)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {*KILLS, MIGRATION, *COMMANDS}
    assert min(Counter(drawn[0]).values()) >= 2


def test_a_killed_sweep_of_commands_and_a_killed_judge_lose_nothing(tmp_path):
    report = Report({}, tmp_path)
    kill_commands(tmp_path / "kills", 3, Counter(COMMANDS), report)
    assert (Counter(fault.kind for fault in report.faults), report.findings) == (Counter(COMMANDS), [])


@pytest.mark.services
@pytest.mark.slow
def test_faults_of_unlike_parts_lose_nothing_repeat_nothing_and_leave_nothing_behind():
    """Four kills, a corruption of a sweep that is killed, and two of copies."""
    number, seed = 4, 9396
    kills = [KILLS[name] for name in islice(deck(Random(seed)), number)]
    assert {kill.role for kill in kills} == {"MLflow", "trial", "controller", "worker"}
    assert len({kill.signal for kill in kills}) >= 2
    assert any(kill.then for kill in kills)
    words = f"--kills {number} --corruptions 3 --mutants 0 --seed {seed}".split()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    chaos = subprocess.Popen(
        [sys.executable, RUN, *words], env=environment(), start_new_session=True, **pipes
    )
    try:
        output, _ = chaos.communicate(timeout=500)
    finally:
        end_family(chaos)  # its servers and its Ray, too, if it takes too long
        chaos.stdout.close()
    assert chaos.returncode == 0, output
    assert f"seed {seed}, faults 7, lost 0, twice 0, silent 0, wrong 0" in output.splitlines()


def test_the_mark_of_a_suites_processes_does_not_make_them_repeat_the_checks_of_the_numerics(monkeypatch):
    before = passed_checks.subject()
    monkeypatch.setenv(MARK, "a command")
    assert passed_checks.subject() == before
