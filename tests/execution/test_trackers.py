"""Trackers beside MLflow: one of another package, TensorBoard's files, and one that fails."""

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.commands import INLINE, here
from support.experiments import ledger, sweep, tiny, until, write
from support.toy_tracker import Toy

from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.progress import Outcome, RunOptions
from ablate.execution.tracking.runs import gap_key, key, shown
from ablate.execution.tracking.tracker import TRACKERS, Follower, Tracker, open_trackers
from ablate.execution.workers import Inline
from ablate.training.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]


def follow(folder: Path, trackers: Mapping[str, Tracker], **keys: Any) -> tuple[Outcome, list[str]]:
    """Run a sweep with trackers; return its outcome and news."""
    options = RunOptions(trackers=trackers, describe=lambda ledger: "the answer")
    run = Controller(tiny(folder, **{"seeds": 2} | keys), folder, "cpu", Inline, None, options)
    steps = [*run.run()]
    assert isinstance(steps[-1], Outcome)
    return steps[-1], [*(line for step in steps[:-1] for line in step.news), *run.news]


def test_a_tracker_of_another_module_shows_every_member_and_the_answer(tmp_path):
    trackers = open_trackers("support.toy_tracker:Toy", tmp_path, "tiny")
    assert follow(tmp_path, trackers)[0].status == "done"
    book = ledger(tmp_path)
    expected = [
        f"{m.name} seed={m.seed}: done {book.last_value(m.trial, 'val/loss')!r}" for m in book.members()
    ]
    book.close()
    assert len(expected) == 6
    assert (tmp_path / "tiny.txt").read_text().splitlines() == [*expected, "FINISHED", "", "the answer"]


@pytest.mark.parametrize("workload", [name for name, one in WORKLOADS.items() if one.METRICS])
def test_mlflow_gets_at_most_twelve_metrics_of_every_workload_the_main_one_and_its_gap_first(workload):
    """A forked run has most: the parts of its damage, and the losses and tokens that every trainer records."""
    main = "val/loss" if "val/loss" in WORKLOADS[workload].METRICS else sorted(WORKLOADS[workload].METRICS)[0]
    recorded = {*WORKLOADS[workload].METRICS, "train/loss", "tokens", "memory/rss", "nan/loss"}
    added = {gap_key(main), f"{gap_key(main)}_pct", "watch/damage/direct", "watch/damage/learnt"}
    keys = sorted({*added, *filter(None, (key(name, [main]) for name in recorded))})
    assert keys[:3] == [main, f"{main}_gap", f"{main}_gap_pct"]
    assert sum(not key.startswith(("watch/nan/", "watch/quant/")) for key in keys) <= 12


