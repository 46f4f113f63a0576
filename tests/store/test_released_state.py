"""The state folder of each release opens, is verified, reports and resumes; a ledger of another format is refused in one sentence.

`tests/golden/state_VERSION.tar.gz` was written by that release: `PYTHONPATH=tests python tests/store/test_released_state.py` writes it. It is never written again:
a later release that cannot read it has raised `ledger_file.FORMAT`, the numerics' VERSION or a workload's, and says so in the changelog.
"""

import hashlib
import io
import json
import os
import platform
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from pydantic import create_model
from support.commands import INLINE, here
from support.experiments import ledger, shards, statuses, values, write
from support.ledgers import ledger_content
from support.workloads import fields_of

from ablate.experiment.trial_spec import TrialSpec
from ablate.reports.report_files import BROWSERS
from ablate.store.ledger import Ledger
from ablate.store.ledger_file import FORMAT
from ablate.training.workloads import WORKLOADS
from ablate.version import __version__

GOLDEN = Path(__file__).parents[1] / "golden"
SWEEP = {"seeds": 2, "ablate": {"rht": [True]}, "telemetry": None}
"""Keys of the sweep: bf16 and one arm at two seeds, 4 trials, with rows for each tensor."""


@pytest.fixture(params=sorted(GOLDEN.glob("state_*.tar.gz")), ids=lambda path: path.name)
def released(request, tmp_path):
    """(folder of the experiment file, the released state folder in it)."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    write(tmp_path, **SWEEP)
    return tmp_path, tmp_path / "state"


def test_it_is_verified_and_reports(released):
    _, state = released
    checked = here("status", "--verify", "--state", state)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == "tiny: 4 of 4 trials verified against their records\n"
    made = here("report", "tiny", "--state", state)
    assert made.returncode == 0, made.stderr
    written = [state / "reports" / "tiny" / name for name in ("index.html", "index.pdf")]
    assert [path.exists() for path in written] == [True, any(map(shutil.which, BROWSERS))]
    assert set(map(str, filter(Path.exists, written))) <= set(made.stdout.splitlines())


def test_it_resumes_and_nothing_runs_again(released):
    folder, state = released
    before = {path: path.read_bytes() for path in state.glob("trials/*/*")}
    kept = ledger_content(state)
    resumed = here("sweep", folder / "tiny.yaml", "--state", state, *INLINE)
    assert resumed.returncode == 0, resumed.stderr
    assert "0 trials run, 4 already done" in resumed.stdout
    assert set(statuses(state).values()) == {"done"}
    assert ledger_content(state) | {"facts": None} == kept | {"facts": None}
    assert {path: path.read_bytes() for path in state.glob("trials/*/*")} == before


def test_its_losses_and_arms_are_what_they_were(released):
    _, state = released
    with closing(ledger(state)) as book:
        assert [(arm.name, arm.role) for arm in book.arms()] == [("bf16", "baseline"), ("rht=true", "listed")]
        assert len({member.id for member in book.members()}) == 4
    assert all(3.5 < loss < 5 for loss in values(state).values())


def test_a_field_that_a_later_release_adds_leaves_the_ids_of_released_trials(released, tmp_path, monkeypatch):
    """The field is added as a later release would: to a workload, and named in its LATER (recipes: recipes/test_ids.py)."""
    _, state = released
    with closing(ledger(state)) as book:
        (wire, *_) = (member.spec for member in book.members())
    content = json.loads(wire)
    content["workload"]["gpt"]["data"] |= shards(tmp_path)  # the same data, where they are now
    wire = json.dumps(content)
    assert TrialSpec.parse(wire).id == content["id"]
    later = create_model("Gpt", __base__=WORKLOADS["gpt"], added=(int, 1))
    spec = TrialSpec.parse(wire)

    def id_of(**added: int) -> str:
        return TrialSpec(**fields_of(spec) | {"config": later(**fields_of(spec.config), **added)}).id

    assert id_of() != content["id"]
    monkeypatch.setattr(later, "LATER", later.LATER | {"added"})
    assert id_of() == content["id"] != id_of(added=2)


def write_format(path: Path, number: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"PRAGMA user_version = {number}")


REFUSALS = {
    0: "a version before 0.1.0 wrote this ledger",
    FORMAT + 1: f"a later version of ablate wrote this ledger (format {FORMAT + 1}; this one reads {FORMAT})",
}


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("command", ["sweep", "plan", "status", "report", "rebuild", "show"])
def test_a_ledger_of_another_format_is_refused_by_every_command_and_left_as_it_is(command, number, released):
    folder, state = released
    path = state / "sweeps" / "tiny" / "ledger.db"
    write_format(path, number)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    words = {
        "sweep": ("sweep", folder / "tiny.yaml", *INLINE),
        "plan": ("plan", folder / "tiny.yaml"),
        "status": ("status",),
        "report": ("report", "tiny"),
        "rebuild": ("rebuild", folder / "tiny.yaml"),
        "show": ("show", "tiny:bf16", "tiny:rht=true"),
    }[command]
    done = here(*words, "--state", state)
    shown = f"{path}: {REFUSALS[number]}"
    if command == "status":  # of all sweeps: one that cannot be read hides no other
        (found,) = json.loads(here("status", "--json", "--state", state).stdout)
        assert (done.returncode, found["trouble"].startswith(shown)) == (0, True)
    else:
        assert done.returncode == 2, done.stdout
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("Starting: ")]
        assert line.startswith(shown)
        assert line.endswith("choose another state folder with --state")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_the_leaderboard_leaves_out_a_ledger_of_another_format(released):
    _, state = released
    path = state / "sweeps" / "tiny" / "ledger.db"
    write_format(path, 0)
    done = here("show", "--state", state)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"left out: {path}: {REFUSALS[0]}" in done.stderr


def test_tables_are_there_all_or_none(tmp_path, monkeypatch):
    """A process that ends while it creates a ledger leaves an empty file, which the next one makes a ledger."""
    path = tmp_path / "ledger.db"
    connect = sqlite3.connect

    def without_triggers(*words, **more):
        db = connect(*words, **more)
        db.set_authorizer(
            lambda action, *_: (
                sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_CREATE_TEMP_TRIGGER else sqlite3.SQLITE_OK
            )
        )
        return db

    with monkeypatch.context() as broken:
        broken.setattr(sqlite3, "connect", without_triggers)
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            Ledger(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == []
        assert db.execute("PRAGMA user_version").fetchone() == (0,)
    with closing(Ledger(path)) as book:
        assert book.db.execute("PRAGMA user_version").fetchone()[0] == FORMAT
        assert book.fact("edition")


def main() -> None:
    """Write the archive, without a word on the machine."""
    target = GOLDEN / f"state_{__version__}.tar.gz"
    if target.exists():
        sys.exit(f"{target} is of a release, and stays")
    nobody = os.uname_result(("Linux", "node", "6", "1", platform.machine()))
    with (
        mock.patch("platform.platform", return_value="Linux"),
        mock.patch("platform.node", return_value="node"),
        mock.patch("os.uname", return_value=nobody),
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        done = here("sweep", write(folder, **SWEEP), "--state", folder / "state", *INLINE)
        assert done.returncode == 0, done.stderr
        with closing(sqlite3.connect(folder / "state" / "sweeps" / "tiny" / "ledger.db")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with tarfile.open(target, "w:gz") as archive:
            for path in sorted((folder / "state").rglob("*")):
                if path.is_file() and not path.name.startswith("ledger.db-"):
                    entry = archive.gettarinfo(path, path.relative_to(folder))
                    entry.uid = entry.gid = 0
                    entry.uname = entry.gname = ""
                    archive.addfile(entry, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    main()
