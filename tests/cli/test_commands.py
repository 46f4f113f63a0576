"""The command line as people and machines use it: real processes, real signals, exit statuses, and what is printed."""

import json
import math
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import typer
from jsonschema import Draft202012Validator
from lint_weight import leaves
from support.cases import covering, every
from support.commands import INLINE, here
from support.experiments import (
    EXPERIMENTS,
    IDLE,
    TOO_LARGE,
    WILD,
    ablate,
    end,
    environment,
    gone,
    idle,
    ledger,
    start,
    statuses,
    sweep,
    tiny,
    until,
    values,
    words_of,
    write,
)
from support.gates import Gate
from support.processes import modules
from support.studies import trials

from ablate import __version__
from ablate.cli import common
from ablate.cli.answer_view import how_to_read
from ablate.cli.commands import VERBS, whole_app
from ablate.execution.time_model import Load, MachinePaces
from ablate.execution.tracking import database
from ablate.files import lock
from ablate.store.databases import url

PLANS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from ablate.__main__ import main
for path in sys.argv[2:]:
    said, errors, status = io.StringIO(), io.StringIO(), 0
    state, sys.argv[1:] = sys.argv[1], ["plan", path, "--state", sys.argv[1], "--device", "cpu"]
    with redirect_stdout(said), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    sys.argv[1:] = [state]
    imported = sorted({name.partition('.')[0] for name in sys.modules})
    print(json.dumps([path, status, said.getvalue(), errors.getvalue(), imported]))