def content(folder: Path) -> dict[Path, bytes]:
    """Return the files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [*TRACKERS, "support.toy_tracker:Toy"])
def test_a_tracker_is_a_function_of_the_ledger_that_can_be_repeated_and_deleted(name, tmp_path):
    """The contract of every tracker of this package: what it wrote is the same however often it is called."""
    if name in TRACKERS:
        pytest.importorskip(name, reason=f"needs the package {name}")
    follow(tmp_path, {}, seeds=2)
    book, before = ledger(tmp_path), content(tmp_path)

    def opened() -> Tracker:
        return open_trackers(name, tmp_path, "tiny")[name]

    def written() -> dict[Path, bytes]:
        found = content(tmp_path)
        assert before.items() <= found.items()  # nothing else of the state folder is touched
        return {path: text for path, text in found.items() if path not in before}

    first = opened()
    assert isinstance(first, Tracker)
    assert written() == {}
    first.refresh(book)
    refreshed = written()
    assert refreshed
    first.refresh(book)
    assert written() == refreshed
    first.finish(book, "FINISHED", "the answer")
    finished = written()
    again = opened()
    again.refresh(book)
    again.finish(book, "FINISHED", "the answer")
    assert written() == finished
    for path in finished:
        path.unlink()
    anew = opened()
    anew.refresh(book)
    anew.finish(book, "FINISHED", "the answer")
    assert written() == finished
    for trouble in (OSError(), OSError("no more paper\nin the printer"), ValueError("x" * 1000)):
        why = anew.trouble(book, trouble)
        assert 0 < len(why) < 200
        assert "\n" not in why
    book.close()


class Broken(Toy):
    """Fails at every look."""

    def refresh(self, ledger) -> None:
        raise OSError("no more paper\nin the printer")


def test_a_tracker_that_fails_is_named_and_neither_stops_the_sweep_nor_another_tracker(tmp_path):
    trackers = {"broken": Broken(tmp_path, "other"), "toy": Toy(tmp_path, "tiny")}
    outcome, news = sweep(tiny(tmp_path), tmp_path, trackers=trackers, grace=3.0)
    assert outcome.status == "done"
    assert news[-1] == "broken is behind (OSError: no more paper): the next run of this sweep writes the rest"
    assert "FINISHED" in (tmp_path / "tiny.txt").read_text()


def test_a_reason_that_is_cut_has_no_part_of_a_password(tmp_path):
    password, path = "correct-horse-battery-staple", "api/2.0/mlflow/experiments/get-by-name"
    error = OSError(f"API request to https://me:{password}@mlflow.internal.example.com:5000/{path} failed")
    assert "correct" not in Broken(tmp_path, "other").trouble(None, error)


def test_a_ledger_that_cannot_be_read_is_the_reason_for_a_delay(tmp_path):
    follower = Follower(Toy(tmp_path, "tiny"), tmp_path / "ledger.db", "toy")
    assert until(lambda: follower.trouble is not None)
    assert str(tmp_path / "ledger.db") in follower.trouble
    assert not follower.finish("FINISHED", "", 0.1)


def test_a_tracker_from_this_checkout_leaves_the_imported_package_as_it_is(tmp_path):
    """The current folder of such a command holds the package, whose modules are not the tracker's."""
    program = (
        "import sys; from pathlib import Path; import ablate.store.ledger as before;"
        "from ablate.execution.tracking.tracker import open_trackers;"
        "assert open_trackers('tests.support.toy_tracker:Toy', Path(sys.argv[1]), 'x');"
        "assert sys.modules['ablate.store.ledger'] is before"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)


def test_none_is_no_tracker(tmp_path):
    assert open_trackers("none", tmp_path, "tiny") == {}


@pytest.mark.parametrize("name", ["tensorbord", "no_such_module:Toy", "support.toy_tracker:Tory"])
def test_a_name_that_is_no_tracker_is_refused(name, tmp_path):
    with pytest.raises(InputError, match=name):
        open_trackers(name, tmp_path, "tiny")


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return step, value and time of all scalars below a folder, by tag, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_ledgers_records_and_a_second_run_writes_nothing(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    command = "sweep", write(tmp_path, seeds=1), "--state", tmp_path, *INLINE, "--tracker", "tensorboard"
    done = here(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    book = ledger(tmp_path)
    metrics = json.loads(book.fact("metrics") or "[]")
    for member in book.members():
        expected: dict[str, list[tuple[int, float, float]]] = {}
        for step, name, value, moment in book.records(member.trial):
            if shown(name, metrics):
                single = struct.unpack("f", struct.pack("f", value))[0]
                expected.setdefault(name, []).append((step, single, moment))
        found = scalars(tmp_path / "tensorboard" / "tiny" / member.name / f"seed={member.seed}")
        assert found == expected
        assert len(found) > 5
    assert len(book.members()) == 3
    book.close()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "tensorboard").rglob("events.*")}
    assert len(before) == 3
    next(iter(before)).unlink()
    assert here(*command).returncode == 0
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "tensorboard").rglob("events.*")}
    assert after.keys() == before.keys()
    assert sum(after[path] != before[path] for path in before) == 1


def test_tensorboard_has_a_folder_inside_the_sweeps_for_every_arm_whatever_its_name(tmp_path):
    """Names of arms as users may write them: long ones that differ at the end, and names of folders."""
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    names = ["x" * 300 + "a", "x" * 300 + "b", "漢" * 40 + "一", "漢" * 40 + "二", "..", ".", "a/b"]
    follow(
        tmp_path,
        open_trackers("tensorboard", tmp_path, "tiny"),
        workload={"idle": {"steps": 3}},
        ablate=None,
        arms={name: {"workload.x": number / 8} for number, name in enumerate(names, 1)},
        against=names[0],
        seeds=1,
    )
    files = [*(tmp_path / "tensorboard").rglob("events.*")]
    book = ledger(tmp_path)
    assert len(files) == len(book.members()) >= len(names)
    book.close()
    assert {path.parents[2].relative_to(tmp_path) for path in files} == {Path("tensorboard/tiny")}
    assert len({path.parents[1].name for path in files}) == len(files)
