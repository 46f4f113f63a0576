"""Finished sweeps of every kind say what they said: commands, notes and reports, as text, on any processor.

A change that means to leave answers alone leaves these texts. One that means to change words writes them anew by
`python tests/golden_answers.py render`, and its diff is what is read.
"""

import difflib
from pathlib import Path

import pytest
from golden_answers import FOLDER, NAMES, OTHERS, rendered, unpacked


def difference(name: str, text: str) -> str:
    """Return the first lines in which a text differs from the committed one."""
    committed = (FOLDER / f"{name}.txt").read_text()
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), name, "now", lineterm="", n=1)
    return "\n".join(list(lines)[:40])


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_sweep_says_what_it_said(name, tmp_path):
    assert difference(name, rendered(name, unpacked(name, tmp_path))) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_plans_and_exports_are_what_they_were(name):
    assert difference(name, OTHERS[name]()) == ""


def test_every_kind_of_sweep_is_there_in_at_most_three_megabytes():
    archives = {path.name.removesuffix(".tar.xz"): path.stat().st_size for path in FOLDER.glob("*.tar.xz")}
    assert archives.keys() == {*NAMES}
    assert len(NAMES) == 12
    assert sum(archives.values()) < 3e6


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_no_text_has_a_path_of_the_machine_that_made_it(path: Path):
    folders = ("/tmp/", "/home/", "/root/", str(Path(__file__).parents[2]))
    assert not any(folder in path.read_text() for folder in folders)
