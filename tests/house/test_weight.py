"""Tests of the ratchet of code lines, commands and options."""

import lint_weight
import typer
from lint_weight import code_lines, excess, leaves, stale

SOURCE = '''"""A module.

Its docstring.
"""

import os  # why

# A comment.
NAMES = [
    "a",  # one

    "b",
]
"""Names are documented, too."""


def join() -> str:
    """Return a path."""
    text = """two
lines"""
    return os.path.join(*NAMES, text)
'''


def test_code_lines_are_those_with_code_without_docstrings_and_comments():
    expected = {"import", "NAMES", "a", "b", "]", "def", "text", "lines", "return"}
    assert code_lines(SOURCE) == len(expected)


def test_a_blank_line_inside_an_expression_is_not_code():
    assert code_lines("x = [\n\n    1,\n]\n") == 3


def test_one_line_of_code_too_many_fails_with_the_way_out():
    limits = {"code_lines": 1000, "commands": 30, "options": 200}
    assert excess({"code_lines": 1010, "commands": 30, "options": 202}, limits) == []
    (sentence,) = excess({"code_lines": 1011, "commands": 30, "options": 200}, limits)
    assert "code lines: 1,011 are above 1,000" in sentence
    assert "by 1." in sentence
    assert "--write" in sentence
    assert len(excess({"code_lines": 1, "commands": 31, "options": 203}, limits)) == 2


def test_commands_and_options_are_counted_in_groups_too():
    app, inner = typer.Typer(), typer.Typer()
    inner.command("one")(lambda: None)
    inner.command("two")(lambda: None)
    app.command("three")(lambda: None)
    app.add_typer(inner, name="group")
    assert sorted(each.name for each in leaves(typer.main.get_command(app))) == ["one", "three", "two"]


def test_a_limit_that_a_cut_left_behind_is_named():
    assert stale({"code_lines": 969, "commands": 30}, {"code_lines": 1000, "commands": 30}) == ["code lines"]


def test_the_lint_counts_without_git(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lint_weight, "ROOT", tmp_path)
    assert list(lint_weight.growths()) == []
