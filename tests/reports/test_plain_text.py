"""Text of users is text: no markup, no terminal's orders, no forged line, no formula and no tag, wherever it is printed or written."""

import csv
import io
import json
import re
import unicodedata
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table as RichTable
from support.commands import INLINE, here
from support.experiments import ledger, sweep, tiny, write

from ablate.cli.common import Screen
from ablate.errors import one_line, printable
from ablate.reports import page
from ablate.reports.plain_text import csv_cell, markdown_cell
from ablate.reports.table import Table

NASTY = (
    "[/]",
    "[sr]",
    "c[/red]d",
    "[bold]b",
    ":smile:",
    "e\x1b[31m\x1b]0;t\x07",
    "f\ng",
    "=1+1",
    "@h",
    "-2+3+cmd|' /C x'!A0",
    "i|j",
    "<k>",
    "l\u202em",
    "\\<script>n</script>",
    "![o](https://o.test/o.png)",
)
QUESTION = "Does [/] or [red] \x1b[2J matter :smile:?"
IDLE = {"workload": {"idle": {"steps": 4}}, "seeds": 1}
HIDDEN = {"Cc", "Cs", "Zl", "Zp"}


def hidden(text: str) -> set[str]:
    """The characters of a text that a terminal obeys, line breaks apart."""
    return {
        character for character in text if character != "\n" and unicodedata.category(character) in HIDDEN
    }