"""


def table(output: str) -> list[str]:
    """The lines of the tables, from their heading to the line that counts trials."""
    lines = output.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("arm "))
    last = next(n for n, line in enumerate(lines) if re.match(r"\d+ trials run", line))
    return [line.rstrip() for line in lines[first:last]]


# What needs no trial


@pytest.mark.parametrize("words", [("--help",), ("-h",), ()])
def test_help_names_every_verb(words):
    done = here(*words)
    assert all(f" {verb} " in done.stdout for verb in ("sweep", "plan", "data", "recipe"))
    assert done.returncode == (0 if words else 2)


@pytest.mark.parametrize("verb", ["sweep", "plan"])
def test_a_verbs_help_lists_its_options(verb):
    done = here(verb, "--help")
    assert done.returncode == 0
    options = [
        "--state",
        "--device",
        *(["--executor", "--workers", "--mlflow", "--dry-run", "--address"] if verb == "sweep" else []),
    ]
    assert all(option in done.stdout for option in options)
    assert "ABLATE_STATE" in done.stdout


def test_version_prints_the_version():
    done, imported = modules("--version")
    assert done.stdout == f"{__version__}\n"
    assert not imported & {"numpy", "pydantic"}  # of the files of verbs, which are not needed


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["recipe", "show", "nvfp4_pa"], ["nvfp4_paper"]),
        (["report", "ti"], ["tiny"]),
        (["sho"], ["show"]),
        (["plan", "--js"], ["--json"]),
    ],
)
def test_the_shell_completes_verbs_options_presets_and_sweeps(words, found, tmp_path):
    (tmp_path / "sweeps" / "tiny").mkdir(parents=True)
    (tmp_path / "sweeps" / "tiny" / "ledger.db").touch()
    typed = {"COMP_WORDS": " ".join(("ablate", *words)), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [Path(sys.executable).parent / "ablate"],
        env=environment(_ABLATE_COMPLETE="complete_bash", ABLATE_STATE=str(tmp_path), **typed),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == found


def test_schema_prints_a_json_schema():
    Draft202012Validator.check_schema(json.loads(here("init", "--schema").stdout))


@pytest.mark.parametrize("words", [["ablate.sweep"], ["ablate", "plan"]], ids=" ".join)
def test_a_verb_is_a_module_too(words, tmp_path):
    command = [sys.executable, "-m", *words, str(tmp_path / "nowhere.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (2, f"{tmp_path / 'nowhere.yaml'}: no such file\n")


def computes(path):
    """Return True for a plan that states a power, for which it needs scipy."""
    return "\nblame:" in path.read_text()


def features(path):
    """Return the workload and the keys of an experiment, which decide what its plan imports."""
    text = path.read_text()
    (workload,) = re.findall(r"^workload:\s*\{?(\w+)", text, re.MULTILINE)
    return [f"workload={workload}", *(f"key={key}" for key in re.findall(r"^(\w+):", text, re.MULTILINE))]


PLANNED = [(path, computes(path)) for path in covering({path: features(path) for path in EXPERIMENTS})]
"""Experiments whose plans are made: `make test` plans all of them in this process for the committed texts of plans."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The plans of experiments, made by one process; (state folder, what each came to). Their models' outlines, for which torch has
    to make the model once on a machine, are there."""
    paths = [str(path) for path, _ in sorted(PLANNED, key=lambda one: one[1])]
    for path in paths:
        assert here("plan", path).returncode == 0
    state = tmp_path_factory.mktemp("plans") / "state"
    command = [sys.executable, "-c", PLANS, str(state), *paths]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment(), check=False
    )
    return state, {path: found for path, *found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, common.INTERRUPTED), (signal.SIGTERM, common.TERMINATED)]
)
def test_a_signal_within_an_import_ends_the_command_after_it(sent, status, tmp_path, monkeypatch):
    """Python code that C++ calls in an import of torch may raise nothing: the process would abort."""
    text = f"import os, time\nos.kill(os.getpid(), {int(sent)})\ntime.sleep(0.2)\nwhole = True\n"
    (tmp_path / f"signalled_{status}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    reached = []

    def command():
        with common.raise_on_sigterm():
            reached.append(import_module(f"signalled_{status}").whole)
            time.sleep(20)

    with pytest.raises(KeyboardInterrupt) as ended:
        common.run(command)
    assert (reached, common.interruption(ended.value)[0]) == ([True], status)


@pytest.mark.slow
@every(path__scipy=PLANNED)
def test_a_plan_imports_nothing_heavy(path, scipy, plans):
    state, found = plans
    status, said, errors, imported = found[str(path)]
    assert status == 0, errors
    heavy = {"torch", "ray", "mlflow", "optuna", "pandas", "matplotlib", "scipy"}
    assert not set(imported) & (heavy - {"scipy"} if scipy else heavy)
    assert re.search(
        r"\d+ trials to run, 0 done\. (Roughly|No estimate .* no trial of this code has run here)", said
    )
    assert not state.exists()


def test_a_plan_names_arms_baselines_ids_and_what_is_done(tmp_path):
    path = write(tmp_path, **IDLE)
    sweep(idle(tmp_path, "part", ablate={"rht": [True]}), tmp_path / "state")
    done = here("plan", path, "--device", "cpu", ABLATE_STATE=str(tmp_path / "state"))
    rows = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith(("bf16", "rht="))
    }
    experiment = idle(tmp_path)
    ids = {arm.name: [experiment.spec(arm, seed, "cpu").id[:8] for seed in (0, 1)] for arm in experiment.arms}
    assert rows == {
        "bf16": ["-", "2", "2", *ids["bf16"]],
        "rht=true": ["bf16", "2", "2", *ids["rht=true"]],
        "rht=false": ["bf16", "2", "0", *ids["rht=false"]],
    }
    assert "2 trials to run, 4 done. Roughly" in done.stdout


def test_a_plan_as_json_has_the_trials_that_the_sweep_runs(tmp_path):
    path = write(tmp_path, search=None, seeds=2, **IDLE)
    sweep(idle(tmp_path, "part", ablate={"rht": [True]}), tmp_path / "state")
    plan = json.loads(here("plan", path, "--json", "--device", "cpu", "--state", tmp_path / "state").stdout)
    experiment = idle(tmp_path)
    assert {(arm["arm"], trial["seed"]): trial["id"] for arm in plan["arms"] for trial in arm["trials"]} == {
        (arm.name, seed): experiment.spec(arm, seed, "cpu").id for arm in experiment.arms for seed in (0, 1)
    }
    assert [arm["done"] for arm in plan["arms"]] == [2, 2, 0]
    assert (plan["to_run"], plan["done"], plan["measured_trials"]) == (2, 4, 4)
    assert plan["seconds"] > 0
    sweep(experiment, tmp_path / "state")
    plan = json.loads(here("plan", path, "--json", "--device", "cpu", "--state", tmp_path / "state").stdout)
    assert (plan["to_run"], plan["done"], plan["seconds"]) == (0, 6, 0)


def test_a_dry_run_says_what_a_plan_says_and_runs_nothing(tmp_path, cache):
    """Both count the trials that this machine remembers, in a cache that no test beside this one writes to."""
    path = write(tmp_path)
    MachinePaces("cpu").keep([(Load(("gpt", "emulated", "cpu"), "a", True, 1.0, 10), 2.0)] * 3)
    dry = here("sweep", path, "--dry-run", "--state", tmp_path / "state", "--device", "cpu")
    assert dry.returncode == 0
    assert "based on 3 trials measured on this machine before" in dry.stdout
    assert dry.stdout == here("plan", path, "--state", tmp_path / "state", "--device", "cpu").stdout
    assert not (tmp_path / "state").exists()


def refused(*words, **extra: str) -> list[str]:
    """Return the complaints of the command, which must end with status 2 and no traceback."""
    done = here(*words, **extra)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("verb", [("sweep",), ("plan",), ("sweep", "--dry-run")], ids=" ".join)
def test_bad_input_is_told_line_by_line_with_status_2_before_anything_runs(verb, tmp_path):
    path = write(tmp_path, ablate={"rhtt": [True], "sr": [1]}, seeds=0, extra=1)
    found = refused(*verb, path, "--state", tmp_path / "state")
    assert len(found) == 4
    assert all(line.startswith(f"{path}:1:") for line in found)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "this file is empty"),
        (b"- a\n", "this file is a list"),
        (b"a: \xff\n", "is not UTF-8"),
        (b"a: &x [1]\nb: *x\n", "aliases are refused"),
        (b"a: [1\n", ":2:1: while parsing a flow sequence expected ',' or ']'"),
        (None, "no such file; 'tiny.yaml' is the nearest"),
    ],
    ids=["empty", "list", "latin", "alias", "open", "missing"],
)
def test_a_file_that_is_no_experiment_is_told_in_one_line(content, said, tmp_path):
    write(tmp_path)
    path = tmp_path / "tinny.yaml"
    if content is not None:
        path.write_bytes(content)
    (line,) = refused("sweep", path, "--state", tmp_path / "state")
    assert line.startswith(f"{path}:")
    assert said in line


@pytest.mark.parametrize(
    "words",
    [
        ("judge", "{}.csv", "--against", "bf16"),
        ("check", "{}"),
        ("check", "{}.py:train"),
        ("conform", "{}"),
        ("recipe", "show", "{}.yaml"),
        ("recipe", "import", "--te", "{}"),
        ("recipe", "import", "--script", "{}"),
        ("plan", "{}.yaml"),
        ("sweep", "{}.yaml"),
        ("status", "--state", "{}"),
        ("show", "tiny", "--state", "{}"),
        ("report", "tiny", "--state", "{}"),
        ("data", "prepare", "{}", "--out", "data"),
        ("judge", "runs/{}/{{arm}}.csv", "--against", "bf16"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_name_that_no_file_system_has_room_for_is_told_in_one_sentence(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = here(*(word.format("n" * 300) for word in words))
    *starting, sentence = done.stderr.splitlines()
    assert done.returncode == 2
    assert all(line.startswith("Starting: ") for line in starting), starting
    assert len(sentence) < 450, sentence


@pytest.mark.parametrize(
    "shape", [{"model": "m" * 300}, {"data": {"text": "t", "tokenizer": "m" * 300}}], ids=str
)
def test_a_name_that_no_file_can_have_is_told_at_its_place(shape, tmp_path):
    path = write(tmp_path, shape=shape)
    assert all(line.startswith(f"{path}:1:") for line in refused("plan", path))


@pytest.mark.parametrize("under", ["file", "file/below"])
def test_a_state_folder_that_cannot_be_written_is_told(under, tmp_path):
    (tmp_path / "file").touch()
    (line,) = refused("sweep", write(tmp_path), "--state", tmp_path / under, *INLINE)
    assert line.startswith(f"--state {tmp_path / under}: not writable (")


@pytest.mark.parametrize(
    "words", [("--executor", "slurm"), ("--workers", "0"), ("--exec", "inline"), ("--nonsense",)]
)
def test_an_option_that_is_none_is_refused(words, tmp_path):
    assert any(words[0] in line for line in refused("sweep", write(tmp_path), *words))


def test_a_sweep_that_another_process_runs_is_refused_with_its_holder(tmp_path):
    with lock(tmp_path / "state" / "sweeps" / "tiny" / "lock"):
        (line,) = refused("sweep", write(tmp_path), "--state", tmp_path / "state", *INLINE)
    assert (
        f"another process (pid {os.getpid()} on {os.uname().nodename}) runs this sweep; wait for it" in line
    )


def test_the_answer_does_not_need_the_files_own_recipe_to_be_runnable(tmp_path):
    experiment = tiny(
        tmp_path, recipe="nvfp4_paper", ablate={"recipe.layers.last_fraction": [0.0]}
    )  # with 1 layer the paper's keeps all
    try:
        assert "paired by seed" in how_to_read(experiment, [], valid=True)
    except ValueError as error:
        pytest.fail(f"a traceback: {error}", pytrace=False)


# Sweeps, inline


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep run by the command, inline; leave it as it is. (folder, the finished process)."""
    folder = tmp_path_factory.mktemp("command")
    return folder, ablate("sweep", write(folder), "--state", folder / "state", "--all", *INLINE)


