"""The frame: every record once a member, whatever is remembered; what was forgotten is not remembered."""

import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import here
from support.experiments import sweep, tiny, write

from ablate.experiment.recorded_spec import RecordedSpec
from ablate.store.ledger import Ledger
from ablate.store.records import frame, tokens_per_step

SPEC = '{"workload": {"gpt": {"batch": 2, "context": 16, "accumulate": 3}}, "seed": 0}'


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.identity()
    base = ledger.add_arm("bf16", {"recipe": "bf16"}, None, None)
    arm = ledger.add_arm("a", {"rht": True, "rules": [1, 2], "p": None}, base, None)
    for number, name in ((base, "bf16"), (arm, "a")):
        for seed in range(2):
            add(ledger, number, seed, f"{name}/{seed}", 1.0 + seed)
    yield ledger
    ledger.close()


def add(ledger: Ledger, arm: int, seed: int, trial: str, level: float, status: str = "done") -> int:
    number = ledger.add_member(arm, seed, trial, SPEC)
    values = {"val/loss": level, "quant/fprop.x/sqnr_db": math.nan, "quant/fprop.x/blocks.0/sqnr_db": 20.0}
    ledger.record(number, [{"step": step, "time": 0.0, "metrics": values} for step in (5, 10)])
    ledger.settle(number, status)
    return number


def rows(table) -> set:
    return {
        (r.arm, r.seed, r.step, r.metric, None if math.isnan(r.value) else r.value)
        for r in table.itertuples()
    }


def expected(ledger: Ledger) -> set:
    """Return the records of the ledger's own reader, one after the other."""
    return {
        (member.name, member.seed, step, name, None if math.isnan(value) else value)
        for member in ledger.members()
        for step, name, value, _ in ledger.records(member.trial)
    }


def test_every_record_is_a_row_with_its_members_facts(book):
    table = frame(book)
    assert len(table) == 4 * 2 * 3
    assert rows(table) == expected(book)
    assert set(table["sweep"]) == {"x"}
    arm = table[table["arm"] == "a"]
    assert set(arm["baseline"]) == {"bf16"}
    assert set(arm["rules"]) == {"[1, 2]"}
    assert arm["p"].isna().all()
    assert (table["tokens"] == table["step"] * 2 * 16 * 3).all()
    assert table["value"].isna().sum() == 8


def test_metrics_are_chosen_by_pattern(book):
    assert set(frame(book, metrics=["val/*"])["metric"]) == {"val/loss"}
    assert set(frame(book, metrics=["quant/*/sqnr_db", "none"])["metric"]) == {
        "quant/fprop.x/sqnr_db",
        "quant/fprop.x/blocks.0/sqnr_db",
    }
    assert frame(book, metrics=["none"]).empty


def test_a_shared_trial_has_its_rows_once_for_each_member(book):
    other = book.add_arm("again", {"rht": True}, 1, None)
    book.add_member(other, 0, "a/0", SPEC)
    assert rows(frame(book)) == expected(book)
    assert (frame(book)["arm"] == "again").sum() == 6


def test_what_is_remembered_is_what_the_ledger_says(book, tmp_path):
    running = add(book, 2, 2, "a/2", 7.0, status="running")
    before = frame(book, worth_keeping=1)
    (part,) = (tmp_path / "sweeps" / "x" / "records").glob("*.parquet")
    book.record(running, [{"step": 15, "time": 0.0, "metrics": {"val/loss": 6.0}}])
    book.settle(running, "done")
    wanted = expected(book)
    book.db.execute(
        "DELETE FROM records WHERE trial <> ?", (running,)
    )  # the finished ones are not read again
    after = frame(book)
    assert rows(after) == wanted
    assert len(after) == len(before) + 1
    assert rows(frame(book, metrics=["val/*"])) == {row for row in wanted if row[3] == "val/loss"}
    assert part.exists()


def test_what_was_forgotten_is_read_anew(book):
    frame(book, worth_keeping=1)
    book.forget(1)
    book.record(1, [{"step": 5, "time": 0.0, "metrics": {"val/loss": 4.5}}])
    book.settle(1, "done")
    assert rows(frame(book)) == expected(book)


