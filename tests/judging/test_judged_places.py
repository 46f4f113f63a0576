"""Judged runs leave nothing where it does not belong: names of results, and settings of the user's process."""

import csv
import os
from contextlib import suppress

import pytest
from support.cases import every
from support.commands import here

from ablate.cli.report import make
from ablate.errors import InputError
from ablate.judging.answer import judge
from ablate.judging.chosen_runs import Question
from ablate.judging.judged_ledger import add_to_sweep, write_ledger
from ablate.judging.run import ForeignRun, Found

BAD_NAMES = ("../../x", "..", ".", "", " ", "/tmp/x", "a/b", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 201)


@every(name=BAD_NAMES)
def test_results_stay_in_the_state_folder(name, tmp_path):
    state = tmp_path / "one" / "two" / "state"
    runs = [
        ForeignRun(f"{arm} {s}", arm, s, {"val/loss": {1: 3.0 + s}})
        for arm in ("bf16", "nvfp4")
        for s in (0, 1)
    ]
    for write in (write_ledger, add_to_sweep):
        with pytest.raises(InputError):
            write(state, name, Found(runs, [], ["here"]), Question("bf16"))
    (tmp_path / "one" / "x").mkdir(parents=True)
    with pytest.raises(InputError):
        make(state, name)
    assert [path.name for path in (tmp_path / "one").rglob("*")] == ["x"]


@every(name=("../x", "sub/x", "..", ".x", ""))
def test_a_command_writes_no_file_outside_its_folder(name, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("arm,seed,val/loss\nbf16,0,3\nnvfp4,0,4\n")
    for words in (
        ("judge", path, "--against", "bf16", "--as", name, "--state", tmp_path / "state"),
        ("init", name, "--folder", tmp_path / "new"),
    ):
        asked = here(*words)
        assert asked.returncode == 2, (words, asked.stdout)
        assert "Traceback" not in asked.stderr
    assert not [*tmp_path.rglob("*.yaml"), *tmp_path.rglob("ledger.db")]


@every(content=("arm,seed,val/loss\nbf16,0,3\nnvfp4,0,4\n", 'arm,seed,val/loss\nbf16,0,"3', "arm\n"))
def test_the_limit_of_a_csv_cell_in_the_users_process_stays(content, tmp_path):
    (tmp_path / "runs.csv").write_text(content)
    before = csv.field_size_limit(4321)
    try:
        with suppress(InputError):
            judge(tmp_path / "runs.csv", "bf16")
        assert csv.field_size_limit() == 4321
    finally:
        csv.field_size_limit(before)


@pytest.mark.slow
@every(place=("none.db", "empty.db", "mlruns"), given=({}, {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}))
def test_mlflows_variables_in_the_users_process_stay(place, given, tmp_path, monkeypatch):
    (tmp_path / "empty.db").touch()
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text(
        "artifact_location: x\nexperiment_id: '0'\nlifecycle_stage: active\nname: x\n"
    )
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        with pytest.raises(InputError):
            judge(str(tmp_path / place) if place != "none.db" else f"sqlite:///{tmp_path / place}", "bf16")
        assert {name: os.environ[name] for name in os.environ if name.startswith("MLFLOW_")} == given
