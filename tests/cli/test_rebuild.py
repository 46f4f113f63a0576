"""A damaged ledger is refused, and made again from what describes itself; what came back is what was there."""

import contextlib
import os
import re
import shlex
import shutil
import sqlite3

import pytest
from support.commands import INLINE, here
from support.experiments import IDLE, idle, statuses, sweep, tiny, values, write
from support.ledgers import ledger_content, overwrite_middle
from support.mlflow_runs import runs

from ablate.execution.search.journal import points
from ablate.execution.sweep_control import damage
from ablate.files import lock
from ablate.store.trial_store import line

HARMS = {
    "text": lambda content: b"not a database" * 1000,
    "pages": overwrite_middle,
    "half": lambda content: content[: len(content) // 2],
}


def printed(text: str, after: str) -> list[str]:
    """Words of a printed command, without `ablate`, by what is said of it."""
    (command,) = re.findall(f"`ablate ([^`]*)` {after}", text)
    return shlex.split(command)


def harm(state, how, name: str = "tiny"):
    """Damage the sweep's ledger; returns its path."""
    path = state / "sweeps" / name / "ledger.db"
    path.write_bytes(HARMS[how](path.read_bytes()))
    return path


@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_ledger_is_refused_and_then_made_again_as_it_was(how, tmp_path):
    path, state = write(tmp_path, **IDLE), tmp_path / "state"
    sweep(idle(tmp_path), state)
    before = ledger_content(state)
    book = harm(state, how)
    kept = book.read_bytes()
    refused = here("sweep", path, "--state", state, *INLINE)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"{book}: damaged (")
    assert book.read_bytes() == kept

    done = here(*printed(line, "makes it again"))
    assert done.returncode == 0, done.stderr
    assert ledger_content(state) == before
    records = sum(len(records) for records in before["records"].values())
    assert f"Recovered: 3 arms, 6 trials (6 done) with {records:,} records." in done.stdout
    assert [
        aside.read_bytes()
        for aside in book.parent.glob("ledger.db.damaged-*")
        if aside.suffix[-4:] not in ("-wal", "-shm")
    ] == [kept]
    assert damage(book) is None
    again = here(*printed(done.stdout, "runs the missing trials"), *INLINE)
    assert again.returncode == 0
    assert "0 trials run, 6 already done" in again.stdout


def test_what_was_not_finished_waits_and_its_records_are_kept_for_when_it_goes_on(tmp_path):
    state = tmp_path / "state"
    sweep(idle(tmp_path, budget={"trials": 2}), state)
    path = write(tmp_path, **IDLE)
    harm(state, "text")
    done = here("rebuild", path, "--state", state)
    assert "Recovered: 3 arms, 6 trials (2 done)" in done.stdout
    assert "4 trials are not finished; each continues from its last checkpoint." in done.stdout
    assert (
        "Lost: failed trials and their reasons (they run again); members that the file names no more"
        in done.stdout
    )
    assert sorted(statuses(state).values()) == ["done"] * 2 + ["pending"] * 4
    assert sweep(idle(tmp_path), state)[0].status == "done"
    sweep(idle(tmp_path), tmp_path / "undisturbed")
    assert values(state) == values(tmp_path / "undisturbed")


SEARCH = IDLE | {
    "ablate": {
        "cooldown": {"uniform": [0.25, 0.5]},
        "rht": {"choice": [True, False]},
        "recipe.wgrad.hadamard": {"choice": [None, {"size": 16}]},
    },
    "search": {"trials": 4, "sampler": "random"},
    "seeds": 1,
}


def test_a_search_gets_its_points_back_from_the_studys_journal(tmp_path):
    path, state = write(tmp_path, **SEARCH), tmp_path / "state"
    outcome, _ = sweep(tiny(tmp_path, **SEARCH), state)
    before = ledger_content(state)
    assert len([arm for arm in before["arms"] if arm[2] is not None]) == 4
    harm(state, "text")
    done = here("rebuild", path, "--state", state)
    assert done.returncode == 0, done.stderr
    assert "4 points of the search" in done.stdout
    assert ledger_content(state) == before
    again, _ = sweep(tiny(tmp_path, **SEARCH), state)
    assert (outcome.ran > 0, again.ran) == (True, 0)


def test_a_search_without_its_journal_says_that_its_points_are_lost(tmp_path):
    path, state = write(tmp_path, **SEARCH), tmp_path / "state"
    sweep(tiny(tmp_path, **SEARCH), state)
    harm(state, "text")
    (state / "sweeps" / "tiny" / "optuna.log").unlink()
    done = here("rebuild", path, "--state", state)
    assert done.returncode == 0, done.stderr
    assert "the points of the search" in done.stdout.partition("Lost: ")[2]