def test_a_sweep_answers_its_question(swept):
    folder, done = swept
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Does it matter?\n[1/6] bf16 seed=0: val/loss ")
    assert "6 trials run in" in done.stdout
    rows = {line.split()[0]: line for line in table(done.stdout)[1:4]}
    means = {arm: (values(folder / "state")[arm, 0] + values(folder / "state")[arm, 1]) / 2 for arm in rows}
    for arm, line in rows.items():
        assert line.split()[1:3] == [f"{means[arm]:.4f}", "2"]
    assert rows["bf16"].endswith("baseline")
    gap = float(rows["rht=true"].split()[3])
    assert gap == pytest.approx(means["rht=true"] - means["bf16"], abs=5e-5)
    assert any(line.startswith("rht   true instead of false") for line in table(done.stdout))
    assert f"A model that ignores context reaches {math.log(64):.2f}" in " ".join(done.stdout.split())
    assert done.stderr.startswith("Starting: ")
    assert done.stderr.count("\n") == 1


def test_a_quiet_sweep_prints_its_answer_alone(swept):
    folder, first = swept
    done = here("sweep", folder / "tiny.yaml", "--state", folder / "quiet", "--quiet", *INLINE)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "seed=0" not in done.stdout
    assert "6 trials run in" in done.stdout
    assert table(done.stdout)[1].split()[:3] == table(first.stdout)[1].split()[:3]


