"""Runs of tables that were not written here: what is read, what is guessed and said, and what is refused."""

import math

import pytest

from ablate.errors import InputError
from ablate.judging.columns import Columns
from ablate.judging.sources import read

LONG = """\
recipe,seed,step,val/loss,lr
bf16,0,100,3.25,0.001
bf16,0,200,3.125,0.001
nvfp4,0,100,3.5,0.001
nvfp4,0,200,nan,0.001
"""


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file and returns its path as text."""

    def write(text, name="runs.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def values(found):
    """Return the records by arm and seed, with NaN as text, so that they compare."""
    return {
        (run.arm, run.seed): {
            name: {step: "nan" if math.isnan(value) else value for step, value in series.items()}
            for name, series in run.records.items()
        }
        for run in found.runs
    }


def test_a_long_table_has_one_run_for_each_arm_and_seed(file):
    found = read([file(LONG)])
    assert values(found) == {
        ("bf16", 0): {"val/loss": {100: 3.25, 200: 3.125}},
        ("nvfp4", 0): {"val/loss": {100: 3.5, 200: "nan"}},
    }
    assert [run.config for run in found.runs] == [{"lr": 0.001}, {"lr": 0.001}]
    assert any("arm: column 'recipe'" in sentence for sentence in found.said)


def test_a_wide_table_has_final_values_and_says_so(file):
    found = read([file("arm;seed;lr;eval_loss\nbf16;0;0.1;3.0\nbf16;1;0.1;inf\n")])
    assert values(found) == {("bf16", 0): {"val/loss": {0: 3.0}}, ("bf16", 1): {"val/loss": {0: math.inf}}}
    assert any("step: no column" in sentence for sentence in found.said)
    assert any("val/loss: column 'eval_loss'" in sentence for sentence in found.said)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_marks_and_line_ends_change_nothing(file, encoding, end):
    assert values(read([file(LONG.replace("\n", end).encode(encoding))])) == values(
        read([file(LONG, "b.csv")])
    )


def test_arm_and_seed_are_read_from_the_path(file, tmp_path):
    file("step,loss\n1,2.5\n", "runs/bf16/seed3.csv")
    file("step,loss\n1,2.75\n", "runs/nv/seed4.csv")
    found = read([str(tmp_path / "runs/{arm}/seed{seed}.csv")])
    assert values(found) == {("bf16", 3): {"train/loss": {1: 2.5}}, ("nv", 4): {"train/loss": {1: 2.75}}}


def test_arm_and_seed_are_read_from_the_name_of_a_run(file):
    table = "run,step,loss\nbf16-s0,1,2.5\nnv-x-s1,1,2.75\n"
    found = read([file(table)], Columns(name="{arm}-s{seed}"))
    assert values(found) == {("bf16", 0): {"train/loss": {1: 2.5}}, ("nv-x", 1): {"train/loss": {1: 2.75}}}


def test_columns_of_the_user_win(file):
    table = "a,s,t,x,y\nbf16,0,1,2.5,9\nbf16,0,2,2.25,9\n"
    columns = Columns(arm="a", seed="s", step="t", metrics={"val/loss": "x"})
    found = read([file(table)], columns)
    assert values(found) == {("bf16", 0): {"val/loss": {1: 2.5, 2: 2.25}}}
    assert found.runs[0].config == {"y": 9}


def test_copies_count_once_and_are_said(file):
    copied = LONG + "bf16,0,100,3.25,0.001\n"
    found = read([file(copied), file(LONG, "again.csv")])
    assert values(found) == values(read([file(LONG, "c.csv")]))
    assert sum("twice" in sentence or "copy" in sentence for sentence in found.said) == 3


def test_commas_within_quotes_of_a_header_separate_no_columns(file):
    quoted = LONG.replace(",", ";").replace("lr", '"lr, warmup, decay, floor, and, so, on"')
    assert values(read([file(quoted)])) == values(read([file(LONG, "b.csv")]))


@pytest.mark.parametrize(
    ("last", "said"), [('{"arm": "x", "arm": "x"}', "'arm' is there twice"), ("[1, 2]", "is not an object")]
)
def test_a_last_line_that_is_whole_and_wrong_is_not_said_to_be_cut(file, last, said):
    with pytest.raises(InputError, match=said):
        read([file('{"arm": "a", "seed": 0, "step": 1, "loss": 2.5}\n' + last, "runs.jsonl")])


REFUSED = {
    "empty": ("", "empty"),
    "header alone": ("arm,seed,step,loss\n", "no row"),
    "no arm": (LONG.replace("recipe", "flavour"), "no column is the arm"),
    "seed nearly": (LONG.replace("seed", "sede"), "'sede'"),
    "step nearly": (LONG.replace("step", "stpe"), "'stpe'"),
    "two arms": (LONG.replace("recipe,", "variant,").replace("lr", "method"), "several columns"),
    "two losses": (LONG.replace("lr", "eval_loss"), "may both be val/loss"),
    "seed of text": (LONG.replace("nvfp4,0,200", "nvfp4,x,200"), "line 5"),
    "seed of half": (LONG.replace("nvfp4,0,200", "nvfp4,0.5,200"), "not a whole number"),
    "seed empty": (LONG.replace("nvfp4,0,200", "nvfp4,,200"), "seed (seed) is empty"),
    "step of text": (LONG.replace(",200,nan", ",2OO,nan"), "column 'step'"),
    "step below 0": (LONG.replace(",200,nan", ",-200,nan"), "not a step"),
    "metric of text": (LONG.replace("3.125", "3.1z5"), "line 3: column 'val/loss'"),
    "metric too large": (LONG.replace("3.125", "1e999"), "does not fit"),
    "decimal comma": (LONG.replace(",", ";").replace("3.125", "3,125"), "decimal point"),
    "two values": (LONG + "bf16,0,100,3.0,0.001\n", "in line 2 and 3.0 in line 6"),
    "cut": (LONG[:-10], "cells"),
    "two names": (LONG.replace("lr", "seed"), "two columns are named"),
    "latin-1": (LONG.replace("bf16", "bü16").encode("latin-1"), "line 2 is not UTF-8"),
    "zero byte": (LONG.replace("3.125", "3.1\0"), "zero byte"),
    "no metric": ("arm,seed,width\nbf16,0,64\n", "no column is known as a metric"),
    "several final values": ("arm,seed,loss\nbf16,0,3\nbf16,0,4\n", "no column is the step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_doubt_is_refused_in_one_sentence(file, case):
    text, said = REFUSED[case]
    with pytest.raises(InputError) as refusal:
        read([file(text)])
    (problem,) = refusal.value.problems
    assert said in problem
    assert problem.startswith("/")
    assert "\n" not in problem


def test_two_runs_of_one_arm_and_seed_are_both_named(file):
    one, other = file(LONG), file(LONG.replace("3.25", "3.0"), "other.csv")
    with pytest.raises(InputError, match=r"runs\.csv.*other\.csv.*both seed 0 of bf16"):
        read([one, other])


@pytest.mark.parametrize(
    ("given", "wrong"), [({"arm": "recipes"}, "recipes"), ({"metrics": {"val/loss": "loss"}}, "loss")]
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(file, given, wrong):
    with pytest.raises(InputError, match=f"no column '{wrong}'.* is the nearest"):
        read([file(LONG)], Columns(**given))


def test_a_log_that_goes_back_counts_from_the_restart(file):
    log = "step,loss\n1,2.5\n2,2.25\n3,2.0\n2,2.125\n3,1.75\n"
    found = read([file(log, "bf16-s0.csv")], Columns(name="{arm}-s{seed}"))
    assert values(found) == {("bf16", 0): {"train/loss": {1: 2.5, 2: 2.125, 3: 1.75}}}
    assert any("goes back from 3 to 2 in line 5" in sentence for sentence in found.said)


def test_a_name_that_fits_a_pattern_in_two_ways_is_refused(file):
    with pytest.raises(InputError, match="in two ways"):
        read([file("step,loss\n1,2\n", "a-b-c.csv")], Columns(name="{arm}-{lr}"))
