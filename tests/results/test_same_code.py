"""Finished trials of edited code that its owner declares to compute the same: `ablate sweep --same-code`."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import INLINE, here

from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.store.verify import verify

CODE = """\
import json, sys
lr, seed = map(float, sys.argv[1:])  # remark
open("ran", "a").write("x")
print(json.dumps({"step": 1, "train/loss": 3 - lr + seed / 100, "val/loss": 3 - lr + seed / 100}))
"""
FILE = """\
schema: 1
question: Does the rate matter?
workload: {command: {run: "python train.py {lr} {seed}", steps: 1, config: {lr: 0.1}MORE}}
recipe: bf16
ablate: {workload.config.lr: [0.1, 0.2]}
against: {workload.config.lr: 0.1}
seeds: 3
metric: {name: val/loss, min_effect: 0.01}
"""


def written(folder: Path, more: str = "") -> Path:
    (folder / "train.py").write_text(CODE)
    (folder / "own.yaml").write_text(FILE.replace("MORE", more))
    return folder / "own.yaml"


def swept(folder: Path, *words: str):
    return here("sweep", folder / "own.yaml", *INLINE, "--no-report", "--state", folder / "state", *words)


def test_an_edit_that_is_declared_the_same_runs_nothing_again_and_is_said(tmp_path):
    path = written(tmp_path)
    assert swept(tmp_path).returncode == 0
    ran = len((tmp_path / "ran").read_text())
    with closing(Ledger(tmp_path / "state" / "sweeps" / "own" / "ledger.db", readonly=True)) as ledger:
        before = {arm.name: arm.values for arm in summaries(ledger)}
        ids = {member.id for member in ledger.members()}
    (tmp_path / "train.py").write_text(CODE.replace("# remark", "# another"))
    done = swept(tmp_path, "--same-code")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "ran").read_text()) == ran
    with closing(Ledger(tmp_path / "state" / "sweeps" / "own" / "ledger.db", readonly=True)) as ledger:
        assert {arm.name: arm.values for arm in summaries(ledger)} == before
        assert not ids & {member.id for member in ledger.members()}
        verified = verify(ledger, Store(tmp_path / "state"))
        assert (verified.verified, verified.mismatches) == (ran, ())
        said = {check.text: check.kind for check in headline_of(Comparisons(ledger)).checks}
    assert said[f"{ran} trials ran before an edit that was declared to change nothing"] == "warning"
    assert swept(tmp_path).returncode == 0  # without the option, too: the trials have the new ids
    assert here("rebuild", path, "--force", "--state", tmp_path / "state").returncode == 0
    assert len((tmp_path / "ran").read_text()) == ran


def test_without_the_declaration_an_edit_runs_all_again(tmp_path):
    written(tmp_path)
    assert swept(tmp_path).returncode == 0
    ran = len((tmp_path / "ran").read_text())
    (tmp_path / "train.py").write_text(CODE.replace("# remark", "# another"))
    assert swept(tmp_path).returncode == 0
    assert len((tmp_path / "ran").read_text()) == 2 * ran


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_trial_whose_folder_is_not_sound_runs_again(damage, tmp_path):
    written(tmp_path)
    assert swept(tmp_path).returncode == 0
    ran = len((tmp_path / "ran").read_text())
    result = sorted((tmp_path / "state" / "trials").glob("*/result.json"))[0]
    if damage == "gone":
        shutil.rmtree(result.parent)
    else:
        events = next(result.parent.glob("events-*.jsonl"))
        events.write_text(events.read_text().replace("2.", "1.", 1))
    (tmp_path / "train.py").write_text(CODE.replace("# remark", "# another"))
    done = swept(tmp_path, "--same-code")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "ran").read_text()) == ran + 1


def test_another_setting_is_not_taken_over(tmp_path):
    path = written(tmp_path)
    assert swept(tmp_path).returncode == 0
    ran = len((tmp_path / "ran").read_text())
    path.write_text(path.read_text().replace("[0.1, 0.2]", "[0.1, 0.3]"))
    (tmp_path / "train.py").write_text(CODE.replace("# remark", "# another"))
    assert swept(tmp_path, "--same-code").returncode == 0
    assert len((tmp_path / "ran").read_text()) == ran + 3


def test_a_setting_that_changed_with_the_code_in_arms_of_the_same_names_is_not_taken_over(tmp_path):
    path, code = written(tmp_path), CODE.replace("argv[1:]", "argv[1:3]")
    text = path.read_text().replace("{seed}", "{seed} {other}").replace("{lr: 0.1}}", "{lr: 0.1, other: 1}}")
    path.write_text(text)
    (tmp_path / "train.py").write_text(code)
    assert swept(tmp_path).returncode == 0
    ran = len((tmp_path / "ran").read_text())
    path.write_text(text.replace("other: 1", "other: 2"))
    (tmp_path / "train.py").write_text(code.replace("# remark", "# another"))
    done = swept(tmp_path, "--same-code")
    assert done.returncode == 0, done.stderr
    assert "taken over" not in done.stdout
    assert len((tmp_path / "ran").read_text()) == 2 * ran


@pytest.mark.parametrize(
    ("more", "workload", "sentence"),
    [
        (", data: [train.py]", None, "data or weights are in the digest"),
        ("", "{idle: {steps: 4}}", "is no code of your own"),
    ],
)
def test_what_cannot_be_declared_is_refused(more, workload, sentence, tmp_path):
    path = written(tmp_path, more)
    if workload:
        path.write_text(
            f"schema: 1\nquestion: Does it?\nworkload: {workload}\nablate: {{recipe: [nvfp4]}}\nagainst: bf16\nseeds: 2\n"
        )
    refused = swept(tmp_path, "--same-code")
    assert refused.returncode == 2, refused.stdout
    assert sentence in refused.stderr


BY_ARMS = "ablate: {workload.config.lr: [0.1, 0.2]}\nagainst: {workload.config.lr: 0.1}\nseeds: 3\n"
DRAWN = """\
ablate: {workload.config.lr: {uniform: [0.1, 0.9]}}
against: bf16
seeds: 2
search: {sampler: random, trials: 4}
"""
GROWING = BY_ARMS.replace("seeds: 3", "seeds: {start: 2, most: 6, step: 2}")


@pytest.mark.parametrize("keys", [DRAWN, GROWING], ids=["search", "growth"])
def test_trials_that_a_sweep_asked_for_while_it_ran_are_taken_over_too(keys, tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text().replace(BY_ARMS, keys).replace("min_effect: 0.01", "min_effect: 0.2"))
    code = CODE.replace("3 - lr + seed / 100", "3 - lr + lr * seed**2")  # undecided on few seeds
    (tmp_path / "train.py").write_text(code)
    done = swept(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = len((tmp_path / "ran").read_text())
    assert ran > 4
    (tmp_path / "train.py").write_text(code.replace("# remark", "# another"))
    done = swept(tmp_path, "--same-code")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "ran").read_text()) == ran
    with closing(Ledger(tmp_path / "state" / "sweeps" / "own" / "ledger.db", readonly=True)) as ledger:
        assert sum(count for _, count in ledger.facts.same_code) == ran
