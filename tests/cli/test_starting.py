"""Start of a sweep: the executor begins early and once, and checks that passed here are not repeated."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from ablate.cli.executor import StartingExecutor
from ablate.execution.workers import ClusterError
from ablate.experiment.schema import Resources
from ablate.verification import passed_checks
from ablate.verification.checkup import Checkup, Unfit

PASSING, FAILING = ((sys.executable, "-c", f"raise SystemExit({status})") for status in (0, 1))


class Started:
    """A pool that records what is done to it."""

    made: list["Started"]

    def __init__(self, *arguments: object) -> None:
        self.closed = 0
        self.made.append(self)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pools() -> list[Started]:
    Started.made = []
    return Started.made


@pytest.fixture
def starting() -> Iterator[Callable[..., StartingExecutor]]:
    """A maker of executors with the checks given."""
    settings = SimpleNamespace(executor="ray", ray=None, workers=2, device="cpu")
    with ExitStack() as stack:
        yield lambda checks=PASSING, connect=Started: StartingExecutor(
            settings, Resources(), stack.enter_context(closing(Checkup(checks))), connect
        )


def test_however_often_it_is_begun_one_pool_starts_and_belongs_to_the_caller(starting, pools):
    both = starting()
    both.begin()
    both.begin()
    pool = both()
    both.begin()
    both.close()
    assert pools == [pool]
    assert pool.closed == 0


def test_a_pool_that_nobody_asked_for_is_closed(starting, pools):
    both = starting()
    both.begin()
    both.close()
    assert [pool.closed for pool in pools] == [1]


def test_what_was_never_begun_starts_nothing(starting, pools):
    starting().close()
    assert pools == []


def test_a_failed_check_closes_the_pool_once(starting, pools):
    both = starting(FAILING)
    with pytest.raises(Unfit):
        both()
    both.close()
    assert [pool.closed for pool in pools] == [1]


def test_a_cluster_that_cannot_be_reached_is_told_to_who_asks_and_only_then(starting):
    def unreachable(*arguments):
        raise ClusterError("Ray cannot be reached")

    both = starting(connect=unreachable)
    with pytest.raises(ClusterError):
        both()
    unasked = starting(connect=unreachable)
    unasked.begin()
    unasked.close()


# Checks that passed


@pytest.fixture
def ran(tmp_path) -> Callable[..., int]:
    """A call that starts the checks of a sweep, and returns how often they have run by now."""
    count = tmp_path / "count"
    count.touch()
    code = f"open({str(count)!r}, 'a').write('x'); raise SystemExit({{status}})"

    def checked(status: int = 0, as_sweeps_do: bool = True) -> int:
        command = (sys.executable, "-c", code.format(status=status))

        class Quick(Checkup):
            remembered = command if as_sweeps_do else Checkup.remembered

        with closing(Quick(command)) as checkup:
            checkup.start()
            with suppress(Unfit):
                checkup.passed()
        return count.stat().st_size

    return checked


def test_checks_run_once_until_something_changes_that_they_depend_on(ran, cache, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [ran() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [ran() for _ in range(2)] == [2, 2]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert ran() == 2


def test_checks_that_are_off_run_again(ran, cache):
    assert [ran(1) for _ in range(3)] == [1, 2, 3]


def test_other_commands_than_the_checks_own_are_never_taken_for_them(ran, cache):
    assert [ran(as_sweeps_do=False) for _ in range(2)] == [1, 2]


def test_a_record_counts_for_a_day(ran, cache):
    assert ran() == 1
    (record,) = (cache / "checks").iterdir()
    later = record.stat().st_mtime - 86_401
    os.utime(record, (later, later))
    assert [ran() for _ in range(2)] == [2, 2]


def test_a_cache_that_cannot_be_written_costs_a_check_a_sweep_and_nothing_else(ran, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file" / "below"))
    assert [ran() for _ in range(2)] == [1, 2]


def test_a_module_path_that_grows_while_the_checks_run_is_not_part_of_their_subject(cache, monkeypatch):
    """Ray puts a folder of its own before the others when it is imported."""
    subject = passed_checks.subject()
    monkeypatch.syspath_prepend(str(cache))
    passed_checks.keep(subject)
    monkeypatch.undo()
    monkeypatch.setenv("ABLATE_CACHE", str(cache))
    assert passed_checks.known(subject)
    assert passed_checks.known(passed_checks.subject() | {"environment": subject["environment"]})


def test_a_record_from_the_future_does_not_count(cache, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(cache))
    subject = passed_checks.subject()
    passed_checks.keep(subject)
    assert passed_checks.known(subject)
    (record,) = (cache / "checks").iterdir()
    os.utime(record, (record.stat().st_atime, record.stat().st_mtime + 10**6))
    assert not passed_checks.known(subject)


def test_the_subject_of_the_checks_has_this_processor_torch_and_every_file(tmp_path):
    subject = passed_checks.subject()
    assert subject["libraries"]["torch"][0] == version("torch")
    assert any(line.startswith(("flags", "Features")) for line in subject["processor"])
    (tmp_path / "numerics").mkdir()
    (tmp_path / "__init__.py").write_text("")
    seen = {subject["files"], passed_checks.subject(package=tmp_path)["files"]}
    for name, text in (("numerics/a.py", "1"), ("numerics/a.py", "2"), ("numerics/b.so", "1"), ("b.py", "")):
        (tmp_path / name).write_text(text)
        seen.add(passed_checks.subject(package=tmp_path)["files"])
    assert len(seen) == 6


def test_settings_of_a_command_repeat_no_check_and_the_mode_of_products_does(monkeypatch):
    before = passed_checks.subject()
    for name in ("STATE", "REPORT", "MLFLOW", "PROFILE", "CACHE"):
        monkeypatch.setenv(f"ABLATE_{name}", "another")
    assert passed_checks.subject() == before
    monkeypatch.setenv("ABLATE_PRODUCTS", "fp32")
    assert passed_checks.subject() != before
