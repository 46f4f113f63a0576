"""Imported modules of commands, held to the table of benchmarks/startup.py: a second of imports is a second of waiting."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from startup import COMMANDS, TABLE, modules, prepare

SLACK = 1.1
"""Versions of libraries differ in the modules that they import."""


@pytest.mark.parametrize("command", ["help", "recipe", "plan", "judge"])
def test_commands_import_no_more_modules_than_the_table_says(tmp_path, command):
    with TABLE.open() as file:
        table = {row["command"]: row["modules"] for row in csv.DictReader(file)}
    prepare(tmp_path)
    assert modules(COMMANDS[command], tmp_path) <= SLACK * int(table[command])
