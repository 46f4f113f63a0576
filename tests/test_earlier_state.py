"""A state folder that an earlier version left in the middle of a sweep opens, is verified as far as it can be, reports and resumes.

`tests/golden/state_without_digests.tar.gz` was written by version 0.1.0 before results had digests and ledgers had seals, with
`ablate sweep tiny.yaml --executor inline --mlflow none` on `support.experiments.write(budget={"trials": 4})`. It is never written again.
"""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import INLINE, here
from support.experiments import ledger, statuses, values, write

GOLDEN = Path(__file__).parent / "golden" / "state_without_digests.tar.gz"


@pytest.fixture
def earlier(tmp_path):
    """(folder of the experiment file, the earlier state folder in it)."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    write(tmp_path)
    return tmp_path, tmp_path / "state"


def test_it_is_verified_by_its_last_steps_and_called_unverified(earlier):
    _, state = earlier
    checked = here("status", "--verify", "--state", state)
    assert checked.returncode == 0, checked.stderr
    assert (
        "0 of 4 trials verified against their records; 4 from an earlier version unverified" in checked.stdout
    )


@pytest.mark.slow
def test_it_reports(earlier):
    _, state = earlier
    made = here("report", "tiny", "--state", state)
    assert made.returncode == 0, made.stderr
    assert (state / "reports" / "tiny" / "index.html").exists()


@pytest.mark.slow
def test_it_resumes_and_nothing_that_was_done_runs_again(earlier):
    folder, state = earlier
    before = {path: path.stat().st_mtime_ns for path in state.glob("trials/*/result.json")}
    numbers = values(state)
    assert len(before) == 4
    resumed = here("sweep", folder / "tiny.yaml", "--state", state, *INLINE)
    assert resumed.returncode == 0, resumed.stderr
    assert set(statuses(state).values()) == {"done"}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    later = values(state)
    assert {key: later[key] for key, value in numbers.items() if value is not None} == {
        key: value for key, value in numbers.items() if value is not None
    }
    with closing(ledger(state)) as book, closing(sqlite3.connect(book.path)) as db:
        assert db.execute("SELECT count(*) FROM trials").fetchone() == (6,)