def test_the_same_command_again_runs_nothing_starts_nothing_and_answers_the_same(swept):
    folder, first = swept
    done, imported = modules(
        "sweep", folder / "tiny.yaml", "--state", folder / "state", "--all", "--mlflow", "none"
    )  # Ray is the default
    assert done.returncode == 0
    assert not imported & {"torch", "ray", "mlflow"}
    assert "0 trials run, 6 already done in" in done.stdout
    assert table(done.stdout) == table(first.stdout)


def test_a_budget_ends_with_status_3_and_an_answer_so_far(tmp_path):
    done = here(
        "sweep", write(tmp_path, budget={"trials": 2}, **IDLE), "--state", tmp_path / "state", *INLINE
    )
    assert done.returncode == 3
    assert "2 trials run in" in done.stdout
    assert (
        "Partial: the budget is reached, and 4 trials are not run. The same command goes on." in done.stdout
    )
    assert "1 of 2" in next(line for line in table(done.stdout) if line.startswith("bf16"))


def done_count(state) -> int:
    try:
        return list(statuses(state).values()).count("done")
    except sqlite3.OperationalError:  # its ledger is not there, or not yet filled
        return 0


@pytest.mark.slow
def test_a_driver_killed_and_then_interrupted_loses_nothing_and_repeats_nothing(tmp_path):
    keys = {"telemetry": {"checkpoint": 0}}
    path, state, gate = write(tmp_path, **keys), tmp_path / "state", Gate(tmp_path)

    def stopped_at(trials: int) -> subprocess.Popen:
        """The command, with so many trials done and in the middle of the next."""
        gate.shut(trials)
        driver = start("sweep", path, "--state", state, *INLINE, **gate.environment)
        until(lambda: done_count(state) == trials and list(state.glob("trials/*/checkpoint.pt")))
        return driver

    driver = stopped_at(2)
    driver.send_signal(signal.SIGKILL)
    end(driver)
    before = {trial.parent.name: trial.stat().st_mtime_ns for trial in state.glob("trials/*/result.json")}
    assert len(before) == 2

    driver = stopped_at(3)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 130, output
    assert output.rstrip().endswith("Interrupted. Nothing is lost: the same command goes on.")
    assert "Traceback" not in output
    assert set(statuses(state).values()) == {"done", "pending"}

    last = here("sweep", path, "--state", state, *INLINE)
    assert last.returncode == 0, last.stderr
    assert set(statuses(state).values()) == {"done"}
    book = ledger(state)
    assert (
        book.db.execute("SELECT count(*) FROM attempts WHERE ended IS NULL OR outcome IS NULL").fetchone()[0]
        == 0
    )
    book.close()
    assert {name: (state / "trials" / name / "result.json").stat().st_mtime_ns for name in before} == before
    sweep(tiny(tmp_path, **keys), tmp_path / "undisturbed")
    assert values(state) == values(tmp_path / "undisturbed")
    assert [trial.state.name for trial in trials(state)].count("COMPLETE") == 2
    assert not [trial for trial in trials(state) if trial.state.name in ("RUNNING", "WAITING")]