PRUNED = {
    "workload": {"idle": {"steps": 6}},
    "ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "workload.x": {"uniform": [1e-4, 3.0], "log": True}},
    "search": {"trials": 8, "sampler": "random", "seed": 1, "rungs": [2, 4], "confirm": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("pruner", "seeds"), [("median", 1), ("asha", 2)])
def test_a_rebuilt_search_has_its_pruned_arms_and_its_confirmed_winner_at_once(pruner, seeds, tmp_path):
    keys = PRUNED | {"search": PRUNED["search"] | {"pruner": pruner}, "seeds": seeds}
    experiment, state = tiny(tmp_path, **keys), tmp_path / "state"
    sweep(experiment, state)
    before = ledger_content(state)
    statuses = [status for *_, status, _ in before["members"]]
    assert "pruned" in statuses
    assert any(name.startswith("confirm: ") for name, *_ in before["arms"])
    done = here("rebuild", tmp_path / "tiny.yaml", "--state", state, "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert ledger_content(state) == before
    assert sweep(experiment, state)[0].ran == 0
    assert ledger_content(state) == before


def test_points_are_read_from_a_journal_that_is_torn_and_none_from_what_is_none(tmp_path):
    sweep(tiny(tmp_path, **SEARCH), tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    whole = points(journal, "tiny")
    assert len(whole) == 4
    assert {str(point["recipe.wgrad.hadamard"]) for point in whole} == {"None", "{'size': 16}"}
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
    assert points(journal, "tiny") == whole
    assert points(tmp_path / "nowhere.log", "tiny") == []
    assert points(journal, "another") == []
    journal.write_bytes(b"no journal\n" * 10)
    assert points(journal, "tiny") == []


def test_a_sound_ledger_is_left_alone(tmp_path):
    path, state = write(tmp_path, seeds=1, **IDLE), tmp_path / "state"
    sweep(idle(tmp_path, seeds=1), state)
    book, before = state / "sweeps/tiny/ledger.db", ledger_content(state)
    kept = book.read_bytes()
    done = here("rebuild", path, "--state", state)
    assert (done.returncode, book.read_bytes()) == (2, kept)
    assert done.stderr.startswith(f"{book}: not damaged")
    assert here("rebuild", path, "--state", state, "--force").returncode == 0
    assert ledger_content(state) == before
    assert kept in [aside.read_bytes() for aside in book.parent.glob("ledger.db.damaged-*")]


CELLS = {
    "a value": "UPDATE records SET value = value + 1e-12 WHERE trial = 2 AND step = 4",
    "a text for a value": "UPDATE records SET value = 'x' WHERE trial = 2 AND step = 4",
    "a record is gone": "DELETE FROM records WHERE trial = 2 AND step = 4",
    "a metric's name": "UPDATE names SET text = 'vbl/loss' WHERE text = 'val/loss'",
    "an arm's knobs": "UPDATE arms SET knobs = '{\"rht\": fblse}' WHERE arm = 3",
    "an arm's name": "UPDATE arms SET name = 'rht=fblse' WHERE name = 'rht=false'",
    "a member's trial": "UPDATE members SET trial = 3 WHERE arm = 2",
    "the metric": "UPDATE sweep SET value = replace(value, 'val/loss', 'vbl/loss') WHERE key = 'metric'",
    "a spec": "UPDATE trials SET spec = 'x' || spec WHERE trial = 2",
    "seconds": "UPDATE trials SET seconds = seconds + 1 WHERE trial = 2",
}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A finished sweep of one seed, to be copied."""
    folder = tmp_path_factory.mktemp("once")
    sweep(idle(folder, seeds=1), folder / "state")
    return folder


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_that_is_not_what_was_written_is_named_refused_and_made_again(cell, once, tmp_path):
    folder = shutil.copytree(once, tmp_path / "copy")
    path, state, before = folder / "tiny.yaml", folder / "state", ledger_content(folder / "state")
    book = state / "sweeps" / "tiny" / "ledger.db"
    with contextlib.closing(sqlite3.connect(book)) as db:
        db.execute(CELLS[cell])
        db.commit()
    said = here("status", "--verify", "--state", state)
    assert (said.returncode, said.stderr) == (1, "")
    assert str(book) in said.stdout
    reported = here("report", "tiny", "--state", state, "--mlflow", "none")
    assert reported.returncode == 2
    assert str(book) in reported.stderr
    assert not (state / "reports").exists()
    assert here("rebuild", path, "--state", state).returncode == 0
    assert ledger_content(state) == before
    assert here("status", "--verify", "--state", state).returncode == 0


FOLDERS = {
    "a digit in an events file": ("events-1.jsonl", lambda content: content.replace(b"1", b"2", 1)),
    "a line that is no JSON": ("events-1.jsonl", lambda content: content.replace(b"{", b"\xff", 1)),
    "a torn result": ("result.json", lambda content: content[: len(content) // 2]),
    "an empty result": ("result.json", lambda content: b""),
    "a flipped bit in a result": (
        "result.json",
        lambda content: content.replace(b'"steps": 4', b'"steps": 5'),
    ),
}


def test_what_a_disk_changed_without_a_trace_in_the_files_times_is_put_aside_by_rebuild(once, tmp_path):
    folder = shutil.copytree(once, tmp_path / "copy")
    path, state, before = folder / "tiny.yaml", folder / "state", values(folder / "state")
    here("sweep", path, "--state", state, *INLINE)
    file = sorted(state.glob("trials/*/events-1.jsonl"))[0]
    times = file.stat()
    file.write_bytes(file.read_bytes().replace(b"1", b"3", 1))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    said = here("status", "--verify", "--state", state)
    assert (said.returncode, f"`ablate rebuild tiny.yaml --state {state}`" in said.stdout) == (1, True)
    rebuilt = here("rebuild", path, "--state", state)
    assert (rebuilt.returncode, file.parent.exists()) == (0, False)
    assert str(file.parent) in rebuilt.stdout
    assert "1 trials run, 2 already done" in here("sweep", path, "--state", state, *INLINE).stdout
    assert values(state) == before
    assert here("status", "--verify", "--state", state).returncode == 0


@pytest.mark.parametrize("harm", FOLDERS)
def test_a_damaged_trial_folder_is_named_put_aside_and_run_again(harm, once, tmp_path):
    folder = shutil.copytree(once, tmp_path / "copy")
    path, state, before = folder / "tiny.yaml", folder / "state", values(folder / "state")
    name, change = FOLDERS[harm]
    file = sorted((state / "trials").glob(f"*/{name}"))[0]
    file.write_bytes(change(file.read_bytes()))
    trial = file.parent.name
    said = here("status", "--verify", "--state", state)
    assert (said.returncode, said.stderr) == (1, "")
    assert trial in said.stdout
    assert here("status", "--state", state).returncode == here("plan", path, "--state", state).returncode == 0
    done = here("sweep", path, "--state", state, *INLINE)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert str(file.parent) in done.stdout
    assert "1 trials run, 2 already done" in done.stdout
    assert [aside.name.partition("-")[0] for aside in (state / "retired").iterdir()] == [trial]
    assert values(state) == before
    assert here("status", "--verify", "--state", state).returncode == 0


def test_a_sweep_that_was_never_run_or_runs_is_told(tmp_path):
    path, state = write(tmp_path, seeds=1), tmp_path / "state"
    done = here("rebuild", path, "--state", state)
    assert (done.returncode, done.stderr) == (
        2,
        f"{state / 'sweeps/tiny'}: there is no such folder, so this sweep has never run\n",
    )
    with lock(state / "sweeps" / "tiny" / "lock"):
        done = here("rebuild", path, "--state", state)
    assert (done.returncode, "runs this sweep" in done.stderr) == (2, True)


@pytest.mark.parametrize("files", [(), ("a.yaml", "b.yaml")], ids=len)
def test_one_ledger_is_rebuilt_at_a_time(files, tmp_path):
    done = here("rebuild", *files, "--state", tmp_path)
    assert (done.returncode, done.stderr.startswith("rebuild: give the YAML file of one")) == (2, True)


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_rebuilt_sweep_finds_its_runs_in_mlflow_again(tmp_path):
    from mlflow import MlflowClient

    path, store = write(tmp_path, seeds=1, **IDLE), f"sqlite:///{tmp_path / 'mlflow.db'}"
    sweep(idle(tmp_path, seeds=1), tmp_path, store)
    client = MlflowClient(store)
    before = {run.info.run_id for kind in ("sweep", "trial") for run in runs(client, "tiny", kind)}
    harm(tmp_path, "pages")
    assert "Lost" in here("rebuild", path, "--state", tmp_path).stdout
    done = here("rebuild", "tiny", "--sync", "--state", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {run.info.run_id for kind in ("sweep", "trial") for run in runs(client, "tiny", kind)} == before


def test_a_name_that_no_ledger_can_hold_is_read_by_neither_rebuild_nor_sweep(once, tmp_path):
    folder = shutil.copytree(once, tmp_path / "copy")
    path, state, before = folder / "tiny.yaml", folder / "state", values(folder / "state")
    file = sorted(state.glob("trials/*/events-1.jsonl"))[0]
    with file.open("ab") as appended:
        appended.write(line({"step": 1, "time": 1.0, "metrics": {"\ud800": 1.0}}, file.parent.name))
    (file.parent / "result.json").unlink()
    assert here("rebuild", path, "--force", "--state", state).returncode == 0
    assert here("sweep", path, "--state", state, *INLINE).returncode == 0
    assert values(state) == before