def drawn(text: str) -> str:
    """The text as it is expected on a screen: rich itself leaves a bell, a backspace and the like out."""
    return printable(re.sub("[\x07\x08\x0b\x0c\r]", "", text))


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> Path:
    """A sweep whose arms and question are nasty, run."""
    folder = tmp_path_factory.mktemp("nasty")
    arms = {name: {"workload.x": float(number)} for number, name in enumerate(NASTY)}
    outcome, _ = sweep(tiny(folder, "nasty", **IDLE, question=QUESTION, ablate=None, arms=arms), folder)
    assert outcome.status == "done"
    assert {arm.name for arm in ledger(folder, "nasty").arms()} >= set(NASTY)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "nasty.yaml", *INLINE, "--all", "--no-report"),
        ("plan", "nasty.yaml"),
        ("status", "nasty"),
        ("show",),
        ("stop", "nasty", "--arm", "[/]"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_prints_what_users_name_as_it_is(state, words):
    done = here(*(state / word if word.endswith(".yaml") else word for word in words), "--state", state)
    assert "Traceback" not in done.stderr
    assert hidden(done.stdout + done.stderr) == set()
    assert done.returncode == (2 if words[0] == "stop" else 0), done.stderr
    if words[0] in ("sweep", "plan", "show"):
        shown = NASTY if words[0] != "sweep" else NASTY[:8]
        assert [name for name in shown if one_line(name) not in done.stdout] == []
    if words[0] != "show" and words[0] != "stop":
        assert drawn(QUESTION) in done.stdout


def test_what_is_pasted_and_opened_elsewhere_has_no_markup_of_a_name(state, tmp_path):
    pasted = here("show", "nasty", "--state", state).stdout
    assert "o.test" in pasted
    assert (hidden(pasted), re.findall(r"<[a-zA-Z/!?]|\]\(", pasted)) == (set(), [])
    web = here("show", "nasty", "--to", "html", "--state", state).stdout
    assert (hidden(web), "<script" in web, "n&lt;/script&gt;" in web) == (set(), False, True)
    here("show", "nasty", "--to", "csv", "--state", state, "--out", tmp_path)
    tables = {file.name: file.read_text() for file in tmp_path.glob("*.csv")}
    assert "arms.csv" in tables
    assert {name: hidden(text) for name, text in tables.items()} == {name: set() for name in tables}


def test_a_failure_is_told_as_it_is(tmp_path):
    """The live view, a line of news, and the reason that an exception gave."""
    from ablate.cli.executor import View
    from ablate.execution.progress import Progress, Running

    for terminal in (False, True):
        out = io.StringIO()
        view = View(Screen(file=out, force_terminal=terminal, color_system=None, width=300))
        running = tuple(Running(name, 1, 1, 1, 0.0, 4, None, None) for name in NASTY)
        with view.open():
            view.show(
                Progress(
                    0,
                    2,
                    0,
                    running,
                    tuple(f"{name} seed=1: failed: {QUESTION}" for name in NASTY),
                    QUESTION,
                    3.0,
                )
            )
        plain = (
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", out.getvalue()) if terminal else out.getvalue()
        )  # what moves the live view
        assert hidden(plain) == set()
        assert all(f"{drawn(name)} seed=1: failed: {drawn(QUESTION)}" in plain for name in NASTY)


def test_a_wrong_file_is_told_without_a_terminals_orders(tmp_path):
    path = write(tmp_path, arms={"a\x1b[31m": {"no\x1b[2Jknob": 1}}, ablate=None)
    done = here("plan", path)
    assert (done.returncode, hidden(done.stdout + done.stderr)) == (2, set())


@given(st.text(max_size=30) | st.sampled_from(NASTY))
@settings(max_examples=300, deadline=None)
def test_any_text_is_printed_as_it_is(text):
    out = io.StringIO()
    screen = Screen(file=out, width=10_000)
    screen.print(text, soft_wrap=True)
    table = RichTable(text, title=text, caption=text)
    table.add_row(one_line(text))
    screen.print(table)
    assert hidden(out.getvalue()) == set()
    assert out.getvalue().startswith(drawn(text)) or "\t" in text


@given(st.text(max_size=30) | st.sampled_from(NASTY))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_cell_of_every_kind(text):
    assert hidden(one_line(text)) == set()
    assert "\n" not in one_line(text)
    cell = csv_cell(text)
    assert cell in (printable(text), f"'{printable(text)}")
    assert not re.match(r"[=@\t\r]|[+-](?!$)\D", cell)
    row = markdown_cell(text)
    assert "\n" not in row
    assert not re.search(r"(?<!\\)\||<[a-zA-Z/!?]|\]\(", row)
    assert not re.search("[\x00-\x09\x0b-\x1f]", page.Text(text).html())


def test_the_name_of_a_file_fits_a_file_system_and_tells_long_metrics_apart():
    assert page.file_stem("curves", "val/loss") == "curves-val-loss"
    names = {page.file_stem("curves", f"{letter * 240}/{end}") for letter in "a模" for end in ("loss", "acc")}
    assert len(names) == 4
    assert max(len(name.encode()) for name in names) < 240


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+A1", "'+A1"),
        ("-2+3+cmd|' /C calc'!A0", "'-2+3+cmd|' /C calc'!A0"),
        ("-", "-"),
        ("-0.0123 ± 0.004", "-0.0123 ± 0.004"),
        ("+1.5 %", "+1.5 %"),
        (-1.5, -1.5),
        ("nvfp4", "nvfp4"),
    ],
)
def test_a_formula_gets_an_apostrophe_and_a_number_does_not(value, cell):
    assert csv_cell(value) == cell


def test_tables_and_pictures_are_written_without_formulas(tmp_path):
    import pandas as pd

    from ablate.reports.figures.style import Figure, Picture

    Table.of("table", [{"arm": name, "gap": ("-0.01", -0.01)} for name in NASTY]).save(tmp_path)
    Picture("picture", "?", Figure(), pd.DataFrame({"arm": pd.Categorical(NASTY), "value": -1.5})).save(
        tmp_path
    )
    for name, gap in (("table", "-0.01"), ("picture", "-1.5")):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        assert [row[0] for row in rows] == [csv_cell(text) for text in NASTY]
        assert {row[1] for row in rows} == {gap}


def test_json_keeps_names_as_they_are(state):
    out = io.StringIO()
    with redirect_stdout(out):
        done = here("show", "--json", "--state", state)
    assert {entry["arm"] for entry in json.loads(done.stdout)} >= set(NASTY)


def test_characters_without_a_meaning_are_shown_as_escapes():
    assert printable("a\U0010ffff\ue000b") == r"a\U0010ffff\ue000b"
