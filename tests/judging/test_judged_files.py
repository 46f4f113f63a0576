"""Runs from elsewhere have files of their own: a ledger that lost or altered them gets them back, or nothing is shown."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.cases import every
from support.commands import INLINE, here
from support.experiments import ledger, tiny
from support.ledgers import overwrite_middle

from ablate.results.summary import summaries
from ablate.store.judged import Judged

ALTER = (
    "UPDATE records SET value = value - 9 WHERE trial IN (SELECT trial FROM members JOIN arms USING (arm)"
    " WHERE arms.name LIKE '%theirs')"
)


def rows(path: Path, **arms: float) -> Path:
    """Four runs of each arm, of the length of those of the sweep; the last one of `short` ends early."""
    lines = [
        f"{arm},{seed},{step},{loss + seed / 100 + step / 10}"
        for arm, loss in arms.items()
        for seed in range(4)
        for step in ((2,) if (arm, seed) == ("short", 3) else (2, 4))
    ]
    path.write_text("\n".join(["arm,seed,step,val/loss", *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder with sweep `tiny`, to which runs of `theirs` and `short` were added, and a judgement `alone`, in `state`."""
    folder = tmp_path_factory.mktemp("swept")
    tiny(folder, seeds=1, shape={"layers": 1, "eval_tokens": 16})
    assert run(folder).returncode == 0
    rows(folder / "other.csv", theirs=5.0, short=6.0)
    rows(folder / "alone.csv", base=5.0, theirs=5.5)
    for done in (into(folder), alone(folder)):
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(swept, tmp_path) -> Path:
    """A copy of that folder. The file that was read stays where it was."""
    shutil.copytree(swept, tmp_path / "copy")
    return tmp_path / "copy"


def run(folder: Path, *words: object):
    return here("sweep", folder / "tiny.yaml", *INLINE, "--no-report", "--state", folder / "state", *words)


def into(folder: Path):
    words = ("--into", "tiny", "--against", "bf16", "--without", "seed 3 of short", "--no-report")
    return here("judge", folder / "other.csv", *words, "--state", folder / "state")


def alone(folder: Path, source: Path | None = None):
    words = ("--against", "base", "--as", "alone", "--no-report")
    return here("judge", (source or folder) / "alone.csv", *words, "--state", folder / "state")


def judged(folder: Path, name: str = "tiny"):
    """Everything that the ledger has of runs from elsewhere, without the times."""
    with closing(ledger(folder / "state", name)) as book:
        runs = {
            (row.name, row.seed, row.status, row.id): [
                (step, value) for step, _, value, _ in book.records(row.trial)
            ]
            for row in book.members()
            if "theirs" in row.name or "short" in row.name
        }
        origin = Judged.of(book)
        return runs, origin and (origin.readings, len(origin.times), origin.times[0])


def verdicts(folder: Path, name: str = "tiny") -> dict[str, tuple]:
    with closing(ledger(folder / "state", name)) as book:
        return {arm.name: (arm.mean, arm.gap and arm.gap.mean) for arm in summaries(book)}


def file_of(folder: Path, name: str = "tiny") -> Path:
    return folder / "state" / "sweeps" / name / "ledger.db"