def test_several_sweeps_are_one_frame(book, tmp_path):
    other = Ledger(tmp_path / "sweeps" / "y" / "ledger.db")
    add(other, other.add_arm("b", {"sr": False}, None, None), 0, "b/0", 3.0)
    both = frame(book, other)
    assert set(both["sweep"]) == {"x", "y"}
    assert rows(both) == expected(book) | expected(other)
    other.close()


def test_a_sweep_without_records_is_an_empty_frame(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "z" / "ledger.db")
    assert frame(ledger).empty
    ledger.close()


def test_a_workload_without_tokens_has_none():
    assert tokens_per_step(RecordedSpec.of({})) is None
    assert tokens_per_step(RecordedSpec.of({"workload": {"gpt": {"unknown": 1}}})) is None


def test_a_rebuilt_ledger_that_numbers_trials_and_metrics_anew_gives_every_arm_its_own_curves(tmp_path):
    ledger = tmp_path / "sweeps" / "tiny" / "ledger.db"

    def read() -> tuple[list[tuple], set, set]:
        with closing(Ledger(ledger, readonly=True)) as book:
            return (
                [tuple(row) for row in book.db.execute("SELECT trial, id FROM trials")],
                rows(frame(book, worth_keeping=1)),
                expected(book),
            )

    sweep(tiny(tmp_path, ablate={"recipe": ["nvfp4", "mxfp4"]}, seeds=1), tmp_path)
    before, found, wanted = read()
    assert found == wanted
    assert list((ledger.parent / "records").glob("*.parquet"))
    ledger.write_bytes(b"damaged" * 1000)
    path = write(tmp_path, ablate={"recipe": ["mxfp4", "nvfp4"]}, seeds=1, against="mxfp4")
    assert here("rebuild", path, "--state", tmp_path).returncode == 0
    after, found, wanted = read()
    assert after != before
    assert found == wanted


def test_what_one_numbering_remembered_is_read_by_another(book, tmp_path):
    """A ledger that was restored from a copy may number what came after it differently."""
    frame(book, worth_keeping=1)
    other = Ledger(tmp_path / "other" / "x" / "ledger.db")
    add(other, other.add_arm("b", {}, None, None), 7, "b/7", 9.0)
    arm = other.add_arm("a", {"rht": True}, None, None)
    other.record(other.add_member(arm, 1, "a/1", SPEC), [{"step": 1, "time": 0.0, "metrics": {"new": 0.0}}])
    add(other, arm, 1, "a/1", 2.0)
    other.describe(edition=book.fact("edition"))
    (tmp_path / "sweeps" / "x" / "records").rename(tmp_path / "other" / "x" / "records")
    kept = {
        row for row in expected(other) if row[3] != "new"
    }  # a finished trial's records are those that were remembered
    assert rows(frame(other)) == kept
    other.close()


def test_records_that_two_readers_remembered_at_once_are_read_once(book, tmp_path):
    frame(book, worth_keeping=1)
    (part,) = (tmp_path / "sweeps" / "x" / "records").glob("*.parquet")
    digest = part.stem.rpartition("-")[2]
    part.with_name(f"{book.fact('edition')}-second-{digest}.parquet").write_bytes(part.read_bytes())
    table = frame(book)
    assert len(table) == len(rows(table)) == len(expected(book))


def test_remembered_records_that_were_damaged_are_read_from_the_ledger_again(book, tmp_path):
    whole = rows(frame(book, worth_keeping=1))
    for place in (0.1, 0.5, 0.9):
        (part,) = (tmp_path / "sweeps" / "x" / "records").glob("*.parquet")
        content = bytearray(part.read_bytes())
        content[int(place * len(content))] ^= 4
        part.write_bytes(content)
        assert rows(frame(book, worth_keeping=1)) == whole


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists a process's libraries by /proc")
def test_one_sqlite_library_reads_a_ledger(book):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ablate.store.ledger import Ledger\n"
        "from ablate.store.records import frame\n"
        "assert len(frame(Ledger(Path(sys.argv[1]), readonly=True)))\n"
        "print(Path('/proc/self/maps').read_text())\n"
    )
    command = [sys.executable, "-c", script, str(book.path)]
    maps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = {Path(line.split(maxsplit=5)[-1]).name for line in maps.splitlines() if "/" in line}
    assert {name.partition(".")[0] for name in files if "sqlite" in name} <= {"_sqlite3", "libsqlite3"}
