"""Files as strangers have them: what is read of each, with the right values, and what a refusal names as a way on."""

import json
import os
import shlex
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet
import pytest
from support import foreign_files
from support.commands import here

from ablate.errors import InputError
from ablate.judging.answer import judge, named_columns
from ablate.judging.chosen_runs import Question
from ablate.judging.columns import Columns
from ablate.judging.judged_ledger import write_ledger
from ablate.judging.sources import read
from ablate.judging.table_files import read_parquet
from ablate.store.checked_ledger import open_ledger
from ablate.store.judged import Judged

ARMS, SEEDS = ("bf16", "fp4"), (0, 1, 2)
PATTERN = {"name": "{arm}-s{seed}"}


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file and returns its path as text."""

    def write(text, name="runs.csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def rows(header: str, cells) -> str:
    """Return a table with a row a run, whose name is `bf16-s0`, and loss 3.00, 3.01, ... in the order of runs."""
    runs = [(arm, seed) for arm in ARMS for seed in SEEDS]
    lines = [f"{arm}-s{seed},{cells(arm, seed)},{3 + n / 100}" for n, (arm, seed) in enumerate(runs)]
    return "\n".join([f"Name,{header},val_loss", *lines, ""])


def last(found, metric):
    return {(run.arm, run.seed): [*run.records[metric].values()][-1] for run in found.runs if run.arm}


def test_an_arm_that_is_no_unicode_text_is_refused_with_its_run(file, tmp_path):
    """A folder named in Latin-1, half of a surrogate pair in JSON, and a key of a dict."""
    for arm in ("a", os.fsdecode(b"caf\xe9")):
        for seed in SEEDS:
            file(f"step,val_loss\n1,3.{seed}\n", f"{arm}/{seed}.csv")
    lines = [json.dumps({"arm": arm, "seed": seed, "loss": 1.5}) for arm in ("a", "\ud800") for seed in SEEDS]
    for place in (str(tmp_path / "{arm}" / "{seed}.csv"), file("\n".join(lines), "runs.jsonl")):
        done = here("judge", place, "--against", "a", "--as", "x", "--state", tmp_path / "state")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert "is not Unicode text; rename it" in done.stderr
    with pytest.raises(InputError, match="is not Unicode text"):
        judge({"a": [1.0, 2.0, 3.0], "\ud800": [2.0, 3.0, 5.0]}, "a")


# --- one JSON object a run -------------------------------------------------------------------------


def test_a_folder_of_files_is_refused_with_the_pattern_that_reads_them(file, tmp_path):
    for arm in ARMS:
        file(json.dumps({"arm": arm, "seed": 0, "loss": 1.5}), f"runs/{arm}.json")
    with pytest.raises(InputError) as error:
        read([str(tmp_path / "runs")])
    assert (way := f"{tmp_path}/runs/*.json") in str(error.value)
    assert len(read([way]).runs) == len(ARMS)


def test_a_flat_object_is_a_row(file, tmp_path):
    for arm in ARMS:
        for seed in SEEDS:
            file(
                json.dumps({"seed": seed, "lr": 0.1, "betas": [0.9, 0.95], "loss": seed / 8}),
                f"{arm}_{seed}.json",
            )
    found = read([f"{tmp_path}/{{arm}}_{{seed}}.json"])
    assert last(found, "train/loss") == {(arm, seed): seed / 8 for arm in ARMS for seed in SEEDS}
    assert found.runs[0].config == {"lr": 0.1, "betas": "[0.9, 0.95]"}


@pytest.mark.parametrize(
    ("content", "found", "way"),
    [
        ({"args": {"lr": 0.1}, "eval": [[200, 0.44]]}, "args, eval", "ablate.judge("),
        ({"arm": {"0": "bf16", "1": "fp4"}, "loss": {"0": 3.0, "1": 3.1}}, "arm, loss", "orient='records'"),
        ({"lr": 0.1, "history": [{"step": 1, "loss": 3.0}]}, "history", "the list of its 'history'"),
        ({"args": {"lr": 1}, "log": [{"step": 1, "loss": 3.0}]}, "args, log", "the list of its 'log'"),
    ],
)
def test_an_object_that_is_not_a_row_is_refused_with_a_way_on(file, content, found, way):
    with pytest.raises(InputError) as error:
        read([file(json.dumps(content), "bf16.json")])
    assert f"an object with {found}, " in str(error.value)
    assert way in str(error.value)


def test_a_list_of_lists_is_refused_with_what_a_row_is(file):
    with pytest.raises(InputError, match="row is not an object, such as"):
        read([file("[[100, 3.2]]", "bf16.json")])


@pytest.mark.parametrize(
    ("ending", "way"),
    [("csv.gz", "gunzip -k"), ("csv.zst", "unzstd"), ("xlsx", "as CSV"), ("pkl", "CSV or Parquet")],
)
def test_a_packed_table_is_refused_with_what_unpacks_it(file, ending, way):
    with pytest.raises(InputError, match=way):
        read([file("x", f"runs.{ending}")])


# --- a column a run --------------------------------------------------------------------------------


def by_columns(between: str = ",", more: str = "") -> str:
    """Return a table of two steps with a column a run; the last loss is 3.00, 3.01, ... in the order of runs."""
    names = [f"{arm}_s{seed}" for arm in ARMS for seed in SEEDS]
    lines = [
        [str(step), *(str(loss + n / 100) for n in range(len(names)))] for step, loss in ((10, 4), (20, 3))
    ]
    ends = [more, *("7" * bool(more) for _ in lines)]
    return "".join(
        between.join([*line, *filter(None, [end])]) + "\n"
        for line, end in zip([["step", *names], *lines], ends, strict=True)
    )


def test_a_table_with_a_column_a_run_is_read_by_the_names_of_its_columns(file):
    for name, between in (("wide.csv", ","), ("wide.tsv", "\t")):
        path = file(by_columns(between), name)
        found = read([path], named_columns({"name": "{arm}_s{seed}"}, "val_loss"))
        losses = [3 + n / 100 for n in range(6)]
        assert [*last(found, "val/loss").values()] == losses
        assert [*last(found, "val/loss")] == [(arm, seed) for arm in ARMS for seed in SEEDS]
    judged = judge(path, "bf16", "val_loss", columns={"name": "{arm}_s{seed}"})
    assert [(arm.arm, round(arm.difference, 9)) for arm in judged.arms] == [("fp4", 0.03)]


def test_a_column_that_is_no_run_is_named_with_the_option_that_leaves_it_out(file):
    path, columns = file(by_columns(more="epoch")), {"name": "{arm}_s{seed}"}
    with pytest.raises(InputError, match=r"6 columns are runs by .* column 'epoch' is not; --without epoch"):
        read([path], named_columns(columns, "val_loss"))
    assert len(read([path], named_columns(columns, "val_loss", ["epoch"])).runs) == 6


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("bf16_3.csv", "step,acc_1,acc_5\n1,0.5,0.8\n", "{arm}_{seed}"),
        ("bf16.csv", "step,loss,acc\n1,3.0,0.5\n", "{arm}"),
        ("x.csv", "name,step,acc_1,acc_5\nbf16_3,1,0.5,0.8\n", "{arm}_{seed}"),
    ],
)
def test_columns_of_metrics_are_no_runs(file, name, text, pattern):
    assert [run.arm for run in read([file(text, name)], Columns(name=pattern)).runs] == ["bf16"]


@pytest.mark.parametrize(
    ("text", "way"),
    [
        (by_columns(), "--name \"{arm}_s{seed}\", where the first is 'bf16_s0'"),
        ("step,bf16_0,bf16_1\n1,3.0,3.1\n", '--name "{arm}_{seed}"'),
        ("run,step,val_loss\nbf16-s0,1,3.0\n", "--name \"{arm}-s{seed}\", where the first is 'bf16-s0'"),
        ("seed,bf16,fp4\n0,3.0,3.1\n", "melt('seed', var_name='arm', value_name='val/loss')"),
        ("flavour,step,val_loss\nbf16,1,3.0\n", "--column arm=COLUMN"),
    ],
)
def test_a_table_without_an_arm_is_refused_with_the_option_that_reads_it(file, text, way):
    with pytest.raises(InputError) as error:
        read([file(text)])
    assert way in str(error.value)


def test_the_pattern_that_is_proposed_for_a_file_fits_it(file, tmp_path):
    path = file('{"loss": 3.0}', "bf16.v2-s0.json")
    with pytest.raises(InputError) as error:
        read([path])
    assert (way := f"{tmp_path}/{{arm}}-s{{seed}}.json") in str(error.value)
    assert [*last(read([way]), "train/loss")] == [("bf16.v2", 0)]


@pytest.mark.parametrize("name", ["log of torchtitan", "log of Megatron", "log of modded-nanogpt"])
def test_a_log_is_refused_with_the_format_that_reads_it(name, tmp_path):
    files = foreign_files.SOURCES[name]()
    foreign_files.write(files, tmp_path)
    with pytest.raises(InputError) as error:
        read([str(tmp_path / next(iter(files.contents)))])
    assert str(error.value).endswith(f"--logs {files.logs}")


def test_another_text_is_refused_with_all_formats(file):
    with pytest.raises(InputError, match=r"--logs torchtitan or .* or hf:\.\.\. or regex:\.\.\.$"):
        read([file("nothing of a run\n", "run.log")])


# --- names of columns ------------------------------------------------------------------------------


def test_a_metric_is_taken_under_the_name_that_it_has_in_the_file(file):
    text = "arm,seed,Runtime,width\n" + "".join(f"{a},{s},{300 + 10 * s},64\n" for a in ARMS for s in SEEDS)
    judged = judge(file(text), "bf16", "Runtime")
    assert [arm.mean for arm in judged.arms] == [310]
    found = read([file(text)], named_columns({}, "Runtime"))
    assert [run.config for run in found.runs] == [{"width": 64}] * 6


def test_a_metric_that_two_columns_may_be_is_the_one_that_is_asked_for(file):
    path = file("arm,seed,val_loss,eval_loss\nbf16,0,3.0,4.0\n")
    for metric, value in (("val_loss", 3.0), ("eval_loss", 4.0)):
        assert last(read([path], named_columns({}, metric)), "val/loss") == {("bf16", 0): value}
    with pytest.raises(InputError, match="may both be val/loss"):
        read([path], named_columns({}, "val/loss"))


def test_an_evaluation_of_hugging_faces_trainer_has_its_own_name_too(file, tmp_path):
    for arm in ARMS:
        for seed in SEEDS:
            history = [{"step": 10, "eval_accuracy": 0.5 + seed / 8, "eval_loss": 1.0}]
            file(json.dumps({"log_history": history}), f"{arm}-s{seed}/trainer_state.json")
    judged = judge(f"{tmp_path}/{{arm}}-s{{seed}}", "bf16", "eval_accuracy")
    assert [arm.mean for arm in judged.arms] == [0.625]
    assert "metric: val/accuracy, the higher the better" in judged.said


W_AND_B = (
    "Created",
    "Runtime",
    "End Time",
    "Updated",
    "Hostname",
    "Agent",
    "OS",
    "Python Version",
    "CPU Count",
    "ID",
)


@pytest.mark.parametrize("column", W_AND_B)
def test_columns_that_weights_and_biases_writes_itself_are_not_settings(file, column):
    judged = judge(file(rows(column, lambda arm, seed: len(arm) * 10 + seed)), "bf16", columns=PATTERN)
    assert [arm.mean for arm in judged.arms] == [pytest.approx(3.04)]


def test_a_command_is_a_setting_unless_only_seeds_and_names_differ(file):
    same = rows("Command", lambda arm, seed: f"train.py --lr 0.1 --seed {seed} --run-name={arm}{seed}")
    assert any(
        "they say which run it is: Command" in each
        for each in judge(file(same), "bf16", columns=PATTERN).said
    )
    with pytest.raises(InputError, match="different configurations"):
        judge(file(same.replace("--lr 0.1 --seed 1", "--lr 0.2 --seed 1")), "bf16", columns=PATTERN)


# --- runs that are not of the pattern --------------------------------------------------------------

CHART = (
    "Step," + ",".join(f"{name} - val/loss" for name in ("bf16-s0", "fp4-s0", "first try")) + "\n10,3,4,5\n"
)
TABLE = "name,step,val/loss\nbf16-s0,10,3\nfp4-s0,10,4\nfirst try,10,5\n"


@pytest.mark.parametrize("text", [CHART, TABLE])
def test_a_run_that_is_left_out_need_not_be_of_the_pattern(file, text):
    text = (
        text
        if text == TABLE
        else text.replace("first try - val/loss", "first try - val/loss,first try - val/loss__MIN").replace(
            "4,5", "4,5,5"
        )
    )
    with pytest.raises(InputError) as error:
        read([file(text)], Columns(**PATTERN))
    option = shlex.split(str(error.value).partition("; ")[2])[:2]
    assert option == ["--without", "first try"]
    found = read([file(text)], named_columns(PATTERN, None, option[1:]))
    assert last(found, "val/loss") == {("bf16", 0): 3, ("fp4", 0): 4}
    judged = judge(file(text), "bf16", columns=PATTERN, without=["first try"])
    assert any(
        sentence.endswith("first try is left out: it is not of the pattern") for sentence in judged.said
    )


def test_a_run_that_is_left_out_by_its_name_hides_no_seed_of_the_others(file, tmp_path):
    found = read([file(TABLE)], named_columns(PATTERN, None, ["first try"]))
    write_ledger(tmp_path, "left", found, Question("bf16", without=("first try",)))
    with closing(open_ledger(tmp_path, "left")) as ledger:
        judged = Judged.of(ledger)
        assert judged is not None
        assert judged.seeded


@pytest.mark.parametrize(
    ("name", "why"), [("fp4-s0", "only a run that ended early"), ("first", "not of the pattern")]
)
def test_other_runs_are_left_out_for_their_old_reasons_alone(file, name, why):
    with pytest.raises(InputError, match=why):
        judge(file(TABLE.replace("first try", "bf16-s1" if name != "first" else "first try")), "bf16",
              columns=PATTERN, without=[name])  # fmt: skip


# --- several runs at one step ----------------------------------------------------------------------

SIZES = [
    {
        "tag": f"{arm}_{dim}",
        "kind": arm,
        "dim": dim,
        "N": dim**2,
        "val_loss": dim / 1024 + (arm != "bf16"),
        "step": 9,
    }
    for dim in (512, 1024, 2048)
    for arm in ARMS
]


def test_several_runs_at_one_step_are_named_with_options_that_work(file):
    path = file("".join(json.dumps(row) + "\n" for row in SIZES), "sizes.jsonl")
    with pytest.raises(InputError, match="3 rows of bf16 at step 9 look like 3 runs") as error:
        read([path], Columns(arm="kind"))
    name, pairing = (shlex.split(way) for way in str(error.value).partition("runs: ")[2].split(", or "))
    assert name[-1] == "run=tag"
    assert pairing[-4:] == ["--column", "seed=dim", "--ignore", "N"]
    found = read([path], Columns(arm="kind", seed="dim"))
    assert last(found, "val/loss") == {(row["kind"], row["dim"]): row["val_loss"] for row in SIZES}
    assert judge(path, "bf16", columns={"arm": "kind", "seed": "dim"}, ignore=["N"]).arms[0].difference == 1
    assert len(read([path], Columns(arm="kind", run="tag")).runs) == 6


def test_several_runs_of_a_seed_at_one_step_are_more_arms(file):
    text = "arm,seed,step,my dim,val_loss\n" + "".join(
        f"{arm},{seed},9,{dim},3.{dim}{seed}\n" for arm in ARMS for seed in SEEDS for dim in (1, 2)
    )
    with pytest.raises(InputError, match="2 rows of seed 0 of bf16 at step 9") as error:
        read([file(text)])
    assert shlex.split(str(error.value))[-1] == "arm=arm,my dim"
    assert len(read([file(text)], Columns(arm="arm,my dim")).runs) == 12


def test_a_metric_is_no_name_of_runs_at_one_step(file):
    lines = [f"{arm},10,{number / 7}" for arm in ARMS for number in range(3)]
    with pytest.raises(InputError, match="keep one of the two"):
        read([file("\n".join(["arm,step,gap", *lines, ""]))])


# --- folders and charts ----------------------------------------------------------------------------


def test_a_folder_of_trainer_states_is_found_with_the_last_of_each_run(file, tmp_path):
    for arm in ARMS:
        for number in (5, 10, 40):
            history = [{"step": step, "eval_loss": 3 - step / 100} for step in range(5, number + 1, 5)]
            file(json.dumps({"log_history": history}), f"{arm}-s1/checkpoint-{number}/trainer_state.json")
    history = [{"step": 45, "eval_loss": 2.0}]
    file(json.dumps({"log_history": history}), "fp4-s1/trainer_state.json")
    assert last(read([str(tmp_path)], Columns(**PATTERN)), "val/loss") == {("bf16", 1): 2.6, ("fp4", 1): 2.0}


AXIS = "tokens,a-s0 - val/loss,a-s0 - val/loss__MIN,a-s0 - _step,a-s0 - _step__MIN\n1e6,3.0,3.0,10,10\n2e6,2.5,2.5,20,20\n"


def test_a_chart_over_another_axis_has_the_steps_of_its_step_columns(file):
    assert read([file(AXIS)], Columns(**PATTERN)).runs[0].records == {"val/loss": {10: 3.0, 20: 2.5}}
    with pytest.raises(InputError, match="line 3: column 'a-s0 - _step__MIN': differs from the mean"):
        read([file(AXIS.replace("20,20", "20,19"))], Columns(**PATTERN))
    with pytest.raises(InputError, match="no column 'a-s0 - _step' has the steps"):
        read([file(AXIS.replace("_step", "_time"))], Columns(**PATTERN))


# --- names of arms and answers ---------------------------------------------------------------------


def test_arms_that_differ_in_capitals_are_hinted_at(file):
    text = "arm,seed,val_loss\n" + "".join(
        f"{a},{s},3.{s}{len(a)}\n" for a in ("bf16", "BF16", "fp4") for s in SEEDS
    )
    assert (
        "bf16 and BF16 are arms of their own, and differ in capitals or spaces alone"
        in judge(file(text), "bf16").said
    )


def test_a_pattern_without_a_name_asks_for_one_before_it_reads(tmp_path):
    result = here("judge", "{arm}/{seed}.csv", "--against", "bf16", "--state", str(tmp_path))
    assert (
        result.returncode,
        "--as NAME is needed" in result.stderr,
        "reading" in result.stdout + result.stderr,
    ) == (
        2,
        True,
        False,
    )


# --- what must not be read -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log.log", "runs.csv", "runs.parquet", "state.json", "run-1.wandb", "m.db"])
def test_devices_and_pipes_are_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    for number, target in enumerate(("/dev/zero", tmp_path / "pipe")):
        link = tmp_path / f"{number}-{name}"
        link.symlink_to(target)
        for logs in (None, "torchtitan"):
            with pytest.raises(InputError, match="is a device, a pipe or a socket"):
                read([str(link)], logs=logs)


def test_a_name_longer_than_a_file_system_has_is_of_no_pattern(file):
    """An expression with several words takes time that grows with a power of the length: this one never ended."""
    name = "a-" * 3000
    with pytest.raises(InputError, match="is not of the pattern"):
        read([file(f"name,val_loss\n{name},1\n")], Columns(name="{arm}-{x}-{y}-s{seed}"))
    found = read([file(f"name,val_loss\n{name[:200]}-x-y-s1,1\n")], Columns(name="{arm}--{x}-{y}-s{seed}"))
    assert (found.runs[0].arm, found.runs[0].seed) == (name[:199], 1)


def test_a_small_parquet_file_with_many_cells_is_refused_by_its_footer(tmp_path):
    pa.parquet.write_table(
        pa.table({"a": pa.nulls(10_500_000), "b": pa.nulls(10_500_000)}), tmp_path / "b.parquet"
    )
    with pytest.raises(InputError, match=r"10500000 rows of 2 columns .* are more than can be judged"):
        read([str(tmp_path / "b.parquet")])


def test_a_text_that_all_rows_of_a_parquet_file_share_is_decoded_once(tmp_path):
    long = "x" * 1000
    pa.parquet.write_table(pa.table({"note": [long, None] * 2_000}), tmp_path / "b.parquet")
    first, second, *others = read_parquet(tmp_path / "b.parquet", {}).columns["note"]
    assert (first, second) == (long, None)
    assert {id(other) for other in others} == {id(first), id(None)}


def test_texts_that_a_parquet_file_has_as_bytes_are_texts(tmp_path):
    """Without the mark of a text, as older writers leave them."""
    pa.parquet.write_table(pa.table({"arm": pa.array([b"bf16", b"nvfp4", None])}), tmp_path / "b.parquet")
    assert read_parquet(tmp_path / "b.parquet", {}).columns["arm"] == ["bf16", "nvfp4", None]


BEYOND = 2**53 + 2


@pytest.mark.parametrize(
    "name", [name for name in foreign_files.SOURCES if "wide" not in name and "Trainer" not in name]
)
def test_a_step_beyond_the_whole_numbers_of_floats_is_refused(name, tmp_path, monkeypatch):
    runs = [(arm, seed) for arm in foreign_files.ARMS for seed in foreign_files.SEEDS]
    monkeypatch.setattr(
        foreign_files, "values_of_runs", lambda: iter([(*run, BEYOND, 2.5, 3.5) for run in runs])
    )
    monkeypatch.setattr(foreign_files, "STEPS", (BEYOND,))
    monkeypatch.setattr(foreign_files, "TRUTH", {(*run, "train/loss", BEYOND): 2.5 for run in runs})
    files = foreign_files.SOURCES[name]()
    foreign_files.write(files, tmp_path)
    with pytest.raises(InputError, match=r"900719925474099\d|2\^53|no (step|iteration) is damaged"):
        foreign_files.result(replace(files), tmp_path)


@pytest.mark.parametrize(
    "text", ["arm,seed,val_loss\nbf16,0,{}\n", "arm,seed,val_loss\nbf16,{},1\n", "{},{}b,val_loss\nbf16,1,1\n",
             '{{"{}": 1, "{}": 2}}', "{}"],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["csv", "jsonl", "json"])
def test_a_refusal_quotes_at_most_200_characters_of_each_word(file, text, ending):
    with pytest.raises(InputError) as error:
        read([file(text.replace("{}", "x" * 5000).replace("{{", "{").replace("}}", "}"), f"runs.{ending}")])
    assert "x" * 201 not in str(error.value)
