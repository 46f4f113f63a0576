"""Tests of what a sweep prints: one line of progress while it runs, at most twelve lines of answer after it."""

import io
import json
import math
import re

import pytest
from rich.cells import cell_len
from support.books import ALIKE, BASE, LOOSE, WORSE, add, noisy, whole_grid
from support.cases import every
from support.commands import INLINE, here
from support.experiments import WILD, write

from ablate.cli.answer_view import MOST_LINES, print_lines
from ablate.cli.common import Screen
from ablate.cli.executor import View
from ablate.execution.progress import Progress, Routine, Running
from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import Asked
from ablate.reports.table import Column, Table
from ablate.results.comparisons import Comparisons
from ablate.results.number_text import shortened
from ablate.store.ledger import Ledger

WIDTHS = (80, 160)


def state(done: int, *news: str, names: tuple[str, ...] = ("rht=true sr=true",)) -> Progress:
    running = tuple(Running(name, 3, 1, 1, 0.0, 240, None, None, step=12) for name in names)
    return Progress(done, 56, 0, running, news, None, 40.0)


# While it runs


def test_a_pipe_gets_a_line_a_minute_and_each_failure_when_it_happens():
    out, now = io.StringIO(), [0.0]
    view = View(Screen(file=out, width=160), clock=lambda: now[0])
    with view.open():
        for second in range(0, 301):
            now[0] = float(second)
            news = [Routine(f"bf16 seed={second}: val/loss 3.1 (1 s)")]
            news += ["b seed=1: failed: no such file"] if second == 30 else []
            view.show(state(second // 6, *news))
    lines = out.getvalue().splitlines()
    assert lines[0] == "[5/56] b seed=1: failed: no such file"
    assert [line.partition(" ")[0] for line in lines[1:]] == [f"{n * 10}/56" for n in range(1, 6)]
    assert lines[1] == "10/56 runs, about 40 s left; rht=true sr=true seed=3 step 12/240"
    assert "\x1b" not in out.getvalue()


@every(age__text=((0.0, "about 40 s left"), (39.5, "about 1 s left"), (41.0, "longer than estimated")))
def test_a_line_in_place_counts_down_between_events_and_says_that_its_estimate_has_run_out(age, text):
    out, now = io.StringIO(), [0.0]
    screen = Screen(file=out, width=160, force_terminal=True, color_system=None)
    with View(screen, clock=lambda: now[0]).open() as view:
        view.show(state(0))
        now[0] = age
    assert f"0/56 runs, {text}; rht=true sr=true seed=3 step 12/240" in out.getvalue()


def test_with_all_a_line_is_printed_for_each_run():
    out = io.StringIO()
    View(Screen(file=out, width=160), everything=True).show(state(1, Routine("bf16 seed=0: val/loss 3.1")))
    assert out.getvalue() == "[1/56] bf16 seed=0: val/loss 3.1\n"


@every(width=WIDTHS)
def test_a_terminal_has_one_line_of_progress_however_much_runs(width):
    out = io.StringIO()
    names = tuple(f"an arm with a long name, number {number}" for number in range(8))
    with View(Screen(file=out, width=width, force_terminal=True, color_system=None)).open() as view:
        for done in range(20):
            view.show(state(done, Routine("bf16 seed=0: val/loss 3.1"), "b: failed", names=names))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "val/loss" not in shown
    assert "19/56 runs, about 40 s left; an arm with a long name, number 0 seed=3" in shown
    drawn = re.split(r"[\r\n]+", shown)
    assert max(map(cell_len, drawn)) <= width
    assert re.findall(r"\x1b\[\d*A", out.getvalue()) == ["\x1b[1A"]  # of its removal: it is one line
    assert shown.count("b: failed") == 20


# After it


@every(
    names__short=(
        (["lr=0.0016051911333587634", "lr=0.0012520653814999472"], ["lr=0.00161", "lr=0.00125"]),
        (["lr=0.0012345678901234", "lr=0.0012341678901234"], ["lr=0.001235", "lr=0.001234"]),
        (
            ["lr=0.12345678901234567", "lr=0.12345678901234568"],
            ["lr=0.12345678901234567", "lr=0.12345678901234568"],
        ),
        (["bf16 lr=1.2345678901e-05", "bf16 lr=0.001"], ["bf16 lr=1.23e-05", "bf16 lr=0.001"]),
        (["lr=0.00123456", "steps=12345678"], ["lr=0.00123456", "steps=12345678"]),
        (["w=[0.123456789, 0.5]", "v2.1234567890.1"], ["w=[0.123, 0.5]", "v2.1234567890.1"]),
        (["0.1000000001", "0.1000000002", "a"], ["0.1000000001", "0.1000000002", "a"]),
        ([], []),
    )
)
def test_long_numbers_get_the_digits_that_tell_arms_apart(names, short):
    assert [*map(shortened(names), names)] == short
    assert len({*short}) == len({*names})
    assert shortened(names)(f"The best is {' and '.join(names)}.") == f"The best is {' and '.join(short)}."


def test_tables_for_people_have_short_numbers_and_files_for_programs_all_digits(tmp_path):
    rates = ("0.0016051911333587634", "0.0012520653814999472")
    table = Table("arms", [f"bf16 lr={rate}" for rate in rates], [Column("arm", str), Column("n", len)])
    table.save(tmp_path)
    for rate, short in zip(rates, ("0.00161", "0.00125"), strict=True):
        assert f"bf16 lr={short}" in table.markdown()
        assert rate not in table.markdown() + table.html()
        assert rate in (tmp_path / "arms.csv").read_text()


def test_the_rerun_of_a_winner_has_a_name_for_people_and_its_own_for_programs(tmp_path):
    name = f"{CONFIRM}0: sr=false"
    table = Table("arms", [name], [Column("arm", str), Column("n", len)])
    table.save(tmp_path)
    for text in (table.markdown(), table.html()):
        assert "winner on fresh seeds, 0: sr=false" in text
        assert name not in text
    assert name in (tmp_path / "arms.csv").read_text()


def test_under_no_answer_there_is_no_advice_on_how_to_read_the_table(tmp_path):
    """At this learning rate a model learns nothing."""
    path = write(tmp_path, shape={"lr": 0.3})
    shown = here("sweep", path, "--state", tmp_path / "runs", *INLINE, "--all").stdout
    assert "No answer:" in shown, shown
    _, _, below = shown.partition("\narm ")  # the table
    assert below.count("A model that ignores context reaches ") == 1
    assert not [word for word in ("Holm", "tokens/s and memory", "Seeds needed") if word in below]


def test_the_advice_below_several_tables_is_about_the_metric_of_the_question(tmp_path):
    """The second metric has no smallest effect that matters."""
    metrics = [{"name": "val/loss", "min_effect": 1e-9}, {"name": "train/recent_loss"}]
    path = write(tmp_path, metric=metrics, shape={"lr": 3e-3}, seeds=3)
    shown = here("sweep", path, "--state", tmp_path / "runs", *INLINE, "--all").stdout
    assert shown.count("\narm ") == 2
    assert "undecided" in shown
    assert "Without metric.min_effect" not in shown


def one_seed(book):
    add(book, "bf16", {0: 3.0}, None)
    add(book, "rht", {0: 3.1})


def wide_names(book):
    add(book, "the baseline with a very long name " * 3, BASE, None)
    for number, losses in enumerate((WORSE, ALIKE, LOOSE)):
        add(book, f"arm {number} with a very long name\x1b[31m of hidden characters " * 3, losses)


def many(book):
    add(book, "bf16", BASE, None)
    noisy(book, 30)


def diverged(book):
    add(book, "bf16", BASE, None)
    add(book, "wild", dict.fromkeys(BASE, math.nan), status="diverged")


def searched(book):
    book.describe(search="tpe")
    add(book, "bf16", BASE, None)
    for number in range(9):
        losses = {seed: value - 0.01 * number for seed, value in BASE.items()}
        add(book, f"point {number}", losses, optuna=number)


def asked_knob(book):
    whole_grid(book)
    book.describe(answer=Asked(knob="sr", given={"rht": True}).model_dump_json())


def asked_arm(book):
    add(book, "bf16", BASE, None)
    add(book, "worse", WORSE)
    add(book, "loose", LOOSE)
    book.describe(answer=Asked(arm="loose", against="bf16").model_dump_json())


def begun(book):
    add(book, "bf16", {}, None)


SHAPES = (whole_grid, one_seed, wide_names, many, diverged, searched, asked_knob, asked_arm, begun)


@every(shape=SHAPES)
@every(width=WIDTHS)
@every(most=(MOST_LINES - 2, 5))
def test_an_answer_has_few_lines_none_wider_than_the_terminal(shape, width, most, tmp_path):
    book, out = Ledger(tmp_path / "sweeps" / "x" / "ledger.db"), io.StringIO()
    metric = json.dumps({"name": "val/loss", "min_effect": 0.01})
    book.describe(question="Does it?", metric=metric, search="", file="x.yaml")
    shape(book)
    print_lines(Comparisons(book), Screen(file=out, width=width), most)
    book.close()
    lines = out.getvalue().splitlines()
    assert 1 <= len(lines) <= most
    assert max(map(cell_len, lines)) <= width


def test_the_rows_are_the_comparisons_that_are_asked_for(tmp_path):
    book, out = Ledger(tmp_path / "sweeps" / "x" / "ledger.db"), io.StringIO()
    book.describe(question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    asked_knob(book)
    print_lines(Comparisons(book), Screen(file=out, width=80), MOST_LINES)
    book.close()
    lines = out.getvalue().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("comparison"))
    assert re.fullmatch(
        r"sr: true instead of false, with rht true +\+0\.\d+ ±0\.\d+ +worse *", lines[head + 1]
    )
    assert not any(line.startswith("rht: ") for line in lines)


def test_a_row_of_an_arm_follows_its_own_baseline(tmp_path):
    book, out = Ledger(tmp_path / "sweeps" / "x" / "ledger.db"), io.StringIO()
    book.describe(question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    first, second = (add(book, name, BASE, None) for name in ("base1", "base2"))
    add(book, "arm1", WORSE, first)
    add(book, "arm2", LOOSE, second)
    print_lines(Comparisons(book), Screen(file=out, width=80), MOST_LINES)
    book.close()
    assert re.findall(r"^(base\d|arm\d) .* 4 ", out.getvalue(), re.MULTILINE) == [
        "base1",
        "arm1",
        "base2",
        "arm2",
    ]


@pytest.mark.slow
def test_a_sweep_with_a_diverged_and_a_failed_run_ends_in_twelve_lines(tmp_path):
    path = write(tmp_path, ablate=None, arms=WILD, seeds=2, retry=0)
    done = here("sweep", path, "--state", tmp_path / "state", *INLINE)
    lines = done.stdout.splitlines()
    news = [number for number, line in enumerate(lines) if re.match(r"\[\d+/\d+\] ", line)]
    assert [line for line in lines if "diverged: non-finite" in line]
    assert not [line for line in lines if ": val/loss " in line]
    assert len(lines) - news[-1] - 1 <= MOST_LINES
    assert re.match(r"\d+ trials run", lines[-3])
    assert lines[-1] == "4 of 8 runs diverged, 2 of them of a baseline."
