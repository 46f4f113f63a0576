"""Whatever order things happen in: no trial is lost, none is committed twice, and every number is that of a plain run."""

import os
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from support.experiments import ledger, sweep, tiny

from ablate.execution.controller import Controller
from ablate.execution.messages import Ended
from ablate.execution.trial_runner import run
from ablate.execution.workers import Inline
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.trial_store import Store
from ablate.training.metric_names import parse

pytestmark = pytest.mark.slow

ARMS = {"plain": {}, "no rht": {"rht": False}, "late": {"cooldown": 0.25}, "early": {"cooldown": 0.5}}
"""The last two begin as the first does, so that what they share is run once."""
EACH_STEP = {"checkpoint": 0, "log": 1, "every": 2, "shadow": 0}
"""Measurements of operands remember weights from step to step; the comparison of gradients remembers nothing."""
MOMENTS = st.integers(0, 60)
"""Messages of a trial, or steps of the controller, before something happens."""
SOME_ARMS = st.sets(st.sampled_from(list(ARMS)), min_size=1)


class Mortal(Inline):
    """The inline executor, whose trials die after so many messages: one number for each that is started, as long as there are some."""

    def __init__(self, lives: list[int]) -> None:
        super().__init__()
        self._lives, self._left = list(lives), {}

    def submit(self, request):
        self._left[request.id] = self._lives.pop(0) if self._lives else 10**9
        super().submit(request)

    def wait(self, seconds):
        dead = [trial for trial in self._running if self._left[trial] <= 0]
        for trial in dead:
            self._running.pop(trial).close()
        for trial in self._running:
            self._left[trial] -= 1
        return [(trial, Ended("failed", "killed by the test")) for trial in dead] + super().wait(seconds)


@cache
def alone(wire: str) -> dict[tuple[int, str], float]:
    """Return the records of a trial that nothing disturbs, that shares nothing, and that leaves no checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        return kept(
            (event["step"], name, value)
            for event in run(TrialSpec.parse(wire), Store(Path(folder)), 1, EACH_STEP | {"checkpoint": 1e9})
            for name, value in event["metrics"].items()
        )


def kept(records) -> dict[tuple[int, str], float]:
    """Records that no clock and no allocator decides. One that comes twice is an error."""
    found = [((step, name), value) for step, name, value in records if not parse(name).of_machine]
    assert len(dict(found)) == len(found)
    return dict(found)


class Sweeps(RuleBasedStateMachine):
    """Two sweeps in one state folder, started, killed, edited and robbed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Path(tempfile.mkdtemp())
        self.arms, self.seeds = {"plain", "late"}, 1
        self.others: tuple[set[str], int] | None = None
        self.committed = self.state / "committed.txt"
        self.committed.touch()
        self._commit, state, committed = Store.commit, self.state, self.committed

        def commit(store: Store, trial: str, result: dict) -> None:
            if store.root.resolve() == state.resolve():
                with committed.open("a") as file:  # a file, since some runs are processes of their own
                    print(trial, file=file)
            self._commit(store, trial, result)

        Store.commit = commit

    def experiment(self, name: str = "one", **keys):
        arms, seeds = (self.arms, self.seeds) if name == "one" else self.others
        listed = {arm: ARMS[arm] for arm in ARMS if arm in arms}
        return tiny(self.state, name, ablate=None, arms=listed, seeds=seeds, telemetry=EACH_STEP, **keys)

    def begin(self, lives=(), **keys) -> Controller:
        return Controller(self.experiment(**keys), self.state, "cpu", lambda: Mortal(list(lives)), None)

    @rule(budget=st.none() | st.integers(1, 3), lives=st.lists(MOMENTS, max_size=4), retry=st.integers(0, 2))
    def start(self, budget, lives, retry):
        keys = {"retry": retry} | ({"budget": {"trials": budget}} if budget else {})
        outcome, _ = sweep(self.experiment(**keys), self.state, connect=lambda: Mortal(lives))
        assert outcome.status in ("done", "failed", "budget")
        assert outcome.status != "failed" or len(lives) > retry

    @rule(moment=MOMENTS, lives=st.lists(MOMENTS, max_size=2))
    def interrupt(self, moment, lives):
        """Ctrl-C, or a terminal that closes."""
        steps = self.begin(lives).run()
        for _, _ in zip(range(moment), steps, strict=False):
            pass
        steps.close()

    @rule(moment=MOMENTS)
    def kill(self, moment):
        """Kill -9: nothing gets to say goodbye."""
        child = os.fork()
        if not child:
            for count, _ in enumerate(self.begin().run()):
                if count == moment:
                    break
            os._exit(0)
        os.waitpid(child, 0)

    @rule(arms=SOME_ARMS)
    def edit(self, arms):
        self.arms = arms

    @precondition(lambda self: self.seeds < 2)
    @rule()
    def add_a_seed(self):
        self.seeds += 1

    @rule(arms=SOME_ARMS, seeds=st.integers(1, 2), moment=MOMENTS)
    def run_another_sweep(self, arms, seeds, moment):
        self.others = arms, seeds
        steps = self.begin(name="two").run()
        for _, _ in zip(range(moment), steps, strict=False):
            pass
        steps.close()

    @rule()
    def lose_the_ledger(self):
        for path in self.state.glob("sweeps/one/ledger.db*"):
            path.unlink()

    @rule()
    def lose_the_journal(self):
        (self.state / "sweeps" / "one" / "optuna.log").unlink(missing_ok=True)

    @rule()
    def tear_the_journal(self):
        journal = self.state / "sweeps" / "one" / "optuna.log"
        if journal.exists():
            journal.write_bytes(journal.read_bytes()[:-3])

    def teardown(self):
        try:
            for name in ("one", "two") if self.others else ("one",):
                self.check(name)
            counts = Counter(self.committed.read_text().split())
            assert set(counts) == {
                path.name for path in (self.state / "trials").iterdir() if (path / "result.json").exists()
            }
            assert set(counts.values()) == {1}
        finally:
            Store.commit = self._commit
            shutil.rmtree(self.state)

    def check(self, name: str) -> None:
        """The same command, once more without faults, and everything is there, once."""
        experiment = self.experiment(name)
        outcome, _ = sweep(experiment, self.state)
        assert outcome.status == "done"
        book = ledger(self.state, name)
        members = book.members()
        assert {(row.name, row.seed) for row in members} == {
            (arm.name, s) for arm in experiment.arms for s in experiment.seeds
        }
        for row in members:
            assert row.status == "done"
            assert kept((step, key, value) for step, key, value, _ in book.records(row.trial)) == alone(
                row.spec
            )
        finished = book.db.execute(
            "SELECT count(*) FROM attempts WHERE outcome = 'done' GROUP BY trial"
        ).fetchall()
        assert {count for (count,) in finished} <= {1}
        assert book.db.execute("SELECT count(*) FROM attempts WHERE ended IS NULL").fetchone()[0] == 0
        book.close()


Sweeps.TestCase.settings = settings(
    max_examples=8, stateful_step_count=8, deadline=None, derandomize=True, database=None
)
test_no_order_of_events_loses_or_repeats_a_trial = Sweeps.TestCase