# Sweeps on Ray


MIXED = {"ablate": None, "arms": WILD | {"broken": {"workload.hidden": TOO_LARGE}}, "seeds": 1, "retry": 1}


@pytest.fixture(scope="module")
def rayed(tmp_path_factory):
    """A good, a diverging and a failing arm on Ray; (folder, the finished process)."""
    folder = tmp_path_factory.mktemp("ray")
    words = ("--state", folder / "state", "--workers", 1, "--mlflow", "none", "--all")
    return folder, ablate("sweep", write(folder, **MIXED), *words)


@pytest.mark.services
@pytest.mark.slow
def test_an_arm_too_large_for_this_machine_ends_with_status_1_and_its_reason(rayed):
    folder, done = rayed
    assert done.returncode == 1, done.stdout + done.stderr
    found = statuses(folder / "state")
    assert (found["good", 0], found["bf16", 0], found["wild", 0], found["broken", 0]) == (
        "done",
        "done",
        "diverged",
        "oom",
    )
    assert re.search(
        r"broken seed=0: oom: out of memory after step 0, .* you tried to allocate \d+ bytes", done.stdout
    )
    assert re.search(r"wild seed=0: diverged: non-finite loss or gradient at step \d", done.stdout)
    assert re.search(r"^wild .* diverged(\S?) *$", done.stdout, re.MULTILINE)
    assert re.search(r"^\S diverged on 1 of 1 seed *$", done.stdout, re.MULTILINE)
    assert ", 2 failed in" in done.stdout  # the arm and its baseline, which has the same workload


