"""The ledger: one row a fact, recording twice is recording once, and what changed starts anew."""

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.cases import every

import ablate
from ablate.experiment.schema import Asked, Constraint, Design, Map, Metric, Published
from ablate.store import ledger_file
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Intervention
from ablate.store.sweep_facts import Fact, SweepFacts


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def event(step: int, time: float = 1.0, **metrics: float) -> dict:
    return {"step": step, "time": time, "metrics": metrics}


def member(ledger: Ledger, arm: str = "a", seed: int = 0, trial: str = "t0") -> int:
    return ledger.add_member(ledger.add_arm(arm, {"rht": True}, None, None), seed, trial, "{}")


def test_a_commit_that_fails_names_the_file_and_leaves_no_transaction(book):
    book.db.execute("PRAGMA journal_mode = DELETE")
    book.db.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(book.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM arms").fetchall()
        with pytest.raises(sqlite3.OperationalError, match="locked") as caught:
            member(book)
    assert caught.value.__notes__ == [str(book.path)]
    assert not book.db.in_transaction
    member(book, "b")
    with closing(Ledger(book.path, readonly=True)) as other:
        assert [arm.name for arm in other.arms()] == ["b"]


def test_facts_are_set_and_set_again(book):
    book.describe(question="why", name="x")
    book.describe(question="what")
    assert (book.fact("question"), book.fact("name"), book.fact("nothing")) == ("what", "x", None)


FACTS = {name: fact for name, fact in vars(SweepFacts).items() if isinstance(fact, Fact)}
VALUES = {
    "design": Design(bad="mxfp4", horizons=(1, 2)),
    "map": Map(layers="kinds", times=3.0),
    "answer": Asked(knob="rht"),
    "metric": Metric(name="train/x", min_effect="1%"),
    "compared": [Metric(), Metric(name="train/x", direction="maximize")],
    "metrics": ["val/loss", "train/x"],
    "published": [Published(arm="a", metric="val/loss", value=3.25, source="a paper")],
    "covered": 0.9125,
    "constraints": [Constraint(metric="train/x", at_most=1.0)],
    "registered": [{"digest": "ab", "time": 1.5}],
    "provenance": {"commit": None, "torch": "2"},
    "left": [12.5, None],
    "shared": {"one", "two"},
    "trunks": set(),
    "warm": {"of": "x", "arms": []},
    "mlflow_discarded": [("t0", 5, ""), ("t1", 6, "a:0")],
}
"""A value of each fact that is not a text."""


@every(name=FACTS)
def test_a_fact_is_read_as_it_was_written_and_a_ledger_without_it_is_not_refused(name, tmp_path):
    book = Ledger(tmp_path / "ledger.db")
    keys = {key for (key,) in book.db.execute("SELECT key FROM sweep")}
    before, value = getattr(book.facts, name), VALUES.get(name, "a text")
    assert name == "edition" or before in (None, "", "t", {}, [], [0, None], Metric())
    setattr(book.facts, name, value)
    assert getattr(book.facts, name) == value != before
    (key,) = {key for (key,) in book.db.execute("SELECT key FROM sweep")} - keys or {"edition"}
    assert isinstance(book.fact(key), str)
    book.close()


def test_each_fact_has_a_key_of_its_own_and_no_other_file_reads_one_by_its_key(book):
    for name in FACTS:
        setattr(book.facts, name, VALUES.get(name, "a text"))
    assert len(book.db.execute("SELECT * FROM sweep").fetchall()) == len(FACTS)
    package = Path(ablate.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    calls = {name for name, text in texts.items() if ".fact(" in text or "ledger.describe(" in text}
    assert calls == {"mlflow_tracker.py"}  # copies of rows, key by key


def test_an_arm_keeps_its_number_and_has_the_knobs_the_baseline_and_the_point_it_was_last_given(book):
    first = book.add_arm("a", {"rht": True}, None, None)
    base = book.add_arm("b", {}, None, None)
    assert book.add_arm("a", {"rht": False}, base, 7) == first
    (row, _) = book.arms()
    assert (row.name, row.baseline, row.optuna, json.loads(row.knobs)) == (
        "a",
        base,
        7,
        {"rht": False},
    )
    assert book.add_arm("a", {"rht": True}, None, None) == first
    (row, _) = book.arms()
    assert (row.name, row.baseline, row.optuna, json.loads(row.knobs)) == (
        "a",
        None,
        None,
        {"rht": True},
    )


def test_what_is_no_longer_wanted_is_out_of_sight_and_found_again_with_all_it_had(book):
    for arm in ("a", "b"):
        for seed in (0, 1):
            book.settle(member(book, arm, seed, f"{arm}{seed}"), "done")
    book.shipped(2, 1, "run", 40, True)
    book.unwant()
    assert (book.arms(), book.members(), book.unshipped()) == ([], [], 0)
    member(book, "b", 1, "b1")
    member(book, "a", 0, "a0")
    assert [row.name for row in book.arms()] == ["b", "a"]
    found = [(row.name, row.seed, row.status, row.mlflow, row.closed) for row in book.members()]
    assert found == [("b", 1, "done", "run", 1), ("a", 0, "done", None, 0)]
    assert book.unshipped() == 1


def test_recording_twice_is_recording_once(book):
    trial = member(book)
    events = [event(1, loss=3.0), event(2, loss=2.0, norm=1.0)]
    book.record(trial, events)
    book.record(trial, events)
    book.record(trial, [event(2, 9.0, loss=7.0), event(3, loss=1.0)])  # another attempt: what is there stays
    assert list(book.records(trial)) == [
        (1, "loss", 3.0, 1.0),
        (2, "loss", 2.0, 1.0),
        (2, "norm", 1.0, 1.0),
        (3, "loss", 1.0, 1.0),
    ]
    assert list(book.records(trial, after=2)) == [(3, "loss", 1.0, 1.0)]
    assert book.last_values(trial) == {"loss": 1.0, "norm": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-300])
def test_every_float_survives(value, book):
    trial = member(book)
    book.record(trial, [event(1, x=value)])
    ((_, _, found, _),) = book.records(trial)
    assert found == pytest.approx(value, abs=0, rel=0, nan_ok=True)
    assert book.last_values(trial)["x"] == pytest.approx(value, abs=0, rel=0, nan_ok=True)


def test_a_nan_is_stored_as_null(book, tmp_path):
    book.record(member(book), [event(1, x=math.nan)])
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        assert db.execute("SELECT value FROM records").fetchall() == [(None,)]
    db.close()


def test_the_last_values_of_all_trials_are_those_of_each(book):
    trials = [member(book, "a", seed, f"t{seed}") for seed in range(3)]
    names = ("loss", "quant/fprop.x/sqnr_db", "quant/fprop.x/blocks.0/sqnr_db", "speed")
    for trial in trials[:2]:
        book.record(trial, [event(step, **dict.fromkeys(names, trial + step / 8)) for step in (1, 10, 2)])
    book.record(trials[1], [event(11, loss=math.nan), event(12, speed=math.nan)])
    found = book.finals(lambda name: name.metric in ("loss", "sqnr_db", "nothing"))
    for trial in trials:
        wanted = {name: value for name, value in book.last_values(trial).items() if name != "speed"}
        assert repr(found[trial]) == repr(wanted)  # by their text, since a NaN equals nothing


def test_a_rate_is_all_steps_over_all_their_time(book):
    trials = [member(book, "a", seed, f"t{seed}") for seed in range(3)]
    book.record(
        trials[0], [event(20, speed=50.0), event(1, speed=10.0), event(10, speed=100.0), event(15, loss=1.0)]
    )
    book.record(trials[1], [event(10, speed=4.0), event(20, speed=math.nan)])
    steps, seconds = 1 + 9 + 10, 1 / 10 + 9 / 100 + 10 / 50
    assert book.rates("speed") == {trials[0]: pytest.approx(steps / seconds), trials[1]: 4.0}


def test_values_beyond_a_limit_have_the_first_step_and_the_worst_of_each_run(book):
    """The limit itself is within."""
    for seed, gains in enumerate(([0.9, 1.5, 1.6, 2.5, 1.7, 0.4, 0.2, 0.3], [1.0, 3.0])):
        trial = member(book, "a", seed, f"t{seed}")
        book.record(trial, [event(step, gain=gain) for step, gain in enumerate(gains, start=1)])
    assert [tuple(row) for row in book.beyond("gain", 1.5, above=True)] == [
        ("a", 0, 3, 2.5),
        ("a", 1, 2, 3.0),
    ]
    assert [tuple(row) for row in book.beyond("gain", 0.4, above=False)] == [("a", 0, 7, 0.2)]


def test_what_is_to_be_shipped_is_under_way_or_over_and_not_complete(book):
    trials = [member(book, "a", seed, f"t{seed}") for seed in range(5)]
    for trial, status in zip(trials, ("pending", "running", "done", "done", "pending"), strict=True):
        book.settle(trial, status)
    book.shipped(1, 3, "run 3", 9, closed=True)
    book.shipped(1, 4, "run 4", 9, closed=False)
    assert [(row.seed, row.status, row.mlflow) for row in book.to_ship()] == [
        (1, "running", None),
        (2, "done", None),
        (4, "pending", "run 4"),
    ]
    assert book.mlflow_runs() == {"run 3", "run 4"}


def test_the_last_values_leave_out_single_layers(book):
    trial = member(book)
    book.record(trial, [event(1, **{"quant/fprop.x/sqnr_db": 1.0, "quant/fprop.x/blocks.0.up/sqnr_db": 2.0})])
    assert book.last_values(trial) == {"quant/fprop.x/sqnr_db": 1.0}


def test_attempts_begin_and_end(book):
    trial, other = member(book), member(book, seed=1, trial="t1")
    for n in range(3):
        book.start_attempt(trial, n + 1, 10.0 + n)
    book.start_attempt(other, 1, 20.0)
    assert book.status(trial) == "running"
    book.end_attempt(trial, 2, 30.0, "failed", "why")
    rows = book.db.execute(
        "SELECT attempt, ended, outcome, reason FROM attempts WHERE trial = ? ORDER BY attempt", (trial,)
    ).fetchall()
    assert [tuple(row) for row in rows] == [
        (1, None, None, None),
        (2, 30.0, "failed", "why"),
        (3, None, None, None),
    ]
    assert book.attempts_since(trial, 11.0) == 2


def test_what_failed_or_was_left_running_is_wanted_again_and_what_is_over_is_not(book):
    statuses = ["pending", "running", "failed", "oom", "stopped", "done", "diverged", "pruned"]
    trials = {status: member(book, seed=n, trial=status) for n, status in enumerate(statuses)}
    for status, trial in trials.items():
        book.settle(trial, status, "why")
    book.start_attempt(trials["running"], 1, 1.0)
    assert book.requeue(5.0) == 4
    found = {row.id: (row.status, row.reason) for row in book.members()}
    assert found["running"] == found["failed"] == found["oom"] == found["stopped"] == ("pending", None)
    assert found["pruned"] == ("pruned", "why")
    assert found["done"] == ("done", "why")
    assert found["diverged"] == ("diverged", "why")
    assert tuple(book.db.execute("SELECT ended, outcome FROM attempts").fetchone()) == (5.0, "orphaned")


def test_a_trial_is_shared_by_the_members_that_are_the_same_trial(book):
    first, second = member(book, "a"), member(book, "b")
    assert first == second
    assert [(row.name, row.id) for row in book.members()] == [("a", "t0"), ("b", "t0")]


def test_a_member_whose_spec_changed_is_another_trial_and_has_shipped_nothing(book):
    arm = book.add_arm("a", {}, None, None)
    for seed in (0, 1):
        book.add_member(arm, seed, f"old{seed}", "{}")
        book.shipped(arm, seed, f"run{seed}", 40, True)
    assert book.unshipped() == 0
    book.add_member(arm, 0, "new", "{}")
    book.add_member(arm, 1, "old1", "{}")
    new, old = book.members()
    assert (new.id, new.mlflow, new.shipped, new.closed, new.status) == (
        "new",
        None,
        -1,
        0,
        "pending",
    )
    assert (old.id, old.mlflow, old.shipped, old.closed) == ("old1", "run1", 40, 1)
    assert book.unshipped() == 1


def test_a_trial_that_goes_on_is_not_closed_any_more(book):
    trial = member(book)
    book.shipped(1, 0, "run", 40, True)
    book.settle(trial, "pending")
    assert book.unshipped() == 1


def test_a_failed_trial_that_is_wanted_again_is_not_closed_any_more(book):
    trial = member(book)
    book.settle(trial, "failed", "why")
    book.shipped(1, 0, "run", 40, True)
    book.requeue(1.0)
    assert book.unshipped() == 1


def test_a_reader_sees_what_the_writer_wrote_and_cannot_write(book, tmp_path):
    trial = member(book)
    reader = Ledger(tmp_path / "ledger.db", readonly=True)
    book.record(trial, [event(1, loss=2.0)])
    assert reader.last_values(trial) == {"loss": 2.0}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.describe(question="mine")
    reader.close()


def test_a_snapshot_shows_one_state_and_what_was_written_meanwhile_shows_after_it(book, tmp_path):
    trial = member(book)
    with closing(Ledger(tmp_path / "ledger.db", readonly=True)) as reader:
        with reader.snapshot():
            assert reader.last_values(trial) == {}
            book.record(trial, [event(1, loss=2.0)])
            with reader.snapshot():  # of one state with the outer one
                assert reader.last_values(trial) == {}
            assert reader.last_values(trial) == {}
        assert reader.last_values(trial) == {"loss": 2.0}


@pytest.mark.parametrize("name", ["a#1", "a?b", "a%20b"])
def test_a_ledger_is_read_wherever_it_is(name, tmp_path):
    (tmp_path / name).mkdir()
    book = Ledger(tmp_path / name / "ledger.db")
    book.describe(question="why")
    book.close()
    reader = Ledger(tmp_path / name / "ledger.db", readonly=True)
    question = reader.fact("question")
    reader.close()
    assert question == "why"


def test_what_was_done_in_a_run_is_kept_in_words_once(book):
    trial = member(book, "nvfp4", 3)
    for _ in range(2):
        book.record(
            trial, [event(7, loss=2.0) | {"events": ["the loss is not finite; step skipped"]}, event(8)]
        )
    assert book.events() == [Intervention("nvfp4", 3, 7, "the loss is not finite; step skipped")]


@pytest.mark.parametrize("statement", [1, 2])
def test_a_ledger_that_another_process_creates_meanwhile_is_not_one_of_another_version(statement, tmp_path):
    path = tmp_path / "ledger.db"
    begun = []

    def create_at_statement(text: str) -> None:
        begun.append(text)
        if len(begun) == statement:
            Ledger(path).close()

    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.set_trace_callback(create_at_statement)
        present = ledger_file.check(db, path)
        db.set_trace_callback(None)
        assert present == (statement == 1)
        ledger_file.create(db, path)
        assert ledger_file.check(db, path)


def test_records_behind_a_flipped_bit_of_a_key_are_replaced(tmp_path):
    """One row of trial 2 says trial 66: a search by key then misses half of trial 2."""
    path = tmp_path / "sweeps" / "x" / "ledger.db"
    events = [
        {"step": step, "time": step + 0.5, "metrics": {"a": 0.1 * step, "b": 0.3 * step}}
        for step in range(1, 41)
    ]
    with closing(Ledger(path)) as book:
        arm = book.add_arm("bf16", {}, None, None)
        for seed in range(3):
            book.record(book.add_member(arm, seed, f"t{seed}", "{}"), events)
        whole = [*book.records(2)]
        others = [*book.records(1)], [*book.records(3)]
        book.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    # A record's header: lengths of the header, three one-byte integers and two reals; then trial, name, step.
    row = bytes([6, 1, 1, 1, 7, 7, 2, 2, 19])
    assert content.count(row) == 1
    content[content.index(row) + 6] ^= 64
    path.write_bytes(content)
    with closing(Ledger(path)) as book:
        assert len([*book.records(2)]) < len(whole) - 1
        book.renew(2, events)
        assert [*book.records(2)] == whole
        assert ([*book.records(1)], [*book.records(3)]) == others
        assert book.db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