def altered(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(ALTER).rowcount


def gone(path: Path) -> None:
    for each in path.parent.glob("ledger.db*"):
        each.unlink()


HARMS = {
    "altered": altered,
    "gone": gone,
    "text": lambda path: path.write_bytes(b"not a database" * 1000),
    "pages": lambda path: path.write_bytes(overwrite_middle(path.read_bytes())),
    "empty": lambda path: (gone(path), path.touch()),
}


def folders_of(folder: Path) -> list[Path]:
    """Folders of the runs from elsewhere in the sweep."""
    return [folder / "state" / "trials" / identity for _, _, _, identity in judged(folder)[0]]


def test_a_run_from_elsewhere_is_a_folder_that_is_verified(swept):
    runs, _ = judged(swept)
    assert [status for *_, status, _ in runs].count("done") == 7
    assert [(name, seed) for name, seed, status, _ in runs if status == "failed"] == [("elsewhere: short", 3)]
    for (_, seed, status, _), path in zip(runs, folders_of(swept), strict=True):
        result = json.loads((path / "result.json").read_bytes())
        assert (result["status"], result["spec"]) == (status, json.loads((path / "spec.json").read_bytes()))
        assert result["spec"]["seed"] == seed
    checked = here("status", "--verify", "--state", swept / "state", "--json")
    found = {each["name"]: each for each in json.loads(checked.stdout)}
    assert {name: (each["trials"], each["verified"]) for name, each in found.items()} == {
        "tiny": (10, 10),
        "alone": (8, 8),
    }


REPAIRS = [
    *(("altered", "sweep"), ("gone", "sweep"), ("empty", "sweep")),
    *(("gone", "rebuild"), ("text", "rebuild"), ("pages", "rebuild")),
]


@every(harm__remedy=REPAIRS)
def test_a_lost_or_altered_ledger_has_the_runs_from_elsewhere_again(harm, remedy, swept, tmp_path):
    before, said = judged(swept), verdicts(swept)
    folder = Path(shutil.copytree(swept, tmp_path / "copy"))
    HARMS[harm](file_of(folder))
    shown = here("show", "tiny", "--state", folder / "state")
    assert (shown.returncode, "theirs" in shown.stdout) == (2, False)
    if remedy == "rebuild":
        done = here("rebuild", folder / "tiny.yaml", "--state", folder / "state")
        assert (done.returncode, "judge" in done.stdout.partition("Lost: ")[2]) == (0, False), done.stderr
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert (judged(folder), verdicts(folder)) == (before, said)


def test_altered_runs_from_elsewhere_without_folders_are_shown_by_no_command(copy):
    """As a state folder of before these files has them."""
    altered(file_of(copy))
    for path in folders_of(copy):
        shutil.rmtree(path)
    (file_of(copy).parent / "judged.json").unlink()
    note = copy / "note.json"
    for done in (run(copy, "--notify", f"tee {note}"), here("report", "tiny", "--state", copy / "state")):
        assert (done.returncode, "theirs" in done.stdout.partition("damaged")[0]) == (2, False)
        assert len(done.stderr.replace("Starting: ", "").strip().splitlines()) <= 2
    assert json.loads(note.read_text())["table"] == ""
    assert into(copy).returncode == 0  # reads them from their file
    assert run(copy).returncode == 0


def test_files_that_were_lost_or_changed_are_written_again_from_a_whole_ledger(copy):
    before = judged(copy)
    first, second, third, *_ = folders_of(copy)
    kept = {path: path.read_bytes() for path in (first / "result.json", third / "result.json")}
    for path in (first, folders_of(copy)[-1]):  # the last one is of the run that was left out
        shutil.rmtree(path)
    events = second / "events-1.jsonl"
    events.write_bytes(events.read_bytes().replace(b"5.", b"4.", 1))
    (third / "result.json").write_text("{")
    manifest = file_of(copy).parent / "judged.json"
    content = manifest.read_bytes()
    for change in (content[:40], content.replace(b"theirs", b"ours"), b"", None):
        manifest.unlink() if change is None else manifest.write_bytes(change)
        done = run(copy)
        assert (done.returncode, judged(copy), manifest.read_bytes()) == (0, before, content), done.stderr
        assert ("judged.json" in done.stdout) == (change is not None)
    assert {path: path.read_bytes() for path in kept} == kept
    assert len([*(copy / "state" / "retired").iterdir()]) == 2


def no_folder(folder: Path) -> str:
    path = folders_of(folder)[0]
    shutil.rmtree(path)
    altered(file_of(folder))
    return path.name


def no_list(folder: Path) -> str:
    gone(file_of(folder))
    path = file_of(folder).parent / "judged.json"
    path.write_text("{}")
    return path.name


def no_run(folder: Path) -> str:
    path = folders_of(folder)[-1]
    gone(file_of(folder))
    (path / "result.json").unlink()
    return path.name


@every(harm=(no_folder, no_list, no_run))
def test_what_is_whole_nowhere_is_refused_by_name(harm, swept, tmp_path):
    folder = Path(shutil.copytree(swept, tmp_path / "copy"))
    named = harm(folder)
    done = run(folder)
    assert (done.returncode, named in done.stderr, "move judged.json away" in done.stderr) == (2, True, True)
    (file_of(folder).parent / "judged.json").unlink()
    gone(file_of(folder))
    assert run(folder).returncode == 0
    assert into(folder).returncode == 0


@every(harm=HARMS)
def test_a_damaged_ledger_of_judged_runs_is_written_again_by_its_own_command(harm, swept, tmp_path):
    before, said = judged(swept, "alone"), verdicts(swept, "alone")
    folder = Path(shutil.copytree(swept, tmp_path / "copy"))
    path = file_of(folder, "alone")
    HARMS[harm](path)
    for words in (("show", "alone"), ("report", "alone"), ("status", "--verify", "alone")):
        done = here(*words, "--state", folder / "state")
        assert done.returncode in (1, 2)
        assert "the same `ablate judge` command" in done.stdout + done.stderr, words
    done = alone(folder, swept)
    assert done.returncode == 0, done.stderr
    assert (judged(folder, "alone"), verdicts(folder, "alone")) == (before, said)
    assert len([*path.parent.glob("ledger.db.damaged-*[0-9]")]) == (harm not in ("gone", "empty"))
    assert here("status", "--verify", "alone", "--state", folder / "state").returncode == 0


def test_the_name_of_judged_runs_is_no_experiments_even_without_their_ledger(copy):
    gone(file_of(copy, "alone"))
    shutil.copy(copy / "tiny.yaml", copy / "alone.yaml")
    done = here("sweep", copy / "alone.yaml", *INLINE, "--no-report", "--state", copy / "state")
    assert (done.returncode, "give the experiment another name" in done.stderr) == (2, True)
    done = here("judge", copy / "alone.csv", "--against", "base", "--as", "tiny", "--state", copy / "state")
    assert (done.returncode, "a sweep of this name" in done.stderr) == (2, True)