@pytest.mark.services
@pytest.mark.slow
def test_ray_and_inline_compute_the_same_bits(rayed, tmp_path):
    folder, _ = rayed
    sweep(tiny(folder, ablate=None, arms=WILD, seeds=1), tmp_path)
    here = values(tmp_path)
    there = values(folder / "state")
    assert {key: value for key, value in here.items() if value is not None} == {
        key: there[key] for key, value in here.items() if value is not None
    }
    assert here["good", 0] is not None


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_driver_killed_on_ray_with_mlflow_leaves_no_process_and_the_next_command_completes_everything(
    tmp_path,
):
    from mlflow import MlflowClient

    path, state = write(tmp_path, workload={"idle": {"steps": 8}}), tmp_path / "state"
    gate = Gate(tmp_path)
    gate.shut(2)
    state.mkdir()
    store = url(state / "mlflow.db")
    database.prepare(store, state)  # now, so that the first runs are drawn while others train
    client = MlflowClient(store)
    driver = start("sweep", path, "--state", state, "--workers", 2, **gate.environment)

    def halfway() -> bool:
        if done_count(state) < 2:
            return False
        book = ledger(state)
        drawn = sum(bool(member.mlflow) for member in book.members())
        book.close()
        return drawn >= 2

    def family() -> list[psutil.Process]:
        return [
            member
            for member in psutil.Process(driver.pid).children(recursive=True)
            if "ablate.execution.trial_process" in words_of(member)
            or "ray::Actor" in " ".join(words_of(member))
        ]

    until(halfway)
    until(lambda: len(family()) >= 5)  # two workers, two warm processes, a trial that waits at the gate
    members = family()
    driver.send_signal(signal.SIGKILL)
    end(driver)
    before = {trial.parent.name for trial in state.glob("trials/*/result.json")}
    assert len(before) < 6
    until(lambda: gone(members))
    gate.open()
    last = here("sweep", path, "--state", state, "--executor", "inline")
    assert last.returncode == 0, last.stderr
    book = ledger(state)
    members = book.members()
    assert {member.status for member in members} == {"done"}
    outcomes = [
        tuple(row) for row in book.db.execute("SELECT id, outcome FROM attempts JOIN trials USING (trial)")
    ]
    assert sorted(trial for trial, outcome in outcomes if outcome == "done") == sorted(
        {m.id for m in members} - {m.id for m in members if m.reused}
    )
    book.close()
    assert {trial.state.name for trial in trials(state)} == {"COMPLETE"}
    assert len(trials(state)) == 2

    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 1 + 6
    assert len({run.data.tags["ablate.trial"] for run in runs if "ablate.trial" in run.data.tags}) == 6
    for run in runs:
        if "ablate.trial" in run.data.tags:
            found = [m.step for m in client.get_metric_history(run.info.run_id, "val/loss")]
            assert found == list(range(1, 9))


def test_help_fits_one_screen_and_begins_with_the_verbs_of_every_day():
    done = here("--help", COLUMNS="80")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    first = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)][:8]
    assert first == [*VERBS["Every day"]]


def test_every_verb_of_the_table_is_in_the_help_with_one_line():
    shown = here("--help", COLUMNS="80").stdout
    for heading, verbs in VERBS.items():
        for verb, (_, about) in verbs.items():
            assert (f" {verb} " in shown) == (about in shown) == bool(heading), verb
    whole = typer.main.get_command(whole_app()).commands
    assert sorted(whole) == sorted(verb for verbs in VERBS.values() for verb in verbs)


