"""Statuses, ids and settings of runs from elsewhere: what counts as done, and what may differ between seeds."""

import csv
import math
import shlex

import pandas as pd
import pytest
from support import planted_tables
from support.cases import every
from support.commands import here

from ablate.errors import InputError
from ablate.experiment.schema import Metric
from ablate.judging.answer import judge
from ablate.judging.chosen_runs import Question, comparable
from ablate.judging.columns import Columns, direction_of
from ablate.judging.named_runs import NamedRun, identified
from ablate.judging.points import Points
from ablate.judging.sources import read

RUNS = [(arm, seed) for arm in ("bf16", "nvfp4") for seed in range(4)]


def table(folder, columns, runs=RUNS, suffix="csv"):
    """Write a table with a row a run and further columns, whose cells stand in the order of the runs."""
    path = folder / f"runs.{suffix}"
    rows = [
        {"arm": arm, "seed": seed, **{name: cells[n] for name, cells in columns.items()}}
        | {"val/loss": 3 + seed / 10 + seed**2 / 100 + n / 1000}
        for n, (arm, seed) in enumerate(runs)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def counted(path, ignored=(), **columns):
    """Return the arm and seed of the runs that are compared, and what is said."""
    runs = read([path], Columns(**columns)).runs
    chosen, said = comparable(runs, Question("bf16", "val/loss", ignored=ignored), Metric(name="val/loss"))
    return [(run.arm, run.seed) for run in chosen.runs], "\n".join(said)


# --- statuses --------------------------------------------------------------------------------------

COLUMNS = (
    *("State", "status", "state", "Status", "run_status", "Job state", "job.state", "jobState", "run/status"),
    *("config.trainer.status", "trial-status", "lifeCycleState", "STATE", " status"),
)
DONE = (
    *(
        "finished",
        "FINISHED",
        "Finished",
        "COMPLETED",
        "complete",
        "done",
        "DONE",
        "success",
        "SUCCEEDED",
        "ok",
    ),
    *("passed", "TrialState.COMPLETE", " finished "),
)
NOT_DONE = (
    *("preempted", "PREEMPTED", "crashed", "failed", "killed", "TIMEOUT", "NODE_FAIL", "CANCELLED by 1000"),
    *(
        "OUT_OF_MEMORY",
        "running",
        "PENDING",
        "stopped",
        "error",
        "TERMINATED",
        "unfinished",
        "not done",
        "0",
        "1",
    ),
    *("True", "False", "0.5", "finished early", "almost"),
)


@every(column=COLUMNS, word=("preempted",), done=("finished",))
def test_a_column_of_statuses_is_known_by_any_usual_name(column, word, done, tmp_path):
    path = table(tmp_path, {column: [done] * 7 + [word]})
    runs, said = counted(path)
    assert runs == RUNS[:-1]
    assert f"seed 3 of nvfp4 is left out: {column.strip()} is 'preempted'" in said
    assert counted(path, (column.strip(),))[0] == RUNS


@every(column=("optimizer_state", "random_state", "estate", "statement", "initial state"))
def test_a_column_of_another_state_is_no_status(column, tmp_path):
    assert counted(table(tmp_path, {column: ["preempted"] * 8}), seed="seed")[0] == RUNS


@every(word=DONE)
def test_words_that_mean_done_count(word, tmp_path):
    assert counted(table(tmp_path, {"State": [word] * 8})) == (RUNS, "")


@every(word=NOT_DONE)
def test_runs_of_any_other_word_are_left_out_by_name(word, tmp_path):
    runs, said = counted(table(tmp_path, {"State": [*["done"] * 6, word, word]}))
    assert runs == RUNS[:6]
    assert f"2 runs of nvfp4 (seed 2 of nvfp4, seed 3 of nvfp4) are left out: State is '{word}'" in said


FLAGS = {
    "exit codes": ("exit_code", ["0"] * 7 + ["1"], 7),
    "signals": ("returncode", ["0"] * 7 + ["-9"], 7),
    "codes of SLURM": ("ExitCode", ["0:0"] * 7 + ["0:9"], 7),
    "codes with gaps": ("exit_code", ["0.0"] * 7 + [""], 7),
    "finished, as truth": ("finished", ["True"] * 7 + ["False"], 7),
    "finished, as number": ("finished", ["1"] * 7 + ["0"], 7),
    "finished, in words": ("completed", ["yes"] * 7 + ["no"], 7),
    "finished, once": ("done", ["true"] * 7 + [""], 7),
    "preempted": ("preempted", ["False"] * 7 + ["True"], 7),
    "preempted, noted": ("preempted", [""] * 7 + ["yes"], 7),
    "failures alone": ("status", [""] * 7 + ["failed"], 7),
    "empty where others are done": ("status", ["done"] * 7 + [""], 7),
    "missing where others are done": ("status", ["done"] * 7 + ["N/A"], 7),
    "empty": ("status", [""] * 8, 8),
    "a share": ("success", [f"0.{n + 1}" for n in range(8)], None),
    "times of the end": ("finished", [f"2026-05-2{n}T10:00" for n in range(8)], 8),
}


@every(case=FLAGS)
def test_flags_codes_and_empty_cells_say_what_is_done(case, tmp_path):
    column, cells, count = FLAGS[case]
    path = table(tmp_path, {column: cells})
    if count is None:
        with pytest.raises(InputError, match=column):
            counted(path)
        return
    assert counted(path)[0] == RUNS[:count]


def test_two_columns_of_statuses_must_both_say_done(tmp_path):
    path = table(tmp_path, {"State": ["COMPLETED"] * 8, "ExitCode": ["0:0"] * 7 + ["1:0"]})
    assert counted(path)[0] == RUNS[:-1]
    assert counted(path, ("State",))[0] == RUNS[:-1]
    assert counted(path, ("ExitCode",))[0] == RUNS


def test_terminated_is_done_in_a_table_of_ray_tune_alone(tmp_path):
    states = {"status": ["TERMINATED"] * 7 + ["ERROR"]}
    ids = {"trial_id": [f"a{n}" for n in range(8)], "training_iteration": [9] * 8}
    assert counted(table(tmp_path, states | ids))[0] == RUNS[:-1]
    with pytest.raises(InputError, match="no run is left"):
        counted(table(tmp_path, states))


def test_the_last_status_of_a_long_table_counts(tmp_path):
    rows = ["arm,seed,step,status,val/loss"]
    for arm, ends in (("bf16", ("finished", "")), ("nvfp4", ("running", "preempted"))):
        for seed, end in enumerate(ends):
            rows += [f"{arm},{seed},1,running,3", f"{arm},{seed},2,{end},2.{seed}"]
    (tmp_path / "runs.csv").write_text("\n".join(rows) + "\n")
    runs, said = counted(str(tmp_path / "runs.csv"))
    assert runs == [("bf16", 0)]
    assert "seed 0 of nvfp4 is left out: status is 'running'" in said
    assert "seed 1 of nvfp4 is left out: status is 'preempted'" in said


def test_an_arm_without_a_finished_run_is_refused_by_its_status_and_counts_if_asked(tmp_path):
    path = table(tmp_path, {"State": ["finished"] * 4 + ["preempted"] * 4})
    with pytest.raises(
        InputError, match=r"4 runs of nvfp4 .* are left out: State is 'preempted' .*--ignore State"
    ):
        judge(path, "bf16")
    with pytest.raises(InputError, match="State is 'preempted'"):
        judge(path, "nvfp4")
    asked = judge(path, "bf16", ignore=["State"])
    assert asked.arms[0].runs == 4
    assert sum("counts as asked: State is 'preempted'" in text for text in asked.said) == 4


# --- ids and settings ------------------------------------------------------------------------------

IDS = {
    "name": "lr{n}e-4", "Name": "bf16-lr{n}", "run_id": "3k2j9x1{n}", "ID": "1234{n}", "hostname": "node1{n}",
    "Hostname": "n{n}", "node": "node{n}", "created": "2026-05-1{n}", "End Time": "2026-05-29T08:5{n}:32.000Z",
    "started_at": "17000{n}.5", "Runtime": "30{n}", "duration": "30.{n}", "path": "runs/bf16_s{n}",
    "output_dir": "runs/bf16_s{n}", "log_file": "logs/{n}.log", "url": "https://x/{n}", "notes": "try {n}",
    "Tags": "lr{n}", "slurm_job_id": "31{n}", "SLURM_ARRAY_TASK_ID": "{n}", "tags.mlflow.runName": "a-{n}",
    "config/output_dir": "o{n}", "tokens_per_second": "91{n}.5",
    "peak_memory_gb": "70.{n}", "datetime_start": "2026-05-01 10:0{n}",
    "codename": "swift-{letter}", "config.host": "n{n}",
}  # fmt: skip
SETTINGS = {
    "lr": "{n}e-4", "learning_rate": "0.0{n}", "batch_size": "{n}", "warmup": "10{n}", "width": "{n}",
    "optimizer.lr": "{n}e-3", "train.optimizer.lr": "{n}e-3", "cmd": "train.py --lr {n}e-4", "Command": "a{n}",
    "args": "--wd .{n}", "schedule": "cosine-{letter}", "mode": "warmup-{letter}", "mystery": "{n}",
    "mystery text": "v{n}", "fraction": "0.{n}", "loss_scale": "{n}", "z_loss_weight": "{n}", "id": "0.{n}",
    "model.name": "size-{letter}", "tokens": "{n}", "dataset": "{letter}", "commit": "a1b2{n}", "start": "0.{n}",
    "optimizerKind": "{letter}", "rank": "{n}", "nodes": "{n}", "init checkpoint": "{letter}",
}  # fmt: skip


def cells_of(pattern):
    """Return a cell for each run, all different."""
    return [pattern.format(n=n + 1, letter="abcdefgh"[n]) for n in range(8)]


@every(name=IDS)
def test_a_field_that_says_which_run_it_is_may_differ_and_is_listed(name, tmp_path):
    path = table(tmp_path, {name: cells_of(IDS[name])})
    runs, said = counted(path)
    assert runs == RUNS
    listed = "".join(line for line in said.splitlines() if line.startswith("not compared"))
    assert (name in listed) or name.lower() in ("name", "run_id", "id")  # the column that names the run


@every(name=SETTINGS)
def test_a_setting_that_differs_in_every_run_is_refused_by_name(name, tmp_path):
    path = table(tmp_path, {name: cells_of(SETTINGS[name]), "run": cells_of("r{n}")})
    with pytest.raises(InputError) as refusal:
        counted(path)
    assert all(name in problem for problem in refusal.value.problems)
    assert counted(path, (name,))[0] == RUNS


def test_other_results_than_the_named_metric_are_no_settings(tmp_path):
    results = {"val_acc": cells_of("0.{n}"), "val_bpb": cells_of("1.{n}"), "train_loss": cells_of("2.{n}")}
    path = table(tmp_path, results)
    assert judge(path, "bf16", metric="val/loss").arms == judge(path, "bf16", metric="val/loss=val/loss").arms


def test_places_and_times_may_be_those_of_several_runs(tmp_path):
    some = {"Hostname": ["n1", "n1", "n2", "n2"] * 2, "End Time": ["8:00", "8:00", "9:00", "9:10"] * 2}
    assert counted(table(tmp_path, some))[1] == (
        "not compared, since they say which run it is: End Time, Hostname"
    )
    with pytest.raises(InputError, match="notes"):
        counted(table(tmp_path, {"notes": ["a", "a", "b", "c"] * 2}))


def test_advice_on_a_name_with_spaces_can_be_pasted(tmp_path):
    path = table(tmp_path, {"batch size": cells_of("{n}"), "it's": cells_of("x{n}")})
    refused = here("judge", path, "--against", "bf16", "--no-report", "--state", tmp_path)
    assert refused.returncode == 2
    advice = refused.stderr.splitlines()[-1].partition("or pass ")[2].partition(" if they")[0]
    words = shlex.split(advice)
    assert words == ["--ignore", "batch size", "--ignore", "it's"]
    assert (
        here("judge", path, "--against", "bf16", *words, "--no-report", "--state", tmp_path).returncode == 0
    )


def test_a_field_of_runs_without_seeds_may_be_named_as_the_seed(tmp_path):
    path = table(tmp_path, {"my number": [0, 1, 2, 3] * 2})
    text = (tmp_path / "runs.csv").read_text().replace("seed", "run")
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(InputError, match="--column 'seed=my number'"):
        counted(path)
    assert counted(path, seed="my number")[0] == RUNS


def test_a_short_list_in_json_is_a_setting(tmp_path):
    rows = [
        f'{{"arm": "{arm}", "seed": {seed}, "val/loss": {3 + seed / 8}, "betas": [0.9, 0.9{seed}]}}'
        for arm, seed in RUNS
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(rows) + "\n")
    with pytest.raises(InputError, match="betas"):
        counted(str(tmp_path / "runs.jsonl"))


# --- names of columns -----------------------------------------------------------------------------

PREFIXED = {
    "seed": (
        "config.seed",
        "config/trainer/seed",
        "args.seed",
        "config.trainer.seed",
        "params/cfg/seed",
        "train.seed",
    ),
    "step": ("trainer.global_step", "trainer/global_step", "config.train.step", "Summary/Train/Iteration"),
    "arm": ("config/recipe", "config.args.variant", "hparams.trainer.precision"),
}


@every(role__name=[(role, name) for role, names in PREFIXED.items() for name in names])
def test_words_above_a_name_change_no_role(role, name, tmp_path):
    usual = {"arm": "arm", "seed": "seed", "step": "step"} | {role: name}
    rows = [",".join([*usual.values(), "val/loss"]), "bf16,3,10,3.5", "nvfp4,3,10,3.25"]
    (tmp_path / "runs.csv").write_text("\n".join(rows) + "\n")
    found = read([str(tmp_path / "runs.csv")]).runs
    assert [(run.arm, run.seed, run.records, run.config) for run in found] == [
        ("bf16", 3, {"val/loss": {10: 3.5}}, {}),
        ("nvfp4", 3, {"val/loss": {10: 3.25}}, {}),
    ]


@every(
    names=[("seed", "config.trainer.seed"), ("args/seed", "config.args.seed"), ("config.seed", "params.seed")]
)
def test_two_columns_of_one_role_are_refused_by_name(names, tmp_path):
    (tmp_path / "runs.csv").write_text(f"arm,{','.join(names)},val/loss\nbf16,0,1,3\n")
    with pytest.raises(InputError, match="several columns may be the seed") as refusal:
        read([str(tmp_path / "runs.csv")])
    assert all(repr(name) in str(refusal.value) for name in names)


@every(name=("data.seed", "model/seed", "config.data.seed", "val.step", "optimizer.precision"))
def test_words_above_a_name_that_mean_another_thing_count(name, tmp_path):
    (tmp_path / "runs.csv").write_text(f"arm,seed,{name},val/loss\nbf16,0,1,3\n")
    (run,) = read([str(tmp_path / "runs.csv")]).runs
    assert (run.seed, run.config) == (0, {name: 1})


# --- directions, learning rates, further seeds -----------------------------------------------------

HIGHER = (
    *("val_acc", "accuracy", "val/accuracy", "eval/acc_norm", "arc_easy/acc,none", "bleu", "rougeL", "f1"),
    *("macro_f1", "test.auc", "em", "exact_match,strict-match", "val-score", "reward", "r2", "mAP", "Acc@1"),
    *("explained_variance", "snr", "quant/fprop.x/sqnr_db", "mfu", "pass@1", "win_rate", "valAcc", "top1"),
)
LOWER = (
    *(
        "val_loss",
        "ppl",
        "error_rate",
        "top1_error",
        "acc_stderr",
        "reward_loss",
        "brier_score",
        "wer",
        "rate",
    ),
    *("grad_acc_steps", "accuracy_drop", "mystery", "gap", "relative_error", "neg_log_likelihood", "value"),
)


@every(name=HIGHER + LOWER)
def test_the_last_words_of_a_metrics_name_say_its_direction(name):
    assert direction_of(name) == ("maximize" if name in HIGHER else "minimize")


@every(metric__name=[("val_acc", "val_acc"), (None, "val_acc"), ("val/accuracy", "val/accuracy")])
def test_the_arm_with_more_accuracy_is_better_and_the_direction_is_said(metric, name):
    rows = [
        {"recipe": arm, "seed": seed, name: 0.5 + seed**2 / 100 - (arm == "nvfp4") * (0.1 + seed / 1000)}
        for arm, seed in RUNS
    ]
    found = judge(pd.DataFrame(rows), "bf16", metric)
    assert found.arms[0].verdict["kind"] == "worse"
    assert f"metric: {name}, the higher the better" in found.said
    asked = judge(pd.DataFrame(rows), "bf16", metric, direction="minimize")
    assert asked.arms[0].verdict["kind"] == "better"
    assert f"metric: {name}, the lower the better" in asked.said


def test_the_command_takes_a_direction_from_the_name_or_from_its_option(tmp_path):
    path = table(tmp_path, {"val_acc": [0.5 + n**2 / 100 - n // 4 for n in range(8)]})
    for flags, direction in (((), "higher"), (("--minimize",), "lower"), (("--maximize",), "higher")):
        state = ("--no-report", "--state", tmp_path)
        found = here("judge", path, "--against", "bf16", "--metric", "val_acc", *flags, *state)
        assert f"metric: val_acc, the {direction} the better" in found.stdout


def decaying(peaks, column="lr", seeds=3):
    """Return rows of steps of two arms whose learning rate decays from a peak, 0.001 if none is given."""
    return pd.DataFrame(
        [
            {
                "recipe": arm,
                "seed": seed,
                "step": step,
                "val_loss": 4 - step / 400 + math.sin(9 * seed + step),
            }
            | {column: peaks.get((arm, seed), 1e-3) * (1 if step == 100 else 0.1)}
            for arm in ("bf16", "nvfp4")
            for seed in range(seeds)
            for step in (100, 200, 300)
        ]
    )


@every(
    column=("lr", "learning_rate", "optim/lr", "lr-AdamW/pg1", "lr/g0"), metric=(None, "val/loss=val_loss")
)
def test_a_learning_rate_that_decays_is_compared_like_a_constant_one(column, metric):
    name = "lr" if column == "learning_rate" and metric is None else column
    unlike = decaying({("nvfp4", 0): 3e-3, ("nvfp4", 1): 3e-3}, column)
    with pytest.raises(InputError) as refusal:
        judge(unlike, "bf16", metric)
    assert f"nvfp4: its runs have different configurations ({name} 0.001 and 0.003)" in str(refusal.value)
    assert len(judge(unlike, "bf16", metric, ignore=[name]).arms) == 1
    between = judge(decaying({("nvfp4", seed): 3e-3 for seed in range(3)}, column), "bf16", metric)
    note = ("note", f"nvfp4 also differs from its baseline in {name} 0.001 → 0.003")
    assert note in between.checks
    assert not [text for _, text in judge(decaying({}, column), "bf16", metric).checks if name in text]


def test_the_learning_rate_of_a_configuration_comes_before_that_of_the_records():
    rows = decaying({("nvfp4", 0): 3e-3})
    assert len(judge(rows.assign(**{"config/learning_rate": 1e-3}), "bf16").arms) == 1
    with pytest.raises(InputError, match=r"lr 0\.001 and 0\.003"):
        judge(rows.assign(**{"min_lr": 1e-5, "lr_scheduler": "cosine"}), "bf16")


def test_a_learning_rate_beside_a_named_metric_is_kept_from_logs_and_trackers():
    points = Points("run")
    for step, loss, rate in ((1, 3.0, 1e-3), (2, 2.5, 1e-4)):
        points.add(step, step, "my loss", loss)
        points.add(step, step, "train/lr", rate)
    run = NamedRun("run", "bf16-s0", points)
    (found,) = identified([run], "logs", Columns(name="{arm}-s{seed}", metrics={"val/loss": "my loss"}), [])
    assert found.records == {"val/loss": {1: 3.0, 2: 2.5}, "train/lr": {1: 1e-3, 2: 1e-4}}


FURTHER = ("data_seed", "sampling_seed", "init_seed", "data.seed", "torch seed", "random_state")


@every(name=FURTHER, value=("{seed}", "10{seed}", "{half}", "7"))
def test_a_further_seed_that_the_seed_decides_is_no_setting(name, value, tmp_path):
    cells = [value.format(seed=seed, half=seed // 2) for _, seed in RUNS]
    path = table(tmp_path, {name: cells})
    assert counted(path, seed="seed")[0] == RUNS
    found = judge(path, "bf16", columns={"seed": "seed"})
    assert not [text for kind, text in found.checks if name in text]


@every(
    name=FURTHER[:3], cells=([*range(8)], [0, 1, 2, 3, 0, 1, 2, 9], [7] * 4 + [8] * 4, [*range(4), *[""] * 4])
)
def test_pairs_with_different_further_seeds_are_named_beside_the_answer(name, cells, tmp_path):
    found = judge(table(tmp_path, {name: cells}), "bf16", columns={"seed": "seed"})
    count = sum(one != other for one, other in zip(cells[:4], cells[4:], strict=True))
    (warning,) = [text for kind, text in found.checks if kind == "warning" and name in text]
    assert warning.startswith(f"{name} differs in {count} of 4 pairs")
    assert warning in found.said
    asked = judge(table(tmp_path, {name: cells}), "bf16", columns={"seed": "seed"}, ignore=[name])
    assert not [text for kind, text in asked.checks if kind == "warning" and name in text]


# --- planted tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [7])
def test_random_tables_have_no_silent_wrong_answer_and_lose_no_right_one(seed):
    """A part of the run that `python -m support.planted_tables` is."""
    tally, problems = planted_tables.run(40, seed)
    assert problems == []
    assert tally["right"] >= 10
    assert tally["right: refused"] >= 10
