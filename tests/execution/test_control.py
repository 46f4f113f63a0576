"""A sweep's folder from outside: orders arrive whole, once and in order; who runs it; whether its ledger is sound."""

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading

import pytest
from support.experiments import sweep, tiny
from support.ledgers import overwrite_middle
from support.processes import HOLD_LOCK

from ablate.errors import InputError
from ablate.execution.sweep_control import check, damage, give, holder, take
from ablate.files import Holder, lock
from ablate.store.checked_ledger import folders


def test_orders_are_taken_once_in_order_of_arrival(tmp_path):
    orders = [{"workers": n} for n in range(20)]
    for order in orders:
        give(tmp_path, order)
    assert take(tmp_path) == orders
    assert take(tmp_path) == []


def test_an_order_is_there_until_it_is_taken(tmp_path):
    path = give(tmp_path, {"stop": "sweep"})
    assert path.exists()
    take(tmp_path)
    assert not path.exists()


def test_a_folder_without_orders_has_none(tmp_path):
    assert take(tmp_path) == []


def test_what_is_no_order_is_passed_over_and_removed(tmp_path):
    give(tmp_path, {"workers": 1})
    (tmp_path / "orders" / "0.json").write_text("{")
    (tmp_path / "orders" / "1.json.12.34").write_text('{"workers": 2')  # on its way in
    assert take(tmp_path) == [{"workers": 1}]
    assert [path.name for path in (tmp_path / "orders").iterdir()] == ["1.json.12.34"]


def _give_many(folder, start):
    for n in range(start, start + 50):
        give(folder, {"workers": n})


def test_orders_given_while_they_are_taken_are_neither_lost_nor_repeated(tmp_path):
    givers = [
        multiprocessing.get_context("spawn").Process(target=_give_many, args=(tmp_path, start))
        for start in (0, 1000)
    ]
    for giver in givers:
        giver.start()
    taken = []
    while any(giver.is_alive() for giver in givers):
        taken += take(tmp_path)
    taken += take(tmp_path)
    numbers = [order["workers"] for order in taken]
    assert sorted(numbers) == [*range(50), *range(1000, 1050)]
    assert [n for n in numbers if n < 1000] == [*range(50)]


# Who runs it


def test_nobody_runs_what_was_never_run(tmp_path):
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_who_holds_the_lock_is_named_and_not_disturbed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path / "lock")], stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    said = (tmp_path / "lock").read_text()
    assert holder(tmp_path) == Holder.parse(said) == Holder(process.pid, os.uname().nodename)
    assert (tmp_path / "lock").read_text() == said
    process.kill()
    process.communicate()
    assert holder(tmp_path) is None
    assert (tmp_path / "lock").read_text() == said


def test_a_lock_that_names_a_process_that_does_not_hold_it_is_nobodys(tmp_path):
    (tmp_path / "lock").write_text(Holder.this_process().content)
    assert holder(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "expected", "words"),
    [
        (Holder(12, "node-1").content, Holder(12, "node-1"), "pid 12 on node-1"),
        (Holder(12, "node-1", 3).content, Holder(12, "node-1", 3), "pid 12 on node-1, attempt 3"),
    ],
)
def test_a_lock_file_is_read_as_it_was_written(content, expected, words):
    assert Holder.parse(content) == expected
    assert str(Holder.parse(content)) == words


@pytest.mark.parametrize(
    "content",
    ["", "pid", "pid 12 on node-1", '{"pid": 1', "pid x on y", "3", "[1]", "{}", '{"pid": "1", "host": "y"}'],
)
def test_what_is_no_lock_file_names_nobody(content, tmp_path):
    assert Holder.parse(content) is None
    (tmp_path / "lock").write_text(content)
    assert holder(tmp_path) is None


def test_asking_who_runs_a_sweep_never_keeps_one_from_starting(tmp_path):
    """The lock of a process that is dead is never taken, not even for a moment."""
    process = subprocess.Popen(["true"])
    process.wait()
    (tmp_path / "lock").write_text(Holder(process.pid, os.uname().nodename).content)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            holder(tmp_path)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for _ in range(300):
            with lock(tmp_path / "lock", wait=False):
                pass
            (tmp_path / "lock").write_text(Holder(process.pid, os.uname().nodename).content)
    finally:
        over.set()
        asker.join()


# Its ledger


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    sweep(tiny(folder), folder)
    return folder / "sweeps" / "tiny" / "ledger.db"


def test_a_sound_ledger_has_no_damage(swept, tmp_path):
    assert damage(swept) is None
    assert damage(tmp_path / "ledger.db") is None
    (tmp_path / "ledger.db").touch()
    assert damage(tmp_path / "ledger.db") is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: b"not a database" * 1000,
        lambda content: content[: len(content) // 2],
        overwrite_middle,
        lambda content: content[:5000],
    ],
    ids=["text", "half", "pages", "torn"],
)
def test_a_damaged_ledger_is_refused_with_the_way_out(swept, tmp_path, harm):
    (tmp_path / "ledger.db").write_bytes(harm(swept.read_bytes()))
    with pytest.raises(InputError) as error:
        check(tmp_path, "tiny.yaml")
    (line,) = error.value.problems
    assert line.startswith(f"{tmp_path / 'ledger.db'}: damaged (")
    assert line.endswith("); `ablate rebuild tiny.yaml` makes it again from the trial folders")
    assert "\n" not in line


def test_a_ledger_that_is_being_written_is_sound(swept, tmp_path):
    path = tmp_path / swept.parent.name / "ledger.db"
    path.parent.mkdir()
    path.write_bytes(swept.read_bytes())
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO sweep VALUES ('x', 'y')")
    assert damage(path) is None
    writer.execute("COMMIT")
    writer.close()


# Which there are


def test_sweeps_are_named_by_name_or_by_file_or_all_are_meant(swept):
    state = swept.parents[2]
    assert (
        folders(state, None)
        == folders(state, [])
        == folders(state, ["tiny"])
        == folders(state, ["some/tiny.yaml", "tiny"])
    )
    assert folders(state, None) == [swept.parent]


def test_a_sweep_that_there_is_not_is_told_with_the_nearest(swept, tmp_path):
    with pytest.raises(InputError, match=r"^tinny: no such sweep in .*; 'tiny' is the nearest of tiny$"):
        folders(swept.parents[2], ["tinny.yaml"])
    with pytest.raises(InputError, match=r"^tiny: no such sweep in .*; none has been run there$"):
        folders(tmp_path, ["tiny"])
    assert folders(tmp_path, None) == []