def test_every_option_of_every_command_has_a_line_of_help():
    """A name below `Args:` that is not a parameter's would leave that parameter without help."""
    commands = [*leaves(typer.main.get_command(whole_app()))]
    assert [(each.name, one.name) for each in commands for one in each.params if not one.help] == []


CAUGHT = """
import sys
from ablate.cli.common import run

def command():
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        sys.exit(130)

run(command)
"""


def test_an_interrupt_within_generated_code_keeps_the_exit_status_of_its_handler(tmp_path):
    """Imports run generated code, which dataclasses are made by; CPython then ends `-m` by SIGINT."""
    (tmp_path / "interrupted.py").write_text(CAUGHT)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 130


@every(
    words=(("recipe", "show", "nvfp4"), ("recipe", "show", "nvfp4", "--yaml"), ("--help",), ("--version",))
)
def test_a_reader_that_ends_early_ends_a_command_without_a_word(words):
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ablate", *words]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environment(), text=True)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@every(words=(("recipe", "show", "nvfp4"), ("recipe", "show", "nvfp4", "--yaml"), ("--help",)))
def test_output_on_a_full_disk_is_refused_in_a_sentence(words):
    command = [sys.executable, "-m", "ablate", *words]
    with open("/dev/full", "w") as disk:
        ended = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE, env=environment(), text=True)
    assert ended.returncode == 2
    assert re.fullmatch("the output: No space left on device: .*\n", ended.stderr)


def test_a_ledger_that_may_not_grow_is_a_full_disk(tmp_path):
    rows = [
        f"{arm},{seed},{step},{3 + seed / step}" for arm in "ab" for seed in range(4) for step in range(1, 99)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,step,val_loss", *rows]))
    words = ["judge", tmp_path / "runs.csv", "--against", "a", "--as", "x", "--state", tmp_path / "runs"]
    command = shlex.join([sys.executable, "-m", "ablate", *map(str, words)])
    limited = ["bash", "-c", f"ulimit -f 100; {command}"]
    ended = subprocess.run(limited, capture_output=True, env=environment(), text=True)
    assert ended.returncode == 2
    assert re.search(r"ledger\.db\.unfinished: disk I/O error: free space there", ended.stderr), ended.stderr


@every(words=(("--version",), ("show", "--state", "/nowhere"), ("show", "--nowhere")))
def test_a_refusal_that_has_no_room_on_the_disk_keeps_its_exit_status(words):
    with open("/dev/full", "w") as disk:
        command = [sys.executable, "-m", "ablate", *words]
        assert subprocess.run(command, stdout=disk, stderr=disk, env=environment()).returncode == 2


def test_a_locale_without_the_signs_of_an_answer_changes_no_file(tmp_path):
    """ASCII alone, as ISO-8859-1 has no minus sign: UTF-8 is what the files of this package are in."""
    arms = {"\N{MICRO SIGN}": {"rht": True}, "other": {"rht": False}}
    path = idle(tmp_path, question="Does \N{MICRO SIGN} matter?", ablate=None, arms=arms, seeds=2).file
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "ABLATE_REPORT": "true"}
    done = ablate("sweep", path, "--state", tmp_path / "runs", *INLINE, **ascii_only)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "Does \\xb5 matter?"), done.stderr
    report = tmp_path / "runs" / "reports" / "tiny"
    for file in ("index.html", "figures/runs.csv"):
        assert "\N{MICRO SIGN}" in (report / file).read_text(encoding="utf-8")


@every(closed=(">&-", "2>&-", "<&- >&- 2>&-"))
def test_a_command_with_closed_standard_streams_keeps_its_exit_status(closed, tmp_path):
    """An error is not printed among the output, nor into a file that was given the number of a stream."""
    for status, words in ((0, ("sweep", idle(tmp_path).file, "--dry-run")), (2, ("plan", "nowhere.yaml"))):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "ablate", *map(str, words)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == status
        assert "nowhere" not in done.stdout
